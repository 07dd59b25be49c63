"""What is seen of a training job from inside, until its step N: this file runs in each process of the user's job.

    Python starts  ->  sitecustomize.py, which job.py put in front of PYTHONPATH, runs this file, then the user's own
    import torch   ->  watching.py puts itself around backward, clipping, embeddings, losses, modules and messages
    optimizer.step ->  the gradients go to files, one at a time; after step N the process waits for the others and ends

Nothing is changed that a process computes. What `torch.compile` traces is left alone, so inside of it nothing is seen.
This file imports nothing of this project: the job may run in another environment.

Shapes: as in the job. A gradient is whole: a DTensor's shards are gathered.

Before: nothing. After: watching.py, who calls this.
"""

import gc
import inspect
import os
import re
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["RING_DOCTOR_FOLDER"])
STEPS = int(os.environ["RING_DOCTOR_STEPS"])
KEPT = 200  # parts that may wait for a backward pass
LARGEST = 2**24  # whole numbers that are kept of one argument


def fresh() -> dict[str, Any]:
    """What is noted of a part of a pass, or of a pass."""
    return {"whole_numbers": {}, "messages": [], "labels": [], "sums": {}, "dtypes": set(), "draws": False}


class Recorder:
    """What one process has seen. `passes` are the passes since the last step, each forward and backward.

    A part is an outermost call of a module, or of a loss. Those parts belong to a pass whose results its loss comes
    from, so nothing is noted of an evaluation, or of a trial of the model.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.steps: list[dict[str, Any]] = []
        self.parts: list[dict[str, Any]] = []
        self.now = fresh()  # the part in hand
        self.depth = self.backwards = 0  # calls of modules, and of backward, that have not returned
        self.weights: dict[str, Any] = {}  # by name, their sizes in the first step
        self.called: list[Any] = []  # the outermost modules that were called since the last backward pass
        self.compiles = False
        self.stepping = ""  # the class of an optimizer that is not torch's, in its step
        self.optimizers: list[Any] = []  # weak references: one that was replaced makes no step
        self.new_step()

    def new_step(self) -> None:
        """Forget what was of the last step."""
        self.passes: list[dict[str, Any]] = []
        self.sums: dict[int, Any] = {}  # by module, its outputs: the sum of squares
        self.of_modules: dict[int, str] = {}  # the names of modules in this step
        self.sizes: dict[str, Any] = {}  # of weights before the step: what each and its squares add up to
        self.norm: float | None = None  # that the first clipping took
        self.clipped: set[str] = set()  # weights whose gradients were seen before clipping
        self.read: set[int] = set()  # weights whose optimizer has begun its step
        self.whose: dict[str, list[str]] = {"owned": [], "left": [], "later": []}  # names of weights: step
        self.scale = 1.0  # of gradients, which an optimizer divides by inside of its step
        self.dtypes: set[str] = set()  # of gradients
        self.own_steps: dict[str, int] = {}  # by class of an optimizer that is not torch's: messages in its step

    # While the model computes --------------------------------------------------------------------------------------

    def looks(self) -> bool:
        """Whether what is called now belongs to a forward pass of the training, and not to a graph that is traced."""
        compiling = self.torch.compiler.is_compiling()
        return not compiling and not self.backwards and (self.depth > 0 or self.torch.is_grad_enabled())

    def whole_numbers(self, key: str, x: Any) -> None:
        """Keep the whole numbers of an argument, if it has some."""
        whole = isinstance(x, self.torch.Tensor) and x.dtype in (self.torch.int64, self.torch.int32)
        if whole and x.dim() > 0 and x.numel() <= LARGEST and key not in self.now["whole_numbers"]:
            self.now["whole_numbers"][key] = local(x).detach().to("cpu", copy=True)

    def call(self, module: Any, original: Any, args: Any, kwargs: Any) -> Any:
        """A call of a module: its whole numbers, and how large its output is."""
        if not self.looks():
            return original(module, *args, **kwargs)
        if not self.depth:
            self.random = self.generators()
            self.called.append(module)
        kind = type(module)
        names = list(inspect.signature(kind.forward).parameters)[1:]
        for name, x in (*zip(names, args, strict=False), *kwargs.items()):
            self.whole_numbers(f"{kind.__name__}.{name}", x)
        self.depth += 1
        try:
            out = original(module, *args, **kwargs)
        finally:
            self.depth -= 1
        parts = flat(list(out.values()) if hasattr(out, "values") and not isinstance(out, self.torch.Tensor) else out)
        found = [x for x in parts if isinstance(x, self.torch.Tensor) and x.is_floating_point()]
        if found and (x := max(found, key=lambda x: x.numel())).numel() > 1:  # a loss is that of a shard
            self.now["dtypes"].add(str(x.dtype))
            square = self.torch.linalg.vector_norm(local(x.detach()), dtype=self.torch.float64) ** 2
            self.now["sums"][id(module)] = self.now["sums"].get(id(module), 0.0) + square
        if not self.depth:
            self.close(found)
        return out

    def close(self, results: list[Any]) -> None:
        """The part in hand has ended, with these results."""
        self.now["draws"] = self.generators() != self.random
        self.parts = [*self.parts[-KEPT:], self.now | {"nodes": {x.grad_fn for x in results if x.grad_fn}}]
        self.now = fresh()

    def generators(self) -> list[bytes]:
        """The states of torch's generators: another state after a part means that it drew random numbers."""
        of_gpu = [self.torch.cuda.get_rng_state()] if self.torch.cuda.is_initialized() else []
        return [x.numpy().tobytes() for x in (self.torch.get_rng_state(), *of_gpu)]

    def backward(self, original: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        """A backward pass ends a forward pass; one inside of it (checkpointing) belongs to it."""
        if self.torch.compiler.is_compiling() or self.backwards:
            return original(tensors, *args, **kwargs)
        self.end_read_step()
        roots = [tensors] if isinstance(tensors, self.torch.Tensor) else list(tensors)
        self.passes.append(self.pass_of(roots))
        if any(key not in self.of_modules for key in self.sums):
            weights = [weight for module in self.called for weight in module.parameters()]
            for at, root in self.homes(weights):
                self.of_modules |= {id(x): f"{at}{plain(name)}" for name, x in root.named_modules()}
        self.parts, self.now, self.called = [], fresh(), []
        self.backwards += 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self.backwards -= 1

    def pass_of(self, roots: list[Any]) -> dict[str, Any]:
        """All parts that these losses come from."""
        graph, todo = set(), [x.grad_fn for x in roots]
        while todo:
            if (node := todo.pop()) is not None and node not in graph:
                graph.add(node)
                todo += [before for before, _ in node.next_functions]
        one = fresh() | {"loss": sum(local(x.detach()).double().sum().item() for x in roots)}
        for part in [*self.parts, self.now | {"nodes": graph}]:
            if part["nodes"] & graph:
                for key, x in part["whole_numbers"].items():
                    while key in one["whole_numbers"]:
                        key += "'"
                    one["whole_numbers"][key] = x
                for key in ("draws", "dtypes"):
                    one[key] |= part[key]
                for key in ("labels", "messages"):
                    one[key] += part[key]
                for module, x in part["sums"].items():
                    self.sums[module] = self.sums.get(module, 0.0) + x
        if self.torch.is_autocast_enabled(device := roots[0].device.type):
            one["dtypes"].add(str(self.torch.get_autocast_dtype(device)))
        return one

    # At a step ----------------------------------------------------------------------------------------------------

    def clip(self, original: Any, parameters: Any, args: Any, kwargs: Any) -> Any:
        """Clipping: the gradients before it, and the norm that it returns or is given."""
        parameters = [parameters] if isinstance(parameters, self.torch.Tensor) else list(parameters)
        most = float(kwargs["max_norm"] if "max_norm" in kwargs else args[0])  # inf: it only measures
        counts = bool(self.passes and parameters) and most < float("inf")
        if counts:
            self.clipped |= self.write_gradients(parameters)
        out = original(parameters, *args, **kwargs)
        if counts and self.norm is None:
            self.norm = float(whole(kwargs.get("total_norm", args[-1]) if out is None else out))
        return out

    def step(self, optimizer: Any, own: str = "", kind: str = "") -> None:
        """Before an optimizer's step: its gradients are read. Those of others may be unfinished, or left by a pass
        that was not for them. So a step of the job ends when no other has any, or when the next backward pass begins.

        `own` is the name of a class that is not torch's. It may sum the gradients, so they are read once more, with
        `kind` "after", when it has made its step.
        """
        if not self.passes or not STEPS or (kind and not self.stepping):  # no STEPS: a function, ../whole_models
            return
        if self.backwards:
            raise RuntimeError("an optimizer steps during backward; ring-doctor sees only steps after backward")
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.scale = float(getattr(optimizer, "grad_scale", None) or 1.0)  # a GradScaler's, if the optimizer is fused
        self.write_gradients([weight for weight in weights if kind or id(weight) not in self.read], kind=kind)
        self.read |= set(map(id, weights))
        self.stepping = "" if kind else own
        if self.stepping:
            self.own_steps[own] = 0
            return
        known, named = set(map(id, self.of_optimizers([]))), [x for x in self.named if id(x[1]) not in self.read]
        left = [name for name, x in named if x.grad is not None]  # others that have a gradient
        later = [name for name, x in named if id(x) in known]  # those of optimizers that have made no step
        self.whose = {"owned": [name for name, x in self.named if id(x) in self.read], "left": left, "later": later}
        if not set(left).intersection(later):
            self.end_step()

    def of_optimizers(self, others: list[Any]) -> list[Any]:
        """The weights of all optimizers, in the order in which these were made, then other ones."""
        own = [w for at in self.optimizers if (one := at()) for group in one.param_groups for w in group["params"]]
        return list({id(weight): weight for weight in [*own, *others]}.values())

    def end_read_step(self) -> None:
        """The step ends in which one optimizer made its own, and others none."""
        if self.read:
            self.end_step()

    def end_step(self, reported: float | None = None) -> None:
        """What was seen of a step. A function reports a loss."""
        names = self.of_modules
        sums = [(names[key] or "the model", float(x)) for key, x in self.sums.items() if key in names]
        seen = {"passes": self.passes, "norm": self.norm, "modules": sums, "dtypes": self.dtypes, "reported": reported}
        more = {"compiles": self.compiles, "sizes": self.sizes, "own_steps": self.own_steps}
        self.steps.append(seen | self.whose | more)
        self.new_step()
        if len(self.steps) == STEPS:
            self.end()

    def write_gradients(self, weights: list[Any], own: dict[int, str] | None = None, kind: str = "") -> set[str]:
        """Each gradient to a file, and what each weight adds up to at first. Returns which have a gradient.

        The `kind` is "before" or "gradient", before and after clipping, if none is given: ../jobs/job.py.
        """
        torch, at, (self.rank, self.world) = self.torch, len(self.steps), self.place()
        found: dict[int, tuple[str, Any]] = {}
        for prefix, root in [] if own else self.homes(weights):
            found |= {id(x): (prefix + plain(name), x) for name, x in root.named_parameters()}
        for n, x in enumerate(weights if own else self.of_optimizers(weights)):
            found.setdefault(id(x), ((own or {}).get(id(x), f"weight {n} of the optimizer"), x))
        self.named, given, written = list(found.values()), set(map(id, weights)), set()
        for name, weight in self.named:
            if name not in self.sizes and not own:
                x = whole(weight).detach().double()
                self.sizes[name] = torch.stack([x.sum(), x.square().sum()]).cpu()
            self.weights.setdefault(name, None if at else self.sizes.get(name))
            # One that was taken away after clipping is 0.
            is_taken = weight.grad is None and name in self.clipped and not kind
            x = torch.zeros_like(weight) if is_taken else weight.grad
            if x is None or id(weight) not in given:
                continue
            written.add(name)
            self.dtypes.add(str(x.dtype))
            of_step = "gradient" if name in self.clipped or (own and self.norm is not None) else "before"
            full, alike = whole(x).detach().to("cpu"), hasattr(x, "full_tensor") and x.device_mesh.size() == self.world
            alike = alike and not any(at.is_replicate() for at in x.placements)  # gathered on all; copies may differ
            if (not self.rank or not alike) and (not kind or full.any()):  # a step may clear them
                of = "all" if alike else self.rank
                full = full.clone() if self.scale == 1 else full.double() / self.scale
                torch.save(full, FOLDER / f"{kind or of_step}-{at}-{name.replace('/', ':')}-{of}.pt")
        self.now = fresh()  # without the messages of gradients
        return written

    def homes(self, weights: list[Any]) -> list[tuple[str, Any]]:
        """The modules that hold these weights, or those of optimizers, or gradients, and are in no other module.

        They are without wrappers, in the order of optimizers, these weights and calls; each with a prefix for names.
        """
        order = {key: n for n, key in enumerate([*map(id, self.of_optimizers(weights)), *self.sums])}
        modules = [x for x in gc.get_objects() if issubclass(type(x), self.torch.nn.Module) and "_modules" in vars(x)]
        inside = {id(child) for module in modules for child in module.children()}
        found: dict[int, Any] = {}
        for root in modules:
            if id(root) in inside or not any(id(x) in order or x.grad is not None for x in root.parameters()):
                continue
            while len(children := list(root.children())) == 1 and not list(root.parameters(recurse=False)):
                root = children[0]
            found[id(root)] = root
        roots = sorted(found.values(), key=lambda x: min(order.get(id(w), len(order)) for w in (x, *x.parameters())))
        return [(f"{n}." if len(roots) > 1 else "", root) for n, root in enumerate(roots)]

    def place(self) -> tuple[int, int]:
        """(rank, number of ranks)"""
        dist = self.torch.distributed
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def end(self) -> None:
        """Write what was seen, wait until the doctor has it from all ranks, and end this process."""
        seen = {"rank": self.rank, "steps": self.steps, "weights": self.weights}
        self.torch.save(seen, file := FOLDER / f"seen-{self.rank}.tmp")
        os.replace(file, FOLDER / f"seen-{self.rank}-of-{self.world}.pt")
        while not (FOLDER / "end").exists():  # should the doctor be killed, this process is too: job.py
            time.sleep(0.02)
        os._exit(0)  # no handler of the user's runs: it might write a file


def plain(name: str) -> str:
    """A name without those of wrappers."""
    return re.sub(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)


def local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def whole(x: Any) -> Any:
    """All of a DTensor. Every rank must call."""
    if hasattr(x, "full_tensor"):
        x = (x.to(x.device_mesh.device_type) if x.device.type != x.device_mesh.device_type else x).full_tensor()
    return x.to_dense() if getattr(x, "is_sparse", False) else x


def flat(x: Any) -> list[Any]:
    return [y for each in x for y in flat(each)] if isinstance(x, list | tuple) else [x]
