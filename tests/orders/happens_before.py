"""Is a ring right in every order of its ranks' steps, not only if no message is fast? One check answers for all orders.

The steps of a rank are messages, and accesses to cells of its memory. A message is a rendezvous (blocking_messages.py):
it moves when both ends have begun. Messages of two ranks and one channel arrive in order. So what a step waits for is
the same in every order: if one order ends, all do, and one is tried.

From its beginning to the wait for it, a message may read or write its cells at any time. So an access between these
two steps is a race, unless both only read: it must happen before the message begins, or after the wait. Where there is
no race, the cells hold the same numbers in every order: those that other tests compare with full attention.

Source: Lamport 1978, "happened before".
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
class Use:
    """Read some cells of memory, or write them."""

    cells: Cells
    writes: bool = False


Step = Isend | Irecv | Wait | Use


def check(programs: Sequence[Sequence[Step]]) -> str:
    """What is bad in some order of the steps of these programs, one a rank, or "": a race, or an endless wait."""
    for rank, steps in enumerate(programs):
        if found := race(steps):
            return f"rank {rank} {found}"
    waiting = stuck(programs)
    return f"these ranks wait for ever: {waiting}" if waiting else ""


def race(steps: Sequence[Step]) -> str:
    """Which cell of a rank a step uses while a message may still read or write it, or ""."""
    over = {n: at for at, step in enumerate(steps) if isinstance(step, Wait) for n in step.steps}
    for begin, message in enumerate(steps):
        if isinstance(message, Isend | Irecv):
            for step in steps[begin + 1 : over.get(begin)]:
                if not isinstance(step, Wait) and not {does(step), does(message)} <= {"reads", "sends"}:
                    for cell in step.cells:
                        if cell in message.cells:
                            return f"{does(step)} {cell} while it {does(message)} {cell}"
    return ""


def does(step: Isend | Irecv | Use) -> str:
    """What a step does with its cells."""
    if isinstance(step, Use):
        return "writes" if step.writes else "reads"
    return "sends" if isinstance(step, Isend) else "receives"


def stuck(programs: Sequence[Sequence[Step]]) -> list[int]:
    """The ranks that wait for ever."""
    places, begun, number = [0] * len(programs), Counter[tuple[object, ...]](), dict[tuple[int, int], int]()

    def moved(rank: int, n: int) -> bool:
        """Whether the other end of a message has begun, too."""
        message = programs[rank][n]
        assert isinstance(message, Isend | Irecv)
        return begun[ends(rank, message), not isinstance(message, Isend)] > number[rank, n]

    def take(rank: int) -> bool:
        """Take the next step of this rank. Returns whether there is one for which it need not wait."""
        at = places[rank]
        if at == len(programs[rank]):
            return False
        step = programs[rank][at]
        if isinstance(step, Wait) and not all(moved(rank, n) for n in step.steps):
            return False
        if isinstance(step, Isend | Irecv):
            end = ends(rank, step), isinstance(step, Isend)
            number[rank, at] = begun[end]
            begun[end] += 1
        places[rank] += 1
        return True

    while any([take(rank) for rank in range(len(programs))]):
        pass
    return [rank for rank, steps in enumerate(programs) if places[rank] < len(steps)]


def ends(rank: int, message: Isend | Irecv) -> tuple[str, int, int]:
    """The channel, the sender and the receiver of a message of this rank."""
    if isinstance(message, Isend):
        return message.channel, rank, message.to
    return message.channel, message.source, rank
