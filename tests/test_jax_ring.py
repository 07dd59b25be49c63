"""The ring in JAX: numbers and gradients on 1 to 8 devices, what it keeps in memory and sends; and with mistakes."""

import inspect
import math
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from ringlab.support.rounding import exact_attention, half_step
from ringlab.training.layouts import LAYOUTS, shard, unshard
from tests.extras import MISSING
from tests.grouped_queries import grouped_inputs
from tests.in_jax import OPTIONS, assert_all_right, equations, to_jax, to_torch
from tests.planted import Mistakes

jax = pytest.importorskip("jax", reason=MISSING["jax"])
jnp, lax = jax.numpy, jax.lax
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from ringlab.training import jax_block, jax_ring  # noqa: E402
from ringlab.training.jax_ring import hop, positions_in_round  # noqa: E402

WORLDS = (1, 2, 3, 4, 8)


def deal(x, layout, world_size):
    return torch.cat([shard(x, layout, rank, world_size) for rank in range(world_size)], dim=2)


def in_jax(world_size, q, k, v, d_out, *, causal=False, layout="contiguous", scale=None):
    """out, dq, dk, dv of the ring on `world_size` virtual devices, whole, in torch."""
    with jax.enable_x64(q.dtype == torch.float64):
        ring = jax_ring.on_mesh(jax_ring.virtual_devices(world_size), causal=causal, layout=layout, scale=scale)
        dealt = [to_jax(deal(x, layout, world_size)) for x in (q, k, v, d_out)]
        results = jax.jit(partial(jax_ring.gradients, ring), compiler_options=OPTIONS)(*dealt)
        return [unshard(to_torch(x).chunk(world_size, dim=2), layout) for x in results]


def assert_exact(world_size, *, chunk=7, layout="contiguous", **options):
    """out, dq, dk, dv in float64 are those of full attention, with 4 query heads on 2. A chunk of 7 is two tiles."""
    inputs = grouped_inputs(2, 4, 2, chunk * world_size, 3, torch.float64)
    with mock.patch.object(jax_block, "TILE", 4):
        mine = in_jax(world_size, *inputs, layout=layout, **options)
    assert_all_right(mine, *inputs, **options)


@pytest.mark.parametrize("size", WORLDS)
def test_numbers_and_gradients_in_float64(size):
    layout = LAYOUTS[size % 3]  # each one with odd and with even numbers of devices
    assert_exact(size, causal=True, layout=layout, chunk=6 if layout == "zigzag" else 7)


@pytest.mark.parametrize(("size", "scale"), [(3, -0.7), (8, None)])
def test_without_a_mask(size, scale):
    assert_exact(size, scale=scale)


@pytest.mark.parametrize(
    ("size", "dtype", "causal"), [(3, torch.float32, True), (4, torch.bfloat16, False), (5, torch.float16, True)]
)
def test_other_dtypes(size, dtype, causal):
    inputs = grouped_inputs(2, 2, 2, 20 * size, 8, dtype)
    assert_all_right(in_jax(size, *inputs, causal=causal), *inputs, causal=causal)


def test_delta_is_summed_in_float32_whatever_the_dtype():
    """With large values delta is large beside dP - delta, so a delta of 16-bit products would spoil dq.

    The exact dq is that of the saved out, which is bfloat16. Its allowed error: half a step of bfloat16, and 2 + √D
    roundings in float32 for dP, for delta and for p each, as in ringlab/support/rounding.py.
    """
    P, D = 2, 8
    q, k, v, d_out = grouped_inputs(1, 1, 1, 16 * P, D, torch.bfloat16)
    v = v + 64
    right = exact_attention(q, k, v)
    out, lse = right["out"].exact.bfloat16(), right["lse"].exact.float()
    qd, kd, vd, dd = (x.double() for x in (q, k, v, d_out))
    p = torch.exp(qd @ kd.mT / math.sqrt(D) - lse.double()[..., None])
    d_p, delta = dd @ vd.mT, (dd * out.double()).sum(dim=-1, keepdim=True)
    exact = p * (d_p - delta) @ kd / math.sqrt(D)
    sizes = dd.abs() @ vd.abs().mT + (dd * out.double()).abs().sum(dim=-1, keepdim=True) + (d_p - delta).abs()
    sums = (2 + math.sqrt(D)) * 2**-24 * (p * sizes) @ kd.abs() / math.sqrt(D)

    ring = jax_ring.Settings("ring", False, "contiguous", D**-0.5)
    spec = PartitionSpec(None, None, None, "ring")
    kv_spec = PartitionSpec(None, None, "ring")
    saved = to_jax(q[:, :, None]), to_jax(k), to_jax(v), to_jax(out[:, :, None]), to_jax(lse[:, :, None, :, None])
    backward = jax.shard_map(
        partial(jax_ring.ring_backward, ring),
        mesh=jax_ring.virtual_devices(P),
        in_specs=((spec, kv_spec, kv_spec, spec, spec), spec),
        out_specs=(spec, kv_spec, kv_spec),
    )
    d_q = to_torch(jax.jit(backward, compiler_options=OPTIONS)(saved, to_jax(d_out[:, :, None]))[0])[:, :, 0]
    assert ((d_q.double() - exact).abs() <= sums + half_step(exact.abs() + sums, torch.bfloat16)).all()


