"""The ring in JAX, the paper's own language: one program for all devices of a mesh, compiled as a whole.

    a hop       ppermute, from i to i+1 mod P   in place of send and receive in ring_attn.py
    the rounds  scan over t = 0 ... P-2         then one more computation, on the last block, which hops no further
    gradients   custom_vjp, weights from lse    as in backward.py; JAX's own would keep the weights of all rounds

scan(body, carry, xs) returns (carry, outputs). These rounds have no outputs.
The paper's listing scans P rounds, one hop more than K and V need, and one more than dK and dV need. In both, dK and dV
hop after the work of a round, so their hops are not hidden. Here the last one is, by the work on the own block.

Shapes: q and out are chunks (B, H, C, D), k and v (B, G, C, D), of C = S/P tokens. Inside, the heads of q are grouped:
(B, G, H/G, C, D), and lse is (B, G, H/G, C, 1).

    $ python -m ringlab.ways.jax.ring
    4 devices, S = 256, 8 query heads on 2, float32, against full attention in float64
    contiguous
    ok    out: largest error 3.9e-07, rounding allows 1.0e-05 (float32 sums)
    ...

It needs JAX: pip install '.[jax]'. Four virtual devices share the CPU.

Before: jax/block.py, what a device computes between two hops; flash_ring.py, this ring in PyTorch. After: your own
model.
Source: Liu et al. 2024, appendix A, figure 4.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ringlab.basics.chunks import check_grouped_chunks
from ringlab.basics.naive_attention import resolve_scale
from ringlab.ring.cases import random_inputs, report_ranks
from ringlab.ring.layouts import check_layout, positions, shard
from ringlab.support.expect import expect
from ringlab.support.extras import extra
from ringlab.support.rounding import exact_attention

with extra("jax", __name__):
    import jax
    import jax.numpy as jnp
    from jax import Array, lax
    from jax.sharding import Mesh, PartitionSpec

from ringlab.ways.jax.block import attend, block_backward, finish, start


@dataclass(frozen=True)
class Settings:
    """What is known while JAX traces, so it is compiled in."""

    axis_name: str
    causal: bool
    layout: str
    scale: float


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: str,
    causal: bool = False,
    layout: str = "contiguous",
    scale: float | None = None,
) -> Array:
    """This device's rows of attention over the whole sequence, differentiable. Call it inside shard_map.

    q (B, H, C, D), k and v (B, G, C, D): chunks along the mesh axis `axis_name`, dealt in this layout; H a multiple of
    G. Returns out (B, H, C, D) in q's dtype; statistics and sums are float32 at least. Raises ValueError for shapes,
    dtypes, a scale or a layout that do not fit, while JAX traces. Liu et al. 2024, appendix A.
    """
    check_chunks(q, k, v)
    (B, H, C, D), G = q.shape, k.shape[1]
    try:
        P = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(f"no mesh axis {axis_name!r} here; expected one: call this inside jax.shard_map") from None
    check_layout(layout, C * P, P)
    ring = Settings(axis_name, causal, layout, resolve_scale(scale, D))
    return _ring(ring, q.reshape(B, G, H // G, C, D), k, v).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Settings, q: Array, k: Array, v: Array) -> Array:
    return jax_forward(ring, q, k, v)[0]


def _ring_saving(ring: Settings, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    out, lse = jax_forward(ring, q, k, v)
    return out, (q, k, v, out, lse)


def jax_forward(ring: Settings, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """q (B, G, H/G, C, D), k and v (B, G, C, D) -> out, of q's shape and dtype, and lse (B, G, H/G, C, 1)."""
    last = lax.axis_size(ring.axis_name) - 1
    q_at = positions_in_round(ring, q, 0)

    def attend_block(state: tuple, kv: tuple[Array, Array], t: Array | int) -> tuple:
        return attend(state, q, *kv, q_at, positions_in_round(ring, q, t), scale=ring.scale)

    def one_round(carry: tuple, t: Array) -> tuple[tuple, None]:
        state, kv = carry
        arriving = hop(kv, ring.axis_name)  # needs nothing that is computed here, so XLA may do both at once
        return (attend_block(state, kv, t), arriving), None

    (state, kv), _ = lax.scan(one_round, (start(q), (k, v)), jnp.arange(last))
    out, lse = finish(attend_block(state, kv, last))  # after it no device needs another block
    return out.astype(q.dtype), lse


