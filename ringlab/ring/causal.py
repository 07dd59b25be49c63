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


def visible_pairs(at: list[Tensor]) -> Tensor:
    """The (query, key) pairs of each round (a row) and rank (a column); at[r] is where rank r's tokens stand."""
    P = len(at)
    return torch.tensor([[(at[(r - t) % P] <= at[r][:, None]).sum() for r in range(P)] for t in range(P)])


def idle_share(pairs: Tensor) -> float:
    """The share of the time of all ranks in which they wait: a round lasts as long as its busiest rank."""
    return 1 - (pairs.sum() / (pairs.shape[1] * pairs.max(dim=1).values.sum())).item()


def times_computed(layout: str, at: list[Tensor]) -> Tensor:
    """How often each (query, key) pair of the sequence is computed: (S, S), int64, by drawing all slices."""
    S = sum(map(len, at))
    times = torch.zeros(S, S, dtype=torch.int64)
    for rank in range(len(at)):
        for block in range(len(at)):
            if visible := visible_slice(layout, rank, block, len(at[rank])):
                queries, keys, triangle = visible
                rows, columns = at[rank][queries], at[block][keys]
                pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
                times[rows[:, None], columns] += pairs.tril() if triangle else pairs
    return times


def main() -> int:
    ok = True
    for layout in LAYOUTS:
        at, far = ([positions(layout, S, rank, 4) for rank in range(4)] for S in (8, 1024))
        print(f"{layout}: ranks 0 to 3 hold", "  ".join(str(tokens.tolist()) for tokens in at))
        pairs = visible_pairs(at)
        for t in range(4):
            print(f"    round {t}: pairs on each rank {'  '.join(str(n) for n in pairs[t].tolist())}")
        shares = idle_share(pairs), idle_share(visible_pairs(far))
        print(f"    idle: {100 * shares[0]:.0f}% here, {100 * shares[1]:.1f}% with 1024 tokens")
        exact = torch.equal(times_computed(layout, at), torch.ones(8, 8, dtype=torch.int64).tril())
        print(f"{'ok   ' if exact else 'WRONG'} every pair of causal attention is computed once, and no other")
        ok &= exact
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
