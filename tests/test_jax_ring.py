"""The ring in JAX: numbers and gradients on 1 to 8 devices, what it keeps in memory and sends; and with mistakes."""

import math
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basics.naive_attention import naive_attention
from support.rounding import exact_attention
from tests.attention import assert_right, random_qkv
from tests.extras import MISSING
from training import flash_ring
from training.causal import shard, unshard

jax = pytest.importorskip("jax", reason=MISSING["jax"])
jnp, lax = jax.numpy, jax.lax
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from training import jax_ring  # noqa: E402

NAMES = ("out", "dq", "dk", "dv")
WORLDS = range(1, 9)
small_tiles = mock.patch.object(jax_ring, "TILE", 4)


def to_jax(x):
    return jnp.asarray(x.float().numpy(), jnp.bfloat16) if x.dtype == torch.bfloat16 else jnp.asarray(x.numpy())


def to_torch(x):
    return (
        torch.from_numpy(np.array(x.astype(jnp.float32))).bfloat16()
        if x.dtype == jnp.bfloat16
        else torch.tensor(np.array(x))
    )


def deal(x, layout, world_size):
    return torch.cat([shard(x, layout, rank, world_size) for rank in range(world_size)], dim=2)


def in_jax(world_size, q, k, v, d_out, *, causal=False, layout="contiguous", scale=None, quick=False):
    """out, dq, dk, dv of the ring on `world_size` virtual devices, whole, in torch. quick: to compile, not to run."""
    options = {"xla_backend_optimization_level": 0} if quick else None
    with jax.enable_x64(q.dtype == torch.float64):
        ring = jax_ring.on_mesh(jax_ring.virtual_devices(world_size), causal=causal, layout=layout, scale=scale)
        inputs = [to_jax(deal(x, layout, world_size)) for x in (q, k, v, d_out)]
        results = jax.jit(partial(jax_ring.gradients, ring), compiler_options=options)(*inputs)
        assert {x.dtype for x in results} == {inputs[0].dtype}
        return [unshard(to_torch(x).chunk(world_size, dim=2), layout) for x in results]


def in_float64(q, k, v, d_out, *, causal=False, scale=None):
    """The same of full attention with the whole square, by torch's autograd."""
    q, k, v, d_out = (x.double() for x in (q, k, v, d_out))
    leaves = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in leaves[1:])
    out = naive_attention(leaves[0], keys, values, causal=causal, scale=scale)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves)]


def by_jax_itself(q, k, v, d_out, *, causal=False, scale=None):
    """The second oracle: plain attention in JAX, and JAX's own gradients."""

    def plain(q, k, v):
        scores = jnp.einsum("bhid,bhjd->bhij", q, k) * (scale if scale is not None else q.shape[3] ** -0.5)
        if causal:
            scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
        return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(scores, axis=-1), v)

    with jax.enable_x64(True):
        results = jax.jit(partial(jax_ring.gradients, plain))(
            *(jnp.asarray(x.double().numpy()) for x in (q, k, v, d_out))
        )
        return [to_torch(x) for x in results]


def assert_all_right(mine, right, exact=None):
    """out, dq, dk, dv are as near as rounding allows to the exact ones, or to those of another oracle."""
    for i, (name, x) in enumerate(zip(NAMES, mine, strict=True)):
        assert_right(x, replace(right[name], exact=exact[i]) if exact else right[name], name)


