"""Checks of chapter 2: attention in blocks, tiles under a causal mask, the largest tensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from basics.naive_attention import naive_attention
from notebooks.checks.answers import NotYet, difference, exercise


@exercise
def check_blockwise(answer: Callable[..., Tensor]) -> str | None:
    """Attention of q, k, v (S, D) with blocks of `block_size` keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, 4, generator=generator) for _ in "qkv")
    exact = naive_attention(q[None, None], k[None, None], v[None, None])[0, 0]
    for block_size in (7, 1, 3):
        out = answer(q, k, v, block_size)
        if problem := difference(out, exact):
            raise NotYet(f"{problem}, with 7 keys in blocks of {block_size}")


@exercise
def check_visible_tiles(answer: Callable[[int], int]) -> str | None:
    """How many of n x n square tiles a causal mask leaves something of."""
    for n in (1, 2, 4, 32):
        given = answer(n)
        if given != n * (n + 1) // 2:
            hint = {n * n: "that is all of them", n * (n - 1) // 2: "the n tiles on the diagonal count too"}
            raise NotYet(f"{n} x {n} tiles, you say {given}: {hint.get(given, 'row i sees tiles 0 to i')}")


@exercise
def check_largest_tensor(answer: Any) -> str | None:
    """Bytes of the largest tensor of blockwise attention, S = 1,000,000, H = 8, D = 64, block 256, float32."""
    tile, whole = 8 * 256 * 256 * 4, 8 * 1_000_000 * 64 * 4
    if answer == whole:
        return "q, k, v and out are what is large now; one tile of scores has only 2 MiB"
    if answer == tile:
        raise NotYet("that is the tile of scores, 2 MiB; one of q, k, v and out is larger")
    raise NotYet(f"out is (B, H, S, D) of 4 bytes each; you say {answer:,}")
