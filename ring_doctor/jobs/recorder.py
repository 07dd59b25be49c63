"""What is seen of a training job from inside, until its step N: this file runs in each process of the user's job.

    Python starts  ->  sitecustomize.py, which job.py put in front of PYTHONPATH, calls watching.py, then the user's own
    import torch   ->  watching.py puts the recorder around modules, losses, messages, backward and clipping
    optimizer.step ->  the gradients go to files, one at a time; after step N the process waits for the others and ends

Nothing is changed that a process computes. What `torch.compile` traces is left alone, so inside of it nothing is seen.
This file imports nothing of this project: the job may run in another environment.

Shapes: as in the job. A gradient is whole: a DTensor's shards are gathered.

Before: nothing. After: watching.py, which calls this.
"""

import gc
import inspect
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["RING_DOCTOR_FOLDER"])
STEPS = int(os.environ["RING_DOCTOR_STEPS"])
MOVE = os.environ["RING_DOCTOR_MOVE"]  # a dtype: weights are moved by one unit of it before they are used; or ""
LARGEST = 2**24  # whole numbers that are kept of one argument
WRAPPERS = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Recorder:
    """What one process has seen. A pass is all that was called since the last backward pass, and this one."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.steps: list[dict[str, Any]] = []
        self.depth = self.backwards = 0  # calls of modules, and of backward, that have not returned
        self.compiles = False
        self.stepping = ""  # the class of the optimizer that makes its step
        self.new_pass()
        self.new_step()

    def new_pass(self) -> None:
        """Forget what was of the last forward pass."""
        self.now: dict[str, Any] = {"whole_numbers": {}, "labels": [], "dtypes": set(), "sent": 0}
        self.random: list[bytes] = []  # the generators' states when it began
        self.noted: set[str] = set()  # arguments of the outermost call in hand

    def new_step(self) -> None:
        """Forget what was of the last step."""
        self.passes: list[dict[str, Any]] = []
        self.sums: dict[int, Any] = {}  # by module, its outputs: the sum of squares
        self.called: list[Any] = []  # the outermost modules; they live until the step ends
        self.norm: float | None = None  # that the first clipping took
        self.clipped: set[str] = set()  # weights whose gradients were seen before clipping
        self.weights: dict[str, Any] = {}  # by name, what each and its squares add up to before the step
        self.read: dict[int, str] = {}  # weights whose optimizer has begun its step
        self.sending = ""  # the class of an optimizer that sends messages in its step
        self.dtypes: set[str] = set()  # of gradients

    # While the model computes --------------------------------------------------------------------------------------

    def looks(self) -> bool:
        """Whether what is called now belongs to a forward pass of the training."""
        return not self.backwards and (self.depth > 0 or self.torch.is_grad_enabled())

    def begin_call(self) -> None:
        """An outermost call. Messages before the first of a pass are none of the model's."""
        self.noted = set()
        if not self.random:
            if self.read:  # only some optimizers have made their step
                self.end_step()
            self.random, self.now["sent"] = self.generators(), 0

    def call(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a module: its whole numbers, and how large its output is."""
        if not self.looks():
            return original(module, *args, **kwargs)
        if not self.depth:
            self.begin_call()
            self.called.append(module)
            move(self.torch, module)
        kind = type(module)
        for name, x in (*zip([*inspect.signature(kind.forward).parameters][1:], args, strict=False), *kwargs.items()):
            self.whole_numbers(f"{kind.__name__}.{name}", x)
        self.depth += 1
        try:
            out = original(module, *args, **kwargs)
        finally:
            self.depth -= 1
        found = [x for x in flat(out) if isinstance(x, self.torch.Tensor) and x.is_floating_point()]
        if found and (x := max(found, key=lambda x: x.numel())).numel() > 1:  # a loss is that of a shard
            self.now["dtypes"].add(str(x.dtype))
            square = self.torch.linalg.vector_norm(local(x.detach()), dtype=self.torch.float64) ** 2
            self.sums[id(module)] = self.sums.get(id(module), 0.0) + square
        return out

    def whole_numbers(self, key: str, x: Any) -> None:
        """Keep the whole numbers of an argument, if it has some: once in an outermost call."""
        whole = isinstance(x, self.torch.Tensor) and x.dtype in (self.torch.int64, self.torch.int32)
        if whole and x.dim() > 0 and x.numel() <= LARGEST and key not in self.noted:
            self.noted.add(key)
            self.now["whole_numbers"].setdefault(key, []).append(local(x).detach().to("cpu", copy=True))

    def embedding(self, original: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        """Tokens, and what else is looked up in a table. Tables are told apart by their shapes."""
        if self.looks():
            if not self.depth:
                self.begin_call()
            self.whole_numbers(f"embedding {tuple(weight.shape)}", input)
        return original(input, weight, *args, **kwargs)

    def loss(self, original: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A loss of torch: its labels."""
        if self.looks():
            self.now["dtypes"].add(str(input.dtype))
            if not target.is_floating_point():
                labels = local(target.detach())
                ignored = labels == kwargs.get("ignore_index", -100)
                self.now["labels"].append(labels.masked_fill(ignored, -100).flatten().cpu())
        return original(input, target, *args, **kwargs)

    def sent(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A message: how many numbers it has, unless it carries weights of fully_shard."""
        if self.stepping:
            self.sending = self.stepping
        elif self.looks():
            callers = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe())]
            if not any(caller.startswith("torch.distributed.fsdp") for caller in callers):
                parts = [x for x in flat([*args, *kwargs.values()]) if isinstance(x, self.torch.Tensor)]
                self.now["sent"] = max([self.now["sent"], *(x.numel() for x in parts if x.is_floating_point())])
        return original(*args, **kwargs)

    def compile(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Messages may be in a graph, where they are not seen."""
        self.compiles = True
        return original(*args, **kwargs)

    def generators(self) -> list[bytes]:
        """The states of torch's generators: another one at the end of a pass means that it drew random numbers."""
        of_gpu = [self.torch.cuda.get_rng_state()] if self.torch.cuda.is_initialized() else []
        return [x.numpy().tobytes() for x in (self.torch.get_rng_state(), *of_gpu)]

    def backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """A backward pass ends a forward pass; one inside of it (checkpointing) belongs to it."""
        if not self.backwards:
            roots = [tensors] if isinstance(tensors, self.torch.Tensor) else list(tensors)
            if self.torch.is_autocast_enabled(device := roots[0].device.type):
                self.now["dtypes"].add(str(self.torch.get_autocast_dtype(device)))
            loss = sum(local(x.detach()).double().sum().item() for x in roots)
            self.passes.append(self.now | {"loss": loss, "draws": self.random not in ([], self.generators())})
            self.new_pass()
        self.backwards += 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self.backwards -= 1

    # At a step ----------------------------------------------------------------------------------------------------

    def clip(self, original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        """Clipping: the gradients before it, and the norm that it returns or is given. By infinity it only measures."""
        parameters = [parameters] if isinstance(parameters, self.torch.Tensor) else list(parameters)
        if counts := bool(self.passes and parameters) and float(max_norm) < float("inf"):
            self.clipped |= self.write_gradients(parameters)
        out = original(parameters, max_norm, *args, **kwargs)
        if counts and self.norm is None:
            self.norm = float(whole(kwargs.get("total_norm", args[:1] and args[0]) if out is None else out))
        return out

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """The gradients that an optimizer gets are read. Those of others may be unfinished until their own step."""
        if self.passes and self.backwards:
            raise RuntimeError("an optimizer steps during backward; ring-doctor sees only steps after backward")
        if self.passes:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            self.write_gradients(weights, float(getattr(optimizer, "grad_scale", None) or 1.0))  # of a fused GradScaler
            self.read |= {id(weight): name for name, weight in self.named if id(weight) in set(map(id, weights))}
            self.stepping = type(optimizer).__name__

    def after_step(self, *_: Any) -> None:
        """A step of the job ends when no other optimizer has gradients, or when the next forward pass begins."""
        self.stepping = ""
        if self.read and all(id(weight) in self.read or weight.grad is None for weight in self.of_optimizers()):
            self.end_step()

    def of_optimizers(self) -> list[Any]:
        optimizers = self.living(self.torch.optim.Optimizer, "param_groups")
        return [weight for one in optimizers for group in one.param_groups for weight in group["params"]]

    def living(self, kind: Any, has: str) -> list[Any]:
        """All objects of a class that have been made so far, and have this attribute of their own."""
        return [x for x in gc.get_objects() if issubclass(type(x), kind) and has in vars(x)]

    def names(self, wanted: list[Any], named: str) -> list[tuple[str, Any]]:
        """The weights or modules, by name, of those modules that have a wanted one and are in no other module.

        They are without wrappers, in the order of their calls. Several have a number each.
        """
        modules, keys = self.living(self.torch.nn.Module, "_modules"), set(map(id, wanted))
        inside = {id(child) for module in modules for child in module.children()}
        order, roots = {key: n for n, key in enumerate(self.sums)}, {}
        for root in (module for module in modules if id(module) not in inside):
            while len(children := list(root.children())) == 1 and not list(root.parameters(recurse=False)):
                root = children[0]
            found = [(WRAPPERS.sub("", name), x) for name, x in getattr(root, named)()]
            if any(id(x) in keys for _, x in found):
                roots[id(root)] = min(order.get(id(x), len(order)) for x in root.modules()), found
        parts = [found for _, found in sorted(roots.values(), key=lambda root: root[0])]
        return [(f"{n}." * (len(parts) > 1) + name, x) for n, found in enumerate(parts) for name, x in found]

    def write_gradients(self, weights: list[Any], scale: float = 1.0) -> set[str]:
        """Each gradient to a file: "gradient" where it was seen before clipping, else "before". Returns their names."""
        torch, (self.rank, self.world), written = self.torch, self.place(), set()
        known = {id(weight): weight for weight in [*self.of_optimizers(), *weights]}
        self.named = self.names(list(known.values()), "named_parameters")
        for _, weight in self.named:
            known.pop(id(weight), None)
        self.named += [(f"weight {n} of the optimizer", weight) for n, weight in enumerate(known.values())]
        given = set(map(id, weights))
        for name, weight in self.named:
            if name not in self.weights:
                x = whole(weight).detach().double()
                self.weights[name] = torch.stack([x.sum(), x.square().sum()]).cpu()
            if weight.grad is not None and id(weight) in given:
                written.add(name)
                self.dtypes.add(str(weight.grad.dtype))
                full = whole(weight.grad).detach().to("cpu", copy=True)
                kind = "gradient" if name in self.clipped else "before"
                file = f"{kind}-{len(self.steps)}-{name.replace('/', ':')}-{self.rank}.pt"
                torch.save(full if scale == 1 else full.double() / scale, FOLDER / file)
        return written

    def end_step(self) -> None:
        """What was seen of a step."""
        names = {id(module): name for name, module in self.names(self.called, "named_modules")}
        sums = [(names[key] or "the model", float(x)) for key, x in self.sums.items() if key in names]
        waiting = {id(weight) for weight in self.of_optimizers()} - set(self.read)
        later = [name for name, weight in self.named if id(weight) in waiting]
        seen = {"passes": self.passes, "norm": self.norm, "modules": sums, "dtypes": self.dtypes, "later": later}
        more = {"owned": list(self.read.values()), "compiles": self.compiles, "sending": self.sending}
        more |= {"weights": self.weights}
        self.steps.append(seen | more)
        self.new_step()
        if len(self.steps) == STEPS:
            self.end()

    def place(self) -> tuple[int, int]:
        """(rank, number of ranks)"""
        dist = self.torch.distributed
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def end(self) -> None:
        """Write what was seen, wait until the doctor has it from all ranks, and end this process."""
        weights = {name: x for step in reversed(self.steps) for name, x in step["weights"].items()}  # the first seen
        seen = {"rank": self.rank, "steps": self.steps, "weights": weights}
        self.torch.save(seen, file := FOLDER / f"seen-{self.rank}.tmp")
        os.replace(file, FOLDER / f"seen-{self.rank}-of-{self.world}.pt")
        while not (FOLDER / "end").exists():  # should the doctor be killed, this process is too: job.py
            time.sleep(0.02)
        os._exit(0)  # no handler of the user's runs: it might write a file


def local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def whole(x: Any) -> Any:
    """All of a DTensor. Every rank must call."""
    if hasattr(x, "full_tensor"):
        x = (x.to(x.device_mesh.device_type) if x.device.type != x.device_mesh.device_type else x).full_tensor()
    return x.to_dense() if getattr(x, "is_sparse", False) else x


def flat(x: Any) -> list[Any]:
    x = list(x.values()) if isinstance(x, dict) else x
    return [y for each in x for y in flat(each)] if isinstance(x, list | tuple) else [x]


def move(torch: Any, module: Any) -> None:
    """Move each weight by one unit of the dtype MOVE, once: w (1 ± eps)."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for whole_weight in module.parameters() if MOVE else ():
            if not hasattr(whole_weight, "ring_doctor_moved") and whole_weight.is_floating_point():
                whole_weight.ring_doctor_moved = True
                weight = local(whole_weight.data)
                signs = torch.randint(0, 2, weight.shape, generator=draw).mul(2).sub(1).to(weight)
                weight.add_(weight.abs() * signs * torch.finfo(getattr(torch, MOVE)).eps)
