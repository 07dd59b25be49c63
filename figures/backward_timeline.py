"""What travels when in the backward pass of the trainable ring: sums of gradients arrive one round after their block.

Drawn from ringlab/ring/flash_ring.py's own `flash_backward`, which P threads run here as P ranks. Each has a clock
that only computing and messages move: computing on a block takes 1 round, K and V of a block take 0.3, and their
gradients 0.6, because they are float32 where K and V have 16 bits. A link carries one message at a time.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from figures import shapes
from figures.gradients_home import problem
from ringlab.basics.naive_attention import naive_attention
from ringlab.ring import flash_ring, overlap, schedule
from ringlab.ring.fused_block import fused_backward
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support import drawing
from ringlab.support.timeline import Event

P = 4
LASTS = {"compute": 1.0, "KV": 0.3, "dKV": 0.6}  # rounds: computing on a block, sending K and V, sending gradients
LEFT, TOP, ROUND, LANE = 92, 150, 184, 104  # pixels: the first round and the first lane, and their sizes


class Simulation:
    """P threads that run the ring's code as P ranks, each with a clock that only computing and messages move.

    `events` is what happened: "compute", and the messages "KV" and "dKV", each noted by the rank that receives it.
    """

    def __init__(self) -> None:
        self.here = threading.local()  # its rank
        self.clocks = [0.0] * P
        self.sent = [[] for _ in range(P)]  # on the link from rank r to rank r + 1: when posted, and the tensors
        self.awaited = [[] for _ in range(P)]
        self.ends = [[] for _ in range(P)]
        self.changed = threading.Condition()
        self.events: list[Event] = []

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """work(rank) on every rank, with the clock in place of real messages. Returns what each rank returned."""

        def on_rank(rank: int) -> Any:
            self.here.rank = rank
            return work(rank)

        with ExitStack() as stack:
            for module in (overlap, schedule):
                stack.enter_context(mock.patch.multiple(module, members=self.members, post=self.post))
            stack.enter_context(mock.patch.object(flash_ring, "fused_backward", self.compute))
            return list(stack.enter_context(ThreadPoolExecutor(P)).map(on_rank, range(P)))

    def members(self, group: None = None) -> tuple[int, int]:
        return self.here.rank, P

    def note(self, rank: int, what: str, t: int, block: int, start: float, end: float) -> None:
        self.events.append(Event(rank, what, t, block, start, end, bytes=0))

    def compute(self, *block: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`fused_backward`, which takes one round."""
        rank = self.here.rank
        t = (1 + sum(event.what == "compute" and event.rank == rank for event in self.events)) % P  # the own block last
        start = self.clocks[rank]
        self.clocks[rank] += LASTS["compute"]
        self.note(rank, "compute", t, (rank - t) % P, start, self.clocks[rank])
        return fused_backward(*block, **options)

    def post(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], group: None = None, *, distance: int = 1
    ) -> list[Any]:
        assert distance % P == 1, "without a mask all messages go to the next rank"
        rank, works = self.here.rank, []
        with self.changed:
            for link, posted, tensors in ((rank, self.sent, sent), ((rank - 1) % P, self.awaited, received)):
                works.append(SimpleNamespace(wait=partial(self.wait, link, len(posted[link]))))
                posted[link].append((self.clocks[rank], tensors))
            self.changed.notify_all()
        return works

    def wait(self, link: int, number: int) -> None:
        """Move this rank's clock to the end of a message."""
        rank, ends = self.here.rank, self.ends[link]
        with self.changed:
            if not self.changed.wait_for(lambda: min(len(self.sent[link]), len(self.awaited[link])) > number, 60):
                raise TimeoutError(f"rank {rank} waits for message {number} of link {link}, which nobody posts")
            while len(ends) <= number:
                self.deliver(link)
            self.clocks[rank] = max(self.clocks[rank], ends[number])

    def deliver(self, link: int) -> None:
        """The next message of a link: it starts when both ranks have posted it and the message before it has ended."""
        ends, receiver = self.ends[link], (link + 1) % P
        (ready, sent), (awaited, received) = self.sent[link][len(ends)], self.awaited[link][len(ends)]
        for x, y in zip(sent, received, strict=True):
            y.copy_(x)
        what = "KV" if len(sent) == 2 else "dKV"  # K and V are two tensors, their gradients one
        t = sum(event.what == what and event.rank == receiver for event in self.events)
        if what == "dKV":  # the sums of round 0 stay
            t += 1
        start = max(ready, awaited, *ends[-1:])
        ends.append(start + LASTS[what])
        self.note(receiver, what, t, (link - t) % P, start, ends[-1])


