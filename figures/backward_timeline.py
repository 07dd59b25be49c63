"""What travels when in the backward pass of the full ring: sums of gradients arrive one round after their block.

Drawn from ringlab/ring/flash_ring.py's own `flash_backward`, which P threads run here as P ranks. Each has a clock
that only computing and messages move: computing on a block takes 1 round, K and V of a block take 0.3, and their
gradients 0.6, because they are float32 where K and V have 16 bits. A link carries one message at a time.
"""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from figures import shapes
from figures.gradients_home import problem
from figures.simulated import Simulation
from ringlab.basics.naive_attention import naive_attention
from ringlab.ring import flash_ring, schedule
from ringlab.ring.fused_block import fused_backward
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support import drawing
from ringlab.support.timeline import Event

P = 4
LASTS = {"compute": 1.0, "KV": 0.3, "dKV": 0.6}  # rounds: computing on a block, sending K and V, sending gradients
LEFT, TOP, ROUND, LANE = 92, 150, 184, 104  # pixels: the first round and the first lane, and their sizes


def timeline() -> tuple[list[Event], list[Tensor]]:
    """What the ranks did in the backward pass, and the whole dq, dk and dv (1, 1, 8, 2) that came out of it."""
    x, d_out, _ = problem()
    scale = x.shape[-1] ** -0.5
    lse = torch.logsumexp(x @ x.transpose(-2, -1) * scale, dim=-1)  # from the forward pass
    chunks = [list(whole.chunk(P, dim=2)) for whole in (x, x, x, naive_attention(x, x, x), lse, d_out)]
    ring = schedule.Ring(Partition(Mask(), "contiguous", (x.shape[2] // P,) * P), scale)
    ranks, events = Simulation(P, lambda link, sent: LASTS[kind(sent)]), []

    def compute(*block: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        rank = ranks.rank
        t = (1 + sum(event.rank == rank for event in events)) % P  # the own block last
        events.append(Event(rank, "compute", t, (rank - t) % P, *ranks.compute(LASTS["compute"]), bytes=0))
        return fused_backward(*block, **options)

    with mock.patch.object(flash_ring, "fused_backward", compute):
        per_rank = ranks.run(lambda rank: flash_ring.flash_backward(*(chunk[rank] for chunk in chunks), ring))
    for (source, to), messages in ranks.moved.items():
        for what, first in (("KV", 0), ("dKV", 1)):  # the sums of round 0 stay
            for t, it in enumerate((it for it in messages if kind(it.tensors) == what), first):
                events.append(Event(to, what, t, (source - t) % P, it.begin, it.end, bytes=0))
    events.sort(key=lambda event: (event.rank, event.start, event.what))
    return events, [torch.cat(parts, dim=2) for parts in zip(*per_rank, strict=True)]


def kind(sent: Sequence[Tensor]) -> str:
    """K and V are two tensors, their gradients one."""
    return "KV" if len(sent) == 2 else "dKV"


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
    said = (
        "Follow block 0. Rank 1 computes on KV0 in round 1, begins the sums dKV0 and sends them on. They arrive",
        "at rank 2 in round 2, while it computes on KV0. Rank 3 adds the third part and sends dKV0 home.",
        "Meanwhile rank 0 computes its own part, which need not travel. No computing hides the first KV.",
    )
    shapes.lines(ax, 20, TOP + P * LANE + 16, said)
    return figure
