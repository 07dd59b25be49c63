"""A blocking send waits for its receiver: if every rank sends first, all wait for ever; the even/odd order prevents it.

    rank r, one hop:   even r:  send to r+1, then receive from r-1
                       odd r:   receive from r-1, then send to r+1

A message moves when its sender has reached `Send` and its receiver the matching `Recv`. This is called a rendezvous;
large messages behave like this in MPI, NCCL and gloo. In one phase a rank takes part in at most one message.

Shapes: none. A message stands for one block, K and V (B, H, C, D), and only the order of messages matters here.

    $ python -m ringlab.basics.blocking_messages
    all send first, 4 ranks: 0 messages moved; 0 waits for 1, 1 waits for 2, 2 waits for 3, 3 waits for 0
        the circle: 0 -> 1 -> 2 -> 3 -> 0
    even/odd, 4 ranks: one hop takes 2 phases
        phase 0: 0 -> 1, 2 -> 3
        phase 1: 1 -> 2, 3 -> 0
    even/odd, 5 ranks: one hop takes 3 phases
        phase 0: 0 -> 1, 2 -> 3
        phase 1: 1 -> 2, 4 -> 0
        phase 2: 3 -> 4
    ok    2 to 8 ranks: all-send-first always deadlocks, even/odd never; an odd P takes one phase more

Before: ../../worked_example.py says what travels. After: ranks.py and ../../ring_attn.py, which sends in this order. In
which other orders could the messages move? tests/orders/ checks all of them.
Source: the even/odd order of blocking send/recv is a classic; Gropp, Lusk & Skjellum, Using MPI, chapter 4.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Send:
    to: int


@dataclass(frozen=True)
class Recv:
    source: int


Program = list[Send | Recv]  # what one rank does, in order


@dataclass(frozen=True)
class Transfer:
    phase: int
    source: int
    to: int


@dataclass(frozen=True)
class Outcome:
    transfers: list[Transfer]  # the messages that moved, in order of phase
    waits_for: dict[int, int]  # rank -> the rank it waits for; empty when every program ran to its end
    cycle: list[int]  # ranks that wait in a circle, smallest first; empty when there is no circle

    @property
    def phases(self) -> int:
        return 1 + max((transfer.phase for transfer in self.transfers), default=-1)


def sends_first(rank: int) -> bool:
    """Whether a rank of the ring sends before it receives: the even ones do."""
    return rank % 2 == 0


def ring_programs(world_size: int, *, even_odd: bool = True) -> list[Program]:
    """The programs of `world_size` ranks for one hop: in even/odd order, or all ranks send first.

    Raises ValueError for fewer than 2 ranks.
    """
    if world_size < 2:
        raise ValueError(f"world_size is {world_size}; expected at least 2 ranks: one has no hop")
    programs: list[Program] = []
    for rank in range(world_size):
        send, receive = Send((rank + 1) % world_size), Recv((rank - 1) % world_size)
        programs.append([send, receive] if sends_first(rank) or not even_odd else [receive, send])
    return programs


def simulate_messages(programs: list[Program]) -> Outcome:
    """Run one program on each rank. In each phase, every message moves whose sender and receiver are both ready.

    Either all programs end, or some ranks wait for ever. Then `waits_for` says who waits for whom, and `cycle` names
    ranks that wait in a circle. Without a circle, some rank waits for a rank that has ended.
    Raises ValueError for a message from or to a rank that does not exist, or to itself.
    """
    for rank, program in enumerate(programs):
        for step in program:
            peer = _peer(step)
            if peer == rank or not 0 <= peer < len(programs):
                raise ValueError(f"rank {rank} has {step}; expected another rank from 0 to {len(programs) - 1}")
    at = [0] * len(programs)  # the step at which each rank stands
    transfers: list[Transfer] = []
    phase = 0
    while True:
        steps = {rank: program[at[rank]] for rank, program in enumerate(programs) if at[rank] < len(program)}
        ready = [
            (rank, step.to)
            for rank, step in steps.items()
            if isinstance(step, Send) and steps.get(step.to) == Recv(rank)
        ]
        if not ready:
            waits_for = {rank: _peer(step) for rank, step in steps.items()}
            return Outcome(transfers, waits_for, _find_cycle(waits_for))
        for source, to in ready:
            transfers.append(Transfer(phase, source, to))
            at[source] += 1
            at[to] += 1
        phase += 1


def _peer(step: Send | Recv) -> int:
    return step.to if isinstance(step, Send) else step.source


def _find_cycle(waits_for: dict[int, int]) -> list[int]:
    for first in sorted(waits_for):
        path = [first]
        while (following := waits_for.get(path[-1])) is not None:
            if following == first:
                return path
            if following in path:
                break  # `first` leads into a circle but is not part of it
            path.append(following)
    return []


def main() -> int:
    stuck = simulate_messages(ring_programs(4, even_odd=False))
    waiting = ", ".join(f"{rank} waits for {peer}" for rank, peer in stuck.waits_for.items())
    print(f"all send first, 4 ranks: {len(stuck.transfers)} messages moved; {waiting}")
    print(f"    the circle: {' -> '.join(str(rank) for rank in [*stuck.cycle, stuck.cycle[0]])}")
    for world_size in (4, 5):
        outcome = simulate_messages(ring_programs(world_size))
        print(f"even/odd, {world_size} ranks: one hop takes {outcome.phases} phases")
        for phase in range(outcome.phases):
            moved = [f"{move.source} -> {move.to}" for move in outcome.transfers if move.phase == phase]
            print(f"    phase {phase}: {', '.join(moved)}")

    ok = True
    for world_size in range(2, 9):
        ok &= sorted(simulate_messages(ring_programs(world_size, even_odd=False)).cycle) == list(range(world_size))
        hop = simulate_messages(ring_programs(world_size))
        ok &= not hop.waits_for and hop.phases == 2 + world_size % 2
    verdict = "all-send-first always deadlocks, even/odd never; an odd P takes one phase more"
    print(f"{'ok   ' if ok else 'WRONG'} 2 to 8 ranks: {verdict}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
