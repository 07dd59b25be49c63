"""Try every order of the steps of some ranks: a state is where each stands, and what each cell of memory holds.

A state is bad where a rank reads a cell while another writes it, or touches a buffer whose message it has not waited
for; where a cell does not hold what its reader expects; and where all ranks wait. Messages move when both ends have
begun, as a rendezvous (blocking_messages.py). The shortest run into a bad state is returned.
Source: Clarke, Grumberg & Peled, Model Checking, chapters 2 and 10; Godefroid 1996, the orders that need no trying.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from ringlab.basics.blocking_messages import Program, Send
from tests.orders.steps import Await, Irecv, Isend, Parts, Raise, Read, Step, Wait, Write, touched

NEVER = (-1, 0)  # a step that no rank takes
DOES = {Isend: "sends", Irecv: "receives", Read: "reads", Write: "writes"}

Held = tuple[Parts | None, ...]  # of each cell; None: nothing was written there
State = tuple[tuple[int, ...], Held]  # the step at which each rank stands, and what the cells hold


@dataclass(frozen=True)
class Explored:
    states: int  # how many were seen
    ends: int = 0  # how many different memories the programs end with: 1 if the same is added up in the same order
    why: str = ""  # what is bad, or ""
    run: list[str] = field(default_factory=list)  # the shortest run into the bad state


class Explorer:
    """The states of some programs, one for each rank, and the steps between them."""

    def __init__(self, programs: Sequence[Sequence[Step]]) -> None:
        self.programs, self.ranks = programs, range(len(programs))
        users, writers = defaultdict(set), set()
        begun: dict[tuple[str, int, int], tuple[list, list]] = defaultdict(lambda: ([], []))
        raised = defaultdict(list)
        for rank, program in enumerate(programs):
            for at, step in enumerate(program):
                for cell, writes in touched(step):
                    users[cell].add(rank)
                    if writes:
                        writers.add(cell)
                if isinstance(step, Isend):
                    begun[step.channel, rank, step.to][0].append((rank, at))
                if isinstance(step, Irecv):
                    begun[step.channel, step.source, rank][1].append((rank, at))
                if isinstance(step, Raise):
                    raised[step.flag].append((rank, at))
        if wrong := [flag for flag, places in raised.items() if len({rank for rank, _ in places}) > 1]:
            raise ValueError(f"{wrong[0]} is raised by several ranks; expected a flag for each of them")
        self.number = {cell: n for n, cell in enumerate(users)}
        self.shared = {cell for cell in users if len(users[cell]) > 1 and cell in writers}
        self.other_end: dict[tuple[int, int], tuple[int, int]] = {}  # of a message: (rank, step) -> (rank, step)
        for sends, receives in begun.values():  # messages of two ranks and one channel arrive in order
            for send, receive in zip(sends, receives, strict=False):
                self.other_end |= {send: receive, receive: send}
        opener = {(flag, n): place for flag, places in raised.items() for n, place in enumerate(places, 1)}
        self.needs: list[
            list[list[tuple[int, int]]]
        ] = []  # of each step: the steps of others that must have been taken
        for rank, program in enumerate(programs):
            self.needs.append([])
            for step in program:
                places = [self.other_end.get((rank, n), NEVER) for n in step.steps] if isinstance(step, Wait) else []
                places += [opener.get((step.flag, step.count), NEVER)] if isinstance(step, Await) else []
                self.needs[rank].append(places)
        self.under_way = [list(_unfinished(program)) for program in programs]
        self.alone = [[not any(cell in self.shared for cell, _ in touched(step)) for step in each] for each in programs]

    def waits_for(self, places: Sequence[int], rank: int) -> int | None:
        """The rank for which this one waits, if it cannot take its next step; -1 for a rank that never comes."""
        for peer, at in self.needs[rank][places[rank]] if places[rank] < len(self.programs[rank]) else ():
            if peer < 0 or places[peer] <= at:
                return peer
        return None

    def after(self, state: State, rank: int) -> State:
        """The state that follows when this rank takes its next step."""
        places, memory = state
        at, step = places[rank], self.programs[rank][places[rank]]
        places = (*places[:rank], at + 1, *places[rank + 1 :])
        if isinstance(step, Write):
            new = list(memory)
            for n, cell in enumerate(step.cells):
                held = memory[self.number[cell]] if step.add else ()
                source = memory[self.number[step.source[n]]] if step.source else step.parts
                new[self.number[cell]] = None if held is None or source is None else held + source
            memory = tuple(new)
        if isinstance(step, Isend | Irecv):
            peer, there = self.other_end.get((rank, at), NEVER)
            if peer >= 0 and places[peer] > there:  # both have begun: the message moves
                ends = (step, self.programs[peer][there])
                sent, received = ends if isinstance(step, Isend) else ends[::-1]
                assert isinstance(sent, Isend)
                assert isinstance(received, Irecv)
                new = list(memory)
                for here, cell in zip(sent.cells, received.cells, strict=True):
                    new[self.number[cell]] = memory[self.number[here]]
                memory = tuple(new)
        return places, memory

    @cache  # noqa: B019 (an explorer lives as long as its search)
    def clash(self, rank: int, at: int, other: int, place: int) -> str:
        """What is bad if one rank takes step `at` while another stands at `place`, or ""."""
        step = self.programs[rank][at]
        there = list(self.under_way[other][place].values())
        if other != rank and place < len(self.programs[other]):
            there.append(self.programs[other][place])
        for cell, writes in touched(step):
            for each in there:
                if any(cell == its and (writes or its_writes) for its, its_writes in touched(each)):
                    return f"rank {rank} {step} while rank {other} {DOES[type(each)]} {cell}"
        return ""

    def wrong(self, state: State) -> str:
        """What is bad about the next step of some rank in this state, or ""."""
        places, memory = state
        for rank in self.ranks:
            if places[rank] == len(self.programs[rank]):
                continue
            step = self.programs[rank][places[rank]]
            for other in [rank] if self.alone[rank][places[rank]] else self.ranks:
                if why := self.clash(rank, places[rank], other, places[other]):
                    return why
            if isinstance(step, Read) and (why := self.not_as_expected(step, memory)):
                return f"rank {rank} reads {why}"
        return ""

    def not_as_expected(self, step: Read, memory: Held) -> str:
        """Which cell does not hold what its reader expects, or ""."""
        for cell in step.cells:
            held = memory[self.number[cell]]
            if held is None or len(held) != len(step.expected) or set(held) != step.expected:
                holds = "nothing yet" if held is None else " + ".join(map(str, held)) or "zero"
                return f"{cell}: it holds {holds}; expected {' + '.join(sorted(map(str, step.expected)))}"
        return ""

    def following(self, places: Sequence[int], every_order: bool) -> list[int]:
        """The ranks whose next steps must be tried.

        A step that touches no cell of others may be taken at once: it may let others go on, but it never stops them.
        """
        ready = []
        for rank in self.ranks:
            if places[rank] < len(self.programs[rank]) and self.waits_for(places, rank) is None:
                if not every_order and self.alone[rank][places[rank]]:
                    return [rank]
                ready.append(rank)
        return ready

    def search(self, every_order: bool) -> Explored:
        begin: State = (0,) * len(self.programs), (None,) * len(self.number)
        before: dict[State, tuple[State, int] | None] = {begin: None}
        ends: set[Held] = set()
        queue = deque([begin])
        while queue:
            state = queue.popleft()
            why, following = self.wrong(state), self.following(state[0], every_order)
            if not why and not following:
                waiting = {rank: self.waits_for(state[0], rank) for rank in self.ranks}
                who = [f"rank {rank} for {_name(peer)}" for rank, peer in waiting.items() if peer is not None]
                why = f"all wait: {', '.join(who)}" if who else ""
            if why:
                return Explored(len(before), why=why, run=self.run(before, state))
            if not following:
                ends.add(state[1])
            for rank in following:
                new = self.after(state, rank)
                if new not in before:
                    before[new] = state, rank
                    queue.append(new)
        return Explored(len(before), len(ends))

    def run(self, before: dict[State, tuple[State, int] | None], state: State) -> list[str]:
        """The steps that led to a state, in words."""
        steps = []
        while (last := before[state]) is not None:
            state, rank = last
            steps.append(f"rank {rank} {self.programs[rank][state[0][rank]]}")
        return steps[::-1]


def _unfinished(program: Sequence[Step]) -> Iterator[dict[int, Step]]:
    """Before each step, and at the end: the messages that were begun and not waited for."""
    messages: dict[int, Step] = {}
    for at, step in enumerate(program):
        yield dict(messages)
        if isinstance(step, Isend | Irecv):
            messages[at] = step
        if isinstance(step, Wait):
            for n in step.steps:
                del messages[n]
    yield messages


def _name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "nobody"


def explore(programs: Sequence[Sequence[Step]], *, every_order: bool = False) -> Explored:
    """See all states that the programs, one for each rank, can reach. Stop at the first bad one.

    The orders of steps that cannot matter to another rank are not all tried: `Explorer.following`. With `every_order`
    they are, and the verdict is the same. A run into a bad state is always the shortest of all orders. Raises
    ValueError for a flag that several ranks raise. Godefroid 1996.
    """
    explorer = Explorer(programs)
    explored = explorer.search(every_order)
    return explorer.search(every_order=True) if explored.why and not every_order else explored


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