def assert_exact(world_size, *, causal=False, layout="contiguous", length=7, oracles=(in_float64,), quick=False):
    """out, dq, dk, dv in float64 are those of full attention; a chunk of 7 is two tiles, one padded."""
    q, k, v = random_qkv((1, 2, length * world_size, 3), torch.float64)
    inputs = q, k, v, random_qkv(q.shape, torch.float64, seed=9)[0]
    with small_tiles:
        mine = in_jax(world_size, *inputs, causal=causal, layout=layout, quick=quick)
    for oracle in oracles:
        assert_all_right(mine, exact_attention(*inputs, causal=causal), oracle(*inputs, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", WORLDS)
def test_numbers_and_gradients_in_float64(size, causal):
    assert_exact(size, causal=causal, oracles=(in_float64, by_jax_itself) if size in (1, 4, 7) else (in_float64,))


@pytest.mark.parametrize(("size", "layout"), [(3, "zigzag"), (2, "zigzag"), (3, "striped"), (5, "striped")])
def test_layouts(size, layout):
    assert_exact(size, causal=True, layout=layout, length=6)


@pytest.mark.parametrize(
    ("size", "dtype", "causal"),
    [(8, torch.float32, False), (3, torch.float32, True), (4, torch.bfloat16, False), (5, torch.bfloat16, True)],
)
def test_other_dtypes(size, dtype, causal):
    q, k, v = random_qkv((2, 2, 20 * size, 8), dtype)
    inputs = q, k, v, random_qkv(q.shape, dtype, seed=9)[0]
    assert_all_right(in_jax(size, *inputs, causal=causal), exact_attention(*inputs, causal=causal))


def assert_sums_are_wide():
    """With bfloat16 input the results are the exact ones, rounded once: their sums of 480 tokens were float32."""
    q, k, v = random_qkv((1, 2, 480, 8), torch.bfloat16)
    d_out = random_qkv(q.shape, torch.bfloat16, seed=9)[0]
    with mock.patch.object(jax_ring, "TILE", 16):
        assert_all_right(in_jax(4, q, k, v, d_out), exact_attention(q, k, v, d_out))


def test_sums_are_wider_than_bfloat16():
    assert_sums_are_wide()


@pytest.mark.parametrize(
    ("size", "causal", "layout"),
    [(3, False, "contiguous"), (4, True, "contiguous"), (3, True, "zigzag"), (4, True, "striped")],
)
def test_it_equals_the_ring_in_torch(ranks, size, causal, layout):
    q, d_out, _ = random_qkv((1, 4, 24 * size, 16))
    k, v, _ = random_qkv((1, 2, 24 * size, 16), seed=1)  # grouped queries: H = 4, G = 2
    of_ranks = ranks(size, flash_ring.chunks_of_rank, [q, k, v, d_out], causal, layout)
    theirs = [unshard(list(chunks), layout) for chunks in zip(*of_ranks, strict=True)]
    right = exact_attention(q, k, v, d_out, causal=causal, fused_blocks=size)
    for results in (theirs, in_jax(size, q, k, v, d_out, causal=causal, layout=layout)):
        assert_all_right(results, right)


@settings(max_examples=6)
@given(
    st.integers(1, 8), st.integers(1, 9), st.integers(1, 5), st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    st.booleans(), st.sampled_from([None, 0.0, -0.7, 3.0]), st.integers(0, 99),
)  # fmt: skip
def test_any_shape_and_scale(size, length, head_dim, heads, causal, scale, seed):
    q, d_out, _ = random_qkv((2, heads[0], length * size, head_dim), torch.float64, seed=seed)
    k, v, _ = random_qkv((2, heads[1], length * size, head_dim), torch.float64, seed=seed + 100)
    options = {"causal": causal, "scale": scale}
    with small_tiles:
        mine = in_jax(size, q, k, v, d_out, **options, quick=True)
    assert_all_right(mine, exact_attention(q, k, v, d_out, **options))


@pytest.mark.parametrize("causal", [False, True])
def test_huge_scores(causal):
    q, k, v = random_qkv((1, 2, 24, 8), largest_score=1e4)
    out, *d_qkv = in_jax(3, q, k, v, v, causal=causal)
    assert_right(out, exact_attention(q, k, v, causal=causal)["out"])
    assert not any(x.isnan().any() for x in d_qkv)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_that_sees_no_key_is_zero_and_so_are_its_gradients(causal):
    q = torch.full((1, 1, 8, 2), 1e30)  # all scores are -inf
    v = torch.ones_like(q)
    results = in_jax(4, q, -q, v, v, causal=causal)
    assert [x.abs().max().item() for x in results] == [0.0] * 4


def test_lse_of_a_row_that_sees_no_key_is_minus_infinity():
    ring = jax_ring.Ring("ring", 2, 1, True, "contiguous", 1.0)
    huge = np.full((1, 1, 1, 8, 1), 1e30, np.float32)
    spec = PartitionSpec(None, None, None, "ring")
    run = jax.shard_map(
        partial(jax_ring.ring_forward, ring),
        mesh=jax_ring.virtual_devices(4),
        in_specs=spec,
        out_specs=spec,
    )
    assert (np.array(jax.jit(run)(huge, -huge, huge)[1]) == -math.inf).all()


def test_inside_a_larger_mesh():
    """Data parallel in one axis, the ring in the other, in the caller's own shard_map, with its checks on."""
    jax_ring.virtual_devices(6)
    mesh = Mesh(np.array(jax.devices("cpu")[:6]).reshape(2, 3), ("data", "ring"))
    spec = PartitionSpec("data", None, "ring")
    mine = partial(jax_ring.ring_attention, axis_name="ring", causal=True)
    ring = jax.shard_map(mine, mesh=mesh, in_specs=spec, out_specs=spec)
    q, k, v = random_qkv((4, 2, 12, 4))
    results = jax.jit(partial(jax_ring.gradients, ring))(*(to_jax(x) for x in (q, k, v, v)))
    assert_all_right([to_torch(x) for x in results], exact_attention(q, k, v, v, causal=True))


# What the program holds and sends, read from its jaxpr ---------------------------------------------------------------


def equations(jaxpr, times=1):
    """All equations of a jaxpr and of those inside it, each with how many times it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        runs = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else [parameter]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, runs)


def program(world_size, chunk, *, backward=True):
    """The equations of the ring: chunks (1, 1, C, 2), under a causal mask."""
    ring = jax_ring.on_mesh(jax_ring.virtual_devices(world_size), causal=True)
    x = jnp.ones((1, 1, world_size * chunk, 2))
    traced = jax.make_jaxpr(partial(jax_ring.gradients, ring) if backward else ring)(*[x] * (4 if backward else 3))
    return list(equations(traced.jaxpr))


def assert_no_square(chunk=64):
    sizes = [math.prod(var.aval.shape) for equation, _ in program(4, chunk) for var in equation.outvars]
    assert len(sizes) > 100
    assert max(sizes) < chunk**2


def test_no_square_of_a_chunk_exists():
    with mock.patch.object(jax_ring, "TILE", 16):
        assert_no_square()
    with mock.patch.object(jax_ring, "TILE", 64), pytest.raises(AssertionError):
        assert_no_square()


def test_jax_of_its_own_would_keep_every_weight():
    """Without our backward pass, what JAX saves grows with S x C on each device; with it, it does not."""

    def saved(ring, *inputs):
        kept = jax.eval_shape(lambda *x: jax.vjp(ring, *x)[1], *inputs)
        return sum(math.prod(x.shape) for x in jax.tree.leaves(kept))

    x = jnp.ones((1, 1, 256, 2))
    mesh = jax_ring.virtual_devices(4)
    with mock.patch.object(jax_ring, "TILE", 16):
        assert saved(jax_ring.on_mesh(mesh), x, x, x) < 10 * 256 * 2
        with mock.patch.object(jax_ring, "_ring", lambda *args: jax_ring.ring_forward(*args)[0]):
            assert saved(jax_ring.on_mesh(mesh), x, x, x) > 256**2


@pytest.mark.parametrize("size", WORLDS)
def test_hops(size):
    """Forwards K and V hop P - 1 times, backwards again, and dK and dV P times, in float32 at least."""

    def hops(backward):
        return sum(times for it, times in program(size, 4, backward=backward) if it.primitive.name == "ppermute")

    assert hops(backward=False) == 2 * (size - 1)
    assert hops(backward=True) == 2 * (size - 1) + 2 * (size - 1) + 2 * size


def test_the_compiled_program_permutes_in_a_ring():
    x = jnp.ones((1, 1, 16, 2))
    text = jax.jit(jax_ring.on_mesh(jax_ring.virtual_devices(4))).lower(x, x, x).compile().as_text()
    assert "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}" in text


# Rings with one mistake each -----------------------------------------------------------------------------------------

WRONG = {}
right = {
    name: getattr(jax_ring, name) for name in ("hop", "go_round", "tile_forward", "tile_backward", "scores_of", "stand")
}


def replaces(name):
    def note(mistake):
        WRONG[mistake.__name__] = mock.patch.object(jax_ring, name, mistake)
        return mistake

    return note


def permute(x, axis_name, step):
    P = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + step) % P) for i in range(P)])


@replaces("tile_forward")
def no_rescale(ring, state, nothing, row, keys):
    m, l, o = state
    (m, l_tile, o_tile), _ = right["tile_forward"](ring, (m, 0 * l, 0 * o), nothing, row, keys)
    return (m, l + l_tile, o + o_tile), nothing


@replaces("hop")
def nobody_moves(x, axis_name):
    return permute(x, axis_name, 0)


@replaces("hop")
def backwards(x, axis_name):
    return permute(x, axis_name, -1)


@replaces("hop")
def two_seats(x, axis_name):
    return permute(x, axis_name, 2)


@replaces("hop")
def keys_without_values(x, axis_name):
    return (right["hop"](x, axis_name)[0], x[1]) if x else x


@replaces("hop")
def stale_block(x, axis_name):
    """Device 0 sends, but goes on with what it had."""
    return jax.tree.map(partial(jnp.where, lax.axis_index(axis_name) == 0), x, right["hop"](x, axis_name))


@replaces("stand")
def off_by_one(ring, t, **options):
    """Query i sees the keys up to i + 1."""
    at = right["stand"](ring, t, **options)
    return at + 1 if "copies" in options else at


@replaces("scores_of")
def no_mask(ring, q, k, q_at, k_at):
    return right["scores_of"](ring, q, k, q_at, 0 * k_at)


@replaces("tile_backward")
def swapped(ring, d_q, d_kv, row, keys):
    d_q, d_kv = right["tile_backward"](ring, d_q, d_kv, row, keys)
    return d_q, d_kv[::-1]


@replaces("tile_backward")
def without_delta(ring, d_q, d_kv, row, keys):
    q, d_out, lse, delta, q_at = row
    return right["tile_backward"](ring, d_q, d_kv, (q, d_out, lse, 0 * delta, q_at), keys)


@replaces("tile_backward")
def lse_of_the_tile(ring, d_q, d_kv, row, keys):
    q, d_out, _, delta, q_at = row
    lse = jax.nn.logsumexp(right["scores_of"](ring, q, keys[0], q_at, keys[-1]), axis=-1)
    return right["tile_backward"](ring, d_q, d_kv, (q, d_out, lse, delta, q_at), keys)


@replaces("tile_backward")
def own_queries_only(ring, d_q, d_kv, row, keys):
    """dK and dV begin anew on every tile."""
    return right["tile_backward"](ring, d_q, jax.tree.map(jnp.zeros_like, d_kv), row, keys)


@replaces("go_round")
def one_hop_short(ring, *args):
    """The gradients stay where the last round left them."""
    of_rows, of_block = right["go_round"](ring, *args)
    return of_rows, permute(of_block, ring.axis_name, -1)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_ring_is_rejected(wrong):
    with WRONG[wrong], pytest.raises(AssertionError, match="numbers are wrong"):
        assert_exact(3, causal=True, quick=True)


@pytest.mark.parametrize("name", ["tile_forward", "tile_backward"])
def test_sums_in_bfloat16_are_rejected(name):
    def rounded(*args):
        sums = right[name](*args)
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), sums)

    with mock.patch.object(jax_ring, name, rounded), pytest.raises(AssertionError, match="numbers are wrong"):
        assert_sums_are_wide()


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 8, 2),) * 3, {}, r"q has shape \(2, 8, 2\); expected \(B, H, S, D\)"),
        (((1, 2, 0, 2),) * 3, {}, "every size 1 or more"),
        (((1, 2, 8, 2), (1, 2, 8, 2), (1, 2, 8, 3)), {}, "k has shape .* and v .*; expected one shape"),
        (((1, 2, 8, 2), (1, 2, 12, 2), (1, 2, 12, 2)), {}, "expected the same B, S and D"),
        (((1, 3, 8, 2), (1, 2, 8, 2), (1, 2, 8, 2)), {}, "a multiple of k's heads in q"),
        (((1, 2, 10, 2),) * 3, {}, "10 tokens on 4 devices; expected a multiple: pad"),
        (((1, 2, 12, 2),) * 3, {"layout": "zigzag"}, "expected a multiple of 8: pad"),
        (((1, 2, 8, 2),) * 3, {"layout": "spiral"}, "layout is 'spiral'; expected one of contiguous"),
        (((1, 2, 8, 2),) * 3, {"scale": math.inf}, "scale is inf; expected a finite number"),
    ],
)
def test_bad_input(shapes, options, message):
    ring = jax_ring.on_mesh(jax_ring.virtual_devices(4), **options)
    with pytest.raises(ValueError, match=message):
        ring(*(jnp.zeros(shape) for shape in shapes))


def test_bad_dtypes():
    ring = jax_ring.on_mesh(jax_ring.virtual_devices(4))
    x = jnp.zeros((1, 1, 8, 2))
    with pytest.raises(ValueError, match="q is int32 and q int32; expected one floating dtype"):
        ring(*[x.astype(jnp.int32)] * 3)
    with pytest.raises(ValueError, match="v is bfloat16 and q float32; expected one floating dtype"):
        ring(x, x, x.astype(jnp.bfloat16))


def test_bad_meshes():
    mesh = Mesh(np.array(jax_ring.virtual_devices(4).devices).reshape(2, 2), ("data", "ring"))
    with pytest.raises(ValueError, match=r"axes .*; expected one"):
        jax_ring.on_mesh(mesh)
    with pytest.raises(ValueError, match=r"8 CPU device\(s\); expected 9"):
        jax_ring.virtual_devices(9)


def test_outside_of_shard_map():
    x = jnp.zeros((1, 1, 8, 2))
    with pytest.raises(ValueError, match="no mesh axis 'ring' here; expected one: call this inside"):
        jax_ring.ring_attention(x, x, x, axis_name="ring")
