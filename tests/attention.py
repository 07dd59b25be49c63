"""What the tests of attention share: inputs, and the one check that every right answer passes and no wrong one does."""

import math

import torch
import torch.nn.functional as F

from basics.naive_attention import accumulation_dtype, naive_attention, resolve_scale, rounding_tolerance

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random_qkv(shape, dtype=torch.float32, *, seed=0, largest_score=None):
    """q, k, v (B, H, S, D), normal; with `largest_score` q is scaled until some score is that large, up or down."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "qkv")
    if largest_score is not None:
        q *= largest_score * shape[-1] ** 0.5 / (q @ k.transpose(-2, -1)).abs().max()
    return q.to(dtype), k.to(dtype), v.to(dtype)


def assert_attention(out, q, k, v, *, causal=False, scale=None):
    """Every number of `out` is as near as rounding allows to full attention in float64, by our code and by torch's."""
    assert out.shape == q.shape, f"out has shape {tuple(out.shape)}, but q {tuple(q.shape)}"
    assert out.dtype == q.dtype, f"out is {out.dtype}, but q {q.dtype}"
    wide = [x.double() for x in (q, k, v)]
    scaled = wide[0] * resolve_scale(scale, q.shape[-1])  # torch's causal kernel gives NaN for a negative scale
    for exact in (
        naive_attention(*wide, causal=causal, scale=scale),
        F.scaled_dot_product_attention(scaled, *wide[1:], is_causal=causal, scale=1.0),
    ):
        assert_near(out, exact, rounding_tolerance(q, k, v, exact, scale=scale))


def assert_lse(lse, q, k, *, causal=False, scale=None):
    """lse (B, H, S) is log Σ e^score of each query, as in float64; it may be off by as much as a score is."""
    B, H, S, D = q.shape
    scores = q.double() @ k.double().transpose(-2, -1) * resolve_scale(scale, D)
    if causal:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    exact = torch.logsumexp(scores, dim=-1)
    wide = accumulation_dtype(q.dtype)
    ones = torch.ones(B, H, S, 1, dtype=wide)
    assert lse.dtype == wide
    assert_near(lse, exact, rounding_tolerance(q.to(wide), k.to(wide), ones, exact[..., None], scale=scale)[..., 0])


def assert_near(out, exact, allowed):
    error = (out.double() - exact).abs()
    wrong = ~(error <= allowed)  # NaN is wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong, by {error.max():.1e} at most"