def test_inside_a_larger_mesh():
    """Data parallel in one axis, the ring in the other, in the caller's own shard_map, with its checks on."""
    jax_ring.virtual_devices(6)
    mesh = Mesh(np.array(jax.devices("cpu")[:6]).reshape(2, 3), ("data", "sequence"))
    spec = PartitionSpec("data", None, "sequence")
    mine = partial(jax_ring.ring_attention, axis_name="sequence", causal=True)
    ring = jax.shard_map(mine, mesh=mesh, in_specs=spec, out_specs=spec)
    inputs = grouped_inputs(4, 2, 1, 12, 4)
    results = jax.jit(partial(jax_ring.gradients, ring), compiler_options=OPTIONS)(*(to_jax(x) for x in inputs))
    assert_all_right([to_torch(x) for x in results], *inputs, causal=True)


# What the program holds and sends, read from its jaxpr ---------------------------------------------------------------


def hops(function, *inputs):
    """The dtypes of all arrays that a device passes on, sorted."""
    found = equations(jax.make_jaxpr(function)(*inputs).jaxpr)
    return sorted(
        var.aval.dtype.name
        for equation, times in found
        for var in equation.invars * times
        if equation.primitive.name == "ppermute"
    )


@pytest.mark.parametrize("size", WORLDS)
def test_hops(size):
    """K and V hop P - 1 times forward, and again backward. So do dK and dV, in float32 at least."""
    ring = jax_ring.on_mesh(jax_ring.virtual_devices(size), causal=True)
    x = jnp.ones((1, 1, 4 * size, 2), jnp.bfloat16)
    assert hops(ring, x, x, x) == ["bfloat16"] * 2 * (size - 1)
    both = hops(partial(jax_ring.gradients, ring), x, x, x, x)
    assert both == ["bfloat16"] * 4 * (size - 1) + ["float32"] * 2 * (size - 1)


def test_the_program_permutes_in_a_ring():
    x = jnp.ones((1, 1, 16, 2))
    text = jax.jit(jax_ring.on_mesh(jax_ring.virtual_devices(4))).lower(x, x, x).as_text()
    assert "source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]>" in text


def test_jax_of_its_own_would_keep_every_weight():
    """Without our backward pass, what JAX saves grows with S x C on each device; with it, it does not."""

    def saved(ring, *inputs):
        kept = jax.eval_shape(lambda *x: jax.vjp(ring, *x)[1], *inputs)
        return sum(math.prod(x.shape) for x in jax.tree.leaves(kept))

    x = jnp.ones((1, 1, 256, 2))
    mesh = jax_ring.virtual_devices(4)
    with mock.patch.object(jax_block, "TILE", 16):
        assert saved(jax_ring.on_mesh(mesh), x, x, x) < 10 * 256 * 2
        with mock.patch.object(jax_ring, "_ring", lambda *args: jax_ring.ring_forward(*args)[0]):
            assert saved(jax_ring.on_mesh(mesh), x, x, x) > 256**2


# Rings with one mistake each -----------------------------------------------------------------------------------------

MISTAKES = Mistakes()


def permute(x, axis_name, step):
    P = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + step) % P) for i in range(P)])


@MISTAKES.replaces(jax_ring, "hop")
def to_the_previous_device(x, axis_name):
    return permute(x, axis_name, -1)


@MISTAKES.replaces(jax_ring, "hop")
def keys_without_values(x, axis_name):
    return (hop(x, axis_name)[0], x[1])


@MISTAKES.replaces(jax_ring, "hop")
def stale_block(x, axis_name):
    """Device 0 sends, but goes on with what it had."""
    return jax.tree.map(partial(jnp.where, lax.axis_index(axis_name) == 0), x, hop(x, axis_name))


@MISTAKES.replaces(jax_ring, "hop")
def gradients_not_home(x, axis_name):
    """The gradients of K and V stay where the last round left them: the only hop outside the rounds is missing."""
    caller = inspect.stack()[1].function
    return x if caller == "ring_backward" else hop(x, axis_name)


@MISTAKES.replaces(jax_ring, "positions_in_round")
def positions_of_another_block(ring, q, t):
    return positions_in_round(ring, q, t + 1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_ring_is_rejected(mistake):
    with MISTAKES[mistake](), pytest.raises(AssertionError, match="numbers are wrong"):
        assert_exact(3, causal=True)


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
