"""Softmax in pieces: carry a running max, sum and output, and rescale them whenever the max grows.

    m' = max(m, max s)        l' = e^(m-m') l + Σ e^(s-m')        o' = e^(m-m') o + Σ e^(s-m') v
    at the end                out = o / l,   lse = m + log l

Two results over different keys merge. Each is weighted by its share of the sum of e^score over all keys:

    lse = log(e^lse_a + e^lse_b)        out = e^(lse_a-lse) out_a + e^(lse_b-lse) out_b

Shapes: scores (..., Sq, Sk), v (..., Sk, D), o and out (..., Sq, D), m, l and lse (..., Sq). Logarithms are natural.

    $ python -m ringlab.basics.online_softmax
    the failure: e^1000 is inf, so a softmax of scores near 1000 is inf/inf = nan
    token 0, two keys at a time:       m       l       o                o / l so far
        after tokens 0 and 1         0.7071  1.4931  1.0000  0.4931   0.6698  0.3302
        after tokens 2 and 3         0.7071  3.4931  3.0000  3.4931   0.8588  1.0000
        after tokens 4 and 5         1.4142  3.7223  5.4792  4.7223   1.4720  1.2686
        after tokens 6 and 7         2.1213  3.8354  8.7016  6.3284   2.2688  1.6500
    ok    running softmax: largest error 2.2e-15, rounding allows 9.9e-14 (float64 sums)
    ok    merge(a, b): largest error 1.8e-15, rounding allows 9.9e-14 (float64 sums)
    ok    merge(b, a): largest error 1.8e-15, rounding allows 9.9e-14 (float64 sums)
    ok    scores up to 5000, in float32: largest error 1.7e-13, rounding allows 1.6e-03 (float32 sums)

Before: naive_attention.py. After: blockwise_attention.py, which feeds these functions one block of keys at a time.
Source: Milakov & Gimelshein 2018, algorithm 3; Rabe & Staats 2021, section 2; Dao et al. 2022, algorithm 1.
"""

import math
import sys

import torch
from torch import Tensor

from ringlab.basics.naive_attention import TOKENS, accumulation_dtype

State = tuple[Tensor, Tensor, Tensor]  # m (..., Sq), l (..., Sq), o (..., Sq, D)


def start(q: Tensor) -> State:
    """(m, l, o) before any key was seen, for queries q (..., Sq, D): m = -inf, l = 0, o = 0; float32 at least."""
    o = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    l = torch.zeros_like(o[..., 0])
    return torch.full_like(l, -math.inf), l, o


def _finite(m: Tensor) -> Tensor:
    """m, with 0 in place of -inf: a row that has seen no key would compute -inf - (-inf), which is NaN."""
    return m.masked_fill(m == -math.inf, 0.0)


def update(state: State, scores: Tensor, v: Tensor) -> State:
    """Fold the scores (..., Sq, Sk) and values (..., Sk, D) of more keys into (m, l, o). Returns the new (m, l, o).

    The scores come in the dtype of the state. A row whose scores are all -inf stays as it was.
    Dao et al. 2022, algorithm 1, lines 10 to 12, with o left unnormalised until `finish`.
    """
    m, l, o = state
    m_new = torch.maximum(m, scores.amax(dim=-1))  # (..., Sq)
    rescale = torch.exp(m - _finite(m_new))  # (..., Sq), 1 where the max stays, less where it grows
    weights = torch.exp(scores - _finite(m_new)[..., None])  # (..., Sq, Sk), none above 1
    l_new = rescale * l + weights.sum(dim=-1)  # (..., Sq)
    o_new = rescale[..., None] * o + weights @ v.to(weights.dtype)  # (..., Sq, D)
    return m_new, l_new, o_new


def finish(state: State) -> tuple[Tensor, Tensor]:
    """(m, l, o) -> (out (..., Sq, D), lse (..., Sq)). A row that saw no key gives out = 0 and lse = -inf."""
    m, l, o = state
    return o / l.masked_fill(l == 0, 1.0)[..., None], m + torch.log(l)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over keys A and attention over other keys B -> attention over both.

    out_a, out_b (..., Sq, D), normalised, of any floating dtype; lse_a, lse_b (..., Sq), natural log, float32 or
    float64. Returns (out, lse), in the dtype of the lse at least. Associative and commutative up to rounding; merging
    (0, -inf) changes nothing. Raises ValueError when shapes or dtypes do not fit. Rabe & Staats 2021, section 2.
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if out.shape[:-1] != lse.shape or out.shape != out_a.shape:
            raise ValueError(
                f"out_{name} has shape {tuple(out.shape)} and lse_{name} {tuple(lse.shape)}, beside out_a "
                f"{tuple(out_a.shape)}; expected out (..., Sq, D) and lse (..., Sq), the same for a and b"
            )
        if lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"lse_{name} has dtype {lse.dtype}; expected float32 or float64: half precision rounds a weight of "
                f"e^lse by several per cent, so keep the lse as the kernel returned it"
            )
    m = _finite(torch.maximum(lse_a, lse_b))
    share_a, share_b = torch.exp(lse_a - m), torch.exp(lse_b - m)  # (..., Sq), the larger one is 1
    total = share_a + share_b
    out = (share_a[..., None] * out_a + share_b[..., None] * out_b) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, m + torch.log(total)


def main() -> int:
    from ringlab.support.rounding import exact_attention, report  # only here: a ring needs no check

    print(f"the failure: e^1000 is {torch.tensor(1000.0).exp()}, so a softmax of scores near 1000 is inf/inf = nan")

    x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
    scores = x @ x.transpose(-2, -1) / math.sqrt(2)  # (1, 1, 8, 8)
    print("token 0, two keys at a time:       m       l       o                o / l so far")
    state = start(x)
    for j in range(4):
        keys = slice(2 * j, 2 * j + 2)
        state = update(state, scores[..., keys], x[:, :, keys])
        m, l, o = (part[0, 0, 0] for part in state)
        so_far = "  ".join(f"{value:.4f}" for value in (o / l).tolist())
        print(f"    after tokens {2 * j} and {2 * j + 1}         {m:.4f}  {l:.4f}  {o[0]:.4f}  {o[1]:.4f}   {so_far}")

    right = exact_attention(x, x, x)["out"]
    ok = report("running softmax", finish(state)[0], right)
    halves = [finish(update(start(x), scores[..., keys], x[:, :, keys])) for keys in (slice(0, 2), slice(2, 8))]
    ok &= report("merge(a, b)", merge(*halves[0], *halves[1])[0], right)
    ok &= report("merge(b, a)", merge(*halves[1], *halves[0])[0], right)

    q, x = 20 * x.float(), x.float()  # scores up to 5000: e^5000 has no float32, and no float64 either
    out, _ = finish(update(start(q), q @ q.transpose(-2, -1) / math.sqrt(2), x))
    ok &= report("scores up to 5000, in float32", out, exact_attention(q, q, x)["out"])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
