"""What the tests of attention share: inputs, and the one check that every right answer passes and no wrong one does."""

import math
import os

import torch

from ringlab.support.rounding import exact_attention

SEED = int(os.environ.get("RING_SEED", "0"))  # moves every random input of the tests
WORLDS = (1, 2, 3, 5)  # the numbers of ranks that most tests try
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random_qkv(shape, dtype=torch.float32, *, seed=0, largest_score=None):
    """q, k, v (B, H, S, D), normal; with `largest_score` q is scaled until some score is that large, up or down."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * SEED)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "qkv")
    if largest_score is not None:
        q *= largest_score * shape[-1] ** 0.5 / (q @ k.transpose(-2, -1)).abs().max()
    return q.to(dtype), k.to(dtype), v.to(dtype)


def assert_right(x, right, name="out"):
    """Every number of x is as near to the exact one as rounding allows. NaN is wrong."""
    wrong = ~(right.error(x) <= right.allowed)
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} numbers are wrong, by up to "
        f"{(right.error(x) / right.allowed).nan_to_num(nan=math.inf).max():.3g} times what rounding allows"
    )


def assert_attention(out, q, k, v, *, causal=False, scale=None, fused_blocks=0):
    """Every number of `out` is as near as rounding allows to full attention in float64."""
    assert_right(out, exact_attention(q, k, v, causal=causal, scale=scale, fused_blocks=fused_blocks)["out"])


def assert_lse(lse, q, k, *, causal=False, scale=None, fused_blocks=0):
    """lse (B, H, S) is log Σ e^score of each query, as in float64."""
    assert_right(lse, exact_attention(q, k, k, causal=causal, scale=scale, fused_blocks=fused_blocks)["lse"], "lse")
