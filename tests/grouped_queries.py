"""What the tests with H query heads on G key/value heads share: inputs, the oracle, and the check of four results.

The oracle is full attention in float64 by its definition; tests/test_rounding.py compares it with autograd and torch.
"""

import functools

import torch

from ringlab.support.rounding import exact_attention
from tests.attention import assert_right, random_qkv
from tests.gradients import NAMES


def grouped_inputs(B, H, G, S, D, dtype=torch.float32, *, seed=0):
    """q (B, H, S, D), k and v (B, G, S, D), d_out as q; normal."""
    q, d_out, _ = random_qkv((B, H, S, D), dtype, seed=seed)
    k, v, _ = random_qkv((B, G, S, D), dtype, seed=seed + 1000)
    return q, k, v, d_out


def expected(q, k, v, d_out, *, fused_blocks=8, **options):
    """What out, dq, dk and dv must be, and how far from it rounding may move them."""
    right = exact_attention(q, k, v, d_out, fused_blocks=fused_blocks, **options)
    return [right[name] for name in NAMES]


@functools.cache
def expected_of_inputs(*sizes_and_dtype, **options):
    """`expected` of `grouped_inputs`, computed once for all worlds and layouts."""
    return expected(*grouped_inputs(*sizes_and_dtype), **options)


def assert_four(mine, right):
    """Each number of out, dq, dk, dv is as near to float64 as rounding allows."""
    for name, x, exact in zip(NAMES, mine, right, strict=True):
        assert_right(x, exact, name)
