"""Who holds which tokens and which slice of each weight, on a mesh of 2 × 2 ranks.

Drawn from `placement`: the order of the ranks is DeviceMesh's, the tokens are `ringlab.ring.layouts.positions`, the
slices are fully_shard's. tests/models/test_mesh.py compares it with what four real ranks hold.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

from figures import shapes
from ringlab.ring.layouts import positions
from ringlab.support import drawing

DP, CP, S, ROWS = 2, 2, 8, 8  # ROWS: of a weight
LAYOUT = "zigzag"
LEFT, TOP, WIDTH, HEIGHT = (150, 600), (128, 334), 370, 176  # of the four cards, in pixels
CELL = 40


@dataclass(frozen=True)
class Held:
    """What one rank of the mesh holds."""

    rank: int
    sequence: int
    tokens: list[int]
    rows: list[int]


def placement() -> list[Held]:
    """What each rank holds, in order of rank."""
    slices = torch.arange(ROWS).chunk(DP * CP)
    return [
        Held(d * CP + c, d, positions(LAYOUT, S, c, CP).tolist(), slices[d * CP + c].tolist())
        for d in range(DP)
        for c in range(CP)
    ]


def _card(ax: Axes, x: float, y: float, held: Held) -> None:
    shapes.box(ax, x, y, WIDTH, HEIGHT)
    drawing.write(ax, x + 18, y + 24, f"rank {held.rank}", size=16, weight="bold")
    drawing.write(ax, x + 18, y + 56, "tokens", color=drawing.MUTED)
    for i, token in enumerate(held.tokens):
        shapes.block(ax, x + 100 + CELL * i, y + 38, CELL - 4, 36, held.rank, str(token))
    drawing.write(ax, x + 18, y + 103, "rows of each weight", color=drawing.MUTED)
    for row in range(ROWS):
        own = row in held.rows
        spot = (x + 18 + (CELL + 2) * row, y + 120)
        shapes.box(ax, *spot, CELL - 2, 36, fc=drawing.INK if own else drawing.FAINT)
        look = {"ha": "center", "color": drawing.PAGE if own else drawing.MUTED, "weight": "bold" if own else "normal"}
        drawing.write(ax, spot[0] + CELL / 2 - 1, spot[1] + 18, str(row), **look)


def draw() -> drawing.Picture:
    """Four ranks in two rows and two columns. The upper row is a ring with sequence 0, the lower row a ring with
    sequence 1; in each, K and V go from the left rank to the right one and back. The left ranks hold tokens 0, 1, 6 and
    7, the right ranks tokens 2, 3, 4 and 5. Of the 8 rows of a weight, rank 0 holds rows 0 and 1, rank 1 rows 2 and 3,
    rank 2 rows 4 and 5, rank 3 rows 6 and 7.
    """
    title = "A mesh of 2 × 2: a ring shares out its sequence, all ranks share out the weights"
    key = f"{S} tokens a sequence, {LAYOUT} layout. A colour: one K/V block. Dark: the rows that a rank keeps"
    figure, ax = shapes.headed(600, draw, title, {66: key})
    for c, x in enumerate(LEFT):
        drawing.write(ax, x + WIDTH / 2, TOP[0] - 20, f"cp index {c}", weight="bold", ha="center")
    for held in placement():
        _card(ax, LEFT[held.rank % CP], TOP[held.sequence], held)
    for d, y in enumerate(TOP):
        for line, text in enumerate((f"dp index {d}", f"ring {d}", f"sequence {d}")):
            drawing.write(ax, 20, y + HEIGHT / 2 + 24 * (line - 1), text, weight="normal" if line else "bold")
        start, end = LEFT[0] + WIDTH + 8, LEFT[1] - 8
        drawing.write(ax, (start + end) / 2, y + HEIGHT / 2, "K, V", ha="center")
        shapes.arrow(ax, (start, y + HEIGHT / 2 - 20), (end, y + HEIGHT / 2 - 20), color=drawing.colour(d * CP))
        shapes.arrow(ax, (end, y + HEIGHT / 2 + 20), (start, y + HEIGHT / 2 + 20), color=drawing.colour(d * CP + 1))
    text = "Before a layer computes, every rank gathers all 8 rows of its weights; after it, each keeps only its own."
    drawing.write(ax, 20, 546, text)
    text = "In the backward pass the gradients of all 4 ranks are averaged; each rank keeps its rows of the average."
    drawing.write(ax, 20, 574, text)
    return figure
