"""Which tokens the state on each rank knows, step by step: handed on by hops, and put together by a scan.

Drawn from the messages of two runs on 8 ranks. Rank r's map adds 1 to entry r of the state and keeps the rest, so a
state or map that arrives says which ranks' tokens are in it.
"""

from functools import cache
from unittest import mock

import torch
from matplotlib.patches import Rectangle

from figures import shapes
from ringlab.states import state_ring
from ringlab.states.linear_attention import Map
from ringlab.support import drawing
from ringlab.support.processes import RankContext, launch

P = 8
CELL, GAP = (46, 34), 6  # pixels


def known_on_rank(context: RankContext) -> tuple[list[int], list[list[int]]]:
    """Whose tokens are in the state that came by hops; and in the maps that came by a scan, after each step."""
    mine = Map(torch.ones(1, 1, P, 1), torch.eye(P)[context.rank, :, None].expand(1, 1, P, 1))
    empty, chain = torch.zeros(1, 1, P, 1), list(range(P))
    (h,) = state_ring.by_hops([mine], chain, empty, None)
    arrived: list[list[int]] = []

    def noted(message: torch.Tensor, like: Map) -> Map:
        one = unpacked(message, like)
        arrived.append(one.add.flatten().nonzero().flatten().tolist())
        return one

    unpacked = state_ring.unpacked
    with mock.patch.object(state_ring, "unpacked", noted):
        state_ring.by_scan([mine], chain, empty, None)
    return h.flatten().nonzero().flatten().tolist(), arrived


@cache
def known() -> dict[str, list[list[set[int]]]]:
    """For hops and for a scan: after each step, whose tokens each rank knows."""
    hops, arrived = zip(*launch(known_on_rank, P), strict=True)
    scan = [[set().union(*each[:step]) for each in arrived] for step in range(1 + max(map(len, arrived)))]
    by_hops = [[set(hops[r]) if r <= step else set() for r in range(P)] for step in range(P)]
    return {"hops": by_hops, "scan": scan}


def draw() -> drawing.Picture:
    """Two tables of 8 ranks. Each cell shows, as coloured strips, whose tokens are in the state before this rank's own.
    By hops one rank more is ready after each step, and the last after seven: it has waited for all others. By a scan
    all ranks work at the same time: each step doubles how far back a rank knows, so after three steps all are ready.
    """
    figure, ax = drawing.canvas(1000, 470, shapes.told(draw))
    title = "Whose tokens are in the state before a rank's own? Two ways to hand it on"
    drawing.write(ax, 20, 32, title, size=drawing.TITLE, weight="bold")
    for left, (name, steps) in zip((20, 520), known().items(), strict=True):
        drawing.write(ax, left, 72, f"{name}: {len(steps) - 1} steps", weight="bold")
        for r in range(P):
            at = left + 64 + (CELL[0] + GAP) * r
            drawing.write(ax, at + CELL[0] / 2, 100, f"{r}", color=drawing.MUTED, ha="center")
        for step, ranks in enumerate(steps):
            top = 118 + (CELL[1] + GAP) * step
            drawing.write(ax, left, top + CELL[1] / 2, "start" if step == 0 else f"step {step}", size=drawing.SMALL)
            for r, seen in enumerate(ranks):
                at = left + 64 + (CELL[0] + GAP) * r
                ready = seen == set(range(r))
                shapes.box(ax, at, top, *CELL, ec=drawing.INK, lw=1.5 if ready else 0)
                strip = (CELL[0] - 6) / P
                for j in seen:
                    place = (at + 3 + strip * j, top + 4)
                    ax.add_patch(Rectangle(place, strip - 1, CELL[1] - 8, lw=0, fc=drawing.colour(j)))
    drawing.write(ax, 520, 330, "A frame: this rank knows all tokens before its own.", color=drawing.MUTED)
    drawing.write(ax, 520, 354, "A strip: the tokens of one rank, in its colour.", color=drawing.MUTED)
    drawing.write(ax, 520, 378, "Hops send a state. A scan sends maps, larger for the delta rule.", color=drawing.MUTED)
    return figure
