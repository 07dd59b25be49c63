"""The ring in JAX, the paper's own language: one program for all devices of a mesh, compiled as a whole.

    a hop       ppermute, from i to i+1 mod P   where ring_attn.py sends and receives
    the rounds  scan over t = 0 ... P-2         and one more computation on the last block, which goes nowhere
    gradients   custom_vjp, weights from lse    as in backward.py: JAX's own would keep all weights of all rounds

The paper's listing scans P rounds, one hop more than K and V need. Here as there dK and dV hop after the round's work,
and are not hidden behind it.

Shapes: q and out are chunks (B, H, C, D), k and v (B, G, C, D), of C = S/P tokens. Inside, queries and
keys lie in n tiles of at most 256, (n, B, G, T, D), so that scores exist as one tile (B, G, T, T) at a time.

    $ python -m training.jax_ring
    4 devices or processes, S = 512, 8 query heads on 2, float32, against full attention in float64
    contiguous
    ok    out, JAX: largest error 4.1e-07, rounding allows 3.0e-06
    ok    out, torch: largest error 4.3e-07, rounding allows 3.0e-06
    ok    out, JAX less torch: largest error 1.8e-07, rounding allows 5.0e-06
    ...
    causal, zigzag
    ...

It needs JAX, pip install -r requirements-jax.txt, and no accelerator: four virtual devices share this machine's CPU.

Before: flash_ring.py, the same in PyTorch. After: your own model.
Source: Liu et al. 2024, appendix A, figure 4; the steps within a tile: Dao et al. 2022, algorithms 1 and 4.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from basics.naive_attention import resolve_scale
from support.processes import launch
from support.rounding import exact_attention, report
from training import flash_ring
from training.causal import check_layout, positions, shard, unshard

try:
    import jax
    import jax.numpy as jnp
    from jax import Array, lax
    from jax.sharding import Mesh, PartitionSpec
except ModuleNotFoundError as error:
    missing = f"{error}; expected JAX, on Python 3.11 or newer: pip install -r requirements-jax.txt"
    if __name__ == "__main__":
        sys.exit(missing)
    raise ModuleNotFoundError(missing, name=error.name) from None

TILE = 256  # tokens; as in ring_attn.py
State = tuple[Array, Array, Array]  # m and l (n, B, G, T), o (n, B, G, T, D)
Pair = tuple[Array, Array]  # k and v, or their gradients

product = partial(jnp.einsum, precision="highest")  # a TPU would round float32 to bfloat16 before it multiplies


@dataclass(frozen=True)
class Ring:
    """What is known before any number is, and so compiled in."""

    axis_name: str
    chunk: int  # C
    heads: int  # H/G
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
    """This device's rows of attention over the whole sequence, differentiable; to be called inside shard_map.

    q (B, H, C, D), k and v (B, G, C, D): chunks along the mesh axis `axis_name`, dealt as `layout` says; H a multiple
    of G. Returns out (B, H, C, D) in q's dtype; statistics and sums are float32 at least. Raises ValueError for shapes,
    dtypes, a scale or a layout that do not fit, while JAX traces. Liu et al. 2024, appendix A.
    """
    check_chunks(q, k, v)
    (B, H, C, D), G = q.shape, k.shape[1]
    try:
        P = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(f"no mesh axis {axis_name!r} here; expected one: call this inside jax.shard_map") from None
    check_layout(layout, C * P, P)
    ring = Ring(axis_name, C, H // G, causal, layout, resolve_scale(scale, D))
    rows = q.reshape(B, G, H // G * C, D)  # the query heads of a group one below the other: grouped_query.py
    out = _ring(ring, *(tiles(x) for x in (rows, k, v)))
    return untile(out, rows.shape[2]).reshape(q.shape)


def on_mesh(mesh: Mesh, **settings: Any) -> Callable[[Array, Array, Array], Array]:
    """The ring for whole arrays: a compiled function of q (B, H, S, D) and k, v (B, G, S, D), cut along S.

    `settings` are the options of `ring_attention`. Chunk r of P must hold the tokens that `layout` gives to rank r.
    Raises ValueError for a mesh of two axes or more, and the function as `ring_attention` does, or where P does not
    divide S.
    """
    if len(mesh.axis_names) != 1:
        raise ValueError(f"the mesh has axes {mesh.axis_names}; expected one: use your own shard_map for more")
    spec = PartitionSpec(None, None, *mesh.axis_names)
    on_device = partial(ring_attention, axis_name=mesh.axis_names[0], **settings)
    ring = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)

    @jax.jit
    def attention(q: Array, k: Array, v: Array) -> Array:
        check_chunks(q, k, v)
        if q.shape[2] % mesh.size:
            raise ValueError(
                f"{q.shape[2]} tokens on {mesh.size} devices; expected a multiple: pad on the right, with causal=True "
                f"(without a mask the padding would be seen)"
            )
        return ring(q, k, v)

    return attention


def check_chunks(q: Array, k: Array, v: Array) -> None:
    """Raise ValueError unless q is (B, H, C, D), k and v (B, G, C, D), H a multiple of G, of one floating dtype."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}; expected (B, H, S, D), every size 1 or more")
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q {q.dtype}; expected one floating dtype: use x.astype(dtype)")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}; expected one shape (B, G, S, D) for both")
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has shape {q.shape} and k {k.shape}; expected the same B, S and D, and a multiple of k's heads in q"
        )


