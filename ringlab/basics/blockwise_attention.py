"""Attention one block of keys at a time: the same numbers, and no S x S matrix anywhere.

    for every tile of queries:  (m, l, o) = (-inf, 0, 0)
        for every block of keys, in any order:  (m, l, o) = update((m, l, o), Q K_jᵀ / √D, V_j)
        out = o / l,   lse = m + log l

Shapes: q, k, v and out (B, H, S, D), lse (B, H, S); the only scores in memory are one tile, (B, H, block, block).
Any order of the blocks gives the same result. In a ring, every rank meets them in an order of its own.

    $ python -m ringlab.basics.blockwise_attention
    ok    blocks of 1: largest error 2.2e-15, rounding allows 9.9e-14 (float64 sums)
    ok    blocks of 2: largest error 2.2e-15, rounding allows 9.9e-14 (float64 sums)
    ok    blocks of 3: largest error 2.2e-15, rounding allows 9.9e-14 (float64 sums)
    ok    blocks of 8: largest error 2.2e-15, rounding allows 9.9e-14 (float64 sums)
    ok    blocks of 2 in the order 2, 0, 3, 1: largest error 2.2e-15, rounding allows 4.8e-14 (float64 sums)
    ok    causal, blocks of 3: largest error 2.2e-15, rounding allows 9.9e-14 (float64 sums)
    lse of the causal rows: 0.7071  1.1079  2.1004  3.8877  4.1853  6.1105  7.4184  12.7598

Before: online_softmax.py. After: ../../worked_example.py, where each block is on another device.
Source: Rabe & Staats 2021; Dao et al. 2022, algorithm 1; Liu & Abbeel 2023 (Blockwise Parallel Transformer), section 3.
"""

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ringlab.basics.naive_attention import TOKENS, check_causal, check_qkv, resolve_scale
from ringlab.basics.online_softmax import State, finish, start, update

TILE = 256  # tokens; a tile of scores is B·H·256·256 numbers, small enough for the cache


def attend_tile(state: State, q: Tensor, k: Tensor, v: Tensor, *, scale: float, future: Tensor | None = None) -> State:
    """Fold keys k and values v (B, H, Sk, D) into the (m, l, o) of queries q (B, H, Sq, D), all scores at once.

    `future` (Sq, Sk) is True where a query may not look. The scores are computed in the dtype of the state.
    """
    dtype = state[0].dtype
    scores = (q.to(dtype) * scale) @ k.to(dtype).transpose(-2, -1)  # (B, H, Sq, Sk), the one large tensor
    if future is not None:
        scores = scores.masked_fill(future, -math.inf)
    return update(state, scores, v)


def attend(state: State, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> State:
    """Fold a whole block of keys and values into the (m, l, o) of all queries, one tile of scores at a time.

    Shapes as in `attend_tile`. No more than TILE x TILE scores of each head exist at a time, however long the block is.
    """
    done = []
    for q_tile, m, l, o in zip(*(x.split(TILE, dim=2) for x in (q, *state)), strict=True):
        tile_state = m, l, o
        for k_tile, v_tile in zip(k.split(TILE, dim=2), v.split(TILE, dim=2), strict=True):
            tile_state = attend_tile(tile_state, q_tile, k_tile, v_tile, scale=scale)
        done.append(tile_state)
    m, l, o = (torch.cat(tiles, dim=2) for tiles in zip(*done, strict=True))
    return m, l, o


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    causal: bool = False,
    scale: float | None = None,
    tile: Callable[..., State] = attend_tile,
) -> tuple[Tensor, Tensor]:
    """Exact attention in tiles of `block_size` queries by `block_size` keys.

    q (B, H, Sq, D), k and v (B, H, Sk, D) -> out (B, H, Sq, D) in q's dtype and lse (B, H, Sq), natural log, in float32
    at least. S need not be a multiple of block_size. `causal` hides key j from query i when j > i, needs Sq = Sk, and
    skips the blocks that lie wholly in the future. A query that sees no key gives out = 0 and lse = -inf. `tile`
    computes the scores: fused_block.py has others.
    Raises ValueError for a block_size below 1 and for shapes, dtypes, devices or a scale that do not fit.
    Liu & Abbeel 2023, section 3.
    """
    check_qkv(q, k, v)
    check_causal(q, k, causal)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected 1 or more tokens")
    scale = resolve_scale(scale, q.shape[-1])
    outs, lses = [], []
    for i in range(0, q.shape[2], block_size):  # a tile of queries
        q_tile = q[:, :, i : i + block_size]
        state = start(q_tile)
        for j in range(0, k.shape[2], block_size):  # a block of keys
            k_block, v_block = k[:, :, j : j + block_size], v[:, :, j : j + block_size]
            future = None
            if causal:
                q_at = torch.arange(i, i + q_tile.shape[2], device=q.device)
                k_at = torch.arange(j, j + k_block.shape[2], device=q.device)
                if j > q_at[-1]:
                    break  # this block and all after it are in the future of the whole tile
                future = k_at > q_at[:, None]  # (tile, block)
            state = tile(state, q_tile, k_block, v_block, scale=scale, future=future)
        out, lse = finish(state)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def main() -> int:
    from ringlab.support.rounding import exact_attention, report  # only here: a ring needs no check

    x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
    right = exact_attention(x, x, x)["out"]
    ok = True
    for block_size in (1, 2, 3, 8):
        out, _ = blockwise_attention(x, x, x, block_size=block_size)
        ok &= report(f"blocks of {block_size}", out, right)

    state, blocks = start(x), x.split(2, dim=2)
    for j in (2, 0, 3, 1):
        state = attend(state, x, blocks[j], blocks[j], scale=1 / math.sqrt(2))
    ok &= report("blocks of 2 in the order 2, 0, 3, 1", finish(state)[0], right)

    right = exact_attention(x, x, x, causal=True)["out"]
    out, lse = blockwise_attention(x, x, x, block_size=3, causal=True)
    ok &= report("causal, blocks of 3", out, right)
    print("lse of the causal rows:", "  ".join(f"{value:.4f}" for value in lse[0, 0].tolist()))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
