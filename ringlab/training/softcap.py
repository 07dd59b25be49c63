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

import torch
from torch import Tensor

from ringlab.basics.online_softmax import State, update


def capped_scores(
    q: Tensor, k: Tensor, *, scale: float, softcap: float, future: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The scores of a tile (B, H, Sq, Sk), and their slope: how much they change where scale q kᵀ changes by 1.

    `future` (Sq, Sk) is True where a query may not look: -inf.
    """
    t = torch.tanh((q * (scale / softcap)) @ k.mT)
    scores = softcap * t
    return scores if future is None else scores.masked_fill(future, -torch.inf), 1 - t * t


def capped_attend(
    state: State, q: Tensor, k: Tensor, v: Tensor, *, scale: float, future: Tensor | None = None, softcap: float
) -> State:
    """`attend_tile` of blockwise_attention.py, with capped scores."""
    wide = q.to(state[0].dtype), k.to(state[0].dtype)
    return update(state, capped_scores(*wide, scale=scale, softcap=softcap, future=future)[0], v)


def capped_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    future: Tensor | None = None,
    *,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tile_backward` of backward.py, with capped scores. lse is inf where no key is seen."""
    q, k, v, d_out = (x.to(lse.dtype) for x in (q, k, v, d_out))
    scores, slope = capped_scores(q, k, scale=scale, softcap=softcap, future=future)
    p = torch.exp(scores - lse[..., None])  # the softmax weights
    d_scores = p * (d_out @ v.mT - delta[..., None]) * slope
    return scale * d_scores @ k, scale * d_scores.mT @ q, p.mT @ d_out
