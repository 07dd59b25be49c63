"""Who holds which head of which token before, between and after the exchanges of an all-to-all, on 4 ranks.

Drawn from `tables`: the heads are those of `ringlab.ways.heads.heads_of_ranks`, the order of the tokens that of
`ringlab.ways.all_to_all.order`. tests/pages/test_figures.py compares it with what four real ranks exchange.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes

from figures import shapes
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.support import drawing
from ringlab.ways.all_to_all import order
from ringlab.ways.heads import heads_of_ranks

P, S, H, G = 4, 8, 6, 2
LAYOUT = "zigzag"
CELL, GAP = 34, 12  # pixels; the gap is between query heads and K/V heads
PANELS, TOP = (60, 400, 740), 150


@dataclass(frozen=True)
class Table:
    """Which ranks hold each head of each token: `ranks[row][column]`, for `tokens[row]`."""

    name: str
    tokens: list[int]
    ranks: list[list[list[int]]]


def tables() -> list[Table]:
    """The tables before, between and after the exchanges. A column is a query head, the last G columns K/V heads."""
    partition = Partition(Mask(causal=True), LAYOUT, (S // P,) * P)
    at = [places.at for places in order(partition, range(P))]
    tokens = torch.cat(at).tolist()
    owners = [rank for rank in range(P) for _ in at[rank]]
    columns = [
        [rank for rank, heads in enumerate(parts) if heads.start <= head < heads.stop]
        for parts, count in zip(heads_of_ranks(H, G, P), (H, G), strict=True)
        for head in range(count)
    ]
    return [
        Table("before: all heads of a few tokens", tokens, [[[rank]] * (H + G) for rank in owners]),
        Table("between: a few heads of all tokens", list(range(S)), [columns] * S),
        Table("after: as before", tokens, [[[rank]] * H for rank in owners]),
    ]


def _table(ax: Axes, left: float, table: Table) -> None:
    drawing.write(ax, left - 40, TOP - 76, table.name, weight="bold")
    name = "heads of out" if len(table.ranks[0]) == H else "query heads"
    drawing.write(ax, left + CELL * H / 2, TOP - 46, name, color=drawing.MUTED, ha="center")
    if len(table.ranks[0]) > H:
        drawing.write(ax, left + CELL * (H + G / 2) + GAP, TOP - 46, "K, V", color=drawing.MUTED, ha="center")
    drawing.write(ax, left - 14, TOP - 18, "token", color=drawing.MUTED, ha="right", size=drawing.SMALL)
    for column in range(len(table.ranks[0])):
        x = left + CELL * column
        if column >= H:
            x += GAP
        drawing.write(ax, x + CELL / 2, TOP - 18, str(column % H), ha="center")
        for row, ranks in enumerate(table.ranks):
            width = (CELL - 3) / len(ranks[column])
            between = 1 if len(ranks[column]) > 1 else 0  # pixels
            for i, rank in enumerate(ranks[column]):
                spot = (x + width * i, TOP + CELL * row, width - between, CELL - 3)
                shapes.block(ax, *spot, rank, str(rank), size=drawing.SMALL)
    for row, token in enumerate(table.tokens):
        drawing.write(ax, left - 14, TOP + CELL * row + CELL / 2, str(token), ha="right")


def draw() -> drawing.Picture:
    """Three tables of 8 tokens by 6 query heads and 2 K/V heads, on 4 ranks in the zigzag layout. A colour and a number
    say which rank holds a cell. Before: rank 0 holds all heads of tokens 0 and 7, rank 1 of tokens 1 and 6, rank 2 of
    tokens 2 and 5, rank 3 of tokens 3 and 4. Between: the tokens are in order, 0 to 7; of all of them, rank 0 holds
    query heads 0 and 1, rank 1 query head 2, rank 2 query heads 3 and 4, rank 3 query head 5. K/V head 0 is on ranks 0
    and 1, K/V head 1 on ranks 2 and 3. After: the 6 heads of the output, held as before.
    """
    title = f"An all-to-all exchanges tokens for heads: {S} tokens, {H} query heads on {G}, {P} ranks"
    figure, ax = shapes.headed(500, draw, title)
    for left, table in zip(PANELS, tables(), strict=True):
        _table(ax, left, table)
    text = f"A number is the rank that holds the cell. {LAYOUT.capitalize()} layout; between, the tokens are in order."
    drawing.write(ax, 20, 452, text)
    drawing.write(ax, 20, 480, "Two ranks need the same K/V head, so each has a copy: half a cell for each rank.")
    return figure
