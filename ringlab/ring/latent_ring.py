"""A ring of latents: keys and values of all heads are made from one small latent a token, so the latent travels.

    K_h = [w_k[h] c, rope]    V_h = w_v[h] c         c a latent of L numbers, rope R numbers for all heads    (MLA)
    forward     a block (B, C, L + R) arrives; make K and V of all heads from it; attend as before
    backward    make them again; dc = Σ_h dK_h w_k[h] + dV_h w_v[h] travels with its block, L + R numbers a token
                dw_k[h] += dK_hᵀ c stays: each rank has its part, and the sum over the ranks is the whole

DeepSeek-V3 has 128 heads with D = 128, R = 64, Dv = 128, and L = 512. Its K and V are 40,960 numbers a token. Its block
has 576: 71 times fewer. The price: every rank makes K and V of every block again, 2·L·H·(D + Dv) operations a token.
That is as much as attention to L·(D + Dv)/(D + R + Dv) = 410 keys more. So it pays where messages of K and V would not
be hidden: in 16 bits, where a query meets fewer keys in a block than FLOP/s reached / bytes/s of the link - 410.
`ring-plan` counts, for a cluster, that hidden messages slow the computing too.

For decoding, `absorbed` makes no K and V at all: the queries meet the latents, one K/V head of L + R numbers.

    $ python -m ringlab.ring.latent_ring
    a hop of the block: 40 numbers a token; of K and V of all heads: 640, 16 times as many
    ok    the ring of latents, causal, contiguous: differs by 8.4e-15
    ok    absorbed, through the ring of K and V, contiguous: differs by 3.8e-15
    ...

Shapes: q (B, H, C, D + R), latents (B, C, L), rope_keys (B, C, R), w_k (H, D, L), w_v (H, Dv, L), out (B, H, C, Dv).

Before: flash_ring.py, chosen_keys.py. After: ../ways/all_gather.py, other ways than the ring.
Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1, equations 9 to 19, and appendix C; Liu et al. 2024, algorithm 1.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringlab.basics.chunks import as_autocast, needs_gradients
from ringlab.basics.naive_attention import naive_attention
from ringlab.ring.backward import differentiable_once, left_as_it_is
from ringlab.ring.chosen_keys import facts_of_chosen, with_chosen
from ringlab.ring.flash_ring import flash_forward, keys_of, piece_backward, queries_of, ring_flash_attention
from ringlab.ring.gpu_kernels import without_cudnn
from ringlab.ring.layouts import LAYOUTS, Layout, shard, unshard
from ringlab.ring.schedule import Group, Ring, Round, Schedule, agree_on_schedule
from ringlab.support.agreement import agree, one_pass
from ringlab.support.processes import RankContext, launch

NAMES = ("q", "latents", "rope_keys", "w_k", "w_v")


@left_as_it_is
def ring_latent_attention(
    q: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    causal: bool = False,
    layout: str | Layout = "contiguous",
    documents: Sequence[int] | Tensor | None = None,
    chosen: Tensor | None = None,
    scale: float | None = None,
    group: Group = None,
) -> Tensor:
    """`ring_flash_attention` with K_h = [w_k[h] c, rope] and V_h = w_v[h] c, of which only c and rope travel.

    q (B, H, C, D + R), its last R numbers rotated, latents c (B, C, L) and rope_keys (B, C, R), rotated: this rank's
    chunks. w_k (H, D, L) and w_v (H, Dv, L) are the same on every rank, and each rank gets its part of their gradients:
    the sum over the ranks is the whole. `scale` is 1/sqrt(D + R) unless given. The other options are those of
    `ring_flash_attention`. A rank sends the block (B, C, L + R) and its gradient, in float32 at least, P - 1 times.
    Returns out (B, H, C, Dv), differentiable once. Where the input of a rank is wrong, or ranks disagree, every rank
    raises the same ValueError before a block travels. DeepSeek-AI 2024, equations 9 to 19.
    """
    q, latents, rope_keys, w_k, w_v = inputs = as_autocast(q, latents, rope_keys, w_k, w_v)
    wrong = why_not(*inputs)
    # The ranks agree on K and V of all heads, which nobody has made yet: views of one number of each token.
    k, v = (q, q) if wrong else (rope_keys[:, None, :, :1].expand(*q.shape[:3], n) for n in (q.shape[3], w_v.shape[1]))

    def check(*_: Tensor) -> None:
        if wrong:
            raise ValueError(wrong)

    def same() -> dict[str, Any]:
        known = {"L": latents.shape[2], "R": rope_keys.shape[2], "gradients": needs_gradients(*inputs)}
        return {**known, **facts_of_chosen(chosen, q, Ring)}

    name, mask = "ring_latent_attention", {"causal": causal, "documents": documents}
    agreed = agree_on_schedule(q, k, v, scale, group, name, check, same, layout=layout, schedule=Ring, **mask)
    return LatentAttention.apply(*inputs, with_chosen(agreed, chosen, name))


def why_not(q: Tensor, latents: Tensor, rope_keys: Tensor, w_k: Tensor, w_v: Tensor) -> str:
    """Why these inputs do not fit each other, or nothing."""
    inputs = dict(zip(NAMES, (q, latents, rope_keys, w_k, w_v), strict=True))
    for (name, x), dims in zip(inputs.items(), (4, 3, 3, 3, 3), strict=True):
        if not isinstance(x, Tensor) or x.dim() != dims or 0 in x.shape or (x.dtype, x.device) != (q.dtype, q.device):
            given = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
            return f"{name} is {given}; expected {dims} dimensions, none of them empty, q's dtype and q's device"
    (B, H, C, of_q), (R, L), D = q.shape, (rope_keys.shape[2], latents.shape[2]), w_k.shape[1]
    fit = latents.shape[:2] == rope_keys.shape[:2] == (B, C) and of_q == D + R
    if fit and w_k.shape[::2] == w_v.shape[::2] == (H, L):
        return ""
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs.items())
    return (
        f"{shapes}; expected (B, H, C, D + R), (B, C, L), (B, C, R), (H, D, L) and (H, Dv, L): one B, C, H, L, D and R"
    )


def heads_of(block: Tensor, w: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """K (B, H, C, D + R) and V (B, H, C, Dv) of a block (B, 1, C, L + R). w (H, D + Dv, L) is w_k and w_v."""
    c, rope = block.split([w.shape[2], block.shape[3] - w.shape[2]], dim=-1)
    heads = (c[:, 0] @ w.flatten(0, 1).mT).unflatten(-1, w.shape[:2]).transpose(1, 2)  # (B, H, C, D + Dv): one product
    return torch.cat([heads[..., :D], rope.expand(-1, len(w), -1, -1)], dim=-1), heads[..., D:]


@torch.no_grad()
def expands(function: Callable[[Tensor, Tensor], Sequence[Tensor]], weights: Sequence[Tensor], R: int) -> bool:
    """Whether K, V = function(latents (1, 1, C, L), rope_keys (1, 1, C, R)) are those of weights w_k and w_v.

    It is asked with a 1 for each number of a latent. Then every sum has one product, and the results are equal.
    """
    w, D = torch.cat([*weights], dim=1), weights[0].shape[1]
    L = w.shape[2]
    c, rope = torch.eye(L).to(w)[None, None], torch.arange(L * R).remainder(251).to(w).view(1, 1, L, R)
    return all(map(torch.equal, heads_of(torch.cat([c, rope], dim=-1), w, D), function(c, rope)))


def heads_backward(d_k: Tensor, d_v: Tensor, block: Tensor, w: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """The gradients of block and w, in d_k's dtype, from those of K and V of all heads. The products have w's dtype."""
    d_heads = torch.cat([d_k[..., :D], d_v], dim=-1).transpose(1, 2).flatten(2).to(w.dtype)  # (B, C, H·(D + Dv))
    d_c, d_rope = d_heads @ w.flatten(0, 1), d_k[..., D:].sum(dim=1)
    d_w = d_heads.flatten(0, 1).mT @ block[:, 0, :, : w.shape[2]].flatten(0, 1)
    return torch.cat([d_c.to(d_k.dtype), d_rope], dim=-1)[:, None], d_w.view(w.shape).to(d_k.dtype)


@dataclass(frozen=True)
class LatentRing(Ring):
    """A ring of blocks (B, 1, C, L + R), of which each round makes K and V of all heads. w stands in place of V."""

    D: int = 0  # numbers of a key without R

    def prepare(self) -> None:
        raise ValueError("schedule is LatentRing, for K and V; expected ring_latent_attention, or use_ring for a model")

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        for t, block, _, pieces in super().rounds(k, k[..., :0]):
            yield t, *heads_of(block, v, self.D), pieces


class LatentAttention(torch.autograd.Function):
    """The ring of latents as one operation of autograd. It saves its inputs, out and lse, and no K or V of a head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latents: Tensor, rope_keys: Tensor, w_k: Tensor, w_v: Tensor, ring: Schedule
    ) -> Tensor:
        with one_pass(ring.group), without_cudnn(ring.partition.mask.documents is not None):
            block = torch.cat([latents, rope_keys], dim=-1)[:, None]  # (B, 1, C, L + R): one message a hop
            w = torch.cat([w_k, w_v], dim=1)  # (H, D + Dv, L)
            out, lse = flash_forward(q, block, w, LatentRing(**vars(ring), D=w_k.shape[1]))
            ctx.ring, ctx.D = ring, w_k.shape[1]
            ctx.save_for_backward(q, block, w, out, lse)
            return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        ring, D, (q, block, w, out, lse) = ctx.ring, ctx.D, ctx.saved_tensors
        agree(lambda: None, ring.group, function=f"the backward pass of call {ring.call}")
        with one_pass(ring.group), without_cudnn(ring.partition.mask.documents is not None):
            d_q, d_block, d_w = (x.to(q.dtype) for x in latent_backward(q, block, w, out, lse, d_out, ring, D))
            return (
                d_q,
                *d_block[:, 0].split([w.shape[2], block.shape[3] - w.shape[2]], dim=-1),
                d_w[:, :D],
                d_w[:, D:],
                None,
            )


