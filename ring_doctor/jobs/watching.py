"""Where the recorder looks: what is put around functions of torch as soon as the user's program has imported it.

    begin()    ->    a finder of modules, which waits for torch; then `watch`

Like recorder.py it runs in each process of the user's job, and imports nothing of this project but that file, by the
name under which job.py has loaded it.

Before: recorder.py. After: job.py, which starts and ends the job; seen.py reads what was written.
"""

import atexit
import functools
import gc
import importlib.util
import inspect
import itertools
import os
import re
import sys
import time
import traceback
import weakref
from typing import Any

import ring_doctor_recorder as recorder  # type: ignore[import-not-found]

MOVE = os.environ.get("RING_DOCTOR_MOVE", "")  # a dtype: weights are moved by one unit of it before the first step
OF_WEIGHTS = ("torch.distributed.fsdp", "torch.nn.parallel")  # whose messages carry weights and gradients
METHODS = re.compile("send|_?(all|broadcast|gather|scatter|reduce)")  # of a group of processes: their names
FUNCTIONAL = "torch.distributed._functional_collectives"  # which return a tensor
FUNCTIONS = "all_gather_tensor all_to_all_single permute_tensor all_reduce reduce_scatter_tensor all_gather_single"
FUNCTIONS += " broadcast all_gather_tensor_autograd all_to_all_single_autograd all_gather_single_autograd"
LAUNCHERS = ("torch/distributed/launcher/api.py", "accelerate/commands/launch.py")  # which say that a rank failed


