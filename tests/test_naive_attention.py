"""The oracle against the definition, spelled out in loops, and against torch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ringlab.basics.naive_attention import accumulation_dtype, naive_attention
from ringlab.support.rounding import exact_attention
from tests.attention import DTYPES, assert_attention, assert_right, random_qkv

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 8, 4)]


def definition(q, k, v, *, causal, scale):
    """softmax(Q Kᵀ · scale) V in plain numpy, one query at a time."""
    B, H, S, D = q.shape
    q, k, v = q.numpy(), k.numpy(), v.numpy()
    out = np.zeros((B, H, S, D))
    for b in range(B):
        for h in range(H):
            for i in range(S):
                keys = range(i + 1 if causal else S)
                weights = [math.exp(scale * np.dot(q[b, h, i], k[b, h, j])) for j in keys]
                out[b, h, i] = sum(weights[j] * v[b, h, j] for j in keys) / sum(weights)
    return torch.from_numpy(out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_oracle_is_the_definition_and_torchs_attention(shape, causal, scale):
    q, k, v = random_qkv(shape, torch.float64)
    out = naive_attention(q, k, v, causal=causal, scale=scale)
    right = exact_attention(q, k, v, causal=causal, scale=scale)["out"]
    for oracle in (
        right.exact,
        definition(q, k, v, causal=causal, scale=scale or 1 / math.sqrt(shape[-1])),
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale),
    ):
        assert_right(out, replace(right, exact=oracle))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("largest_score", [None, 1e4])
def test_every_dtype(dtype, causal, largest_score):
    q, k, v = random_qkv((2, 3, 33, 5), dtype, largest_score=largest_score)
    assert_attention(naive_attention(q, k, v, causal=causal), q, k, v, causal=causal)


def test_fewer_queries_than_keys():
    q, k, v = random_qkv((1, 2, 9, 3))
    assert_attention(naive_attention(q[:, :, 2:4], k, v), q[:, :, 2:4], k, v)


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v = (torch.ones(1, 1, 3, 2) for _ in "qkv")
    k[:, :, 0] = -math.inf  # causal: query 0 sees only key 0, whose score is -inf
    assert naive_attention(q, k, v, causal=True)[0, 0, :, 0].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_accumulation_dtype(dtype, wide):
    assert accumulation_dtype(dtype) is wide
