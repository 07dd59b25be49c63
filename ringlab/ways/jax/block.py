"""One block of attention in JAX, tile by tile: what a device of the ring computes between two hops.

    forward     for every tile of queries: scan over the tiles of keys; the carry is m, l, o
    backward    for every tile of queries: scan over the tiles of keys; the carry is dq, the outputs are dk and dv

Shapes: q, out and o (B, G, R, C, D), k and v (B, G, C, D), where R = H/G query heads share a K/V head. Statistics and
lse (B, G, R, C, 1), positions (C, 1). A chunk is cut into n tiles of T <= 256 tokens, (n, ..., T, D), so that scores
exist as one tile (B, G, R, T, T) at a time. A reader of the ring may skip this file.

Source: Dao et al. 2022, algorithms 1 and 4; grouped queries: Ainslie et al. 2023, section 2.2.
"""

from functools import partial

import numpy as np

from ringlab.support.extras import extra

with extra("jax", __name__):
    import jax.numpy as jnp
    from jax import Array, lax

TILE = 256  # tokens
AFTER_ALL = np.iinfo(np.int32).max  # the position of padded keys, which no query sees
State = tuple[Array, Array, Array]  # m and l (B, G, R, C, 1), o (B, G, R, C, D)
product = partial(jnp.einsum, precision="highest")  # a TPU would round float32 to bfloat16 before it multiplies


def start(q: Array) -> State:
    """(m, l, o) before any key was seen: m = -inf, l = 0, o = 0; float32 at least."""
    o = jnp.zeros_like(q, dtype=jnp.promote_types(q.dtype, jnp.float32))
    l = jnp.zeros_like(o[..., :1])
    return jnp.full_like(l, -jnp.inf), l, o


def finish(state: State) -> tuple[Array, Array]:
    """(m, l, o) -> out and lse. A row that saw no key gives out = 0 and lse = -inf."""
    m, l, o = state
    return o / jnp.where(l == 0, 1.0, l), m + jnp.log(l)


def attend(state: State, q: Array, k: Array, v: Array, q_at: Array, k_at: Array, *, scale: float) -> State:
    """Fold a block of keys and values into the (m, l, o) of all queries.

    `q_at` and `k_at` (C, 1) are positions in the sequence: a query sees the keys at its position and before it.
    Dao et al. 2022, algorithm 1.
    """
    keys = tiles(k), tiles(v), tiles(k_at, AFTER_ALL)

    def one_row(row: tuple) -> State:  # a tile of queries, all tiles of keys
        state, q, q_at = row

        def one_tile(state: State, tile: tuple) -> tuple[State, None]:
            k, v, k_at = tile
            work = partial(attend_tile, scale=scale)
            return lax.cond(visible(q_at, k_at), work, lambda state, *_: state, state, q, k, v, q_at, k_at), None

        return lax.scan(one_tile, state, keys)[0]

    done = lax.map(one_row, (tuple(tiles(x) for x in state), tiles(q), tiles(q_at)))
    return tuple(untile(x, q.shape[-2]) for x in done)


def attend_tile(state: State, q: Array, k: Array, v: Array, q_at: Array, k_at: Array, *, scale: float) -> State:
    """`update` of ringlab/basics/online_softmax.py for one tile of queries and one of keys."""
    m, l, o = state
    scores = scores_of(q, k, q_at, k_at, scale)
    m_new = jnp.maximum(m, scores.max(axis=-1, keepdims=True))
    finite = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # a row that has seen no key would compute -inf - (-inf)
    f, p = jnp.exp(m - finite), jnp.exp(scores - finite)
    return m_new, f * l + p.sum(axis=-1, keepdims=True), f * o + product("bgrij,bgjd->bgrid", p, v.astype(o.dtype))


def block_backward(
    q: Array, k: Array, v: Array, d_out: Array, lse: Array, delta: Array, q_at: Array, k_at: Array, *, scale: float
) -> tuple[Array, Array, Array]:
    """The share of one block of keys in dq, and the share of these queries in its dk and dv; in the dtype of lse.

    lse and delta, the sum of d_out · out, are (B, G, R, C, 1) and those of whole rows. Dao et al. 2022, algorithm 4.
    """
    keys = tiles(k), tiles(v), tiles(k_at, AFTER_ALL)
    d_kv = tuple(jnp.zeros_like(x, dtype=lse.dtype) for x in keys[:2])

    def one_row(d_kv: tuple, row: tuple) -> tuple[tuple, Array]:  # a tile of queries, all tiles of keys
        q_at = row[-1]

        def one_tile(d_q: Array, tile: tuple) -> tuple[Array, tuple]:
            d_kv, keys = tile
            work = partial(tile_backward, scale=scale)
            return lax.cond(visible(q_at, keys[-1]), work, lambda d_q, d_kv, *_: (d_q, d_kv), d_q, d_kv, row, keys)

        d_q, d_kv = lax.scan(one_tile, jnp.zeros_like(row[0], dtype=lse.dtype), (d_kv, keys))
        return d_kv, d_q

    d_kv, d_q = lax.scan(one_row, d_kv, tuple(tiles(x) for x in (q, d_out, lse, delta, q_at)))
    return untile(d_q, q.shape[-2]), *(untile(x, k.shape[-2]) for x in d_kv)


def tile_backward(d_q: Array, d_kv: tuple, row: tuple, keys: tuple, *, scale: float) -> tuple[Array, tuple]:
    """`tile_backward` of backward.py: add what a tile of queries and one of keys give to dq, and to dk and dv."""
    (q, d_out, lse, delta, q_at), (k, v, k_at), (d_k, d_v) = row, keys, d_kv
    p = jnp.exp(scores_of(q, k, q_at, k_at, scale) - jnp.where(lse == -jnp.inf, jnp.inf, lse))
    q, k, v, d_out = (x.astype(lse.dtype) for x in (q, k, v, d_out))
    d_scores = scale * p * (product("bgrid,bgjd->bgrij", d_out, v) - delta)
    d_k += product("bgrij,bgrid->bgjd", d_scores, q)
    d_v += product("bgrij,bgrid->bgjd", p, d_out)
    return d_q + product("bgrij,bgjd->bgrid", d_scores, k), (d_k, d_v)


def scores_of(q: Array, k: Array, q_at: Array, k_at: Array, scale: float) -> Array:
    """A tile of scores (B, G, R, T, T) in float32 at least, with -inf for later keys."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = product("bgrid,bgjd->bgrij", q.astype(wide) * scale, k.astype(wide))
    return jnp.where(q_at >= k_at.T, scores, -jnp.inf)


def visible(q_at: Array, k_at: Array) -> Array:
    """Whether some of these queries see some of these keys. Else the tile is skipped."""
    return k_at.min() <= q_at.max()


def tiles(x: Array, padding: int = 0) -> Array:
    """x (..., C, D) -> (n, ..., T, D), T <= TILE: as few tiles as possible, of one length; the last ones are padded."""
    *rest, C, D = x.shape
    n = -(-C // TILE)
    x = jnp.pad(x, (*[(0, 0)] * len(rest), (0, -C % n), (0, 0)), constant_values=padding)
    return jnp.moveaxis(x.reshape(*rest, n, -1, D), -3, 0)


def untile(x: Array, length: int) -> Array:
    """Undo `tiles`: (n, ..., T, D) -> (..., length, D)."""
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., :length, :]