def tiles(x: Array, padding: int = 0) -> Array:
    """x (B, G, C, D) -> (n, B, G, T, D), T <= TILE: as few tiles as can be, of one length, the last ones padded."""
    B, G, C, D = x.shape
    n = -(-C // TILE)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -C % n), (0, 0)), constant_values=padding)
    return jnp.moveaxis(x.reshape(B, G, n, -1, D), 2, 0)


def untile(x: Array, length: int) -> Array:
    """Undo `tiles`: (n, B, G, T, D) -> (B, G, length, D)."""
    n, B, G, T, D = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(B, G, n * T, D)[:, :, :length]


def stand(ring: Ring, t: Array | int, *, padding: int = 0, copies: int = 1) -> Array:
    """Where the tokens of block j = (r - t) mod P stand in the sequence: (n, 1, 1, T, 1). Without a mask, all at 0."""
    P = lax.axis_size(ring.axis_name)  # the table below has S numbers on every device, next to a chunk of K very few
    at = np.stack([positions(ring.layout, P * ring.chunk, rank, P).numpy() for rank in range(P)]) * ring.causal
    at = jnp.asarray(at)[(lax.axis_index(ring.axis_name) - t) % P]  # (C,)
    return tiles(jnp.tile(at, copies)[None, None, :, None], padding)


def hop(x: Any, axis_name: str) -> Any:
    """Pass x, any number of arrays, to the next device and return the previous device's."""
    P = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + 1) % P) for i in range(P)])


def go_round(ring: Ring, work: Callable, rows: Any, of_rows: Any, block: Any, of_block: Any) -> tuple[Any, Any]:
    """Let every block meet all queries: `rows` and their results `of_rows` stay, `block` and `of_block` travel.

    All are tiles, (n, ...). work(ring, of_rows, of_block, rows, block) returns the new results of one tile of queries
    and one of keys. Returns of_rows and of_block; these are home again, after P hops. Liu et al. 2024, figure 4.
    """
    rows = *rows, stand(ring, 0, copies=ring.heads)

    # A scan returns (what it carried, what each step left), so of_block and of_rows: [::-1] puts the rows first.

    def meet(of_rows: Any, block: Any, of_block: Any, t: Array | int) -> tuple[Any, Any]:  # all queries, one block
        block = *block, stand(ring, t, padding=np.iinfo(np.int32).max)  # no query sees the padding

        def one_row(of_block: Any, row: Any) -> tuple[Any, Any]:  # one tile of queries, all tiles of the block
            of_row, row = row

            def one_tile(of_row: Any, tile: Any) -> tuple[Any, Any]:
                of_tile, keys = tile
                seen = keys[-1].min() <= row[-1].max()  # else the whole tile is in the future
                return lax.cond(seen, partial(work, ring), lambda x, y, *_: (x, y), of_row, of_tile, row, keys)

            return lax.scan(one_tile, of_row, (of_block, block))[::-1]

        return lax.scan(one_row, of_block, (of_rows, rows))[::-1]

    def one_round(carry: Any, t: Array) -> tuple[Any, None]:
        of_rows, block, of_block = carry
        coming = hop(block, ring.axis_name)  # needs nothing that is computed here, so XLA may do both at once
        of_rows, of_block = meet(of_rows, block, of_block, t)
        return (of_rows, coming, hop(of_block, ring.axis_name)), None

    last = lax.axis_size(ring.axis_name) - 1
    carry, _ = lax.scan(one_round, (of_rows, block, of_block), jnp.arange(last))
    of_rows, of_block = meet(*carry, last)  # after it nobody needs another block
    return of_rows, hop(of_block, ring.axis_name)


