"""Where the recorder looks: what is put around functions of torch as soon as the user's program has imported it.

    begin()    ->    a finder of modules, which waits for torch; then `watch`

Like recorder.py it runs in each process of the user's job, and imports nothing of this project but that file, by the
name under which job.py has loaded it.

Before: recorder.py. After: job.py, which starts and ends the job; seen.py reads what was written.
"""

import functools
import gc
import importlib.util
import os
import re
import sys
import time
import traceback
from typing import Any

import ring_doctor_recorder as recorder  # type: ignore[import-not-found]

SENDS = re.compile("send|permute|_?(all|broadcast|gather|scatter|reduce)")  # names of functions that send


def watch(torch: Any) -> None:
    """Begin to note, in a process that has imported torch."""
    nn, seen = torch.nn, recorder.Recorder(torch)
    recorder.seen = seen  # ../whole_models asks for it
    gc.freeze()  # the recorder looks for modules among all objects: torch's own, 300,000 of them, are left out
    homes = [
        (nn.Module, ["__call__"], seen.call),
        (nn.functional, ["embedding"], seen.embedding),
        (nn.functional, ["cross_entropy", "nll_loss"], seen.loss),
        (nn.utils, ["clip_grad_norm_", "clip_grads_with_norm_"], seen.clip),
        (nn.utils.clip_grad, ["clip_grad_norm_"], seen.clip),
        (torch.autograd, ["backward"], seen.backward),
        (torch, ["compile"], seen.compile),
    ]
    if torch.distributed.is_available():
        functional = importlib.import_module("torch.distributed._functional_collectives")
        for home in (torch.distributed.ProcessGroup, functional):
            homes.append((home, list(filter(SENDS.match, dir(home))), seen.sent))
    for home, names, note in homes:
        for name in names:
            around(torch, home, name, note)
    optimizers = importlib.import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_pre_hook(seen.before_step)
    optimizers.register_optimizer_step_post_hook(seen.after_step)


def around(torch: Any, home: Any, name: str, note: Any) -> None:
    """Put `note`, which gets the original first, in the place of a function; once."""
    original = getattr(home, name, None)
    if original is None or hasattr(original, "ring_doctor"):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return note(original, *args, **kwargs)

    wrapped.ring_doctor = True  # type: ignore[attr-defined]
    setattr(home, name, wrapped)


class AfterTorch:
    """Calls `watch` as soon as torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module torch, which calls what is above when it has been loaded."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        if (found := importlib.util.find_spec(name)) and found.loader:
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
    """Write the error that ends this process for job.py, which takes the earliest, before it is shown."""
    said = [*traceback.format_tb(frames)[-2:], *traceback.format_exception_only(kind, error)]
    rank = f"rank {os.environ['RANK']}\n" if "RANK" in os.environ else ""
    (recorder.FOLDER / f"error-{time.time_ns()}-{os.getpid()}").write_text(rank + "".join(said), errors="replace")
    shown(kind, error, frames)
