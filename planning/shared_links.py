"""Messages that use a link at the same time share it: each gets an equal part of its bytes/s.

    rate of a message    min over the links on its way of    bytes/s of the link / messages on it now
    a step begins        when all steps that it waits for have ended: computing, and messages of both its ends

Nothing else is needed to say how long any schedule takes: which steps there are, which waits for which, and which links
a message uses. The time jumps from one end of a step to the next; between two ends all rates stay the same.

Shapes: steps are numbered; n steps give n pairs of seconds (begin, end). `rates` has the bytes/s of every link. The
links are modelled: no latency, and a message does not use what another one on the same link leaves over.

    $ python -m planning.shared_links
    two messages of 6 GB on one link of 2 GB/s; the second begins after 1 s of computing; simulated
    first     0.0 s to 5.0 s
    second    1.0 s to 6.0 s
    ...

Before: ways.py, how many bytes. After: two_speeds.py, the schedules of five ways.
Source: max-min fair sharing is usual for flows (Bertsekas, Gallager: Data Networks, section 6.5); this is its first step.
"""

import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

SAME = 1e-12  # ends that differ by this part of the time are one: rounding


@dataclass(frozen=True)
class Step:
    """Seconds of computing on a rank, or, with `links`, a message of so many bytes."""

    what: str  # "compute"; "inside" or "between" for a message
    rank: int  # that computes or sends
    size: float  # seconds, or bytes
    after: tuple[int, ...] = ()  # the steps that end before this one begins
    links: tuple[Hashable, ...] = ()  # that the message uses
    alike: int = 1  # so many messages of this size, on the same links


def play(steps: Sequence[Step], rates: Mapping[Hashable, float]) -> list[tuple[float, float]]:
    """The seconds at which every step begins and ends.

    Raises ValueError for a negative size, for a step that waits for itself or a later one, and for a link without a
    rate above 0.
    """
    for i, step in enumerate(steps):
        if step.size < 0 or any(not 0 <= before < i for before in step.after):
            raise ValueError(f"step {i} is {step}; expected a size of 0 or more, after earlier steps")
        if missing := [link for link in step.links if not rates.get(link, 0) > 0]:
            raise ValueError(f"step {i} uses {missing}; expected a rate above 0 for every link")
    waits = [len(set(step.after)) for step in steps]
    followers: list[list[int]] = [[] for _ in steps]
    for i, step in enumerate(steps):
        for before in set(step.after):
            followers[before].append(i)

    begins, ends = [0.0] * len(steps), [0.0] * len(steps)
    ready = [i for i, count in enumerate(waits) if count == 0]
    at_work: list[tuple[float, int]] = []  # (end, step), the earliest first: computing, and messages of no bytes
    left: dict[int, float] = {}  # bytes of each message under way
    users: Counter[Hashable] = Counter()
    now = 0.0
    while ready or at_work or left:
        for i in ready:
            begins[i], step = now, steps[i]
            if step.links and step.size > 0:
                left[i] = step.size
                users.update(dict.fromkeys(step.links, step.alike))
            else:
                heappush(at_work, (now + (0 if step.links else step.size), i))
        rate = {i: min(rates[link] / users[link] for link in steps[i].links) for i in left}
        soonest = min((left[i] / rate[i] for i in left), default=float("inf"))
        later = min(now + soonest, at_work[0][0]) if at_work else now + soonest
        ended = [i for i in left if left[i] <= rate[i] * (later - now) + SAME * (rate[i] * later + steps[i].size)]
        for i in left:
            left[i] -= rate[i] * (later - now)
        for i in ended:
            del left[i]
            users.subtract(dict.fromkeys(steps[i].links, steps[i].alike))
        while at_work and at_work[0][0] <= later * (1 + SAME):
            ended.append(heappop(at_work)[1])
        now, ready = later, []
        for i in ended:
            ends[i] = now
            for following in followers[i]:
                waits[following] -= 1
                if waits[following] == 0:
                    ready.append(following)
    return list(zip(begins, ends, strict=True))


def main() -> int:
    ok = True

    def show(title: str, steps: Sequence[Step], right: Sequence[float]) -> bool:
        print(title)
        times = play(steps, {"link": 2e9, "fast": 8e9})
        for name, step, (begin, end) in zip(("first", "second", "third"), steps, times, strict=False):
            print(f"    {name:<9}{step.what:<9} {begin:.1f} s to {end:.1f} s")
        return all(abs(end - expected) < 1e-9 for (_, end), expected in zip(times, right, strict=True))

    both = [Step("compute", 0, 1.0), Step("between", 1, 6e9, (), ("link",)), Step("between", 0, 6e9, (0,), ("link",))]
    ok &= show("two messages of 6 GB on a link of 2 GB/s, one of them after 1 s of computing; simulated", both, [1, 5, 6])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
