"""How the recorder comes into each process of the user's job: by the `sitecustomize` that Python imports at its start.

    begin()    ->    a finder of modules, which waits for torch; then recorder.py

It imports nothing of this project, as the job may run in another environment, but recorder.py, which lies beside it.

Before: recorder.py. After: job.py, which starts and ends the job; seen.py reads what was written.
"""

import functools
import importlib
import importlib.util
import os
import sys
import time
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["RING_DOCTOR_FOLDER"])


def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
    """As a finder of modules, which this file is: torch, with a loader that calls `load_and_watch`."""
    if name != "torch":
        return None
    sys.meta_path.remove(sys.modules[__name__])
    if (found := importlib.util.find_spec(name)) and found.loader:
        found.loader.exec_module = functools.partial(load_and_watch, found.loader.exec_module)  # type: ignore[method-assign]
    return found


def load_and_watch(load: Any, torch: Any) -> None:
    """Begin to note as soon as the user's program has imported torch."""
    load(torch)
    importlib.import_module("ring_doctor_recorder").watch()


def begin() -> None:
    """Let job.py find this process, and the error that ends it; wait for torch; run a sitecustomize of the user's."""

    def note() -> None:
        (FOLDER / f"pid-{os.getpid()}").touch()

    note()
    os.register_at_fork(after_in_child=note)
    sys.excepthook = functools.partial(failed, sys.excepthook)
    sys.meta_path.insert(0, sys.modules[__name__])
    others = [path for path in sys.path if path != str(FOLDER / "start")]
    if (theirs := PathFinder.find_spec("sitecustomize", others)) and theirs.loader:
        theirs.loader.exec_module(importlib.util.module_from_spec(theirs))


def failed(shown: Any, kind: Any, error: Any, frames: Any) -> None:
    """Write the error that ends this process for job.py, which takes the earliest, before it is shown."""
    said = [*traceback.format_tb(frames)[-2:], *traceback.format_exception_only(kind, error)]
    rank = f"rank {os.environ['RANK']}\n" if "RANK" in os.environ else ""
    (FOLDER / f"error-{time.time_ns()}-{os.getpid()}").write_text(rank + "".join(said), errors="replace")
    shown(kind, error, frames)


if __name__ == "sitecustomize":
    begin()
