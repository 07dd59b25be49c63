"""Messages that use a link at the same time share it: each gets an equal part of its bytes/s.

    rate of a message    min over the links on its way of    bytes/s of the link / messages on it now
    a task begins        when all tasks that it waits for have ended
    latency              a message may wait before its first byte flows; it uses no link in this time
    slowdown             computing takes so many times as long while messages of its rank travel: both use the device

A task computes, or is a message on some links. These rules give the times of any list of tasks. The time jumps from
one end of a task to the next. Between two ends all rates stay the same.

Shapes: tasks are numbered from 0; n tasks give n pairs of seconds (begin, end). `rates` has the bytes/s of every link.
The links are modelled. Bytes/s that a message cannot use are not given to another message.

    $ python -m ringlab.planning.shared_links
    two messages of 6 GB on a link of 2 GB/s, one of them after 1 s of computing; simulated
        computing   0.0 s to 1.0 s
        a message   0.0 s to 5.0 s
        a message   1.0 s to 6.0 s
    a message of 4 GB that also uses a link of 0.5 GB/s, and one of 6 GB beside it
        a message   0.0 s to 8.0 s
        a message   0.0 s to 6.0 s
    ring of 8 with one slow link: 38.46 ms, as in simulated_ring.py

Before: ways.py, how many bytes. After: round_costs.py, what a round costs beside its products.
Source: Bertsekas & Gallager, Data Networks, chapter 6: the first step of max-min flow control.
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from ringlab.planning.hidden_communication import LLAMA_7B, block_flops, hop_bytes, ring_seconds
from ringlab.planning.simulated_ring import FAST, FLOPS, SLOW

SAME = 1e-12  # ends whose times differ by this share are the same: rounding

Links = tuple[Hashable, ...]
Ready = list[tuple[int, ...]]  # by rank: the tasks that end before the rank goes on


@dataclass(frozen=True, slots=True)  # slots: a plan of 1,024 GPUs makes a million
class Task:
    """Computing of `size` seconds. With links: a message of `size` bytes."""

    rank: int  # that computes or sends
    size: float  # seconds, or bytes
    after: tuple[int, ...] = ()  # the tasks that end before this task begins
    links: Links = ()
    alike: int = 1  # the number of messages of this size on these links
    latency: float = 0.0  # seconds before the bytes of a message flow
    slows: tuple[int, ...] = ()  # the ranks whose computing takes longer while the bytes flow


def play(tasks: Sequence[Task], rates: Mapping[Any, float], slowdown: float = 1.0) -> list[tuple[float, float]]:
    """The seconds at which every task begins and ends.

    Computing of a rank takes `slowdown` times as long while a message flows that `slows` this rank. Raises ValueError
    for a negative size or latency, for a task that waits for itself or for a later task, for a link without a rate
    above 0, and for a slowdown below 1.
    """
    if not 1 <= slowdown < math.inf:
        raise ValueError(f"slowdown is {slowdown}; expected 1 (messages cost no computing) or more")
    followers, waits = defaultdict[int, list[int]](list), [0] * len(tasks)
    for i, task in enumerate(tasks):
        if min(task.size, task.latency) < 0 or any(not 0 <= before < i for before in task.after):
            raise ValueError(f"task {i} is {task}; expected a size and a latency of 0 or more, after earlier tasks")
        if missing := [link for link in task.links if not rates.get(link, 0) > 0]:
            raise ValueError(f"task {i} uses {missing}; expected a rate above 0 for every link")
        for before in set(task.after):
            followers[before].append(i)
            waits[i] += 1

    begins, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    now = 0.0
    ready, waiting = [i for i, count in enumerate(waits) if count == 0], set[int]()  # waiting: for their latency
    due_at: list[tuple[float, int]] = []  # (time, task), the earliest first: ends that nothing delays, and latencies
    left: dict[int, float] = {}  # what each other task at work has left: bytes, or seconds of computing
    users = defaultdict[Hashable, int](int)  # messages on each link
    slowed = defaultdict[int, int](int)  # messages that slow each rank

    def flows(i: int, count: int) -> None:
        """Count the messages of a task: `count` 1 when its bytes begin to flow, -1 when they have arrived."""
        for link in tasks[i].links:
            users[link] += count * tasks[i].alike
        for rank in tasks[i].slows:
            slowed[rank] += count

    def work(i: int) -> None:
        """Let a task's bytes flow, or let it compute."""
        task = tasks[i]
        if task.size > 0 and (task.links or slowdown > 1):
            left[i] = task.size
            flows(i, 1)
        else:
            heappush(due_at, (now if task.links else now + task.size, i))

    def seconds_left(i: int) -> float:
        """At the rates of now."""
        task = tasks[i]
        if task.links:
            return left[i] / min(rates[link] / users[link] for link in task.links)
        return left[i] * (slowdown if slowed[task.rank] else 1.0)

    while ready or due_at or left:
        for i in ready:
            begins[i] = now
            if tasks[i].latency and tasks[i].size > 0:
                waiting.add(i)
                heappush(due_at, (now + tasks[i].latency, i))
            else:
                work(i)
        due = {i: now + seconds_left(i) for i in left}
        then = min([*due.values(), *(end for end, _ in due_at[:1])])
        ended = [i for i, end in due.items() if end <= then * (1 + SAME)]
        for i in ended:
            del left[i]
            flows(i, -1)
        for i in left:
            left[i] *= (due[i] - then) / (due[i] - now)
        ready, now = [], then
        while due_at and due_at[0][0] <= now * (1 + SAME):
            i = heappop(due_at)[1]
            if i in waiting:
                waiting.remove(i)
                work(i)
            else:
                ended.append(i)
        for i in ended:
            ends[i] = now
            for following in followers[i]:
                waits[following] -= 1
                if waits[following] == 0:
                    ready.append(following)
    return list(zip(begins, ends, strict=True))


