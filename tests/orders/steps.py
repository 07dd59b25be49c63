"""The steps that a rank can take, as far as other ranks can tell: messages, flags, and cells of memory.

A reader may skip this file: each step says what it does. interleavings.py tries them in every order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

Cells = tuple[str, ...]
Parts = tuple[object, ...]  # what a cell holds: a block's number, or whatever was added up in it, in this order


def _list(cells: Cells) -> str:
    return " and ".join(cells) + " " * bool(cells)


@dataclass(frozen=True)
class Isend:
    to: int
    cells: Cells = ()
    channel: str = ""  # messages of two channels do not meet: two process groups

    def __str__(self) -> str:
        return f"begins to send {_list(self.cells)}to rank {self.to}"


@dataclass(frozen=True)
class Irecv:
    source: int
    cells: Cells = ()
    channel: str = ""

    def __str__(self) -> str:
        return f"begins to receive {_list(self.cells)}from rank {self.source}"


@dataclass(frozen=True)
class Wait:
    steps: tuple[int, ...]  # of this program, which began the messages

    def __str__(self) -> str:
        return "sees the end of the message" + "s" * (len(self.steps) > 1)


@dataclass(frozen=True)
class Raise:
    flag: str  # only one rank raises it, by 1

    def __str__(self) -> str:
        return f"raises {self.flag}"


@dataclass(frozen=True)
class Await:
    flag: str
    count: int

    def __str__(self) -> str:
        return f"waits until {self.flag} is {self.count}"


@dataclass(frozen=True)
class Read:
    cells: Cells
    expected: frozenset[object]  # these parts, each once

    def __str__(self) -> str:
        return f"reads {_list(self.cells)}".rstrip()


@dataclass(frozen=True)
class Write:
    """Give the cells new parts, or those that the cells of `source` hold; with `add` besides what they hold."""

    cells: Cells
    parts: Parts = ()
    source: Cells = ()
    add: bool = False

    def __str__(self) -> str:
        return f"{'adds to' if self.add else 'writes'} {_list(self.cells)}".rstrip()


Step = Isend | Irecv | Wait | Raise | Await | Read | Write


def touched(step: Step) -> Iterator[tuple[str, bool]]:
    """The cells that a step touches, and whether it writes them."""
    if isinstance(step, Isend | Irecv | Read | Write):
        yield from ((cell, isinstance(step, Irecv | Write)) for cell in step.cells)
    if isinstance(step, Write):
        yield from ((cell, False) for cell in step.source)
