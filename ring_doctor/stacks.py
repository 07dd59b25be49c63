"""Where a rank is that does not answer: it writes its stack while it works, and the doctor reads what it wrote last.

    hang(folder, [0, 2])      ->    True: these ranks wait for messages, and waited in the same lines some seconds ago
    lines_of_ranks(folder)    ->    {"ring.py, line 12 in attention": [0, 2]}

A thread of the rank looks, and not faulthandler's timer: that one reads frames while the interpreter changes them, and
kills a rank that imports or compiles. A rank that dies by a signal writes its stack too.

Before: on_rank.py, where the ranks write. After: job.py.
Source: the form of the stacks is that of Python's module faulthandler.
"""

import faulthandler
import linecache
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ringlab.support.places import Frame, place

OFTEN = 0.25  # of the time for a question: a stack is written after each such part
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', flags=re.MULTILINE)
STACK = re.compile(r"^(?:Stack|Fatal Python error)", flags=re.MULTILINE)


@contextmanager
def written(path: Path, seconds: float) -> Iterator[None]:
    """While the body runs, the stack of this thread goes into the file, again and again, and when a signal ends it."""
    working, done = threading.get_ident(), threading.Event()
    with path.open("w") as file:

        def look() -> None:
            while not done.wait(OFTEN * seconds):
                frames = traceback.walk_stack(sys._current_frames()[working])
                lines = [f'  File "{of.f_code.co_filename}", line {line} in {of.f_code.co_name}' for of, line in frames]
                file.write("\n".join(["Stack", *lines, ""]))
                file.flush()

        looking = threading.Thread(target=look, daemon=True)
        faulthandler.enable(file, all_threads=False)
        looking.start()
        try:
            yield
        finally:
            done.set()
            looking.join()
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
    """Whether the innermost calls wait for a message, or for what another rank writes into a store."""
    in_torch = any("/torch/distributed/" in path for path, _, _ in frames[:3])
    return in_torch or bool(frames and re.search(r"\.(wait|poll|get|multi_get)\(", linecache.getline(*frames[0][:2])))


def _read(folder: Path) -> dict[int, list[list[Frame]]]:
    """By rank the stacks that it wrote, the innermost frame first."""
    return {
        int(path.name): [[(f, int(line), of) for f, line, of in FRAME.findall(stack)] for stack in stacks]
        for path in folder.glob("[0-9]*")
        for _, *stacks in [STACK.split(path.read_text())]
    }
