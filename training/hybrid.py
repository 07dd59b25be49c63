"""Hybrid (USP): all-to-all among the ranks of a row, where links are fast, and a ring across the rows.

    P = b · a ranks: b rows of a ranks each                    rank h·a + i is number i of row h
    inside row h     tokens are exchanged for heads            a is at most H
    across the rows  a flash ring of b ranks for each i        every rank computes H/a heads of S/b tokens

More ranks than heads can share a sequence this way. Where a host is a row, only K and V of the ring travel between
hosts: (b-1)/b of S tokens of G/a heads, and each hop of a·C tokens is hidden behind as much computing as a·C tokens.

A row joins the chunks of its ranks and puts them in order. Which mask fits then?

    contiguous   row h holds one run of the sequence: the contiguous layout of b
    zigzag       row h holds 2 of 2b runs: the zigzag layout of b
    striped      row h holds a tokens of every P, side by side. This is no layout of b: the tokens 0, 1 | 2, 3 | ...
                 of 4 ranks in 2 rows. Of another row's block, each of the a stripes of queries sees a triangle of each
                 of the a stripes of keys.

Shapes: q and out (B, H, C, D), k and v (B, G, C, D), C = S/P, the same chunks as in a flat ring of P. In the ring,
number i of a row has n of the H query heads and g of the G K/V heads: (B, n, a·C, D) and (B, g, a·C, D).

    $ python -m training.hybrid
    2 rows of 2 ranks, 3 query heads on 1, causal, float32, against full attention in float64
    contiguous: of 8 tokens a row holds [0, 1, 2, 3] and [4, 5, 6, 7]; pieces of row 0's block on row 1: 1
    ok    out: largest error 5.8e-07, rounding allows 1.1e-05 (float32 sums)
    ...
    zigzag: of 8 tokens a row holds [0, 1, 6, 7] and [2, 3, 4, 5]; pieces of row 0's block on row 1: 1
    ...
    striped: of 8 tokens a row holds [0, 1, 4, 5] and [2, 3, 6, 7]; pieces of row 0's block on row 1: 4
    ...

Before: all_to_all.py. After: double_ring.py, where K and V of all heads travel on both kinds of links.
Source: Fang & Zhao 2024 (USP), section 3 and algorithm 1; Jacobs et al. 2023 (DeepSpeed Ulysses), section 3.
"""

import sys
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.agreement import check_mesh
from support.processes import RankContext, launch
from support.rounding import exact_attention, report
from training.all_to_all import Exchange, exchanged_attention, places
from training.causal import LAYOUTS, BlockSlice, shard, unshard
from training.grouped_query import check_grouped_chunks
from training.masks import Mask
from training.schedule import Ring, agree_on_mask
from training.split_heads import check_split, heads_of_ranks, meshes


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

    `mesh` is 2-D, (rings across, all-to-all inside) = (b, a), of any names. Rank h·a + i of it, in row h, holds the
    chunk that `training.causal.shard` cuts for rank h·a + i of P = a·b: q (B, H, C, D), k and v (B, G, C, D), H a
    multiple of G. Returns out as q, differentiable once. Raises the same ValueError on every rank for bad input, for
    ranks that disagree, and for a > H: it says which meshes are possible. Fang & Zhao 2024, algorithm 1.
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
    """The mask of rows that hold the stripes of `inside` ranks each, all tokens in order: a of every P."""

    inside: int = field(kw_only=True)

    def place(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of row `rank` stand: (a·C,), int64, rising."""
        return torch.arange(self.seq_len).view(-1, len(self.lengths), self.inside)[:, rank].flatten().contiguous()

    @lru_cache(maxsize=4096)  # noqa: B019 (as in Mask)
    def pieces(self, rank: int, block: int) -> tuple[BlockSlice, ...]:
        """What row `rank` computes of the block of row `block`."""
        if rank == block or not self.causal:
            return super().pieces(rank, block)
        a, tokens = self.inside, self.lengths[rank]
        hidden = a * (block > rank)  # a query of a later row sees the keys before it in each stripe, and one more
        return tuple(
            BlockSlice(slice(query + hidden, None, a), slice(key, tokens - hidden, a), triangle=True)
            for query in range(a)
            for key in range(a)
            if hidden < tokens
        )


def on_rank(context: RankContext, inside: int, whole: list[Tensor]) -> list[list[Tensor]]:
    """This rank's chunks of out, dq, dk and dv by layout, for whole q, d_out (B, H, S, D), k and v (B, G, S, D)."""
    mesh, results = init_device_mesh(context.device.type, (context.world_size // inside, inside)), []
    for layout in LAYOUTS:
        q, k, v, d_out = (shard(x, layout, context.rank, context.world_size) for x in whole)
        for x in (q, k, v):
            x.requires_grad_()
        out = hybrid_attention(q, k, v, mesh=mesh, causal=True, layout=layout)
        out.backward(d_out)
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return results


def main() -> int:
    B, H, G, S, D, P, a = 1, 3, 1, 512, 64, 4, 2
    generator = torch.Generator().manual_seed(0)
    q, d_out = torch.randn(2, B, H, S, D, generator=generator).unbind()
    k, v = torch.randn(2, B, G, S, D, generator=generator).unbind()
    right, ok = exact_attention(q, k, v, d_out, causal=True, fused_blocks=P), True
    cases = zip(*launch(on_rank, P, a, [q, k, v, d_out], device="cpu"), strict=True)
    print(f"{P // a} rows of {a} ranks, {H} query heads on {G}, causal, float32, against full attention in float64")
    for layout, results in zip(LAYOUTS, cases, strict=True):
        rows = joined_rows(Mask(layout, (2,) * P, causal=True), P // a)
        tokens = " and ".join(str(rows.place(row).tolist()) for row in range(P // a))
        print(f"{layout}: of 8 tokens a row holds {tokens}; pieces of row 0's block on row 1: {len(rows.pieces(1, 0))}")
        for name, chunks in zip(("out", "dq", "dk", "dv"), zip(*results, strict=True), strict=True):
            ok &= report(name, unshard(list(chunks), layout), right[name])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
