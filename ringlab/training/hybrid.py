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

    $ python -m ringlab.training.hybrid
    2 rows of 2 ranks, 3 query heads on 1, causal, float32, against full attention in float64
    contiguous: of 8 tokens the rows hold [0, 1, 2, 3] and [4, 5, 6, 7]
        as 2 ranks of this layout, out is off by 0.0000
    ok    out: largest error 5.8e-07, rounding allows 1.1e-05 (float32 sums)
    ...
    zigzag: of 8 tokens the rows hold [0, 1, 6, 7] and [2, 3, 4, 5]
    ...
    striped: of 8 tokens the rows hold [0, 1, 4, 5] and [2, 3, 6, 7]
        as 2 ranks of this layout, out is off by 2.2934
    ...

Before: all_to_all.py. After: double_ring.py, where K and V of all heads travel on both kinds of links.
Source: Fang & Zhao 2024 (USP), section 3 and algorithm 1; Jacobs et al. 2023 (DeepSpeed Ulysses), section 3.
"""

import sys
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringlab.support.agreement import check_mesh
from ringlab.support.processes import RankContext, launch
from ringlab.support.rounding import exact_attention, report
from ringlab.training.all_to_all import Exchange, exchanged_attention, places
from ringlab.training.causal import LAYOUTS, BlockSlice, positions, unshard
from ringlab.training.flash_ring import chunks_of_rank
from ringlab.training.grouped_query import check_grouped_chunks
from ringlab.training.masks import Mask
from ringlab.training.schedule import Ring, agree_on_mask
from ringlab.training.split_heads import check_split, heads_of_ranks, meshes


@torch.compiler.disable  # torch.compile cannot trace a mesh: this call runs as it is
def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    causal: bool = False,
    layout: str = "contiguous",
    scale: float | None = None,
) -> Tensor:
    """`flash_ring.ring_flash_attention` by exchanges inside the rows of a mesh and rings across them.

    `mesh` has two dimensions of any names: n rows x g ranks of a row. Its rank row · g + i holds the chunk that
    `ringlab.training.causal.shard` cuts for this rank of P: q (B, H, C, D), k and v (B, G, C, D), H a multiple of G.
    Returns out as q, differentiable once. Raises the same ValueError on every rank for bad input, for ranks that
    disagree, and for g > H: it says which meshes are possible. Fang & Zhao 2024, algorithm 1.
    """
    ranks, heads = mesh.size() if isinstance(mesh, DeviceMesh) else dist.get_world_size(), q.shape[1:2].numel()
    check_mesh(mesh, f"2 dimensions, rings across x all-to-all inside: {meshes(heads, ranks)}")
    mask, scale = agree_on_mask(q, k, v, scale, mesh, check=check_grouped_chunks, layout=layout, causal=causal)
    (rows, inside), (row, _) = mesh.shape, mesh.get_coordinate()
    check_split(q.shape[1], inside, mesh.size())
    across, within = mesh.get_all_groups()
    joined = places(mask, range(row * inside, (row + 1) * inside), q.device)
    exchange = Exchange(*heads_of_ranks(q.shape[1], k.shape[1], inside), joined, within)
    return exchanged_attention(q, k, v, exchange, Ring(joined_rows(mask, rows), scale, across))


def joined_rows(flat: Mask, rows: int) -> Mask:
    """The mask of a ring of rows, each with the tokens of its ranks in order. `flat` is that of a ring of all ranks."""
    inside = len(flat.lengths) // rows
    lengths = tuple(sum(flat.lengths[row * inside : (row + 1) * inside]) for row in range(rows))
    if flat.layout == "striped":
        return Stripes("striped", lengths, flat.causal, inside=inside)
    return Mask(flat.layout, lengths, flat.causal)


@dataclass(frozen=True)
class Stripes(Mask):
    """The mask of rows that hold the stripes of `inside` ranks each, all tokens in order: g of every P."""

    inside: int = field(kw_only=True)

    def place(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of row `rank` stand: (g·C,), int64, rising."""
        return torch.arange(self.seq_len).view(-1, len(self.lengths), self.inside)[:, rank].flatten().contiguous()

    @lru_cache(maxsize=4096)  # noqa: B019 (as in Mask)
    def pieces(self, rank: int, block: int) -> tuple[BlockSlice, ...]:
        """What row `rank` computes of the block of row `block`."""
        if rank == block or not self.causal:
            return super().pieces(rank, block)
        g, tokens = self.inside, self.lengths[rank]
        hidden = g * (block > rank)  # the first query of each stripe sees no key of a later row, so it is left out
        return tuple(
            BlockSlice(slice(query + hidden, None, g), slice(key, tokens - hidden, g), triangle=True)
            for query in range(g)
            for key in range(g)
            if hidden < tokens
        )


def on_rank(context: RankContext, inside: int, whole: list[Tensor]) -> list[list[Tensor]]:
    """This rank's chunks of out, dq, dk and dv by layout, for whole q, d_out (B, H, S, D), k and v (B, G, S, D)."""
    mesh = init_device_mesh(context.device.type, (context.world_size // inside, inside))
    attention = partial(hybrid_attention, mesh=mesh, causal=True)
    return [chunks_of_rank(context, whole, partial(attention, layout=layout), layout) for layout in LAYOUTS]


def main() -> int:
    B, H, G, S, D, n, g = 1, 3, 1, 512, 64, 2, 2
    generator = torch.Generator().manual_seed(0)
    q, d_out = torch.randn(2, B, H, S, D, generator=generator).unbind()
    k, v = torch.randn(2, B, G, S, D, generator=generator).unbind()
    right, ok = exact_attention(q, k, v, d_out, causal=True, fused_blocks=n * g), True
    cases = zip(*launch(on_rank, n * g, g, [q, k, v, d_out], device="cpu"), strict=True)
    print(f"{n} rows of {g} ranks, {H} query heads on {G}, causal, float32, against full attention in float64")
    for layout, results in zip(LAYOUTS, cases, strict=True):
        small, rows = (joined_rows(Mask(layout, (tokens // n // g,) * n * g, causal=True), n) for tokens in (8, S))
        print(f"{layout}: of 8 tokens the rows hold {' and '.join(str(small.place(row).tolist()) for row in range(n))}")
        order = torch.cat([rows.place(row) for row in range(n)]).argsort()
        taken = torch.cat([positions(layout, S, row, n) for row in range(n)])[order]  # for where the tokens stand
        wrong = exact_attention(q, k, v, visible=taken <= taken[:, None])["out"].exact
        print(f"    as {n} ranks of this layout, out is off by {(wrong - right['out'].exact).abs().max():.4f}")
        for name, chunks in zip(("out", "dq", "dk", "dv"), zip(*results, strict=True), strict=True):
            ok &= report(name, unshard(list(chunks), layout), right[name])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
