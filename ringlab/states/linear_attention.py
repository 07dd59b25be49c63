"""Linear attention: without a softmax, all keys and values melt into a state, D x Dv numbers however long the sequence.

    h_t = a_t h_(t-1) + k_t u_tᵀ                a_t = e^(log_decay_t): how much of the state is kept, 0 to 1
    o_t = scale · h_tᵀ q_t
    u_t = v_t                                   linear attention; with a decay RetNet, lightning attention, Mamba 2
    u_t = β_t (v_t - (a_t h_(t-1))ᵀ k_t)        the gated delta rule: write what the state does not answer yet

Token by token this is a recurrence: exact, and slow. All tokens at once it is a matrix product: (Q Kᵀ ∘ decays) U, with
S x S scores. In between are chunks. Inside a chunk the tokens are computed at once. What the chunk does to the state is
one affine map, so between chunks only the state goes on:

    h_out = keep h_in + add                     keep: a number, or D x D for the delta rule; add: D x Dv
    o = local + read h_in

a_t is one number, or one for each number of a key, a row of the state: Kimi delta attention (KDA). Then the decays
between the tokens of a chunk are c x c x D numbers, so its chunks are shorter.

Shapes: B sequences, H heads, S tokens, D numbers in a key, Dv in a value. q and k are (B, H, S, D), v and the output
(B, H, S, Dv), log_decay (B, H, S) or (B, H, S, D), beta (B, H, S), a state (B, H, D, Dv). q, k or v may have fewer
heads: each then serves as many heads in a row.

    $ python -m ringlab.states.linear_attention
    a state of 64 x 64 numbers, one head in float32: 16,384 bytes, after 1,024 tokens or 1,048,576
    the last of 8 tokens reads the tokens [4, 5, 6, 7]: the decay of token 4 is 0
    ok    linear attention, in chunks of 3: differs by 2.0e-16
    ...

Before: flash_ring.py, where keys travel. After: state_ring.py, where the state does.
Source: Katharopoulos et al. 2020, equations 16 to 20; Sun et al. 2023 (RetNet), equation 7, for the chunks; Yang et al.
2025 (Gated DeltaNet), section 3, for the delta rule and its chunks; Kimi team 2025 (Kimi Linear), section 3, for KDA.
"""

import sys
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ringlab.basics.naive_attention import accumulation_dtype, resolve_scale
from ringlab.support.expect import expect

CHUNK, CHUNK_OF_KEYS = 64, 16  # tokens; where each number of a key has its own decay


