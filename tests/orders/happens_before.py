"""Do some ranks work together rightly, whichever of them is fast? What must happen before what answers for all orders.

The steps of a rank are messages, flags, and accesses to cells of memory. Messages of two ranks and one channel arrive
in order, and a flag has one owner. So what a step waits for is the same in every order: if one order ends, all do.
Two accesses to a cell, one of which writes, are a race unless a wait stands between them. Where there is no race, the
cells hold the same numbers in every order: those that other tests compare with full attention. So one order is tried,
with a vector clock for each rank: how many steps of each rank are over, as far as this rank can know.

A message is a rendezvous (blocking_messages.py): it moves when both ends have begun. From its beginning to the wait it
may read or write its cells at any time.

    $ python -m tests.orders.happens_before
    a hop of 3 ranks, all send first: these ranks wait for ever: [0, 1, 2]
    a hop of 3 ranks, even ranks send first: right in every order
    the block is written again before the wait for its send: rank 0 writes x while rank 0 sends it
    the block is written again after it: right in every order

Source: Lamport 1978, "happened before"; Mattern 1989, vector clocks.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from ringlab.basics.blocking_messages import Program, Send, ring_programs

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Isend:
    to: int
    cells: Cells = ()
    channel: str = ""  # messages of two channels do not meet: two process groups


@dataclass(frozen=True)
class Irecv:
    source: int
    cells: Cells = ()
    channel: str = ""


@dataclass(frozen=True)
class Wait:
    steps: tuple[int, ...]  # of this program, which began the messages


@dataclass(frozen=True)
class Raise:
    flag: str  # only one rank raises it, by 1


@dataclass(frozen=True)
class Await:
    flag: str
    count: int


@dataclass(frozen=True)
class Use:
    """Read some cells of memory, or write them."""

    cells: Cells
    writes: bool = False

    @property
    def does(self) -> str:
        return "writes" if self.writes else "reads"


Step = Isend | Irecv | Wait | Raise | Await | Use


@dataclass
class Access:
    """What a step does with a cell, until the place `end` of its rank's program."""

    rank: int
    does: str  # sends, receives, reads, writes
    end: float
    over: tuple[int, ...]  # how many steps of each rank are over when it begins

    def clashes(self, other: "Access") -> bool:
        apart = self.over[other.rank] > other.end or other.over[self.rank] > self.end
        return not apart and not {self.does, other.does} <= {"sends", "reads"}