def jax_backward(ring: Settings, saved: tuple[Array, ...], d_out: Array) -> tuple[Array, ...]:
    """dq, dk and dv, shaped like q, k and v and in their dtype, from what the forward pass saved."""
    q, k, v, out, lse = saved
    last = lax.axis_size(ring.axis_name) - 1
    q_at = positions_in_round(ring, q, 0)
    delta = (d_out.astype(lse.dtype) * out.astype(lse.dtype)).sum(axis=-1, keepdims=True)

    def add_block(sums: tuple, kv: tuple[Array, Array], t: Array | int) -> tuple:
        parts = block_backward(q, *kv, d_out, lse, delta, q_at, positions_in_round(ring, q, t), scale=ring.scale)
        return tuple(x + part for x, part in zip(sums, parts, strict=True))

    def one_round(carry: tuple, t: Array) -> tuple[tuple, None]:
        sums, kv = carry
        arriving = hop(kv, ring.axis_name)
        d_q, *d_kv = add_block(sums, kv, t)
        return ((d_q, *hop(d_kv, ring.axis_name)), arriving), None

    d_q, *coming = (jnp.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    if last:
        carry = (d_q, *coming), hop((k, v), ring.axis_name)
        (sums, kv), _ = lax.scan(one_round, carry, jnp.arange(1, last))
        d_q, *d_kv = add_block(sums, kv, last)
        coming = hop(d_kv, ring.axis_name)  # home, while the device computes on its own block, whose sums stay there
    d_q, *at_home = add_block((d_q, *(jnp.zeros_like(x) for x in coming)), (k, v), 0)
    return tuple(x.astype(q.dtype) for x in (d_q, *(a + b for a, b in zip(at_home, coming, strict=True))))


_ring.defvjp(_ring_saving, jax_backward)


def hop(x: Any, axis_name: str) -> Any:
    """Pass x, any number of arrays, to the next device and return those of the previous device."""
    P = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + 1) % P) for i in range(P)])


def positions_in_round(ring: Settings, q: Array, t: Array | int) -> Array:
    """The positions (C, 1) of the tokens of block (r - t) mod P in the sequence. Without a mask all are 0."""
    P = lax.axis_size(ring.axis_name)
    table = np.stack([positions(ring.layout, P * q.shape[-2], rank, P).numpy() for rank in range(P)])  # (P, C)
    return jnp.asarray(table * ring.causal)[(lax.axis_index(ring.axis_name) - t) % P, :, None]


def on_mesh(mesh: Mesh, **settings: Any) -> Callable[[Array, Array, Array], Array]:
    """The ring for whole arrays: a compiled function of q (B, H, S, D) and k, v (B, G, S, D), which are cut along S.

    `settings` are the options of `ring_attention`. Chunk r of P must hold the tokens that the layout gives to rank r.
    Raises ValueError for a mesh of two axes or more. The function raises it as `ring_attention` does, and when P does
    not divide S.
    """
    expect(len(mesh.axis_names) == 1, f"the mesh has axes {mesh.axis_names}", "one: use your own shard_map for more")
    spec = PartitionSpec(None, None, *mesh.axis_names)
    on_device = partial(ring_attention, axis_name=mesh.axis_names[0], **settings)
    ring = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)

    @jax.jit
    def attention(q: Array, k: Array, v: Array) -> Array:
        check_chunks(q, k, v)
        pad = "a multiple: pad on the right, with causal=True (without a mask the padding would be seen)"
        expect(q.shape[2] % mesh.size == 0, f"{q.shape[2]} tokens on {mesh.size} devices", pad)
        return ring(q, k, v)

    return attention


def check_chunks(q: Array, k: Array, v: Array) -> None:
    """Raise ValueError as `check_grouped_chunks` does in PyTorch: for shapes and dtypes."""
    dtypes = [getattr(torch, x.dtype.name, torch.bool) for x in (q, k, v)]
    like = [torch.zeros((), dtype=dtype).expand(x.shape) for x, dtype in zip((q, k, v), dtypes, strict=True)]
    check_grouped_chunks(*like)


def virtual_devices(number: int) -> Mesh:
    """A mesh of so many virtual devices on this machine's CPU, with one axis, "ring". Call it before JAX computes.

    Raises ValueError when JAX is at work already, and with fewer.
    """
    with contextlib.suppress(RuntimeError):  # JAX is at work: it keeps the devices that it has
        jax.config.update("jax_num_cpu_devices", max(number, jax.config.jax_num_cpu_devices))
    devices = jax.devices("cpu")
    given = f"JAX is at work with {len(devices)} CPU device(s)"
    expect(len(devices) >= number, given, f"{number}: call this first of all")
    return Mesh(np.array(devices[:number]), ("ring",))


def gradients(attention: Callable[..., Array], q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, ...]:
    """out, dq, dk and dv of any attention."""
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(d_out)


def main() -> int:
    B, H, G, S, D, P = 1, 8, 2, 256, 64, 4
    mesh, ok = virtual_devices(P), True
    whole = random_inputs(B, H, G, S, D)
    print(f"{P} devices, S = {S}, {H} query heads on {G}, float32, against full attention in float64")
    for causal, layout in ((False, "contiguous"), (True, "zigzag")):
        dealt = [torch.cat([shard(x, layout, rank, P) for rank in range(P)], dim=2).numpy() for x in whole]
        results = gradients(on_mesh(mesh, causal=causal, layout=layout), *dealt)
        of_ranks = zip(*(torch.from_numpy(np.array(x)).chunk(P, dim=2) for x in results), strict=True)
        print(f"{'causal, ' if causal else ''}{layout}")
        ok &= report_ranks(list(of_ranks), layout, exact_attention(*whole, causal=causal, fused_blocks=P))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
