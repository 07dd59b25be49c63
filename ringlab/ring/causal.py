"""Under a causal mask contiguous chunks leave ranks idle; zigzag gives every rank the same work, striped nearly so.

What rank r computes of block j (K and V of rank j's tokens):

                 j < r                     j = r       j > r
    contiguous   all of it                 a triangle  nothing
    zigzag       the first half of it      a triangle  all of it, for the last half of the queries
    striped      a triangle                a triangle  a triangle, without the first query and the last key

Shapes: P ranks, S tokens; each rank holds a chunk of C = S/P tokens in rising order. "A triangle" is the usual causal
mask: query i sees keys 0 ... i, counted among those that are left.

    $ python -m ringlab.ring.causal
    contiguous: ranks 0 to 3 hold [0, 1]  [2, 3]  [4, 5]  [6, 7]
        round 0: pairs on each rank 3  3  3  3
        round 1: pairs on each rank 0  4  4  4
        round 2: pairs on each rank 0  0  4  4
        round 3: pairs on each rank 0  0  0  4
        idle: 40% here, 42.8% with 1024 tokens
    ok    every pair of causal attention is computed once, and no other
    zigzag: ranks 0 to 3 hold [0, 7]  [1, 6]  [2, 5]  [3, 4]
    ...
        idle: 0% here, 0.0% with 1024 tokens
    ...

Before: layouts.py. After: fused_block.py, kernels for a block.
Source: Brandon et al. 2023 (Striped Attention), section 3; Llama 3 (2024), section 3.3.2.
"""

import sys

import torch
from torch import Tensor

from ringlab.ring.layouts import LAYOUTS, positions


def visible_slice(layout: str, rank: int, block: int, length: int) -> tuple[slice, slice, bool] | None:
    """What `rank` computes of `block`, or None: which of its queries, which keys, and whether only a triangle of them.

    `length` is the chunk length C of the rank. The other ranks' may differ in the contiguous layout only.
    """
    everything = slice(None)
    if block == rank:
        return everything, everything, True
    if layout == "zigzag":
        if block < rank:  # the block's last half is in the future of all this rank's tokens
            return everything, slice(0, length // 2), False
        return slice(length // 2, None), everything, False
    if layout == "striped":
        if block < rank:
            return everything, everything, True
        if length == 1:
            return None  # this rank's only query comes before the block's only key
        return slice(1, None), slice(0, length - 1), True  # query i sees the keys before i
    return (everything, everything, False) if block < rank else None


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


def times_computed(layout: str, seq_len: int, world_size: int) -> Tensor:
    """How often each (query, key) pair of the sequence is computed: (S, S), int64, by drawing all slices."""
    times = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    at = [positions(layout, seq_len, rank, world_size) for rank in range(world_size)]
    for rank in range(world_size):
        for block in range(world_size):
            if visible := visible_slice(layout, rank, block, len(at[rank])):
                queries, keys, triangle = visible
                rows, columns = at[rank][queries], at[block][keys]
                pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
                times[rows[:, None], columns] += pairs.tril() if triangle else pairs
    return times


def main() -> int:
    ok = True
    for layout in LAYOUTS:
        tokens = "  ".join(str(positions(layout, 8, rank, 4).tolist()) for rank in range(4))
        print(f"{layout}: ranks 0 to 3 hold {tokens}")
        pairs = visible_pairs(layout, 8, 4)
        for t in range(4):
            print(f"    round {t}: pairs on each rank {'  '.join(str(n) for n in pairs[t].tolist())}")
        long = visible_pairs(layout, 1024, 4)
        print(f"    idle: {100 * idle_share(pairs):.0f}% here, {100 * idle_share(long):.1f}% with 1024 tokens")
        exact = torch.equal(times_computed(layout, 8, 4), torch.ones(8, 8, dtype=torch.int64).tril())
        print(f"{'ok   ' if exact else 'WRONG'} every pair of causal attention is computed once, and no other")
        ok &= exact
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