def latent_backward(
    q: Tensor, block: Tensor, w: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, ring: Schedule, D: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, the gradient of this rank's block, and its part of dw, in lse's dtype. Liu et al. 2024, appendix A."""
    d_q, d_w = (torch.zeros(x.shape, dtype=lse.dtype, device=q.device) for x in (q, w))
    none = block[..., :0]  # the block travels as a K without a V
    sums = ring.sums(block, none, lse.dtype)
    for t, block_j, _, pieces in ring.rounds_back(block, none):
        if pieces:
            k_j, v_j = heads_of(block_j, w, D)
            d_k, d_v = (torch.zeros(x.shape, dtype=lse.dtype, device=q.device) for x in (k_j, v_j))
            for piece in pieces:
                parts = piece_backward(piece, q, k_j, v_j, out, lse, d_out, ring)
                for total, part in zip(queries_of(piece, d_q) + keys_of(piece, d_k, d_v), parts, strict=True):
                    total += part
            d_block_j, d_w_j = heads_backward(d_k, d_v, block_j, w, D)
            d_w += d_w_j
            sums.of_round(t)[0].add_(d_block_j)
        sums.send_on(t)
    return d_q, sums.home()[0], d_w


def absorbed(q: Tensor, latents: Tensor, rope_keys: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, C, L + R), one k (B, 1, C, L + R) and one v (B, 1, C, L) for all heads: attention to the latents.

    qᵀ [w_k c, rope] = [w_kᵀ q, q_rope]ᵀ [c, rope]. Attention to them, with the same scale, gives (B, H, C, L), and this
    @ w_v.mT is out. It costs more operations a pair, L + R + L in place of D + R + Dv, and no K and V are made: so it
    is for decoding, where few queries meet many keys. DeepSeek-AI 2024, section 2.1.2.
    """
    D = w_k.shape[1]
    query = torch.cat([q[..., :D] @ w_k, q[..., D:]], dim=-1)
    return query, torch.cat([latents, rope_keys], dim=-1)[:, None], latents[:, None]


def parts_of_rank(context: RankContext, whole: Sequence[Tensor], layout: str) -> list[Tensor]:
    """This rank's out and gradients, causal, and out by `absorbed`, for whole q, latents (B, 1, S, L), rope_keys, d_out
    (all four with heads), w_k and w_v. Chunks have heads, too."""
    q, c, rope, d_out = (shard(x, layout, context.rank, context.world_size).requires_grad_() for x in whole[:4])
    w_k, w_v = (x.requires_grad_() for x in whole[4:])
    out = ring_latent_attention(q, c[:, 0], rope[:, 0], w_k, w_v, causal=True, layout=layout)
    few = absorbed(q, c[:, 0], rope[:, 0], w_k)
    few_out = ring_flash_attention(*few, causal=True, layout=layout, scale=q.shape[3] ** -0.5) @ w_v.mT
    return [x.detach() for x in (out, few_out, *torch.autograd.grad(out, (q, c, rope, w_k, w_v), d_out))]


def main() -> int:
    from ringlab.ring.cases import report_loop

    B, H, S, D, R, L, P, ok = 1, 8, 256, 32, 8, 32, 4, True
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, S, D + R), (B, 1, S, L), (B, 1, S, R), (B, H, S, D + R), (H, D, L), (H, D + R, L)
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    q, c, rope, w_k, w_v = inputs = [x.requires_grad_() for x in (*whole[:3], *whole[4:])]
    k = torch.cat([c @ w_k.mT, rope.expand(B, H, S, R)], dim=-1)
    out = naive_attention(q, k, c @ w_v.mT, causal=True)
    right = [out, out, *torch.autograd.grad(out, inputs, whole[3])]
    block, heads = L + R, H * 2 * (D + R)
    print(
        f"a hop of the block: {block} numbers a token; of K and V of all heads: {heads}, {heads // block} times as many"
    )
    for layout in LAYOUTS:
        parts = zip(*launch(parts_of_rank, P, [x.detach() for x in whole], layout), strict=True)
        results = [sum(x) if x[0].dim() == 3 else unshard(x, layout) for x in parts]
        ok &= report_loop(f"the ring of latents, causal, {layout}", results[:1] + results[2:], right[1:])
        ok &= report_loop(f"absorbed, through the ring of K and V, {layout}", results[1:2], right[:1])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
