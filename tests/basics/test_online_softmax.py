"""The running softmax in any split and any order, and the algebra of `merge`, on inputs that hypothesis invents.

And attention in blocks: the same numbers for every block size, no square of scores; the oracle by its definition.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from notebooks.source.checks.softmax_and_blocks import Peak
from ringlab.basics import blockwise_attention as module
from ringlab.basics.blockwise_attention import blockwise_attention
from ringlab.basics.naive_attention import naive_attention
from ringlab.basics.online_softmax import finish, merge, start, update
from ringlab.support.rounding import exact_attention
from tests.attention import DTYPES, SEED, assert_attention, assert_lse, assert_right, random_qkv

SEEDS = st.integers(0, 2**32)


def random_scores(seed, rows, keys, size, hidden):
    """Scores (rows, keys) of about `size`, a share `hidden` of them -inf, and values (keys, 3)."""
    generator = torch.Generator().manual_seed(seed + SEED)
    scores = size * torch.randn(rows, keys, generator=generator, dtype=torch.float64)
    scores[torch.rand(rows, keys, generator=generator) < hidden] = -math.inf
    return scores, torch.randn(keys, 3, generator=generator, dtype=torch.float64)


@st.composite
def pieces(draw, keys):
    """The numbers below `keys` in some order, cut into some pieces."""
    order = draw(st.permutations(range(keys)))
    cuts = sorted(draw(st.sets(st.integers(1, keys - 1)))) if keys > 1 else []
    return [order[i:j] for i, j in zip([0, *cuts], [*cuts, keys], strict=True)]


def assert_softmax(out, lse, scores, v, merged=0):
    """out (rows, D) and lse (rows,) are those of scores (rows, keys) and v (keys, D) or (rows, keys, D)."""
    rows, keys = scores.shape
    visible = scores > -math.inf
    q = scores.masked_fill(~visible, 0.0)[:, None, None]  # (rows, 1, 1, keys): with the identity for keys, the scores
    k, v = torch.eye(keys, dtype=scores.dtype).expand(rows, 1, -1, -1), v.expand(rows, keys, -1)[:, None]
    right = exact_attention(q, k, v, visible=visible[:, None, None], scale=1.0, fused_blocks=merged)
    assert_right(out[:, None, None], right["out"])
    assert_right(lse[:, None, None], right["lse"], "lse")


@given(
    data=st.data(),
    seed=SEEDS,
    rows=st.integers(1, 4),
    keys=st.integers(1, 12),
    size=st.sampled_from([0.0, 1.0, 50.0, 1e4]),
    hidden=st.sampled_from([0.0, 0.5, 0.9]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_split_in_any_order_is_the_whole(data, seed, rows, keys, size, hidden, dtype):
    scores, v = random_scores(seed, rows, keys, size, hidden)
    scores, v = scores.to(dtype), v.to(dtype)
    state = start(v.new_empty(rows, 3))
    for piece in data.draw(pieces(keys)):
        state = update(state, scores[:, piece], v[piece])
    out, lse = finish(state)

    assert_softmax(out, lse, scores, v)


@st.composite
def partial_results(draw, count):
    """`count` results (out (3, 2), lse (3,)) over different keys, in float64; a row may have seen no key."""
    lse = st.one_of(st.just(-math.inf), st.floats(-1e4, 1e4))
    results = []
    for _ in range(count):
        lses = torch.tensor(draw(st.lists(lse, min_size=3, max_size=3)), dtype=torch.float64)
        out = torch.randn(3, 2, generator=torch.Generator().manual_seed(draw(SEEDS) + SEED), dtype=torch.float64)
        results.append((out.masked_fill((lses == -math.inf)[:, None], 0.0), lses))
    return results


@given(partial_results(3))
def test_merge_is_associative(results):
    """In both orders it is attention over three keys, whose scores are the lse and whose values the outputs."""
    a, b, c = results
    v, scores = (torch.stack(each, dim=1) for each in zip(*results, strict=True))  # (3, 3, 2), (3, 3)
    assert_softmax(*merge(*merge(*a, *b), *c), scores, v, merged=3)
    assert_softmax(*merge(*a, *merge(*b, *c)), scores, v, merged=3)


@given(partial_results(1))
def test_merging_nothing_changes_nothing(results):
    (out, lse) = results[0]
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)  # -inf on both sides too, where `out` saw no key
    for merged in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


# In blocks -----------------------------------------------------------------------------------------------------------


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


def test_no_square_of_scores_is_made():
    B, H, S, D, block_size = 2, 3, 96, 4, 8
    q, k, v = random_qkv((B, H, S, D))
    with Peak((q, k, v)) as seen:
        blockwise_attention(q, k, v, block_size=block_size, causal=True)
    assert seen.most < B * H * S * S * q.itemsize / 2


# The oracle: attention by its definition ------------------------------------------------------------------------------


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v = (torch.ones(1, 1, 3, 2) for _ in "qkv")
    k[:, :, 0] = -math.inf  # causal: query 0 sees only key 0, whose score is -inf
    assert naive_attention(q, k, v, causal=True)[0, 0, :, 0].tolist() == [0, 1, 1]
