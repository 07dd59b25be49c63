"""Where the recorder looks: what is put around functions of torch as soon as the user's program has imported it.

    begin()    ->    a finder of modules, which waits for torch; then `watch`

Like recorder.py it runs in each process of the user's job, and imports nothing of this project but that file, by the
name under which job.py has loaded it.

Before: recorder.py. After: job.py, which starts and ends the job; seen.py reads what was written.
"""

import atexit
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import sys
import time
import traceback
import weakref
from typing import Any

import ring_doctor_recorder as recorder  # type: ignore[import-not-found]

METHODS = "send broadcast gather scatter reduce allreduce allgather _allgather_base allgather_into_tensor_coalesced"
METHODS += " reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced"
METHODS += " all_gather_single alltoall alltoall_base all_to_all_single"  # of a group of processes
FUNCTIONAL = "torch.distributed._functional_collectives"  # which return a tensor
FUNCTIONS = "all_gather_tensor all_to_all_single permute_tensor all_reduce reduce_scatter_tensor all_gather_single"
FUNCTIONS += " all_gather_tensor_autograd all_to_all_single_autograd all_gather_single_autograd"
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

    def part(*_: Any, **__: Any) -> None:
        """Nothing is noted but whether random numbers are drawn."""

    notes = {"embedding": embedding, "cross_entropy": loss, "nll_loss": loss, "dropout": part}
    for name, note in (notes | {"scaled_dot_product_attention": part}).items():
        around(torch.nn.functional, name, functools.partial(noted, seen, note))
    around(torch.autograd, "backward", lambda by, tensors, *args, **kw: seen.backward(by, tensors, args, kw))
    for home in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
            around(home, name, lambda by, weights, *args, **kw: seen.clip(by, weights, args, kw))
    if torch.distributed.is_available():
        for name in METHODS.split():
            around(torch._C._distributed_c10d.ProcessGroup, name, functools.partial(sent, name))
        for name in FUNCTIONS.split():  # before a program imports them from their module
            around(importlib.import_module(FUNCTIONAL), name, functools.partial(sent, name))

    def compiled(original: Any, *args: Any, **kwargs: Any) -> Any:
        # A step that is compiled whole has all of these in it.
        for name in () if seen.compiles else ("backward", "clip", "step", "stepped"):
            setattr(seen, name, torch.compiler.disable(getattr(seen, name)))
        seen.compiles = True
        return original(*args, **kwargs)

    around(torch, "compile", compiled)
    call = torch.nn.Module.__call__

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        return seen.call(module, call, args, kwargs)

    torch.nn.Module.__call__ = called

    def made(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Read as late as can be: hooks, and what a class of the user's does before super().step(), may sum gradients.
        kind = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind) and not steps_on(kind))
        own = "" if kind.__module__.startswith("torch.") else kind.__name__

        def steps(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            seen.step(optimizer, own)
            out = original(optimizer, *args, **kwargs)
            seen.stepped(optimizer)
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
    recorder.seen.message(name, (*args, *kwargs.values()))
    return original(*args, **kwargs)


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
