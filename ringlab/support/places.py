"""In which line of the user's code did it happen? Of a stack or an error, the line that its reader knows best.

    place([("/usr/lib/python3.12/queue.py", 7, "get"), ("/home/me/ring.py", 12, "attention")])
        ->  "ring.py, line 12 in attention"

A reader of the ring may skip this file.
"""

import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Frame = tuple[str, int, str]  # (file, line, function)
HERE = Path(__file__).parent
CALLERS = tuple(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, HERE, HERE.parents[1] / "ring_doctor"))
PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
INSTALLED = f"{os.sep}site-packages{os.sep}"
LOST_CONNECTION = re.compile(
    "Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Timed out waiting|timed out|"
    "Socket closed|remote process exited"
)


def place(frames: Sequence[Frame]) -> str:
    """The innermost frame of the user's own files, or else of a library that they call; "" where there is none.

    `frames` begin with the innermost one.
    """
    called = [frame for frame in frames if not frame[0].startswith(("<", *CALLERS))]
    own = [frame for frame in called if not frame[0].startswith(PYTHON) and INSTALLED not in frame[0]]
    libraries = [frame for frame in called if INSTALLED in frame[0]]
    for path, line, function in [*own, *libraries][:1]:
        return f"{short(path)}, line {line}" + (f" in {function}" if function != "<module>" else "")
    return ""


def place_of(error: BaseException) -> str:
    """Where an error was raised, as `place` says it. Of a syntax error: the line that is no Python."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short(error.filename)}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return place([(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames)])


def short(path: str) -> str:
    """The path from the current folder, or the name of a file that is elsewhere."""
    file = Path(path)
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else file.name


@dataclass(frozen=True)
class Raised:
    """The error of a rank, in place of its result."""

    kind: str  # "ValueError", "RuntimeError", ...
    message: str
    trace: str
    where: str = ""  # "ring.py, line 12 in attention": in the user's own files, if it passed through them

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """The kind, message, trace and place of an error."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)), place_of(error))

    @property
    def lost_connection(self) -> bool:
        """Whether it was raised because another rank had failed: that rank's connections close."""
        kinds = ("RuntimeError", "DistBackendError", "DistNetworkError")
        return self.kind in kinds and LOST_CONNECTION.search(self.message) is not None