def watch(torch: Any) -> None:
    """Begin to note, in a process that has imported torch."""
    seen = recorder.seen = recorder.Recorder(torch)
    gc.freeze()  # the recorder looks for modules among all objects: torch's own, 300,000 of them, are left out

    def embedding(input: Any, *_: Any, **__: Any) -> None:
        count = sum(key.startswith("embedding") for key in seen.now["whole_numbers"])
        seen.whole_numbers(f"embedding {count}", input)

    def loss(input: Any, target: Any, *_: Any, **options: Any) -> None:
        seen.now["dtypes"].add(str(input.dtype))
        if not target.is_floating_point():
            ignored = target == options.get("ignore_index", -100)
            seen.now["labels"].append(target.detach().masked_fill(ignored, -100).flatten().cpu())

    notes = {"embedding": embedding, "cross_entropy": loss, "nll_loss": loss}
    for name in (*notes, "dropout", "scaled_dot_product_attention"):  # these two may draw random numbers
        around(torch.nn.functional, name, functools.partial(noted, seen, notes.get(name, lambda *_, **__: None)))
    around(torch.autograd, "backward", lambda by, tensors, *args, **kw: seen.backward(by, tensors, args, kw))
    for home in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
            around(home, name, lambda by, weights, *args, **kw: seen.clip(by, weights, args, kw))
    if torch.distributed.is_available():
        for name in filter(METHODS.match, dir(torch.distributed.ProcessGroup)):
            around(torch.distributed.ProcessGroup, name, functools.partial(sent, name))
        for name in FUNCTIONS.split():  # before a program imports them from their module
            around(importlib.import_module(FUNCTIONAL), name, functools.partial(sent, name))

    def compiled(original: Any, *args: Any, **kwargs: Any) -> Any:
        # A step that is compiled whole has all of these in it.
        for name in () if seen.compiles else ("backward", "clip", "step"):
            setattr(seen, name, torch.compiler.disable(getattr(seen, name)))
        seen.compiles = True
        return original(*args, **kwargs)

    around(torch, "compile", compiled)
    call = torch.nn.Module.__call__

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        if MOVE and not seen.depth and seen.looks():
            move(torch, module)
        return seen.call(module, call, args, kwargs)

    torch.nn.Module.__call__ = called

    def made(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Read as late as can be: hooks, and what a class of the user's does before super().step(), may sum gradients.
        kind = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind) and not steps_on(kind))
        own = "" if kind.__module__.startswith("torch.") else kind.__name__

        def steps(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            seen.step(optimizer, own)
            out = original(optimizer, *args, **kwargs)
            if own:
                seen.step(optimizer, own, kind="after")
            return out

        around(kind, "step", steps)
        original(optimizer, *args, **kwargs)
        seen.optimizers.append(weakref.ref(optimizer))

    around(torch.optim.Optimizer, "__init__", made)
    atexit.register(seen.end_read_step)


def around(home: Any, name: str, wrapper: Any) -> None:
    """Put `wrapper`, which gets the original first, in the place of a function; once."""
    original = getattr(home, name, None)
    if original is None or hasattr(original, "ring_doctor"):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.ring_doctor = True  # type: ignore[attr-defined]
    setattr(home, name, wrapped)


def noted(seen: Any, note: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of which a note is taken; outside of a module it is a part of its own."""
    if not seen.looks():
        return original(*args, **kwargs)
    if not seen.depth:
        seen.random = seen.generators()
    note(*args, **kwargs)
    out = original(*args, **kwargs)
    if not seen.depth:
        seen.close([out])
    return out


def steps_on(kind: Any) -> bool:
    """Whether the step of these optimizers calls another one, as super().step()."""
    return "step" in getattr(getattr(inspect.unwrap(kind.step), "__code__", None), "co_names", ())


def sent(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    """A message, of which a note is taken unless it carries weights or gradients."""
    seen, frames = recorder.seen, traceback.walk_stack(sys._getframe(1))
    callers = [frame.f_globals.get("__name__", "") for frame, _ in itertools.islice(frames, 12)]
    if seen.stepping:
        seen.own_steps[seen.stepping] += 1
    elif seen.looks() and not any(caller.startswith(OF_WEIGHTS) for caller in callers):
        parts = recorder.flat([*args, *kwargs.values()])
        sizes = [x.numel() for x in parts if hasattr(x, "is_floating_point") and x.is_floating_point()]
        seen.now["messages"].append((name, max(sizes, default=0)))
    return original(*args, **kwargs)


def move(torch: Any, module: Any) -> None:
    """Move each weight by one unit of the dtype MOVE, once: w (1 ± eps)."""
    eps, draw = torch.finfo(getattr(torch, MOVE)).eps, torch.Generator().manual_seed(0)
    with torch.no_grad():
        for whole_weight in module.parameters():
            if hasattr(whole_weight, "ring_doctor_moved") or not whole_weight.is_floating_point():
                continue
            whole_weight.ring_doctor_moved = True
            weight = recorder.local(whole_weight.data)
            signs = torch.randint(0, 2, weight.shape, generator=draw).mul(2).sub(1).to(weight)
            weight.add_(weight.abs() * signs * eps)


class AfterTorch:
    """Calls `watch` as soon as torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module torch, which calls what is above when it has been loaded."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found and found.loader:
            load = found.loader.exec_module

            def load_and_watch(module: Any) -> None:
                load(module)
                watch(module)

            found.loader.exec_module = load_and_watch  # type: ignore[method-assign]
        return found


def begin() -> None:
    """Let job.py find this process, and the error that ends it, and wait for torch."""

    def note() -> None:
        (recorder.FOLDER / f"pid-{os.getpid()}").touch()

    note()
    os.register_at_fork(after_in_child=note)
    sys.excepthook = functools.partial(failed, sys.excepthook)
    sys.meta_path.insert(0, AfterTorch())


def failed(shown: Any, kind: Any, error: Any, frames: Any) -> None:
    """Write the error that ends this process for job.py, before it is shown; not that of a launcher about a rank.

    The files are in the order of their time, those of processes that imported torch first. An error that was caught is
    none of these, as it is in the output.
    """
    if frames and traceback.extract_tb(frames)[-1].filename.endswith(LAUNCHERS):
        return
    # A group is one of Python, or of the package exceptiongroup.
    while any(each.__name__ == "BaseExceptionGroup" for each in type(error).__mro__):
        error = error.exceptions[0]
    said = [*traceback.format_tb(error.__traceback__)[-2:], *traceback.format_exception_only(error)]
    rank = f"rank {os.environ['RANK']}\n" if "RANK" in os.environ else ""
    file = recorder.FOLDER / f"error-{int(not hasattr(recorder, 'seen'))}-{time.time_ns()}-{os.getpid()}"
    file.write_text(rank + "".join(said), errors="replace")
    shown(kind, error, frames)
