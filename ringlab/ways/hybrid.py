"""Hybrid (USP): all-to-all among the ranks of a row, where links are fast, and a ring across the rows.

    P = n · g ranks: n rows of g                    rank r = row · g + i is number i of its row
    inside a row      tokens for heads              each rank then has H/g heads of the row's g·C tokens; g is at most H
    across the rows   for each i a ring of n        each hop: K and V of G/g heads, g·C tokens

So more ranks than heads can share a sequence. Let a row be a host: between hosts a rank then sends n - 1 blocks, where
in a flat ring it sends P - 1. Where g divides G, the blocks are as large as there. Each has g times as long to arrive,
because a rank computes g·C queries of H/g heads on a block of g·C keys.

A row joins the chunks of its ranks and puts their tokens in order. Which mask fits then?

    contiguous   a row holds one run of the sequence, as in the contiguous layout of n ranks
    zigzag       a row holds two of 2n runs, as in the zigzag layout of n ranks
    striped      a row holds g tokens of every P, side by side, which is no layout of n ranks. In the square of a row's
                 queries and another row's keys, each stripe of queries sees a triangle of each stripe of keys.

Shapes: q and out (B, H, C, D), k and v (B, G, C, D), C = S/P, the same chunks as in a flat ring of P. In a ring across
the rows, a rank has H_r query heads on G_r K/V heads: (B, H_r, g·C, D) and (B, G_r, g·C, D).

    $ python -m ringlab.ways.hybrid
    4 ranks, S = 256, 3 query heads on 1, float32, against full attention in float64
    contiguous
    ok    out: largest error 3.3e-07, rounding allows 7.1e-06 (float32 sums)
    ...

Before: all_to_all.py. After: double_ring.py, where K and V of all heads travel on both kinds of links.
Source: Fang & Zhao 2024 (USP), section 3 and algorithm 1; Jacobs et al. 2023 (DeepSpeed Ulysses), section 3.
"""

import sys
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.partition import BlockSlice, Partition, every, kept
from ringlab.ring.schedule import Group, Ring, Schedule
from ringlab.support.agreement import check_mesh
from ringlab.ways.all_to_all import AllToAll, Exchange, order
from ringlab.ways.heads import check_split, heads_of_ranks, meshes


class Hybrid(AllToAll):
    """All-to-all inside the rows of a mesh, and rings across them. Fang & Zhao 2024, algorithm 1.

    The group is a mesh of n rows x g ranks of a row, with any names. Its rank row · g + i holds the chunk of this rank
    of P. Raises ValueError on every rank for g > H: it says which meshes are possible.
    """

    @staticmethod
    def checked_group(group: Group, heads: int) -> Group:
        ranks = group.size() if isinstance(group, DeviceMesh) else dist.get_world_size()
        check_mesh(group, f"2 dimensions, rings across x all-to-all inside: {meshes(heads, ranks)}")
        return group

    @cached_property
    def exchange(self) -> Exchange:
        """Who gets which heads inside a row."""
        (_, inside), (row, _) = self.group.shape, self.group.get_coordinate()
        check_split(self.heads, inside, self.group.size())
        joined = order(self.partition, range(row * inside, (row + 1) * inside))
        return Exchange(*heads_of_ranks(self.heads, self.kv_heads, inside), joined, self.group.get_all_groups()[1])

    @cached_property
    def between(self) -> Schedule:
        """The ring of rows that this rank is in."""
        (rows, inside), flat = self.group.shape, self.partition
        lengths = tuple(sum(flat.lengths[row * inside : (row + 1) * inside]) for row in range(rows))
        return Ring(Rows(flat.mask, flat.layout, lengths, flat=flat), self.scale, self.group.get_all_groups()[0])


@dataclass(frozen=True)
class Rows(Partition):
    """What each row computes of the block of each row."""

    flat: Partition = field(kw_only=True)  # of all ranks; a row has the tokens of its ranks in order

    def __post_init__(self) -> None:
        """Nothing to check: `flat` has checked the lengths of its ranks."""

    def ranks(self, row: int) -> range:
        """The ranks of a row."""
        inside = len(self.flat.lengths) // len(self.lengths)
        return range(row * inside, (row + 1) * inside)

    def positions(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of row `rank` stand: (g·C,), int64, rising."""
        return torch.cat([self.flat.positions(member) for member in self.ranks(rank)]).sort().values

    @kept
    def pieces(self, rank: int, block: int) -> tuple[BlockSlice, ...]:
        """What row `rank` computes of the block of row `block`."""
        if rank == block or self.mask.shows_all or not self.flat.striped:
            return super().pieces(rank, block)
        g = len(self.ranks(rank))  # a row has g stripes of every P: so the pieces of two stripes, g x g times
        return tuple(
            replace(piece, queries=every(g, i, piece.queries), keys=every(g, j, piece.keys))
            for i, of_row in enumerate(self.ranks(rank))
            for j, of_block in enumerate(self.ranks(block))
            for piece in self.flat.pieces(of_row, of_block)
        )


def main() -> int:
    from ringlab.ring.cases import random_inputs, report_cases

    whole, attention = random_inputs(1, 3, 1, 256, 64), partial(ring_flash_attention, schedule=Hybrid)
    return 0 if report_cases(4, whole, attention, (2, 2)) else 1


if __name__ == "__main__":
    sys.exit(main())
