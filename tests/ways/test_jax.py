"""The ring in JAX and its blocks: numbers, gradients, what it keeps in memory, and what it sends."""

import math
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from ringlab.ring.layouts import shard, unshard
from tests.attention import assert_four, expected, grouped_inputs
from tests.concepts import MISSING

jax = pytest.importorskip("jax", reason=MISSING["jax"])
jnp, lax = jax.numpy, jax.lax
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from ringlab.ways.jax import block as jax_block  # noqa: E402
from ringlab.ways.jax import ring as jax_ring  # noqa: E402

OPTIONS = {  # of the compiler
    "xla_backend_optimization_level": 0,  # quick to compile, slow to run
    "xla_allow_excess_precision": False,  # else XLA leaves out roundings to 16 bits that the program asks for
}


def to_jax(x):
    return jnp.asarray(x.float().numpy(), jnp.bfloat16) if x.dtype == torch.bfloat16 else jnp.asarray(x.numpy())


def to_torch(x):
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(x, np.float32)).bfloat16()
    return torch.tensor(np.array(x))


def assert_all_right(mine, *inputs, layout=None, **options):
    """out, dq, dk, dv are as near as rounding allows to full attention, whatever the layout was."""
    assert_four(mine, expected(*inputs, fused_blocks=0, **options))


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


# The ring ------------------------------------------------------------------------------------------------------------

WORLDS = (1, 3, 4)


def deal(x, layout, world_size):
    return torch.cat([shard(x, layout, rank, world_size) for rank in range(world_size)], dim=2)


def in_jax(world_size, q, k, v, d_out, *, layout="contiguous", tile=4, **options):
    """out, dq, dk, dv of the ring on `world_size` virtual devices, whole, in torch."""
    with jax.enable_x64(q.dtype == torch.float64), mock.patch.object(jax_block, "TILE", tile):
        ring = jax_ring.on_mesh(jax_ring.virtual_devices(world_size), layout=layout, **options)
        dealt = [to_jax(deal(x, layout, world_size)) for x in (q, k, v, d_out)]
        results = jax.jit(partial(jax_ring.gradients, ring), compiler_options=OPTIONS)(*dealt)
        return [unshard(to_torch(x).chunk(world_size, dim=2), layout) for x in results]


@pytest.mark.parametrize(
    ("size", "chunk", "options"),
    [
        (1, 1, {"causal": True}),
        (3, 6, {"causal": True, "layout": "zigzag"}),
        (4, 7, {"causal": True, "layout": "striped", "scale": -0.7}),
    ],
    ids=str,
)
def test_numbers_and_gradients_in_float64(size, chunk, options):
    """Of 4 query heads on 2. A chunk of 7 is two tiles."""
    inputs = grouped_inputs(2, 4, 2, chunk * size, 3, torch.float64)
    assert_all_right(in_jax(size, *inputs, **options), *inputs, **options)


@pytest.mark.parametrize(("size", "dtype", "options"), [(4, torch.bfloat16, {}), (3, torch.float16, {"causal": True})])
def test_other_dtypes(size, dtype, options):
    inputs = grouped_inputs(2, 2, 2, 20 * size, 8, dtype)
    assert_all_right(in_jax(size, *inputs, **options), *inputs, **options)


def test_a_fully_masked_row_is_zero_and_so_are_its_gradients():
    q = torch.full((1, 1, 8, 2), 1e30)  # all scores are -inf
    assert [x.count_nonzero() for x in in_jax(1, q, -q, torch.ones_like(q), torch.ones_like(q))] == [0] * 4


def test_inside_a_larger_mesh():
    """Data parallel in one axis, the ring in the other, in the caller's own shard_map, with its checks on."""
    with mock.patch.object(jax.config, "update") as update:
        jax_ring.virtual_devices(3)
    update.assert_called_once_with("jax_num_cpu_devices", 8)  # all that there are, and never fewer
    mesh = Mesh(np.array(jax_ring.virtual_devices(8).devices[:6]).reshape(2, 3), ("data", "sequence"))
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


@pytest.mark.parametrize("tile", [16, 64])
def test_no_square_of_a_block_exists(tile):
    ring, x = jax_ring.on_mesh(jax_ring.virtual_devices(1), causal=True), jnp.ones((1, 1, 64, 2))
    with mock.patch.object(jax_block, "TILE", tile):
        traced = jax.make_jaxpr(partial(jax_ring.gradients, ring))(x, x, x, x)
    precisions = {it.params.get("precision") for it, _ in equations(traced.jaxpr) if it.primitive.name == "dot_general"}
    assert precisions == {(lax.Precision.HIGHEST,) * 2}  # a TPU would round float32 to bfloat16
    sizes = [math.prod(var.aval.shape) for equation, _ in equations(traced.jaxpr) for var in equation.outvars]
    assert len(sizes) > 100
    assert (max(sizes) < 64**2) == (tile < 64)


@pytest.mark.parametrize("size", WORLDS)
def test_hops(size):
    """K and V hop P - 1 times forward, and again backward. So do dK and dV, in float32 at least."""
    ring = jax_ring.on_mesh(jax_ring.virtual_devices(size), causal=True)
    x = jnp.ones((1, 1, 4 * size, 2), jnp.bfloat16)
    assert hops(ring, x, x, x) == ["bfloat16"] * 2 * (size - 1)
    both = hops(partial(jax_ring.gradients, ring), x, x, x, x)
    assert both == ["bfloat16"] * 4 * (size - 1) + ["float32"] * 2 * (size - 1)


# Bad input -----------------------------------------------------------------------------------------------------------


def on_four(*shapes, **options):
    return jax_ring.on_mesh(jax_ring.virtual_devices(4), **options)(*(jnp.zeros(shape) for shape in shapes))


X = jnp.ones((1, 1, 8, 2))


def on_two_axes():
    jax_ring.on_mesh(Mesh(np.array(jax_ring.virtual_devices(4).devices).reshape(2, 2), ("data", "ring")))


@pytest.mark.parametrize(
    ("refuses", "message"),
    [
        (lambda: on_four((1, 2, 8, 2), (1, 2, 8, 2), (1, 2, 8, 3)), "k has shape .* and v .*; expected one shape"),
        (lambda: on_four(*[(1, 2, 10, 2)] * 3), "10 tokens on 4 devices; expected a multiple: pad"),
        (lambda: on_four(*[(1, 2, 12, 2)] * 3, layout="zigzag"), "expected a multiple of 8: pad"),
        (lambda: on_four(*[(1, 2, 8, 2)] * 3, scale=math.inf), "scale is inf; expected a finite number"),
        (on_two_axes, r"axes .*; expected one"),
        (lambda: jax_ring.virtual_devices(9), r"8 CPU device\(s\); expected 9"),
        (lambda: jax_ring.ring_attention(X, X.astype(int), X, axis_name="ring"), "k has dtype torch.int32; expected"),
        (lambda: jax_ring.ring_attention(X, X, X, axis_name="ring"), "no mesh axis 'ring' here"),
    ],
)
def test_bad_input(refuses, message):
    with pytest.raises(ValueError, match=message):
        refuses()
