"""Packed documents and a sliding window in the ring: the rectangles and triangles that each rank computes.

Drawn from `Partition.pieces` of ringlab/ring/partition.py: each outlined part is one call of the kernel, in the
colour of its block.
"""

from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle

from figures import shapes
from ringlab.ring.masks import Mask
from ringlab.ring.partition import BlockSlice, Partition
from ringlab.support import drawing

P, C = 4, 8
S = P * C
MASKS = {
    "documents of 5, 11, 10 and 6 tokens": Partition(Mask(True, (5, 11, 10, 6)), "contiguous", (C,) * P),
    "a window of 6, and 2 global tokens": Partition(Mask(True, None, 6, 2), "contiguous", (C,) * P),
}
CELL = 12.5  # pixels
PANELS, TOP = (92, 566), 140


def outline(piece: BlockSlice) -> list[tuple[int, int]]:
    """The corners of a piece, (key, query), in the rows of its rank and the columns of its block."""
    left, right, top, bottom = piece.keys.start, piece.keys.stop, piece.queries.start, piece.queries.stop
    if not piece.triangle:
        return [(left, top), (right, top), (right, bottom), (left, bottom)]
    steps = [(left + i, top + i + down) for i in range(right - left) for down in (0, 1)]
    if piece.upper:
        return [*steps, (right, bottom), (right, top)]
    return [(left, top), *((x + 1, y) for x, y in steps), (left, bottom)]


def _panel(ax: Axes, x: float, name: str, partition: Partition) -> None:
    drawing.write(ax, x, TOP - 50, name, size=16, weight="bold")
    ax.add_patch(Rectangle((x, TOP), CELL * S, CELL * S, fc=drawing.CARD, lw=0))
    for block in range(P):
        middle = x + CELL * C * (block + 0.5)
        drawing.write(ax, middle, TOP - 14, f"KV{block}", size=drawing.SMALL, weight="bold", ha="center")
        for rank in range(P):
            left, top = x + CELL * C * block, TOP + CELL * C * rank
            for piece in partition.pieces(rank, block):
                corners = [(left + CELL * key, top + CELL * query) for key, query in outline(piece)]
                ax.add_patch(Polygon(corners, fc=drawing.colour(block), ec=drawing.PAGE, lw=1.6, joinstyle="miter"))
    for i in range(P + 1):
        far = CELL * C * i
        ax.plot([x, x + CELL * S], [TOP + far, TOP + far], color=drawing.INK, lw=1)
        ax.plot([x + far, x + far], [TOP, TOP + CELL * S], color=drawing.INK, lw=1)
    for rank in range(P):
        drawing.write(ax, x - 8, TOP + CELL * C * (rank + 0.5), f"rank {rank}", weight="bold", ha="right")
    pairs = ", ".join(str(partition.pairs(rank)) for rank in range(P))
    below = TOP + CELL * S + 26
    hops = "1 hop" if partition.hops == 1 else f"{partition.hops} hops"
    drawing.write(ax, x, below, f"{hops}; pairs on each rank: {pairs}")


def draw() -> drawing.Picture:
    """Two squares of 32 queries by 32 keys, on 4 ranks with contiguous chunks of 8 tokens. Left: documents of 5, 11, 10
    and 6 tokens, a triangle for each along the diagonal, cut at the borders of ranks and blocks into smaller triangles
    and rectangles; a rank computes on its own block and on the block before it, so there is 1 hop. Right: a window of 6
    tokens, a band along the diagonal, cut into triangles of both directions and rectangles; and 2 global tokens, a
    narrow column at the left that all ranks compute from block KV0, so there are 3 hops.
    """
    key = "Rows: queries. Columns: keys, in the colour of their block. Each outlined part is one call of the kernel"
    figure, ax = shapes.headed(596, draw, "What each rank computes under a mask", {64: key})
    for x, (name, partition) in zip(PANELS, MASKS.items(), strict=True):
        _panel(ax, x, name, partition)
    return figure
