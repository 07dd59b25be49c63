"""Where a rank is that does not answer: it writes its stack while it works, and the doctor reads what it wrote last.

    hang(folder, [0, 2])      ->    True: these ranks wait for messages, and waited in the same lines some seconds ago
    lines_of_ranks(folder)    ->    {"ring.py, line 12 in attention": [0, 2]}

A rank that compiles, or computes for long, is in no such line: it may go on until its time is over. A rank that dies by
a signal writes its stack too.

Before: on_rank.py, where the ranks write. After: job.py.
Source: the form of the stacks is that of Python's module faulthandler.
"""

import faulthandler
import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ringlab.support.places import Frame, place

OFTEN = 0.25  # of the time for a question: a stack is written after each such part
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', flags=re.MULTILINE)
DUMP = re.compile(r"^(?:Timeout|Fatal Python error)", flags=re.MULTILINE)
WAITING = ("/torch/distributed/", "\\torch\\distributed\\")


@contextmanager
def written(file: Path, seconds: float) -> Iterator[None]:
    """While the body runs, the stack of this process goes into the file, again and again, and when a signal ends it."""
    with file.open("w") as stack:
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(OFTEN * seconds, repeat=True, file=stack)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()


def lines_of_ranks(folder: Path) -> dict[str, list[int]]:
    """The ranks that have written a stack, by the line of the user's code in which they are."""
    found: dict[str, list[int]] = {}
    for rank, stacks in sorted(_read(folder).items()):
        if stacks and (at := place(stacks[-1])):
            found.setdefault(at, []).append(rank)
    return found


def hang(folder: Path, silent: Sequence[int]) -> bool:
    """Whether each of these ranks waits for a message, in the line in which it waited the last time."""
    stacks = _read(folder)
    last = [stacks.get(rank, [])[-2:] for rank in silent]
    return all(len(two) == 2 and two[0] == two[1] and _waits(two[1]) for two in last)


def _waits(frames: Sequence[Frame]) -> bool:
    """Whether the innermost calls are torch's to wait for a message."""
    in_torch = any(each in path for path, _, _ in frames[:3] for each in WAITING)
    return in_torch or (bool(frames) and ".wait(" in linecache.getline(*frames[0][:2]))


def _read(folder: Path) -> dict[int, list[list[Frame]]]:
    """By rank the stacks that it wrote, the innermost frame first: those of the main thread, which comes last."""
    found = {}
    for path in folder.glob("[0-9]*"):
        stacks = [dump.split("Thread 0x")[-1] for dump in DUMP.split(path.read_text())[1:]]
        found[int(path.name)] = [[(f, int(line), of) for f, line, of in FRAME.findall(stack)] for stack in stacks]
    return found
