"""Under a causal mask contiguous chunks leave ranks idle; zigzag gives every rank the same work, striped nearly so.

What rank r computes of block j (K and V of rank j's tokens):

                 j < r                     j = r       j > r
    contiguous   all of it                 a triangle  nothing
    zigzag       the first half of it      a triangle  all of it, for the last half of the queries
    striped      a triangle                a triangle  a triangle, without the first query and the last key

Shapes: P ranks, S tokens. x is (B, H, S, D), and each rank holds a chunk of it, (B, H, C, D) with C = S/P tokens in
rising order. "A triangle" is the usual causal mask: query i sees keys 0 ... i, counted among those that are left.

    $ python -m ringlab.ring.causal
    contiguous: ranks 0 to 3 hold [0, 1]  [2, 3]  [4, 5]  [6, 7]
        round 0: pairs on each rank 3  3  3  3
        round 1: pairs on each rank 0  4  4  4
        round 2: pairs on each rank 0  0  4  4
        round 3: pairs on each rank 0  0  0  4
        idle: 40% here, 42.8% with 1024 tokens
    ok    these pairs give causal attention: largest error 2.2e-16, rounding allows 5.4e-15 (float64 sums)
    zigzag: ranks 0 to 3 hold [0, 7]  [1, 6]  [2, 5]  [3, 4]
    ...
        idle: 0% here, 0.0% with 1024 tokens
    ...

Before: layouts.py. After: grouped_query.py, fewer heads of K and V.
Source: Brandon et al. 2023 (Striped Attention), section 3; Llama 3 (2024), section 3.3.2.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringlab.basics.blockwise_attention import attend_tile
from ringlab.basics.naive_attention import TOKENS
from ringlab.basics.online_softmax import State, finish, start
from ringlab.ring.layouts import LAYOUTS, positions, shard, unshard
from ringlab.support.rounding import exact_attention, report


@dataclass(frozen=True)
class BlockSlice:
    """What a rank computes of a block: some of its queries, some of the block's keys, and all pairs or a triangle."""

    queries: slice
    keys: slice
    triangle: bool  # query i sees keys 0 ... i
    upper: bool = False  # the triangle is the upper one: query i sees keys i ... (partition.py needs it for windows)
    heads: slice = field(default_factory=lambda: slice(None))  # of the queries; other ways take some at a time
    kv_heads: slice = field(default_factory=lambda: slice(None))  # of the block


def visible_slice(
    layout: str, rank: int, block: int, lengths: Sequence[int], *, causal: bool = True
) -> BlockSlice | None:
    """What `rank` computes of `block`, or None where it computes nothing. Without a mask, it is the whole block.

    `lengths` is the chunk length C of every rank. They may differ in the contiguous layout only.
    """
    everything, length = slice(None), lengths[rank]
    whole, triangle = (BlockSlice(everything, everything, triangle=triangle) for triangle in (False, True))
    if not causal:
        return whole
    if block == rank:
        return triangle
    if layout == "zigzag":
        if block < rank:  # the block's last half is in the future of all this rank's tokens
            return BlockSlice(everything, slice(0, length // 2), triangle=False)
        return BlockSlice(slice(length // 2, None), everything, triangle=False)
    if layout == "striped":
        if block < rank:
            return triangle
        if length == 1:
            return None  # this rank's only query comes before the block's only key
        return BlockSlice(slice(1, None), slice(0, length - 1), triangle=True)  # query i sees the keys before i
    return whole if block < rank else None


def visible_pairs(layout: str, seq_len: int, world_size: int) -> Tensor:
    """How many (query, key) pairs each rank computes in each round: (P, P), int64, a row for each round."""
    at = [positions(layout, seq_len, rank, world_size) for rank in range(world_size)]
    pairs = torch.zeros(world_size, world_size, dtype=torch.int64)
    for t in range(world_size):
        for rank in range(world_size):
            pairs[t, rank] = (at[(rank - t) % world_size] <= at[rank][:, None]).sum()
    return pairs


def idle_share(pairs: Tensor) -> float:
    """The share of the ranks' time that they wait, for `visible_pairs`. A round lasts as long as its busiest rank."""
    return 1 - pairs.sum().item() / (pairs.shape[1] * pairs.max(dim=1).values.sum().item())


def one_process_ring(
    q: Tensor, k: Tensor, v: Tensor, world_size: int, *, layout: str = "contiguous", causal: bool = False
) -> Iterator[tuple[list[int], list[State]]]:
    """The ring in one process: q, k, v (B, H, S, D) are dealt out to `world_size` ranks, and the blocks go round.

    Yields after each round, by rank, the number of the block in hand and the (m, l, o) of the rank's queries.
    """
    queries, keys, values = ([shard(x, layout, rank, world_size) for rank in range(world_size)] for x in (q, k, v))
    lengths = [x.shape[2] for x in queries]
    states, blocks = [start(x) for x in queries], list(range(world_size))
    for _ in range(world_size):
        for rank, block in enumerate(blocks):
            visible = visible_slice(layout, rank, block, lengths, causal=causal)
            if visible is not None:
                states[rank] = _attend_slice(states[rank], queries[rank], keys[block], values[block], visible)
        yield blocks, list(states)
        blocks = blocks[-1:] + blocks[:-1]  # the hop: rank r + 1 gets what rank r had


def _attend_slice(state: State, q: Tensor, k: Tensor, v: Tensor, visible: BlockSlice) -> State:
    """`state` after the visible part of a block: q (B, H, Cq, D), k and v (B, H, Ck, D), with the scale 1/√D."""
    rows = visible.queries
    q, k, v = q[:, :, rows], k[:, :, visible.keys], v[:, :, visible.keys]
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1) if visible.triangle else None
    m, l, o = (x.clone() for x in state)
    before = m[:, :, rows], l[:, :, rows], o[:, :, rows]
    after = attend_tile(before, q, k, v, scale=1 / math.sqrt(q.shape[3]), future=future)
    m[:, :, rows], l[:, :, rows], o[:, :, rows] = after
    return m, l, o


def main() -> int:
    x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
    exact = exact_attention(x, x, x, causal=True)["out"]
    ok = True
    for layout in LAYOUTS:
        tokens = "  ".join(str(positions(layout, 8, rank, 4).tolist()) for rank in range(4))
        print(f"{layout}: ranks 0 to 3 hold {tokens}")
        pairs = visible_pairs(layout, 8, 4)
        for t in range(4):
            print(f"    round {t}: pairs on each rank {'  '.join(str(n) for n in pairs[t].tolist())}")
        long = visible_pairs(layout, 1024, 4)
        print(f"    idle: {100 * idle_share(pairs):.0f}% here, {100 * idle_share(long):.1f}% with 1024 tokens")
        *_, (_, states) = one_process_ring(x, x, x, 4, layout=layout, causal=True)
        out = unshard([finish(state)[0] for state in states], layout)
        ok &= report("these pairs give causal attention", out, exact)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
