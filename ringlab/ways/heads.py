"""The heads of each rank, without torch, so that `ring-plan` starts fast. A reader may skip this file."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


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
    length, more = divmod(len(items), parts)
    ends = [0, *accumulate(length + (i < more) for i in range(parts))]
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
