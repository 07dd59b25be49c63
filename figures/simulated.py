"""P threads run the ring's own code as P ranks, each with a clock that only computing and messages move.

A message starts when both ranks have posted it and the message before it on their link has ended: a link carries one at
a time. The pictures of schedules are drawn from what the ranks did.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from ringlab.ring import overlap, schedule

Link = tuple[int, int]  # from a rank, to a rank


@dataclass
class Message:
    """What has travelled on a link, and when; `waited` is the clock of its receiver when that began to wait for it."""

    link: Link
    tensors: list[Tensor]
    begin: float
    end: float
    waited: float = -1.0


class Simulation:
    """`lasts` says how long a message takes: of its link and its tensors. `group` is a range of ranks, or None: all."""

    def __init__(self, world_size: int, lasts: Callable[[Link, Sequence[Tensor]], float]) -> None:
        self.world_size, self.lasts = world_size, lasts
        self.here = threading.local()
        self.clocks = [0.0] * world_size
        self.sent: dict[Link, list] = defaultdict(list)  # when posted, and the tensors
        self.awaited: dict[Link, list] = defaultdict(list)
        self.moved: dict[Link, list[Message]] = defaultdict(list)
        self.changed = threading.Condition()

    @property
    def rank(self) -> int:
        """That of the thread that asks."""
        return self.here.rank

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """work(rank) on every rank, with the clocks in place of real messages. Returns what each rank returned."""

        def on_rank(rank: int) -> Any:
            self.here.rank = rank
            return work(rank)

        with ExitStack() as stack:
            for module in (overlap, schedule):
                stack.enter_context(mock.patch.multiple(module, members=self.members, post=self.post))
            threads = stack.enter_context(ThreadPoolExecutor(self.world_size))
            return list(threads.map(on_rank, range(self.world_size)))

    def compute(self, lasts: float) -> tuple[float, float]:
        """Move this rank's clock on: from when to when it computed."""
        start = self.clocks[self.rank]
        self.clocks[self.rank] = start + lasts
        return start, start + lasts

    def members(self, group: range | None = None) -> tuple[int, int]:
        ranks = group or range(self.world_size)
        return ranks.index(self.rank), len(ranks)

    def post(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], group: range | None = None, *, distance: int = 1
    ) -> list[Any]:
        ranks, (place, size) = group or range(self.world_size), self.members(group)
        to, source = ranks[(place + distance) % size], ranks[(place - distance) % size]
        works = []
        with self.changed:
            for link, posted, tensors in (
                ((self.rank, to), self.sent, sent),
                ((source, self.rank), self.awaited, received),
            ):
                works.append(SimpleNamespace(wait=partial(self.wait, link, len(posted[link]))))
                posted[link].append((self.clocks[self.rank], tensors))
            self.changed.notify_all()
        return works

    def wait(self, link: Link, number: int) -> None:
        """Move this rank's clock to the end of a message."""
        with self.changed:
            if not self.changed.wait_for(lambda: min(len(self.sent[link]), len(self.awaited[link])) > number, 60):
                raise TimeoutError(f"rank {self.rank} waits for message {number} of {link}, which nobody posts")
            while len(self.moved[link]) <= number:
                self.deliver(link)
            message = self.moved[link][number]
            if link[1] == self.rank:
                message.waited = self.clocks[self.rank]
            self.clocks[self.rank] = max(self.clocks[self.rank], message.end)

    def deliver(self, link: Link) -> None:
        """The next message of a link."""
        before = self.moved[link]
        (ready, sent), (awaited, received) = self.sent[link][len(before)], self.awaited[link][len(before)]
        for x, y in zip(sent, received, strict=True):
            y.copy_(x)
        start = max(ready, awaited, *(message.end for message in before[-1:]))
        before.append(Message(link, [x.clone() for x in sent], start, start + self.lasts(link, sent)))