def scores_of(ring: Ring, q: Array, k: Array, q_at: Array, k_at: Array) -> Array:
    """A tile of scores (B, G, T, T) in float32 at least, with -inf for later keys."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = product("bgid,bgjd->bgij", q.astype(wide) * ring.scale, k.astype(wide))
    return jnp.where(k_at.swapaxes(-2, -1) <= q_at, scores, -jnp.inf)


def tile_forward(ring: Ring, state: State, nothing: tuple, row: Any, keys: Any) -> tuple[State, tuple]:
    """`update` of basics/online_softmax.py: fold a tile of keys and values into m, l (B, G, T) and o (B, G, T, D)."""
    (m, l, o), (q, q_at), (k, v, k_at) = state, row, keys
    scores = scores_of(ring, q, k, q_at, k_at)
    m_new = jnp.maximum(m, scores.max(axis=-1))
    finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # a row that has seen no key would compute -inf - (-inf)
    rescale = jnp.exp(m - finite)
    weights = jnp.exp(scores - finite[..., None])
    o_new = rescale[..., None] * o + product("bgij,bgjd->bgid", weights, v.astype(o.dtype))
    return (m_new, rescale * l + weights.sum(axis=-1), o_new), nothing


def tile_backward(ring: Ring, d_q: Array, d_kv: Pair, row: Any, keys: Any) -> tuple[Array, Pair]:
    """`tile_backward` of backward.py: add to dq, and to dk and dv, what a tile of queries and one of keys give."""
    (q, d_out, lse, delta, q_at), (k, v, k_at) = row, keys
    weights = jnp.exp(scores_of(ring, q, k, q_at, k_at) - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])
    q, k, v, d_out = (x.astype(lse.dtype) for x in (q, k, v, d_out))
    d_weights = product("bgid,bgjd->bgij", d_out, v)
    d_scores = ring.scale * weights * (d_weights - delta[..., None])
    d_k = d_kv[0] + product("bgij,bgid->bgjd", d_scores, q)
    d_v = d_kv[1] + product("bgij,bgid->bgjd", weights, d_out)
    return d_q + product("bgij,bgjd->bgid", d_scores, k), (d_k, d_v)


def ring_forward(ring: Ring, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Tiles (n, B, G, T, D) of the device's chunks -> out, of q's shape and dtype, and lse (n, B, G, T)."""
    o = jnp.zeros_like(q, dtype=jnp.promote_types(q.dtype, jnp.float32))
    l = jnp.zeros_like(o[..., 0])
    (m, l, o), _ = go_round(ring, tile_forward, (q,), (jnp.full_like(l, -jnp.inf), l, o), (k, v), ())
    return (o / jnp.where(l == 0, 1.0, l)[..., None]).astype(q.dtype), m + jnp.log(l)


def ring_backward(ring: Ring, saved: tuple[Array, ...], d_out: Array) -> tuple[Array, ...]:
    """dq, dk and dv, tiles (n, B, G, T, D), from what the forward pass saved."""
    q, k, v, out, lse = saved
    delta = (d_out.astype(lse.dtype) * out.astype(lse.dtype)).sum(axis=-1)  # (n, B, G, T)
    d_q, d_k, d_v = (jnp.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    d_q, d_kv = go_round(ring, tile_backward, (q, d_out, lse, delta), d_q, (k, v), (d_k, d_v))
    return tuple(x.astype(q.dtype) for x in (d_q, *d_kv))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, q: Array, k: Array, v: Array) -> Array:
    return ring_forward(ring, q, k, v)[0]


def _ring_saving(ring: Ring, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    out, lse = ring_forward(ring, q, k, v)
    return out, (q, k, v, out, lse)


_ring.defvjp(_ring_saving, ring_backward)


def virtual_devices(number: int) -> Mesh:
    """A mesh of so many virtual devices on this machine's CPU, with one axis, "ring". Call it before JAX computes.

    Raises ValueError when JAX is at work already, and with fewer.
    """
    with contextlib.suppress(RuntimeError):  # JAX is at work: it keeps the devices that it has
        jax.config.update("jax_num_cpu_devices", max(number, jax.config.jax_num_cpu_devices))
    devices = jax.devices("cpu")
    if len(devices) < number:
        raise ValueError(f"JAX is at work with {len(devices)} CPU device(s); expected {number}: call this first of all")
    return Mesh(np.array(devices[:number]), ("ring",))


def gradients(attention: Callable[..., Array], q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, ...]:
    """out, dq, dk and dv of any attention."""
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(d_out)


def main() -> int:
    B, H, G, S, D, P = 1, 8, 2, 512, 64, 4
    mesh = virtual_devices(P)
    generator = torch.Generator().manual_seed(0)
    q, d_out = torch.randn(2, B, H, S, D, generator=generator).unbind()
    k, v = torch.randn(2, B, G, S, D, generator=generator).unbind()
    ok = True
    print(f"{P} devices or processes, S = {S}, {H} query heads on {G}, float32, against full attention in float64")
    for causal, layout in ((False, "contiguous"), (True, "zigzag")):
        right = exact_attention(q, k, v, d_out, causal=causal, fused_blocks=P)
        dealt = [torch.cat([shard(x, layout, rank, P) for rank in range(P)], dim=2).numpy() for x in (q, k, v, d_out)]
        in_jax = gradients(on_mesh(mesh, causal=causal, layout=layout), *dealt)
        in_torch = zip(
            *launch(flash_ring.chunks_of_rank, P, [q, k, v, d_out], causal, layout, device="cpu"), strict=True
        )
        print(f"{'causal, ' if causal else ''}{layout}")
        for name, x, y in zip(("out", "dq", "dk", "dv"), in_jax, in_torch, strict=True):
            x, y = unshard(torch.from_numpy(np.array(x)).chunk(P, dim=2), layout), unshard(list(y), layout)
            ok &= report(f"{name}, JAX", x, right[name])
            ok &= report(f"{name}, torch", y, right[name])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
