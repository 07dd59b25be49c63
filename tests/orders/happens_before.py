"""Do some ranks work together rightly, whichever of them is fast? What must happen before what answers for all orders.

The steps of a rank are messages, flags, and accesses to cells of memory. Messages of two ranks and one channel arrive
in order, and a flag has one owner. So what a step waits for is the same in every order: if one order ends, all do.
Two accesses to a cell, one of which writes, are a race unless a wait stands between them. Where there is no race, the
cells hold the same in every order. So one order is tried, with a vector clock for each rank: how many steps of each
rank are over, as far as this rank can know.

A message is a rendezvous (blocking_messages.py): it moves when both ends have begun. From its beginning to the wait it
may read or write its cells at any time.
Source: Lamport 1978, "happened before"; Mattern 1989, vector clocks.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from ringlab.basics.blocking_messages import Program, Send

Cells = tuple[str, ...]
Parts = tuple[object, ...]  # what a cell holds: a block's number, or whatever was added up in it, in this order


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
class Read:
    cells: Cells
    expected: frozenset[object]  # these parts, each once


@dataclass(frozen=True)
class Write:
    """Give the cells new parts, or those that the cells of `source` hold; with `add` besides what they hold."""

    cells: Cells
    parts: Parts = ()
    source: Cells = ()
    add: bool = False


Step = Isend | Irecv | Wait | Raise | Await | Read | Write


@dataclass
class Access:
    """What a step does with a cell, from the place `begin` of its rank's program to the place `end`."""

    rank: int
    does: str  # sends, receives, reads, writes
    begin: int
    end: float
    over: tuple[int, ...]  # how many steps of each rank are over when it begins

    def clashes(self, other: "Access") -> bool:
        apart = self.over[other.rank] > other.end or other.over[self.rank] > self.end
        one_step = (self.rank, self.begin) == (other.rank, other.begin)
        return not apart and not one_step and not {self.does, other.does} <= {"sends", "reads"}


class Run:
    """One order of the steps of some programs, one program for each rank."""

    def __init__(self, programs: Sequence[Sequence[Step]]) -> None:
        self.programs, self.ranks = programs, range(len(programs))
        self.places = [0] * len(programs)
        self.over = [[0] * len(programs) for _ in programs]  # as each rank knows
        self.begun: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))  # sends and receives of two ranks
        self.number: dict[tuple[int, int], int] = {}  # of each message, by rank and place
        self.raised: dict[str, list[tuple[int, ...]]] = defaultdict(list)  # what its owner knew
        self.owner: dict[str, int] = {}  # of each flag
        self.accesses: dict[str, list[Access]] = defaultdict(list)
        self.open: dict[tuple[int, int], list[Access]] = {}  # of messages that are not waited for
        self.cells: dict[str, Parts | None] = defaultdict(lambda: None)  # None: nothing was written there
        self.wrong = ""  # the first read of something unexpected

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
        return self.wrong or (f"these ranks wait for ever: {waiting}" if waiting else "")

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
        if isinstance(step, Isend | Irecv):
            self.open[rank, at] = [self.access(rank, cell, step, inf) for cell in step.cells]
        elif isinstance(step, Wait):
            for n in step.steps:
                for access in self.open[rank, n]:
                    access.end = at
        elif isinstance(step, Read | Write):
            self.use(rank, step)
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
            yield peers[number][1] if number < len(peers) else None
        if isinstance(step, Await):
            raised = self.raised[step.flag]
            yield raised[step.count - 1] if step.count <= len(raised) else None

    def begin(self, rank: int, at: int, message: Isend | Irecv) -> None:
        """Begin a message. It moves, if the other end has begun."""
        of_both = self.begun[ends(rank, message)]
        mine = of_both[isinstance(message, Irecv)]
        self.number[rank, at] = number = len(mine)
        mine.append((message, tuple(self.over[rank])))
        if all(number < len(begun) for begun in of_both):
            (sent, _), (received, _) = (begun[number] for begun in of_both)
            for here, there in zip(sent.cells, received.cells, strict=True):
                self.cells[there] = self.cells[here]

    def access(self, rank: int, cell: str, step: Step, end: float | None = None, does: str = "") -> Access:
        at = self.places[rank]
        does = does or {Isend: "sends", Irecv: "receives", Read: "reads", Write: "writes"}[type(step)]
        self.accesses[cell].append(Access(rank, does, at, at if end is None else end, tuple(self.over[rank])))
        return self.accesses[cell][-1]

    def use(self, rank: int, step: Read | Write) -> None:
        for cell in step.cells:
            self.access(rank, cell, step)
        if isinstance(step, Read):
            for cell in step.cells:
                held = self.cells[cell]
                if held is None or len(held) != len(step.expected) or set(held) != step.expected:
                    holds = "nothing yet" if held is None else " + ".join(map(str, held)) or "zero"
                    expected = " + ".join(sorted(map(str, step.expected)))
                    self.wrong = self.wrong or f"rank {rank} reads {cell}: it holds {holds}; expected {expected}"
            return
        for cell in step.source:
            self.access(rank, cell, step, does="reads")
        for n, cell in enumerate(step.cells):
            held, source = (
                self.cells[cell] if step.add else (),
                self.cells[step.source[n]] if step.source else step.parts,
            )
            self.cells[cell] = None if held is None or source is None else held + source


def ends(rank: int, message: Isend | Irecv) -> tuple[str, int, int]:
    """The channel, the sender and the receiver of a message of this rank."""
    return (
        (message.channel, rank, message.to) if isinstance(message, Isend) else (message.channel, message.source, rank)
    )


def check(programs: Sequence[Sequence[Step]]) -> str:
    """What is bad in some order of the steps of these programs, one for each rank, or "".

    It is a race; or what a rank reads without one is not what it expects; or ranks wait for ever. Raises ValueError for
    a flag that several ranks raise.
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
