"""Attention in blocks: the same numbers for every block size, no square of scores; the oracle by its definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ringlab.basics import blockwise_attention as module
from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.naive_attention import accumulation_dtype, naive_attention
from tests.attention import DTYPES, assert_attention, assert_lse, random_qkv


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 9)),
    block_size=st.integers(1, 24),  # larger than S too
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    scale=st.sampled_from([None, -0.7, 0.01, 3.0]),
    largest_score=st.sampled_from([None, 0.0, 1e4]),
    seed=st.integers(0, 2**32),
)
def test_every_block_size_shape_dtype_and_scale(shape, block_size, dtype, causal, scale, largest_score, seed):
    q, k, v = random_qkv(shape, dtype, seed=seed, largest_score=largest_score)
    out, lse = blockwise_attention(q, k, v, block_size=block_size, causal=causal, scale=scale)
    assert_attention(out, q, k, v, causal=causal, scale=scale)
    assert_lse(lse, q, k, causal=causal, scale=scale)


def test_views_and_fewer_queries_than_keys():
    q, k, v = (x.transpose(1, 2) for x in random_qkv((2, 7, 3, 4)))
    out, _ = blockwise_attention(q[:, :, 2:4], k, v, block_size=3)
    assert_attention(out, q[:, :, 2:4], k, v)


@pytest.mark.parametrize("block_size", [1, 3, 5])
def test_hidden_keys_and_queries_that_see_nothing(block_size):
    q, k, v = random_qkv((1, 1, 5, 3))
    q = q.abs()
    k[:, :, :2] = -math.inf  # scores of -inf: nobody sees keys 0 and 1, so that queries 0 and 1, causal, see nothing
    out, lse = blockwise_attention(q, k, v, block_size=block_size, causal=True)
    assert out[:, :, :2].count_nonzero() == 0
    assert lse[0, 0, :2].tolist() == [-math.inf] * 2
    assert_attention(out[:, :, 2:], q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], causal=True)


@pytest.mark.parametrize("block_size", [3, 8])
def test_causal_skips_the_blocks_in_the_future(block_size):
    seen = []

    def attend_tile(state, q, k, v, **options):
        seen.append(q.shape[2] * k.shape[2])
        return module.update(state, q @ k.transpose(-2, -1), v)

    q, k, v = random_qkv((1, 1, 24, 2))
    blockwise_attention(q, k, v, block_size=block_size, causal=True, tile=attend_tile)
    tiles = 24 // block_size
    assert seen == [block_size**2] * (tiles * (tiles + 1) // 2)


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation of torch returns."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return result


def test_no_square_of_scores_is_made():
    B, H, S, D, block_size = 2, 3, 96, 4, 8
    q, k, v = random_qkv((B, H, S, D))
    with LargestTensor() as largest:
        blockwise_attention(q, k, v, block_size=block_size, causal=True)
    assert largest.numbers == B * H * S * D  # the result itself; the square has 24 times as many


# The oracle: attention by its definition ------------------------------------------------------------------------------


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v = (torch.ones(1, 1, 3, 2) for _ in "qkv")
    k[:, :, 0] = -math.inf  # causal: query 0 sees only key 0, whose score is -inf
    assert naive_attention(q, k, v, causal=True)[0, 0, :, 0].tolist() == [0, 1, 1]


def test_accumulation_dtype():
    assert {accumulation_dtype(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)} == {torch.float32}
    assert accumulation_dtype(torch.float64) is torch.float64
