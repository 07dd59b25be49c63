"""Heads that do not divide: which query heads does each rank compute, and which K/V heads does it need for them?

    query head h uses K/V head h // (H/G)         rank r of P gets some query heads, side by side
    P divides G     rank r has H/P query heads on G/P K/V heads
    G divides P     rank r has H/P query heads, rounded up or down, on K/V head ⌊r·G/P⌋: P/G ranks have a copy of it
    neither         query heads are split as evenly as can be; a rank may have 1 on a K/V head and 2 on the next

Kernels for grouped queries want the same number of query heads on every K/V head. So such a rank computes its heads in
runs: in each of them the number is the same.

Shapes: H query heads on G K/V heads, P ranks. Rank r has H_r query heads on G_r K/V heads for all S tokens: q and out
(B, H_r, S, D), k and v (B, G_r, S, D). That is 2·(H_r + G_r)·P heads of C = S/P tokens.

    $ python -m ringlab.training.split_heads
    40 heads.chunk(16): 3 for each of 13 ranks, 1, and none for 2 ranks
    query heads on K/V heads
    40 on 8, 16 ranks: 0-2 on 0, 3-4 on 0, 5-7 on 1, 8-9 on 1, ...
    10 on 2, 3 ranks: 0-3 on 0, 4-6 on 0-1, 7-9 on 1; rank 1 in runs of 1 on 1, 2 on 1

Before: all_gather.py. After: all_to_all.py, which sends each rank its heads.
Source: Jacobs et al. 2023 (DeepSpeed Ulysses), section 3, for heads that divide. verl issue 1226: a model with 40 heads
on 8 that could take no more than 8 ranks. prime-rl PR 3042: copies of K/V heads.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise


def heads_of_ranks(heads: int, kv_heads: int, world_size: int) -> tuple[list[slice], list[slice]]:
    """The query heads of each rank, and the K/V heads that these use: query head h uses h // (H/G).

    No rank has more than ⌈H/P⌉ query heads. Raises ValueError for more ranks than query heads: it says which meshes of
    rows and ranks are possible.
    """
    check_split(heads, world_size, world_size)
    parts = kv_heads if world_size % kv_heads == 0 else 1
    shares = [share for part in dealt(range(heads), parts) for share in dealt(part, world_size // parts)]
    served = heads // kv_heads
    keys = [slice(share[0] // served, share[-1] // served + 1) for share in shares]
    return [slice(share[0], share[-1] + 1) for share in shares], keys


def dealt(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """The items in `parts` runs, side by side; the first ones have one more where they cannot be equal."""
    each, more = divmod(len(items), parts)
    ends = [0, *accumulate(each + (i < more) for i in range(parts))]
    return [items[begin:end] for begin, end in pairwise(ends)]


def check_split(heads: int, inside: int, world_size: int) -> None:
    """Raise ValueError when H heads are split among more than H of the P ranks."""
    if inside > heads:
        raise ValueError(
            f"all-to-all among {inside} ranks, and {heads} query heads; expected a head or more for each rank: use "
            f"hybrid.py with a mesh (rings across x all-to-all inside) of {meshes(heads, world_size)}"
        )


def meshes(heads: int, world_size: int) -> str:
    """The meshes (rows x ranks of a row) of P ranks in which each rank of a row gets a head."""
    insides = (inside for inside in range(min(heads, world_size), 0, -1) if world_size % inside == 0)
    return ", ".join(f"{world_size // inside} x {inside}" for inside in insides)


def runs(mine: slice, served: int) -> list[tuple[slice, slice]]:
    """(query heads, K/V heads) of runs of the query heads `mine`, both counted from the rank's first.

    In a run every K/V head serves the same number. Where `served` = 3 query heads share a K/V head, query heads 2 to 6
    are cut into 2, 3 to 5, and 6: 1 on 1, 3 on 1, 1 on 1. Kernels for grouped queries take one run at a time.
    """
    users = Counter(h // served for h in range(mine.start, mine.stop)).values()  # of each K/V head, in order
    sizes = [(n, len(list(run))) for n, run in groupby(users)]
    ends = accumulate(((n * keys, keys) for n, keys in sizes), lambda end, run: (end[0] + run[0], end[1] + run[1]))
    return [
        (slice(queries_end - n * keys, queries_end), slice(keys_end - keys, keys_end))
        for (n, keys), (queries_end, keys_end) in zip(sizes, ends, strict=True)
    ]


def count(part: slice) -> int:
    """How many heads these are."""
    return part.stop - part.start


def main() -> int:
    import torch

    chunks, ok = [len(chunk) for chunk in torch.arange(40).chunk(16)], True
    full, rest = chunks.count(3), chunks[-1]
    print(f"40 heads.chunk(16): 3 for each of {full} ranks, {rest}, and none for {16 - len(chunks)} ranks")
    print("query heads on K/V heads")
    for H, G, P in ((40, 8, 16), (10, 2, 3)):
        shares = list(zip(*heads_of_ranks(H, G, P), strict=True))
        names = [" on ".join("-".join(map(str, sorted({x.start, x.stop - 1}))) for x in share) for share in shares]
        cut = [" on ".join(str(count(heads)) for heads in run) for run in runs(shares[1][0], H // G)]
        more = f"; rank 1 in runs of {', '.join(cut)}" if len(cut) > 1 else ""
        print(f"{H} on {G}, {P} ranks: {', '.join(names[:4])}{', ...' if P > 4 else ''}{more}")
        ok &= [h for mine, _ in shares for h in range(mine.start, mine.stop)] == list(range(H))
        ok &= max(count(mine) for mine, _ in shares) == -(-H // P)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