def wait_for(*ready: Ready) -> Ready:
    """By rank: the tasks of all these lists."""
    return [sum(each, ()) for each in zip(*ready, strict=True)]


class TaskGraph:
    """The tasks of some ranks. The first n of P ranks may stand for all: a message to rank r goes to rank r mod n."""

    def __init__(
        self,
        ranks: int,
        links: Callable[[int, int], Links],
        latency: Callable[[int, int], float] = lambda source, target: 0.0,
    ) -> None:
        """`links` says which links a message from one rank to another uses, `latency` how long its first byte takes."""
        self.ranks, self.links, self.latency, self.tasks = ranks, links, latency, list[Task]()
        self.start: Ready = [()] * ranks  # nothing to wait for

    def compute(self, seconds: Sequence[float], ready: Ready) -> Ready:
        """Every rank r computes for seconds[r]."""
        first = len(self.tasks)
        self.tasks += [Task(r, seconds[r], ready[r]) for r in range(self.ranks)]
        return [(first + r,) for r in range(self.ranks)]

    def send(self, messages: Counter[tuple[int, int, float]], ready: Ready) -> Ready:
        """Messages (source, target, bytes): each begins when its two ranks are ready. Returns every rank's messages."""
        of_rank: Ready = [()] * self.ranks
        alike: Counter[tuple[int, int, float, Links, float]] = Counter()
        for (source, target, size), count in messages.items():
            links, latency = self.links(source, target), self.latency(source, target)
            alike[source, target % self.ranks, size, links, latency] += count
        for (source, target, size, links, latency), count in alike.items():
            ends = tuple({source, target})
            for rank in ends:
                of_rank[rank] += (len(self.tasks),)
            self.tasks.append(Task(source, size, ready[source] + ready[target], links, count, latency, ends))
        return of_rank

    def hop(self, onward: Callable[[int], int], sizes: Sequence[float], ready: Ready) -> Ready:
        """Every rank r sends sizes[r] bytes to rank onward(r)."""
        return self.send(Counter((r, onward(r), sizes[r]) for r in range(self.ranks)), ready)

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
        """A ring of `rounds` rounds: in round t rank r computes for seconds(r, t) and passes on kv(r, t) bytes.

        The gradients of a block travel one round behind it. After the last round they travel home. Returns the tasks
        that end the last round, and the messages home. `after_first` may add tasks to those that end the first round.
        Liu et al. 2024, algorithm 1.
        """
        under_way, ranks = self.start, range(self.ranks)
        for t in range(rounds):
            hops = self.hop(onward, [kv(r, t) for r in ranks], ready) if t < rounds - 1 else self.start
            done = wait_for(self.compute([seconds(r, t) for r in ranks], ready), under_way)
            if gradients and rounds > 1:
                under_way = self.hop(onward, [gradients(r, t) for r in ranks], done)
            ready = wait_for(after_first(done) if t == 0 else done, hops)
        return ready, under_way


def main() -> int:
    rates, ok = {"link": 2e9, "slow": 0.5e9}, True

    def show(title: str, *tasks: Task) -> list[float]:
        times = play(tasks, rates)
        print(title)
        for task, (begin, end) in zip(tasks, times, strict=True):
            print(f"    {'a message' if task.links else 'computing'}   {begin:.1f} s to {end:.1f} s")
        return [round(end, 9) for _, end in times]

    two = Task(0, 1.0), Task(1, 6e9, (), ("link",)), Task(0, 6e9, (0,), ("link",))
    title = "two messages of 6 GB on a link of 2 GB/s, one of them after 1 s of computing; simulated"
    ok &= show(title, *two) == [1, 5, 6]
    title = "a message of 4 GB that also uses a link of 0.5 GB/s, and one of 6 GB beside it"
    ok &= show(title, Task(0, 4e9, (), ("link", "slow")), Task(1, 6e9, (), ("link",))) == [8, 6]

    P, C = 8, 4096
    computing, sent = block_flops(LLAMA_7B, C**2) / FLOPS, hop_bytes(LLAMA_7B, C)
    ring = TaskGraph(P, lambda source, target: (source,))
    ring.turn(ring.start, lambda r: (r + 1) % P, P, lambda r, t: computing, lambda r, t: sent, None)
    bandwidths = [SLOW] + [FAST] * (P - 1)
    seconds = max(end for _, end in play(ring.tasks, dict(enumerate(bandwidths))))
    right = ring_seconds(P, computing, sent / SLOW, overlap=True)
    ok &= abs(seconds - right) < 1e-9 * right
    print(f"ring of {P} with one slow link: {1e3 * seconds:.2f} ms, as in simulated_ring.py")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
