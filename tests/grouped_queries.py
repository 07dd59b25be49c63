"""What the tests with H query heads on G key/value heads share: inputs, two oracles, and the check of four results.

The oracles are full attention in float64, by our definition and by torch's own kernel.
"""

import functools

import torch
import torch.nn.functional as F

from basics.naive_attention import naive_attention, resolve_scale
from support.rounding import exact_attention
from tests.attention import assert_right, random_qkv
from tests.gradients import NAMES, gradients
from tests.ranks import WORLDS


def grouped_inputs(B, H, G, S, D, dtype=torch.float32, *, seed=0):
    """q (B, H, S, D), k and v (B, G, S, D), d_out as q; normal."""
    q, d_out, _ = random_qkv((B, H, S, D), dtype, seed=seed)
    k, v, _ = random_qkv((B, G, S, D), dtype, seed=seed + 1000)
    return q, k, v, d_out


def full_attention(q, k, v, *, causal=False, scale=None):
    """Full attention by the definition: query head h uses K/V head h // (H/G)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return naive_attention(q, k, v, causal=causal, scale=scale)


def torchs_attention(q, k, v, *, causal=False, scale=None):
    """Full attention by torch. Its causal kernel gives NaN for a scale <= 0, so the sign goes to q, which is exact."""
    scale = resolve_scale(scale, q.shape[-1])
    sign = (scale > 0) - (scale < 0)
    return F.scaled_dot_product_attention(
        q if sign == 1 else q * sign, k, v, is_causal=causal, scale=abs(scale) or 1.0, enable_gqa=True
    )


def expected(q, k, v, d_out, *, causal=False, scale=None, fused_blocks=WORLDS[-1]):
    """What out, dq, dk and dv must be, and how far from it rounding may move them. The two oracles must agree first."""
    options = {"causal": causal, "scale": scale}
    right = exact_attention(q, k, v, d_out, **options, fused_blocks=fused_blocks)
    wide = [x.double() for x in (q, k, v, d_out)]
    right_in_float64 = exact_attention(*wide, **options)
    for name, second in zip(NAMES, gradients(functools.partial(torchs_attention, **options), *wide), strict=True):
        assert_right(second, right_in_float64[name], f"torch's {name}")
    return [right[name] for name in NAMES]


@functools.cache
def expected_of_inputs(*sizes_and_dtype, **options):
    """`expected` of `grouped_inputs`, computed once for all worlds and layouts."""
    return expected(*grouped_inputs(*sizes_and_dtype), **options)


def assert_four(mine, right):
    """Each number of out, dq, dk, dv is as near to float64 as rounding allows."""
    for name, x, exact in zip(NAMES, mine, right, strict=True):
        assert_right(x, exact, name)
