"""How many pairs a causal mask leaves to each rank in each round, in three layouts, for 8 tokens and for 1024.

Drawn from `visible_pairs` and `idle_share` of ringlab/training/causal.py.

    $ python -m figures.visible_pairs
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from torch import Tensor

from figures import FOLDER
from ringlab.support import drawing
from ringlab.support.colours import ink_on
from ringlab.training.causal import idle_share, visible_pairs
from ringlab.training.layouts import LAYOUTS

ALT = (
    "Six tables of rounds by ranks, three layouts for 8 tokens and for 1024. Contiguous: 3 pairs each in round 0, then "
    "4 or none, so 40 percent of the time is idle, and 42.8 percent with 1024 tokens. Zigzag: 3 each in round 0, then "
    "2 each, nothing idle, however long the sequence. Striped: 1 or 3, 25 percent idle; with 1024 tokens 32,640 or "
    "32,896, and 0.3 percent."
)
P, LENGTHS = 4, (8, 1024)
CELL, LEFT, PANEL, TOP, ROW = (64, 38), 96, 304, 140, 246  # pixels
DARK = "#3B2A6B"  # no block's colour: the most pairs of a table


def shade(share: float) -> str:
    """From the page (0) to DARK (1)."""
    return to_hex(
        [(1 - share) * paper + share * dark for paper, dark in zip(to_rgb(drawing.PAGE), to_rgb(DARK), strict=True)]
    )


def _table(ax: Axes, x: float, y: float, pairs: Tensor) -> None:
    """Rounds downwards, ranks to the right. The busiest rank of a round, for which the others wait, is bold."""
    most = pairs.max().item()
    for rank in range(P):
        drawing.write(
            ax, x + CELL[0] * (rank + 0.5), y - 14, f"rank {rank}", size=drawing.SMALL, color=drawing.MUTED, ha="center"
        )
    for t in range(P):
        busiest = pairs[t].max().item()
        for rank, number in enumerate(pairs[t].tolist()):
            left, top, colour = x + CELL[0] * rank, y + CELL[1] * t, shade(number / most)
            drawing.box(ax, left + 1, top + 1, CELL[0] - 2, CELL[1] - 2, fc=colour, ec=drawing.FAINT, lw=0.6)
            look = {"weight": "bold"} if number == busiest else {}
            drawing.write(
                ax, left + CELL[0] / 2, top + CELL[1] / 2, f"{number:,}", color=ink_on(colour), ha="center", **look
            )
    drawing.write(ax, x, y + CELL[1] * P + 20, f"idle: {100 * idle_share(pairs):.1f}%", weight="bold")


def draw() -> drawing.Picture:
    """Layouts side by side, a short sequence above a longer one."""
    figure, ax = drawing.canvas(1000, 588, ALT)
    title = f"(query, key) pairs that each of {P} ranks computes in each round under a causal mask"
    drawing.write(ax, 20, 34, title, size=drawing.TITLE, weight="bold")
    key = "Bold: the busiest of its round, for whom all wait. The darker, the more pairs, within a table"
    drawing.write(ax, 20, 64, key, color=drawing.MUTED)
    for column, layout in enumerate(LAYOUTS):
        x = LEFT + PANEL * column
        drawing.write(ax, x, TOP - 40, layout, size=16, weight="bold")
        for row, seq_len in enumerate(LENGTHS):
            _table(ax, x, TOP + ROW * row, visible_pairs(layout, seq_len, P))
    for row, seq_len in enumerate(LENGTHS):
        y = TOP + ROW * row
        drawing.write(ax, 20, y - 14, f"S = {seq_len}", weight="bold")
        for t in range(P):
            drawing.write(ax, 20, y + CELL[1] * (t + 0.5), f"round {t}")
    return figure


def save(folder: Path = FOLDER) -> None:
    """Write visible_pairs.svg."""
    drawing.save(draw(), "visible_pairs", folder)


if __name__ == "__main__":
    save()