class Inputs(NamedTuple):
    """q, k (B, H, S, D), v (B, H, S, Dv), log_decay (B, H, S, 1 or D), beta (B, H, S) or None, in the dtype of sums."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None


def checked_inputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None = None
) -> tuple[Inputs, Tensor]:
    """The inputs with all heads, and the first state (B, H, D, Dv), zeros unless given; in float32 at least.

    Raises ValueError when they do not fit each other.
    """
    of_tokens = q.dim() == k.dim() == v.dim() == 4 and q.shape[::2] == k.shape[::2] == v.shape[::2] and q.numel()
    given = f"q, k and v have the shapes {', '.join(str(tuple(x.shape)) for x in (q, k, v))}"
    expect(of_tokens, given, "(B, H, S, D), with one B and one S")
    H = max(x.shape[1] for x in (q, k, v))
    fits = q.shape[3] == k.shape[3] and not any(H % x.shape[1] for x in (q, k, v))
    expect(fits, given, "numbers of heads that divide the largest, and q and k of one size")
    per_token, of_state = (len(q), H, q.shape[2]), (len(q), H, k.shape[3], v.shape[3])
    for name, x, shapes_of, words in (
        ("log_decay", log_decay, (per_token, (*per_token, q.shape[3])), "(B, H, S) or (B, H, S, D)"),
        ("beta", beta, (per_token,), "(B, H, S)"),
        ("state", state, (of_state,), "(B, H, D, Dv)"),
    ):
        if x is not None:
            expected = f"{words}, {' or '.join(map(str, shapes_of))}"
            expect(x.shape in shapes_of, f"{name} has shape {tuple(x.shape)}", expected)
    kinds, one = [f"{x.dtype} on {x.device}" for x in (q, k, v)], "one floating dtype and one device: use x.to(q)"
    expect(len(set(kinds)) == 1 and q.is_floating_point(), f"q, k and v are {', '.join(kinds)}", one)
    wide = accumulation_dtype(q.dtype)
    q, k, v = (x.to(wide) for x in (q, k, v))
    q, k, v = (x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1) for x in (q, k, v))
    log_decay = (q.new_zeros(per_token) if log_decay is None else log_decay.to(wide)).view(*per_token, -1)
    inputs = Inputs(q, k, v, log_decay, None if beta is None else beta.to(wide))
    return inputs, q.new_zeros(of_state) if state is None else state.to(wide)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token by token: out (B, H, S, Dv) in q's dtype, and the state (B, H, D, Dv). In float64 all is compared with it.

    `scale` is 1/sqrt(D) unless given, `state` what was there before the first token. log_decay (B, H, S), or
    (B, H, S, D) for a decay of each row of the state, is 0 or less; -inf forgets everything before its token. Without
    beta nothing is read before it is written: plain linear attention.
    Raises ValueError as `checked_inputs` does. Yang et al. 2025, section 3.
    """
    (x, h), scale = checked_inputs(q, k, v, log_decay, beta, state), resolve_scale(scale, q.shape[-1])
    out = []
    for t in range(q.shape[2]):
        q_t, k_t, u_t = x.q[:, :, t, :, None], x.k[:, :, t, :, None], x.v[:, :, t, None]  # columns, and a row
        h = x.log_decay[:, :, t, :, None].exp() * h
        if x.beta is not None:
            u_t = x.beta[:, :, t, None, None] * (u_t - k_t.mT @ h)
        h = h + k_t @ u_t
        out.append(scale * q_t.mT @ h)
    return torch.cat(out, dim=2).to(q.dtype), h


class Map(NamedTuple):
    """An affine function of the state, keep h + add: what tokens do to it, or what they read of it."""

    keep: Tensor  # (..., D, D); or (..., D, 1) where each row of the state is kept by itself
    add: Tensor  # (..., D, Dv)

    def __call__(self, h: Tensor) -> Tensor:
        return kept(self.keep, h) + self.add

    def after(self, first: "Map") -> "Map":
        """One map in place of two: that of `first`, then this one."""
        return Map(kept(self.keep, first.keep), self(first.add))


def kept(keep: Tensor, h: Tensor) -> Tensor:
    """keep h, for a matrix, or for numbers."""
    return keep * h if keep.shape[-1] == 1 else keep @ h


def each_of(maps: Map) -> list[Map]:
    """The maps of n chunks, keep and add (B, H, n, ...), one by one."""
    return [Map(keep, add) for keep, add in zip(maps.keep.unbind(2), maps.add.unbind(2), strict=True)]


def states_along(maps: Iterable[Map], h: Tensor) -> list[Tensor]:
    """The states before, between and after these maps, from h on."""
    return [*accumulate(maps, lambda state, one: one(state), initial=h)]


def decays_between(log_decay: Tensor) -> Tensor:
    """(..., c, n) -> (..., c, c, n): how much of token j's state is left at token i, 0 where j > i.

    Each entry sums its own log decays. A difference of running sums would be inf - inf where a decay is 0.
    """
    j = torch.arange(log_decay.shape[-2], device=log_decay.device)[:, None]
    t = j[:, None]
    sums = log_decay[..., None, :].masked_fill(t <= j, 0.0).cumsum(dim=-3)  # over the tokens t after j, up to i
    return sums.masked_fill_(t < j, -torch.inf).exp_()


