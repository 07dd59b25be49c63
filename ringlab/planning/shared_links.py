"""Messages that use a link at the same time share it: each gets an equal part of its bytes/s.

    rate of a message    min over the links on its way of    bytes/s of the link / messages on it now
    a step begins        when all steps that it waits for have ended

With this rule any schedule can be timed: a list of steps, what each waits for, and the links of each message. The time
jumps from one end of a step to the next; between two ends all rates stay the same.

Shapes: steps are numbered from 0; n steps give n pairs of seconds (begin, end). `rates` has the bytes/s of every link.
The links are modelled: they have no latency. What a message leaves over on a link is not given to another one.

    $ python -m ringlab.planning.shared_links
    two messages of 6 GB on a link of 2 GB/s, one of them after 1 s of computing; simulated
        computing   0.0 s to 1.0 s
        a message   0.0 s to 5.0 s
        a message   1.0 s to 6.0 s
    a message of 4 GB that also uses a link of 0.5 GB/s, and one of 6 GB beside it
        a message   0.0 s to 8.0 s
        a message   0.0 s to 6.0 s
    ring of 8 with one slow link: 38.46 ms, as in simulated_ring.py

Before: ways.py, how many bytes. After: two_speeds.py, the schedules of five ways.
Source: sharing as in Bertsekas & Gallager, Data Networks, chapter 6 (max-min flow control), only its first step.
"""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ringlab.planning.hidden_communication import LLAMA_7B, TABLE_2, block_flops, hop_bytes, ring_seconds

SAME = 1e-12  # ends whose times differ by this part are one: rounding

Links = tuple[Hashable, ...]
Ready = list[tuple[int, ...]]  # by rank: the steps that end before the rank goes on


@dataclass(frozen=True)
class Step:
    """So many seconds of computing or, with links, a message of so many bytes."""

    rank: int  # that computes or sends
    size: float  # seconds, or bytes
    after: tuple[int, ...] = ()  # the steps that end before this one begins
    links: Links = ()
    alike: int = 1  # so many messages, all of this size, on the same links


def play(steps: Sequence[Step], rates: Mapping[Hashable, float]) -> list[tuple[float, float]]:
    """The seconds at which every step begins and ends.

    Raises ValueError for a negative size, for a step that waits for itself or a later one, and for a link without a
    rate above 0.
    """
    followers: list[list[int]] = [[] for _ in steps]
    for i, step in enumerate(steps):
        if step.size < 0 or any(not 0 <= before < i for before in step.after):
            raise ValueError(f"step {i} is {step}; expected a size of 0 or more, after earlier steps")
        if missing := [link for link in step.links if not rates.get(link, 0) > 0]:
            raise ValueError(f"step {i} uses {missing}; expected a rate above 0 for every link")
        for before in set(step.after):
            followers[before].append(i)

    waits = [len(set(step.after)) for step in steps]
    begins, ends = [0.0] * len(steps), [0.0] * len(steps)
    ready, now = [i for i, count in enumerate(waits) if count == 0], 0.0
    at_work: list[tuple[float, int]] = []  # (end, step), the earliest first: computing, and messages of no bytes
    left: dict[int, float] = {}  # the bytes of each message under way
    users: Counter[Hashable] = Counter()  # messages on each link
    while ready or at_work or left:
        for i in ready:
            begins[i], step = now, steps[i]
            if step.links and step.size > 0:
                left[i] = step.size
                for link in step.links:
                    users[link] += step.alike
            else:
                heappush(at_work, (now if step.links else now + step.size, i))
        due = {i: now + left[i] / min(rates[link] / users[link] for link in steps[i].links) for i in left}
        then = min([*due.values(), *(end for end, _ in at_work[:1])])
        ended = [i for i, end in due.items() if end <= then * (1 + SAME)]
        for i in ended:
            del left[i]
            for link in steps[i].links:
                users[link] -= steps[i].alike
        for i in left:
            left[i] *= (due[i] - then) / (due[i] - now)
        while at_work and at_work[0][0] <= then * (1 + SAME):
            ended.append(heappop(at_work)[1])
        ready, now = [], then
        for i in ended:
            ends[i] = now
            for following in followers[i]:
                waits[following] -= 1
                if waits[following] == 0:
                    ready.append(following)
    return list(zip(begins, ends, strict=True))


def both(*ready: Ready) -> Ready:
    """What all of these wait for."""
    return [sum(each, ()) for each in zip(*ready, strict=True)]


