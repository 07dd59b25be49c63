"""Softcap: scores that cannot leave -c ... c, as in Gemma 2. No fused kernel of torch computes them; plain tiles do.

    scores  s = c tanh(scale Q Kᵀ / c), then the mask          dS = p ∘ (dp - δ) ∘ (1 - (s/c)²)

A small score stays nearly as it is, a large one ends near c. A tile of scores exists at a time, as in
../basics/blockwise_attention.py and backward.py, and only the scores and their slope differ. The mask comes last: a
hidden key with the score -inf would get -c, and so a weight.

Shapes: q, out and dO, the gradient of out, are (B, H, Sq, D), k and v (B, H, Sk, D); lse and δ (B, H, Sq), as in
backward.py. In memory at a time: B·H·256·256 scores.

    $ python -m ringlab.training.softcap
    scores of 0.5 1 5 50 capped at 2: 0.490 0.924 1.973 2.000
    ok    out: largest error 4.4e-16, rounding allows 1.0e-14 (float64 sums)
    ok    dq: largest error 1.4e-16, rounding allows 1.1e-14 (float64 sums)
    ok    dk: largest error 1.1e-16, rounding allows 2.1e-14 (float64 sums)
    ok    dv: largest error 0.0e+00, rounding allows 2.1e-14 (float64 sums)
    without the cap dq would be off by 0.3667

Before: grouped_query.py. After: fused_block.py, which takes these tiles for a softcap.
Source: Gemma Team 2024 (Gemma 2), section 2, "logit soft-capping"; Dao et al. 2022, algorithms 1 and 4.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ringlab.basics.blockwise_attention import TILE
from ringlab.basics.naive_attention import TOKENS, accumulation_dtype
from ringlab.basics.online_softmax import finish, start, update
from ringlab.support.rounding import exact_attention, report


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


def main() -> int:
    x, softcap, scale = TOKENS[None, None], 2.0, 2**-0.5  # (B, H, S, D) = (1, 1, 8, 2)
    some = torch.tensor([0.5, 1.0, 5.0, 50.0], dtype=x.dtype)
    capped, _ = capped_scores(some[None, None, :, None], torch.ones_like(x[:, :, :1, :1]), scale=1.0, softcap=softcap)
    print(f"scores of 0.5 1 5 50 capped at 2: {' '.join(f'{score:.3f}' for score in capped.flatten().tolist())}")

    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "causal": True}
    d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    right = exact_attention(x, x, x, d_out, **options)
    out, lse = capped_forward(x, x, x, **options)
    ok = report("out", out, right["out"])
    gradients = capped_backward(x, x, x, d_out, lse, (d_out * out).sum(dim=-1), **options)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        ok &= report(name, gradient, right[name])
    d_q = exact_attention(x, x, x, d_out, scale=scale, causal=True)["dq"].exact
    print(f"without the cap dq would be off by {(d_q - right['dq'].exact).abs().max():.4f}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
