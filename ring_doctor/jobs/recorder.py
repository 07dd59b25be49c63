"""What is seen of a training job from inside, until its step N: this file runs in each process of the user's job.

    import torch   ->  torch calls `begin`, which puts notes around modules, losses, messages, backward, clipping
    optimizer.step ->  the gradients go to files, one at a time; after step N the process waits for the others and ends

Nothing is changed that a process computes. What `torch.compile` traces is left alone, so inside of it nothing is seen.
This file imports nothing of this project: the job may run in another environment.

Shapes: as in the job. A gradient is whole: a DTensor's shards are gathered.

Before: nothing. After: job.py, which brings it into the job.
"""

import functools
import inspect
import os
import re
import sys
import time
import traceback
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

FOLDER = Path(os.environ["RING_DOCTOR_FOLDER"])
STEPS = int(os.environ["RING_DOCTOR_STEPS"])
MOVE = os.environ["RING_DOCTOR_MOVE"]  # a dtype: weights are moved by one unit of it before they are used; or ""
WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
SENDS = re.compile("send|permute|_?(all|broadcast|gather|scatter|reduce)")  # names of functions that send


class Recorder:
    """What one process has seen. A pass is all that was called since the last backward pass, and this one.

    Each note gets the function that it is put around, and its arguments.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.called: dict[int, nn.Module] = {}  # the outermost modules
        self.optimizers: Any = weakref.WeakKeyDictionary()  # in the order in which they were made
        self.depth = 0  # calls of modules that have not returned
        self.new_pass()
        self.new_step()

    def new_pass(self) -> None:
        """Forget what was of the last forward pass. "calls" are the whole numbers of each outermost call."""
        self.now: dict[str, Any] = {"calls": [{}], "labels": [], "sent": 0}
        self.random: list[bytes] = []  # the generators' states when it began

    def new_step(self) -> None:
        """Forget what was of the last step.

        The norm is that of its first clipping. What a weight and its squares add up to is that before it. "sending" is
        the class of an optimizer that sends messages.
        """
        self.step: dict[str, Any] = {"passes": [], "dtypes": set(), "norm": None, "weights": {}, "sending": ""}
        self.sums: dict[int, Any] = {}  # by module, its outputs: the sum of squares
        self.read: set[int] = set()  # weights whose optimizer has begun its step

    # While the model computes --------------------------------------------------------------------------------------

    def looks(self) -> bool:
        """Whether what is called now belongs to a forward pass of the training."""
        return not in_backward() and (self.depth > 0 or torch.is_grad_enabled())

    def call(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a module: its whole numbers, and how large its output is.

        An argument is kept once in an outermost call, the tokens of a table by its shape.
        """
        if not self.looks():
            return original(module, *args, **kwargs)
        if not self.depth:
            self.now["calls"].append({})
            self.called[id(module)] = module
            move(module)
            if not self.random:  # messages before the first call of a pass are none of the model's
                self.random, self.now["sent"] = generators(), 0
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None):
            self.now["sent"] = float("inf")  # messages may be in its graph, where they are not seen
        kind = f"embedding {tuple(module.weight.shape)}" if isinstance(module, nn.Embedding) else type(module).__name__
        names = [*inspect.signature(type(module).forward).parameters][1:]
        for name, x in (*zip(names, args, strict=False), *kwargs.items()):
            if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim() > 0:
                self.now["calls"][-1].setdefault(f"{kind}.{name}", local(x).detach().to("cpu", copy=True))
        self.depth += 1
        try:
            out = original(module, *args, **kwargs)
        finally:
            self.depth -= 1
        for x in [x for x in floats(out) if x.numel() > 1][:1]:  # a loss is that of a shard
            self.step["dtypes"].add(str(x.dtype))
            square = torch.linalg.vector_norm(local(x.detach()), dtype=torch.float64) ** 2
            self.sums[id(module)] = self.sums.get(id(module), 0.0) + square
        return out

    def loss(self, original: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A loss of torch: its labels."""
        if self.looks() and not target.is_floating_point():
            labels = local(target.detach())
            ignored = labels == kwargs.get("ignore_index", -100)
            self.now["labels"].append(labels.masked_fill(ignored, -100).flatten().cpu())
        return original(input, target, *args, **kwargs)

    def sent(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A message: how many numbers it has, unless it carries weights of fully_shard."""
        if not in_backward():
            callers = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe())]
            if not any(caller.startswith("torch.distributed.fsdp") for caller in callers):
                self.now["sent"] = max([self.now["sent"], *(x.numel() for x in floats([args, kwargs]))])
        return original(*args, **kwargs)

    def backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """A backward pass ends a forward pass; one inside of it (checkpointing) belongs to it."""
        if not in_backward():
            loss = sum(local(x.detach()).double().sum().item() for x in floats(tensors))
            self.step["passes"].append(self.now | {"loss": loss, "draws": self.random not in ([], generators())})
            self.new_pass()
        original(tensors, *args, **kwargs)

    # At a step ----------------------------------------------------------------------------------------------------

    def clip(self, original: Any, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        """The first clipping: the gradients before it, and the norm. By infinity it only measures."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.step["passes"] and parameters and self.step["norm"] is None and max_norm < float("inf"):
            self.write("before", self.weights(), parameters)
            self.step["norm"] = float(whole(total_norm))
        original(parameters, max_norm, total_norm, *args, **kwargs)

    def made(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """An optimizer."""
        original(optimizer, *args, **kwargs)
        self.optimizers[optimizer] = True

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """The gradients that an optimizer gets are read. Those of others may be unfinished until their own step.

        A step inside of a step, as that of the class that it is derived from, is not another one.
        """
        if self.step["passes"] and not self.read.issuperset(map(id, weights := in_groups([optimizer]))):
            if in_backward():
                raise RuntimeError("an optimizer steps during backward; ring-doctor sees only steps after backward")
            self.write("gradient", self.weights(), weights)
            self.read |= set(map(id, weights))
            self.now["sent"] = 0  # from here on, by the optimizer

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """A step of the job ends when no other optimizer has gradients."""
        if self.read and self.now["sent"]:
            self.step["sending"] = type(optimizer).__name__
        if self.read and all(id(x) in self.read or x.grad is None for x in in_groups(self.optimizers)):
            self.end_step()

    def names(self, of: str) -> dict[str, Any]:
        """What `of` gives for the outermost modules that have weights, by name, without wrappers.

        Several modules have a number each, in the order of their calls.
        """
        inside = {id(x) for root in self.called.values() for x in root.modules() if x is not root}
        roots = [root for key, root in self.called.items() if key not in inside and [*root.parameters()]]
        parts = [(f"{n}." * (len(roots) > 1), getattr(root, of)()) for n, root in enumerate(roots)]
        return {number + WRAPPERS.sub("", name): x for number, found in parts for name, x in found}

    def weights(self) -> dict[str, Any]:
        """All weights by name. Those of optimizers that are in no module have a number.

        What all names begin with is left out: the module may be in a wrapper in one of the jobs only.
        """
        named = self.names("named_parameters")
        shared = os.path.commonprefix([*named]).rfind(".") + 1  # noqa: RUF071
        known = set(map(id, named.values()))
        others = [x for x in in_groups(self.optimizers) if id(x) not in known]
        numbered = {f"weight {n} of the optimizer": x for n, x in enumerate(others)}
        return {name[shared:]: x for name, x in named.items()} | numbered

    def write(self, kind: str, named: dict[str, Any], weights: Iterable[Any]) -> None:
        """Each gradient of `weights` to a file: as the optimizer gets it, or as it is "before" the first clipping."""
        given, rank = set(map(id, weights)), place()[0]
        for name, weight in named.items():
            if name not in self.step["weights"]:
                x = whole(weight).detach().double()
                self.step["weights"][name] = torch.stack([x.sum(), x.square().sum()]).cpu()
            file = FOLDER / f"{kind}-{len(self.steps)}-{name.replace('/', ':')}-{rank}.pt"
            if weight.grad is not None and id(weight) in given:
                self.step["dtypes"].add(str(weight.grad.dtype))
                torch.save(whole(weight.grad).detach().to("cpu", copy=True), file)

    def end_step(self) -> None:
        """What was seen of a step. "later" are the weights whose optimizer made none: numbers of this process."""
        names = {id(module): name for name, module in self.names("named_modules").items()}
        sums = {names[key] or "the model": x.cpu() for key, x in self.sums.items() if key in names}
        self.steps.append(self.step | {"modules": sums, "later": set(map(id, in_groups(self.optimizers))) - self.read})
        self.new_step()
        if len(self.steps) == STEPS:
            self.end()

    def end(self) -> None:
        """Write what was seen, wait until the doctor has it from all ranks, and end this process."""
        rank, world = place()
        torch.save(self.steps, file := FOLDER / f"seen-{rank}.tmp")
        os.replace(file, FOLDER / f"seen-{rank:05}-of-{world:05}.pt")
        while not (FOLDER / "end").exists():  # should the doctor be killed, this process is too: job.py
            time.sleep(0.02)
        os._exit(0)  # no handler of the user's runs: it might write a file


def in_backward() -> bool:
    """Whether a backward pass calls this."""
    return torch._C._current_graph_task_id() != -1


def in_groups(optimizers: Iterable[Any]) -> list[Any]:
    """The weights of optimizers."""
    return [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]


def place() -> tuple[int, int]:
    """(rank, number of ranks)"""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def generators() -> list[bytes]:
    """The states of torch's generators: another one at the end of a pass means that it drew random numbers."""
    of_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [x.numpy().tobytes() for x in (torch.get_rng_state(), *of_gpu)]


def local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def whole(x: Any) -> Any:
    """All of a DTensor. Every rank must call."""
    if hasattr(x, "full_tensor"):
        x = (x.to(x.device_mesh.device_type) if x.device.type != x.device_mesh.device_type else x).full_tensor()
    return x.to_dense() if getattr(x, "is_sparse", False) else x


def floats(x: Any) -> list[Tensor]:
    """The tensors in x, or in lists and dicts in x, that are no whole numbers."""
    if isinstance(x, dict | list | tuple):
        return [y for each in (x.values() if isinstance(x, dict) else x) for y in floats(each)]
    return [x] if isinstance(x, Tensor) and x.is_floating_point() else []


def move(module: nn.Module) -> None:
    """Move each weight by one unit of the dtype MOVE, once: w (1 ± eps)."""
    draw = torch.Generator().manual_seed(0)
    for weight in module.parameters() if MOVE else ():
        if weight.is_floating_point() and not hasattr(weight, "ring_doctor_moved"):
            weight.ring_doctor_moved = True  # type: ignore[attr-defined]
            x = local(weight.data)
            signs = torch.randint(0, 2, x.shape, generator=draw).mul(2).sub(1).to(x)
            x.add_(x.abs() * signs * torch.finfo(getattr(torch, MOVE)).eps)


seen = Recorder()  # of this process


def failed(shown: Any, kind: Any, error: Any, frames: Any) -> None:
    """Write the error that ends this process for job.py, which takes the earliest, before it is shown."""
    said = [*traceback.format_tb(frames)[-2:], *traceback.format_exception_only(kind, error)]
    rank = f"rank {os.environ['RANK']}\n" if "RANK" in os.environ else ""
    (FOLDER / f"error-{time.time_ns()}-{os.getpid()}").write_text(rank + "".join(said), errors="replace")
    shown(kind, error, frames)


def begin() -> None:
    """Begin to note: torch calls it at the end of its import. Without the doctor's folder, the job is to end."""
    (FOLDER / f"torch-{os.getpid()}").touch()
    sys.excepthook = functools.partial(failed, sys.excepthook)
    register_optimizer_step_pre_hook(seen.before_step)
    register_optimizer_step_post_hook(seen.after_step)
    around(Optimizer, "__init__", seen.made)
    around(nn.Module, "__call__", seen.call)
    around(nn.functional, "cross_entropy", seen.loss)
    around(nn.functional, "nll_loss", seen.loss)
    around(nn.utils, "clip_grads_with_norm_", seen.clip)
    around(nn.utils.clip_grad, "_clip_grads_with_norm_", seen.clip)  # clip_grad_norm_ calls it
    around(torch.autograd, "backward", seen.backward)
    if torch.distributed.is_available():
        from torch.distributed import _functional_collectives

        for home in (torch.distributed.ProcessGroup, _functional_collectives):
            for name in filter(SENDS.match, dir(home)):
                around(home, name, seen.sent)


def around(home: Any, name: str, note: Any) -> None:
    """Put `note` in the place of a function, if there is one."""
    if original := getattr(home, name, None):

        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if torch.compiler.is_compiling() else note(original, *args, **kwargs)

        setattr(home, name, noted)
