"""Softcap: scores that cannot leave -c ... c, as in Gemma 2. No fused kernel of torch computes them; plain tiles do.

    scores  s = c tanh(scale Q Kᵀ / c), then the mask          dS = p ∘ (dp - δ) ∘ (1 - (s/c)²)

A small score stays nearly as it is, a large one ends near c. A tile of scores exists at a time, as in
../basics/blockwise_attention.py and backward.py, and only the scores and their slope differ. The mask comes last: a
hidden key with the score -inf would get -c, and so a weight.

Shapes: q, out and dO, the gradient of out, are (B, H, Sq, D), k and v (B, H, Sk, D); lse and δ (B, H, Sq), as in
backward.py. In memory at a time: B·H·256·256 scores.

A reader of the ring may skip this file; fused_block.py takes these tiles for a softcap.
Source: Gemma Team 2024 (Gemma 2), section 2, "logit soft-capping"; Dao et al. 2022, algorithms 1 and 4.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ringlab.basics.blockwise_attention import TILE
from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.basics.online_softmax import finish, start, update


def capped_scores(
    q: Tensor, k: Tensor, *, scale: float, softcap: float, future: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The scores of a tile (B, H, Sq, Sk), and their slope: how much they change where scale q kᵀ changes by 1.

    `future` (Sq, Sk) is True where a query may not look: -inf.
    """
    t = torch.tanh((q * (scale / softcap)) @ k.mT)
    scores = softcap * t
    return scores if future is None else scores.masked_fill(future, -torch.inf), 1 - t * t


def tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, list[tuple[slice, Tensor | None]]]]:
    """The rows of each tile of queries; with each of its tiles of keys, and what of it lies in the future, if any."""
    for i in range(0, q.shape[2], TILE):
        n = min(TILE, q.shape[2] - i)
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        ends = i + n if causal else k.shape[2]  # the tiles after these lie wholly in the future
        yield (
            slice(i, i + n),
            [(slice(j, min(j + TILE, ends)), future if causal and i == j else None) for j in range(0, ends, TILE)],
        )


def capped_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, D) in q's dtype and lse (B, H, Sq), in float32 at least. `causal` needs Sq = Sk."""
    wide, outs, lses = accumulation_dtype(q.dtype), [], []
    for rows, of_keys in tiles(q, k, causal):
        state = start(q[:, :, rows])
        for keys, future in of_keys:
            tile = q[:, :, rows].to(wide), k[:, :, keys].to(wide)
            scores, _ = capped_scores(*tile, scale=scale, softcap=softcap, future=future)
            state = update(state, scores, v[:, :, keys])
        out, lse = finish(state)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def capped_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    scale: float,
    softcap: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to dq, dk and dv, in the dtype of lse. lse, inf where no key is seen, and δ of *whole* rows."""
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    for rows, of_keys in tiles(q, k, causal):
        q_i, d_out_i = (x[:, :, rows].to(lse.dtype) for x in (q, d_out))
        for keys, future in of_keys:
            k_j, v_j = (x[:, :, keys].to(lse.dtype) for x in (k, v))
            scores, slope = capped_scores(q_i, k_j, scale=scale, softcap=softcap, future=future)
            p = torch.exp(scores - lse[:, :, rows, None])  # the softmax weights
            d_scores = p * (d_out_i @ v_j.mT - delta[:, :, rows, None]) * slope
            d_q[:, :, rows] += scale * d_scores @ k_j
            d_k[:, :, keys] += scale * d_scores.mT @ q_i
            d_v[:, :, keys] += p.mT @ d_out_i
    return d_q, d_k, d_v
