"""A block in JAX: numbers and gradients block by block, in tiles; what it keeps in memory; blocks with one mistake."""

import math
from functools import partial
from unittest import mock

import pytest
import torch

from ringlab.support.rounding import exact_attention
from tests.attention import assert_right, random_qkv
from tests.extras import MISSING
from tests.grouped_queries import grouped_inputs
from tests.in_jax import OPTIONS, assert_all_right, equations, to_jax, to_torch
from tests.planted import Mistakes

jax = pytest.importorskip("jax", reason=MISSING["jax"])
jnp = jax.numpy

from ringlab.training import jax_block  # noqa: E402
from ringlab.training.jax_block import attend_tile, scores_of, tile_backward  # noqa: E402


def whole(scale, lengths, causal, q, k, v, d_out):
    """out, dq, dk, dv and lse, by blocks of these lengths; q and d_out (B, G, R, S, D)."""
    at = jnp.arange(sum(lengths))[:, None] * causal
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    blocks = [[x[..., i : i + n, :] for x in (k, v, at)] for i, n in zip(begins, lengths, strict=True)]
    state = jax_block.start(q)
    for k_j, v_j, k_at in blocks:
        state = jax_block.attend(state, q, k_j, v_j, at, k_at, scale=scale)
    out, lse = jax_block.finish(state)
    delta = (d_out.astype(lse.dtype) * out).sum(axis=-1, keepdims=True)
    parts = [
        jax_block.block_backward(q, k_j, v_j, d_out, lse, delta, at, k_at, scale=scale) for k_j, v_j, k_at in blocks
    ]
    d_q, d_k, d_v = zip(*parts, strict=True)
    return out, sum(d_q), jnp.concatenate(d_k, axis=-2), jnp.concatenate(d_v, axis=-2), lse


def by_blocks(lengths, q, k, v, d_out, *, causal=False, scale=None, tile=4):
    """`whole`, compiled, with tensors of torch and tiles of so many tokens. lse (B, H, S)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with jax.enable_x64(q.dtype == torch.float64), mock.patch.object(jax_block, "TILE", tile):
        grouped = [to_jax(x).reshape(len(k), k.shape[1], -1, *x.shape[2:]) for x in (q, d_out)]
        run = jax.jit(partial(whole, scale, lengths, causal), compiler_options=OPTIONS)
        out, d_q, d_k, d_v, lse = (to_torch(x) for x in run(grouped[0], to_jax(k), to_jax(v), grouped[1]))
    return [out.reshape(q.shape), d_q.reshape(q.shape), d_k, d_v], lse.reshape(q.shape[:3])


def assert_exact(lengths=(7, 5), *, heads=(4, 2), head_dim=3, seed=0, **options):
    """The numbers are those of full attention in float64. 12 queries are 3 tiles, 7 keys are 2, one of them padded."""
    inputs = grouped_inputs(2, *heads, sum(lengths), head_dim, torch.float64, seed=seed)
    mine, lse = by_blocks(lengths, *inputs, **options)
    assert_all_right(mine, *inputs, **options)
    assert_right(lse, exact_attention(*inputs, **options)["lse"], "lse")


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((7, 5), {"causal": False}),
        ((7, 5), {"causal": True}),
        ((1,), {"heads": (1, 1), "head_dim": 1, "scale": 0.0}),
        ((9, 3), {"heads": (2, 1), "head_dim": 5, "scale": -0.7, "causal": True}),
    ],
    ids=str,
)
def test_numbers_gradients_and_lse_in_float64(lengths, options):
    assert_exact(lengths, **options)


def test_huge_scores():
    q, k, v = random_qkv((1, 2, 24, 8), largest_score=1e4)
    (out, *gradients), lse = by_blocks((24,), q, k, v, v, causal=True, tile=8)
    right = exact_attention(q, k, v, causal=True)
    assert_right(out, right["out"])
    assert_right(lse, right["lse"], "lse")
    assert not any(x.isnan().any() for x in gradients)


def test_a_fully_masked_row_is_zero_and_so_are_its_gradients():
    q = torch.full((1, 1, 8, 2), 1e30)  # all scores are -inf
    v = torch.ones_like(q)
    mine, lse = by_blocks((8,), q, -q, v, v)
    assert [x.abs().max().item() for x in mine] == [0.0] * 4
    assert (lse == -math.inf).all()


def assert_sums_are_wide():
    """With bfloat16 input the results are float32, and as exact as those of the same numbers in float32."""
    inputs = grouped_inputs(1, 2, 2, 480, 8, torch.bfloat16)
    mine, lse = by_blocks((480,), *inputs, tile=16)
    assert lse.dtype == torch.float32
    assert_all_right(mine, *(x.float() for x in inputs))


def test_sums_are_wider_than_bfloat16():
    assert_sums_are_wide()


MISTAKES = Mistakes()


@pytest.mark.parametrize("name", ["attend_tile", "tile_backward"])
def test_sums_in_bfloat16_are_rejected(name):
    function = getattr(jax_block, name)

    def rounded(*args, **options):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), function(*args, **options))

    with mock.patch.object(jax_block, name, rounded), pytest.raises(AssertionError, match="numbers are wrong"):
        assert_sums_are_wide()


# What the program holds, read from its jaxpr -------------------------------------------------------------------------


def assert_no_square(seq_len=64):
    x = jnp.ones((1, 1, 1, seq_len, 2))
    kv = x[:, :, 0]
    traced = jax.make_jaxpr(partial(whole, 1.0, (seq_len,), True))(x, kv, kv, x)
    sizes = [math.prod(var.aval.shape) for equation, _ in equations(traced.jaxpr) for var in equation.outvars]
    assert len(sizes) > 100
    assert max(sizes) < seq_len**2


def test_no_square_of_a_block_exists():
    with mock.patch.object(jax_block, "TILE", 16):
        assert_no_square()
    with mock.patch.object(jax_block, "TILE", 64), pytest.raises(AssertionError):
        assert_no_square()


# Blocks with one mistake each ----------------------------------------------------------------------------------------


@MISTAKES.replaces(jax_block, "attend_tile")
def no_rescale(state, *tiles, scale):
    m, l, o = state
    m_new, l_tile, o_tile = attend_tile((m, 0 * l, 0 * o), *tiles, scale=scale)
    return m_new, l + l_tile, o + o_tile


@MISTAKES.replaces(jax_block, "scores_of")
def later_by_one(q, k, q_at, k_at, scale):
    return scores_of(q, k, q_at + 1, k_at, scale)


@MISTAKES.replaces(jax_block, "visible")
def skips_the_diagonal(q_at, k_at):
    return k_at.max() <= q_at.min()


@MISTAKES.replaces(jax_block, "tile_backward")
def lse_of_the_tile(d_q, d_kv, row, keys, *, scale):
    q, d_out, _, delta, q_at = row
    lse = jax.nn.logsumexp(scores_of(q, keys[0], q_at, keys[-1], scale), axis=-1, keepdims=True)
    return tile_backward(d_q, d_kv, (q, d_out, lse, delta, q_at), keys, scale=scale)


@MISTAKES.replaces(jax_block, "tile_backward")
def own_queries_only(d_q, d_kv, *tiles, scale):
    """dK and dV begin anew with every tile of queries."""
    return tile_backward(d_q, jax.tree.map(jnp.zeros_like, d_kv), *tiles, scale=scale)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_block_is_rejected(mistake):
    with MISTAKES[mistake](), pytest.raises(AssertionError, match="numbers are wrong"):
        assert_exact((7,), causal=True)