class Schedule:
    """The steps of some ranks. The first n of P ranks may stand for all: a message to rank r is one to rank r mod n."""

    def __init__(self, ranks: int, links: Callable[[int, int], Links]) -> None:
        """`links` says which links a message from one rank to another uses."""
        self.ranks, self.links, self.steps = ranks, links, list[Step]()
        self.start: Ready = [()] * ranks  # nothing to wait for

    def compute(self, seconds: Callable[[int], float], ready: Ready) -> Ready:
        """Every rank r computes for seconds(r)."""
        first = len(self.steps)
        self.steps += [Step(r, seconds(r), ready[r]) for r in range(self.ranks)]
        return [(first + r,) for r in range(self.ranks)]

    def send(self, messages: Counter[tuple[int, int, float]], ready: Ready) -> Ready:
        """Messages (source, target, bytes): each begins when its two ranks are ready. Returns every rank's messages."""
        of_rank: Ready = [()] * self.ranks
        alike: Counter[tuple[int, int, float, Links]] = Counter()
        for (source, target, size), count in messages.items():
            alike[source, target % self.ranks, size, self.links(source, target)] += count
        for (source, target, size, links), count in alike.items():
            for rank in {source, target}:
                of_rank[rank] += (len(self.steps),)
            self.steps.append(Step(source, size, ready[source] + ready[target], links, count))
        return of_rank

    def hop(self, onward: Callable[[int], int], size: Callable[[int], float], ready: Ready) -> Ready:
        """Every rank r sends size(r) bytes to rank onward(r)."""
        return self.send(Counter((r, onward(r), size(r)) for r in range(self.ranks)), ready)

    def turn(
        self,
        ready: Ready,
        onward: Callable[[int], int],
        rounds: int,
        seconds: Callable[[int, int], float],
        kv: Callable[[int, int], float],
        gradients: Callable[[int, int], float] | None,
        after_first: Callable[[Ready], Ready] = lambda done: done,
    ) -> tuple[Ready, Ready]:
        """A ring of so many rounds: in round t rank r computes for seconds(r, t) and passes on kv(r, t) bytes.

        The gradients of a block travel one round after it, and after the last round home. Returns what ends the last
        round, and the messages home. `after_first` adds to what ends the first round. Liu et al. 2024, algorithm 1.
        """
        under_way = self.start
        for t in range(rounds):
            hops = self.hop(onward, lambda r, t=t: kv(r, t), ready) if t < rounds - 1 else self.start
            done = both(self.compute(lambda r, t=t: seconds(r, t), ready), under_way)
            if gradients and rounds > 1:
                under_way = self.hop(onward, lambda r, t=t: gradients(r, t), done)
            ready = both(after_first(done) if t == 0 else done, hops)
        return ready, under_way


def main() -> int:
    rates, ok = {"link": 2e9, "slow": 0.5e9}, True

    def show(title: str, *steps: Step) -> list[float]:
        times = play(steps, rates)
        print(title)
        for step, (begin, end) in zip(steps, times, strict=True):
            print(f"    {'a message' if step.links else 'computing'}   {begin:.1f} s to {end:.1f} s")
        return [round(end, 9) for _, end in times]

    two = Step(0, 1.0), Step(1, 6e9, (), ("link",)), Step(0, 6e9, (0,), ("link",))
    title = "two messages of 6 GB on a link of 2 GB/s, one of them after 1 s of computing; simulated"
    ok &= show(title, *two) == [1, 5, 6]
    title = "a message of 4 GB that also uses a link of 0.5 GB/s, and one of 6 GB beside it"
    ok &= show(title, Step(0, 4e9, (), ("link", "slow")), Step(1, 6e9, (), ("link",))) == [8, 6]

    P, C = 8, 4096
    (_, flops, fast, *_), (_, _, slow, *_) = TABLE_2[:2]
    computing, sent = block_flops(LLAMA_7B, C**2) / flops, hop_bytes(LLAMA_7B, C)
    ring = Schedule(P, lambda source, target: (source,))
    ring.turn(ring.start, lambda r: (r + 1) % P, P, lambda r, t: computing, lambda r, t: sent, None)
    bandwidths = [slow] + [fast] * (P - 1)
    seconds = max(end for _, end in play(ring.steps, dict(enumerate(bandwidths))))
    right = ring_seconds(P, computing, sent / slow, overlap=True)
    ok &= abs(seconds - right) < 1e-9 * right
    print(f"ring of {P} with one slow link: {1e3 * seconds:.2f} ms, as in simulated_ring.py")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