class Run:
    """One order of the steps of some programs, one program for each rank."""

    def __init__(self, programs: Sequence[Sequence[Step]]) -> None:
        self.programs, self.ranks = programs, range(len(programs))
        self.places = [0] * len(programs)
        self.over = [[0] * len(programs) for _ in programs]  # as each rank knows
        self.begun: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))  # what senders and receivers knew
        self.number: dict[tuple[int, int], int] = {}  # of each message, by rank and place
        self.raised: dict[str, list[tuple[int, ...]]] = defaultdict(list)  # what its owner knew
        self.owner: dict[str, int] = {}  # of each flag
        self.accesses: dict[str, list[Access]] = defaultdict(list)
        self.open: dict[tuple[int, int], list[Access]] = {}  # of messages that are not waited for

    def to_the_end(self) -> str:
        """What is bad, or ""."""
        while any([self.take(rank) for rank in self.ranks]):
            pass
        for cell, accesses in self.accesses.items():
            for pair in combinations(accesses, 2):
                if pair[0].clashes(pair[1]):
                    first, then = sorted(pair, key=lambda it: ["writes", "reads", "receives", "sends"].index(it.does))
                    return f"rank {first.rank} {first.does} {cell} while rank {then.rank} {then.does} it"
        waiting = [rank for rank in self.ranks if self.places[rank] < len(self.programs[rank])]
        return f"these ranks wait for ever: {waiting}" if waiting else ""

    def take(self, rank: int) -> bool:
        """Take the next step of this rank. Returns whether there is one for which it need not wait."""
        at = self.places[rank]
        if at == len(self.programs[rank]):
            return False
        step = self.programs[rank][at]
        needed = list(self.needed(rank, step))
        if None in needed:
            return False
        self.over[rank] = [max(known) for known in zip(self.over[rank], *needed, strict=True)]
        if isinstance(step, Isend | Irecv | Use):
            does, end = ("sends" if isinstance(step, Isend) else "receives"), inf
            if isinstance(step, Use):
                does, end = step.does, at
            self.open[rank, at] = [Access(rank, does, end, tuple(self.over[rank])) for _ in step.cells]
            for cell, access in zip(step.cells, self.open[rank, at], strict=True):
                self.accesses[cell].append(access)
        elif isinstance(step, Wait):
            for access in (access for n in step.steps for access in self.open[rank, n]):
                access.end = at
        self.places[rank] = self.over[rank][rank] = at + 1
        if isinstance(step, Raise):
            if self.owner.setdefault(step.flag, rank) != rank:
                raise ValueError(f"{step.flag} is raised by several ranks; expected a flag for each of them")
            self.raised[step.flag].append(tuple(self.over[rank]))
        if isinstance(step, Isend | Irecv):
            self.begin(rank, at, step)
        return True

    def needed(self, rank: int, step: Step) -> Iterator[Sequence[int] | None]:
        """What is over when the step is: for a wait, what the others knew. None: not yet."""
        for n in step.steps if isinstance(step, Wait) else ():
            message = self.programs[rank][n]
            sends = isinstance(message, Isend)
            peers = self.begun[ends(rank, message)][sends]
            number = self.number[rank, n]
            yield peers[number] if number < len(peers) else None
        if isinstance(step, Await):
            raised = self.raised[step.flag]
            yield raised[step.count - 1] if step.count <= len(raised) else None

    def begin(self, rank: int, at: int, message: Isend | Irecv) -> None:
        mine = self.begun[ends(rank, message)][isinstance(message, Irecv)]
        self.number[rank, at] = len(mine)
        mine.append(tuple(self.over[rank]))


def ends(rank: int, message: Isend | Irecv) -> tuple[str, int, int]:
    """The channel, the sender and the receiver of a message of this rank."""
    return (
        (message.channel, rank, message.to) if isinstance(message, Isend) else (message.channel, message.source, rank)
    )


def check(programs: Sequence[Sequence[Step]]) -> str:
    """What is bad in some order of the steps of these programs, one for each rank, or "".

    It is a race, or ranks wait for ever. Raises ValueError for a flag that several ranks raise.
    """
    return Run(programs).to_the_end()


def of_blocking(programs: Sequence[Program]) -> list[list[Step]]:
    """Programs of blocking messages: each message is begun and waited for at once."""
    return [
        [
            each
            for n, step in enumerate(program)
            for each in (Isend(step.to) if isinstance(step, Send) else Irecv(step.source), Wait((2 * n,)))
        ]
        for program in programs
    ]


def main() -> int:
    hop = {name: of_blocking(ring_programs(3, even_odd=name != "all")) for name in ("all", "even ranks")}
    send, write, wait, receives = Isend(1, ("x",)), Use(("x",), writes=True), Wait((0,)), [Irecv(0), Wait((0,))]
    cases = {f"a hop of 3 ranks, {name} send first": programs for name, programs in hop.items()}
    cases["the block is written again before the wait for its send"] = [[send, write, wait], receives]
    cases["the block is written again after it"] = [[send, wait, write], receives]
    found = [check(programs) for programs in cases.values()]
    for name, bad in zip(cases, found, strict=True):
        print(f"{name}: {bad or 'right in every order'}")
    return 0 if list(map(bool, found)) == [True, False, True, False] else 1


if __name__ == "__main__":
    sys.exit(main())