def products(q: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """(..., c, c): q_i · k_j, times what is left of token j at token i."""
    if between.shape[-1] == 1:
        return q @ k.mT * between[..., 0]
    return torch.einsum("...id,...jd,...ijd->...ij", q, k, between)


def in_chunks(x: Inputs, scale: float, size: int | None = None) -> tuple[Map, Map]:
    """What each of n chunks of `size` tokens reads of the state before it, and what it does to it: two maps.

    Their keep and add are (B, H, n, ...). No chunk needs a state for it, so all are computed at once. The delta rule's
    u are (I + L) u = β (v - since h k), with L = β (K Kᵀ ∘ decays) below the diagonal: a triangular system, once for
    what v writes and once for what the state before the chunk takes back. Yang et al. 2025, section 3.
    """
    size = size or (CHUNK if x.log_decay.shape[3] == 1 else CHUNK_OF_KEYS)
    missing = -x.q.shape[2] % size  # tokens that write nothing and keep everything

    def cut(y: Tensor) -> Tensor:
        if missing:  # pad would copy else
            y = torch.nn.functional.pad(y, (0, 0) * (y.dim() - 3) + (0, missing))
        return y.unflatten(2, (-1, size))

    q, k, u, log_decay = scale * cut(x.q), cut(x.k), cut(x.v), cut(x.log_decay)  # (B, H, n, c, ...)
    between = decays_between(log_decay)  # (B, H, n, c, c, 1 or D)
    since = log_decay.cumsum(dim=-2).exp()  # from the state before the chunk to each token
    left = between[..., -1, :, :] * k  # what is left of each key at the end of the chunk
    scores, read, keep = products(q, k, between), since * q, since[..., -1:, :].mT.expand(*k.shape[:3], k.shape[4], -1)
    if x.beta is not None:
        beta = cut(x.beta)[..., None]
        system = beta * products(k, k, between).tril(-1)
        sides = torch.cat([beta * u, beta * since * k], dim=-1)  # (B, H, n, c, Dv + D)
        sides = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        u, taken = sides.split([u.shape[-1], k.shape[-1]], dim=-1)
        read = read - scores @ taken
        keep = keep * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - left.mT @ taken
    return Map(read, scores @ u), Map(keep, left.mT @ u)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrence` in chunks of `size` tokens (64; KDA 16), for speed: the same arguments, results and errors.

    Differentiable. With one chunk of all S tokens it is the matrix product: (Q Kᵀ ∘ decays) U. Yang et al. 2025,
    section 3.
    """
    x, h = checked_inputs(q, k, v, log_decay, beta, state)
    reads, changes = in_chunks(x, resolve_scale(scale, q.shape[-1]), size)
    *before, last = states_along(each_of(changes), h)
    out = reads(torch.stack(before, dim=2)).flatten(2, 3)[:, :, : q.shape[2]]
    return out.to(q.dtype), last


def main() -> int:
    from ringlab.ring.cases import report_loop

    D, S, ok = 64, 8, True
    print(f"a state of {D} x {D} numbers, one head in float32: {4 * D * D:,} bytes, after 1,024 tokens or 1,048,576")
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, S, D, generator=generator, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    log_decay, beta = torch.rand(2, 1, 2, S, generator=generator, dtype=torch.float64).log()
    log_decay[..., 4] = -torch.inf  # a new document
    read = decays_between(log_decay[0, 0, :, None])[-1].flatten().nonzero().flatten().tolist()
    print(f"the last of {S} tokens reads the tokens {read}: the decay of token 4 is 0")
    for name, options in (
        ("linear attention", (None, None)),
        ("with a decay", (log_decay, None)),
        ("the gated delta rule", (log_decay, beta.exp())),
        ("with a decay for each number of a key", (log_decay[..., None] * q.sigmoid(), beta.exp())),
    ):
        right, _ = recurrence(q, k, v, *options)
        for size in (3, S):
            out, _ = linear_attention(q, k, v, *options, size=size)
            ok &= report_loop(f"{name}, in chunks of {size}", [out], [right])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
