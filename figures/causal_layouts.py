"""Three layouts under a causal mask: the mask as the ranks hold it, tile by tile, and the time that each rank waits.

Drawn from ringlab/ring/causal.py: the rows and columns are `positions`, a filled cell is a pair that the mask
leaves, and the bars are `visible_pairs`. A round lasts as long as its busiest rank computes.
"""

import textwrap

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from figures import shapes
from ringlab.ring.causal import idle_share, visible_pairs
from ringlab.ring.layouts import LAYOUTS, positions
from ringlab.support import drawing
from ringlab.support.colours import ink_on

S, P = 16, 4
C = S // P
CELL = 15  # pixels
PANELS, TOP, BARS = (98, 412, 726), 130, 322  # left edges of the three masks; the first's top; from it to its bars
NARROW, NEXT = 400, 560  # the width for phones, and from one layout to the next there
BAR, UNIT = 30, 4  # pixels: the height of a bar, and one pair


def visible(layout: str) -> tuple[Tensor, Tensor]:
    """The tokens in the order of the ranks (S,), and which pairs the mask leaves, in that order (S, S)."""
    order = torch.cat([positions(layout, S, rank, P) for rank in range(P)])
    return order, order <= order[:, None]


def _mask(ax: Axes, x: float, y: float, layout: str) -> None:
    """Rows are queries, columns are keys; every tile says its round."""
    order, pairs = visible(layout)
    for row in range(S):
        drawing.write(
            ax, x - 6, y + CELL * (row + 0.5), f"{order[row]}", size=drawing.SMALL, color=drawing.MUTED, ha="right"
        )
        for column in range(S):
            colour = drawing.colour(column // C) if pairs[row, column] else drawing.CARD
            spot = (x + CELL * column, y + CELL * row)
            ax.add_patch(Rectangle(spot, CELL, CELL, fc=colour, ec=drawing.PAGE, lw=0.6))
    for block in range(P):
        middle = x + CELL * C * (block + 0.5)
        drawing.write(ax, middle, y - 14, f"KV{block}", size=drawing.SMALL, weight="bold", ha="center")
        for rank in range(P):
            tile = pairs[C * rank : C * (rank + 1), C * block : C * (block + 1)]
            spot = (x + CELL * C * block, y + CELL * C * rank)
            ax.add_patch(Rectangle(spot, CELL * C, CELL * C, fill=False, ec=drawing.INK, lw=1))
            if tile.any():  # the last query and the first keys, at the bottom left, are among what is left
                ink = ink_on(drawing.colour(block))
                at = (spot[0] + CELL, spot[1] + CELL * (C - 1))
                ax.add_patch(
                    Rectangle((at[0] - 8, at[1] - 10), 16, 20, fc=drawing.colour(block), lw=0)
                )  # over the grid
                drawing.write(ax, *at, f"{(rank - block) % P}", weight="bold", color=ink, ha="center")


def _bars(ax: Axes, x: float, y: float, layout: str) -> None:
    """A bar for each rank: the block it computes on in each round, then its wait for the busiest."""
    pairs = visible_pairs([positions(layout, S, rank, P) for rank in range(P)])  # (rounds, ranks)
    lasts = pairs.max(dim=1).values.tolist()
    for rank in range(P):
        left, top = x, y + (BAR + 6) * rank
        for t in range(P):
            block, work = (rank - t) % P, pairs[t, rank].item()
            wait = {"fc": drawing.PAGE, "ec": drawing.FAINT, "hatch": "////", "lw": 0}
            ax.add_patch(Rectangle((left, top), UNIT * lasts[t], BAR, **wait))
            if work:
                ax.add_patch(Rectangle((left, top), UNIT * work, BAR, fc=drawing.colour(block), lw=0))
                ink = ink_on(drawing.colour(block))
                drawing.write(
                    ax, left + UNIT * work / 2, top + BAR / 2, f"{work}", size=drawing.SMALL, color=ink, ha="center"
                )
            left += UNIT * lasts[t]
    edge = x
    for t in range(P):  # where all have waited for the busiest
        drawing.write(
            ax, edge + UNIT * lasts[t] / 2, y - 14, f"{t}", size=drawing.SMALL, color=drawing.MUTED, ha="center"
        )
        edge += UNIT * lasts[t]
        ax.plot([edge, edge], [y - 6, y + (BAR + 6) * P], color=drawing.INK, lw=1.2)
    drawing.write(ax, x, y + (BAR + 6) * P + 20, f"idle: {100 * idle_share(pairs):.0f}% of the time", weight="bold")


def draw(narrow: bool = False) -> drawing.Picture:
    """16 tokens on 4 ranks in three layouts. Above, the causal mask with rows and columns in the order in which the
    ranks hold the tokens, coloured by K/V block. Contiguous: tiles below the diagonal are full, those above it are
    empty. Zigzag: the left half of each tile below the diagonal, the lower half of each above it. Striped: a triangle
    in every tile. Below, a bar for each rank: with contiguous chunks rank 0 waits in three of four rounds and all ranks
    together 41 percent of the time, with zigzag none waits, with striped 15 percent.
    """
    width, height = (NARROW, 204 + 3 * NEXT) if narrow else (1000, 648)
    figure, ax = drawing.canvas(width, height, shapes.told(draw))
    title = "A causal mask, as the ranks hold it: the same pairs, shared out in three ways"
    rows = f"{S} tokens. Rows: the queries of each rank. Columns: the keys of each block. "
    key = rows + f"In each tile: the round (r − j) mod {P}"
    text = "The time of each rank; a round lasts until its busiest rank is done. Numbers: pairs. Hatched: waiting"
    if narrow:
        shapes.lines(ax, 20, 34, textwrap.wrap(title, 41), size=15, weight="bold")
        below = textwrap.wrap(f"{key}. Below: {text[0].lower()}{text[1:]}", 48)
        shapes.lines(ax, 20, 88, below, color=drawing.MUTED)
    else:
        drawing.write(ax, 20, 34, title, size=drawing.TITLE, weight="bold")
        drawing.write(ax, 20, 64, key, color=drawing.MUTED)
        drawing.write(ax, 20, TOP + BARS - 48, text, color=drawing.MUTED)
    for i, layout in enumerate(LAYOUTS):
        x, top = (PANELS[0], 250 + NEXT * i) if narrow else (PANELS[i], TOP)
        drawing.write(ax, x, top - 38, layout, size=16, weight="bold")
        _mask(ax, x, top, layout)
        _bars(ax, x, top + BARS, layout)
        if x == PANELS[0]:
            for rank in range(P):
                drawing.write(ax, 20, top + CELL * C * (rank + 0.5), f"rank {rank}", weight="bold")
                drawing.write(ax, 20, top + BARS + (BAR + 6) * rank + BAR / 2, f"rank {rank}", weight="bold")
            drawing.write(ax, 20, top + BARS - 14, "round", size=drawing.SMALL, color=drawing.MUTED)
    return figure
