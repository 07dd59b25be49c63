"""The picture of an X-ray: a ring's weights and gradients beside the right ones.

A column of cells is a key, in the colour of its K/V block; a row is a query. The stronger the colour, the larger the
number in its row, without its sign. A wrong tile has a frame and a word. A tile with the numbers of another block has
the colour of that block.

Before: xray.py. After: the report of the doctor.
Source: drawn from the matrices of an `XRay`, as all pictures here from what the code did.
"""

from itertools import product

import numpy as np
import torch
from torch import Tensor

from ring_doctor.explaining.grids import Matrix, XRay
from ringlab.support.extras import extra

with extra("plots", __name__):
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

from ringlab.support import drawing

WIDTH, SIDE, LEFTS, TOP, STEP = 1000, 276, (84, 392, 704), 164, 386  # pixels
FRAME = 2.6  # width of the frame of a wrong tile
SMALLEST = 50  # pixels: a tile with a word in it
BACK = {"boxstyle": "round,pad=0.12", "fc": drawing.PAGE, "ec": "none"}


def picture(xray: XRay, title: str = "X-ray of a ring") -> drawing.Picture:
    """Each matrix of the X-ray, tokens in the order of the ranks, and at the end of each row the right matrix."""
    rows = [row for kind in ("W", "dS", "A") if (row := [it for it in xray.matrices if it.name.startswith(kind)])]
    shown = [f"{matrix.title}: {'; '.join(matrix.shown) or 'right'}." for matrix in xray.matrices]
    figure, ax = drawing.canvas(WIDTH, TOP + STEP * len(rows) - 90, " ".join([f"{title}.", *shown]))
    drawing.write(ax, 20, 34, title, size=drawing.TITLE, weight="bold")
    key = "Rows: queries. Columns: keys, in the colour of their block; the stronger, the larger. Framed: wrong"
    drawing.write(ax, 20, 64, key, color=drawing.MUTED)
    for top, row in zip(range(TOP, TOP + STEP * len(rows), STEP), rows, strict=True):
        for x, matrix in zip(LEFTS, row, strict=False):
            head, result = matrix.shows
            how = f"read from {result}: {_verdict(matrix)}"
            drawing.write(ax, x, top - 58, head.capitalize(), weight="bold")
            drawing.write(ax, x, top - 37, how, size=drawing.SMALL, color=drawing.MUTED)
            _panel(ax, x, top, matrix, matrix.sheet.seen, labels=True)
        drawing.write(ax, LEFTS[2], top - 58, "What they should be", weight="bold")
        _panel(ax, LEFTS[2], top, row[0], row[0].sheet.right, labels=False)
        for rank, (start, end) in enumerate(_edges(row[0].sheet.lengths, top)):
            drawing.write(ax, LEFTS[0] - 8, (start + end) / 2, f"rank {rank}", weight="bold", ha="right")
    return figure


def svg(xray: XRay) -> str:
    """The picture as SVG. A page with several must show each as an <img>, because all have the same ids."""
    return drawing.svg(picture(xray))


def _verdict(matrix: Matrix) -> str:
    if matrix.wrong:
        return f"{len(matrix.wrong)} of {len(matrix.tiles)} tiles wrong"
    if matrix.sums is not None:
        return "sums of rows wrong"
    return "right" if matrix.ok else "follows from these weights"


def _panel(ax: Axes, x: float, y: float, matrix: Matrix, numbers: Tensor, *, labels: bool) -> None:
    """All cells as one image, a line around each tile; with labels a frame and a word on each wrong tile."""
    lengths = matrix.sheet.lengths
    cells = _cells(matrix, numbers).repeat(16, axis=0).repeat(16, axis=1)  # so that a viewer may smooth the image
    ax.imshow(cells, extent=(x, x + SIDE, y + SIDE, y), interpolation="none", aspect="auto", zorder=1)
    for i in np.linspace(0, SIDE, sum(lengths) + 1):
        ax.plot([x, x + SIDE, np.nan, x + i, x + i], [y + i, y + i, np.nan, y, y + SIDE], color=drawing.PAGE, lw=0.7)
    columns, rows = _edges(lengths, x), _edges(lengths, y)
    for (top, bottom), (left, right) in product(rows, columns):
        size = right - left, bottom - top
        ax.add_patch(Rectangle((left, top), *size, fill=False, ec=drawing.MUTED, lw=0.8, zorder=2.5))
    for block, (left, right) in enumerate(columns):
        drawing.write(ax, (left + right) / 2, y - 14, f"KV{block}", size=drawing.SMALL, weight="bold", ha="center")
    inside = FRAME * 0.7  # so that the frames of two neighbours are two
    for tile in matrix.wrong if labels else ():
        (left, right), (top, bottom) = columns[tile.block], rows[tile.rank]
        spot, size = (left + inside, top + inside), (right - left - 2 * inside, bottom - top - 2 * inside)
        ax.add_patch(Rectangle(spot, *size, fill=False, ec=drawing.INK, lw=FRAME, joinstyle="miter", zorder=3))
    for tile in matrix.wrong if labels else ():
        (left, right), (top, bottom) = columns[tile.block], rows[tile.rank]
        label = tile.label if len(tile.label) < 8 and "-" not in tile.label else tile.kind
        height = (top + bottom) / 2 if tile.kind == "missing" else top + 14  # above what the tile holds
        if right - left >= SMALLEST:
            drawing.write(ax, (left + right) / 2, height, label, size=drawing.SMALL, ha="center", bbox=BACK)


def _edges(lengths: tuple[int, ...], start: float) -> list[tuple[float, float]]:
    """Where the tiles begin and end, in pixels, from `start` on."""
    ends = start + np.cumsum(lengths) * SIDE / sum(lengths)
    return list(zip([start, *ends], ends, strict=False))


def _cells(matrix: Matrix, numbers: Tensor) -> np.ndarray:
    """The colour of each pair: (S, S, 3)."""
    largest = matrix.sheet.right.abs().amax(dim=1, keepdim=True)  # of a row
    largest = torch.where(largest > matrix.sheet.allowed.amax(), largest, matrix.sheet.right.abs().max())
    strength = (numbers.abs() / largest).nan_to_num(nan=1.0).clamp(max=1).sqrt()[:, :, None].numpy()
    colours = torch.empty(*numbers.shape, 3, dtype=torch.float64)
    for tile in matrix.tiles:
        block = tile.block if tile.holds is None or numbers is not matrix.sheet.seen else tile.holds
        matrix.sheet.cut(colours, tile.rank, tile.block)[:] = torch.tensor(to_rgb(drawing.colour(block)))
    return strength * colours.numpy() + (1 - strength) * np.array(to_rgb(drawing.CARD))