def timeline() -> tuple[list[Event], list[Tensor]]:
    """What the ranks did in the backward pass, and the whole dq, dk and dv (1, 1, 8, 2) that came out of it."""
    x, d_out, _ = problem()
    scale = x.shape[-1] ** -0.5
    lse = torch.logsumexp(x @ x.transpose(-2, -1) * scale, dim=-1)  # from the forward pass
    chunks = [list(whole.chunk(P, dim=2)) for whole in (x, x, x, naive_attention(x, x, x), lse, d_out)]
    ring = schedule.Ring(Partition(Mask(), "contiguous", (x.shape[2] // P,) * P), scale)
    simulation = Simulation()
    per_rank = simulation.run(lambda rank: flash_ring.flash_backward(*(chunk[rank] for chunk in chunks), ring))
    events = sorted(simulation.events, key=lambda event: (event.rank, event.start, event.what))
    return events, [torch.cat(parts, dim=2) for parts in zip(*per_rank, strict=True)]


def _bar(ax: Axes, event: Event, top: float, height: float, text: str) -> None:
    x, width = LEFT + ROUND * event.start, ROUND * (event.end - event.start)
    if event.what == "dKV":  # pale, with the edge of its block
        shapes.box(
            ax, x + 1, top, width - 2, height, fc=shapes.tint(event.block), ec=drawing.colour(event.block), lw=1.5
        )
        drawing.write(ax, x + width / 2, top + height / 2, text, size=drawing.SMALL, ha="center")
    else:
        shapes.block(ax, x + 1, top, width - 2, height, event.block, text, size=drawing.SMALL)


def draw() -> Figure:
    """A timeline of four ranks in the backward pass: the first hop of the K/V blocks, which no computing hides, then
    rounds 1, 2 and 3, and round 0 as the last one. In rounds 2 and 3, while rank r computes on block j, first the
    gradients of this block j arrive from rank r minus 1, then the next K/V block. In round 0 every rank computes on its
    own block. Meanwhile the gradients that the other ranks have added for block r arrive at rank r: home.
    """
    events, _ = timeline()
    end = max(event.end for event in events)
    key = "Above: a rank computes on a block.   Below: what arrives meanwhile, KV (K and V) or dKV (their gradients)."
    sizes = f"A clock counts: computing on a block 1, a message KV {LASTS['KV']:g}, a message dKV {LASTS['dKV']:g}."
    figure, ax = shapes.headed(
        TOP + P * LANE + 92, draw, "The gradients of a block arrive one round after the block", {66: key, 90: sizes}
    )
    for n in range(P + 1):
        x = LEFT + ROUND * (end - P + n)
        ax.plot([x, x], [TOP - 12, TOP + P * LANE - 12], color=drawing.FAINT, lw=1.2, zorder=0)
        if n < P:
            drawing.write(ax, x + ROUND / 2, TOP - 24, f"round {(n + 1) % P}", weight="bold", ha="center")
    for rank in range(P):
        y = TOP + LANE * rank
        drawing.write(ax, 20, y + 26, f"rank {rank}", weight="bold")
        for event in events:
            if event.rank == rank and event.what == "compute":
                _bar(ax, event, y, 40, f"computes on KV{event.block}")
            elif event.rank == rank:
                _bar(ax, event, y + 46, 30, f"{event.what}{event.block}")
    y = TOP + P * LANE + 16
    for line, text in enumerate(
        (
            "Follow block 0. Rank 1 computes on KV0 in round 1, begins the sums dKV0 and sends them on. They arrive",
            "at rank 2 in round 2, while it computes on KV0. Rank 3 adds the third part and sends dKV0 home.",
            "Meanwhile rank 0 computes its own part, which need not travel. No computing hides the first KV.",
        )
    ):
        drawing.write(ax, 20, y + 24 * line, text)
    return figure
