"""The backward pass of the ring: dQ stays on its rank; dK and dV travel with their block, and the last hop is home.

    p  = e^(scale Q K_jᵀ - lse)            the softmax weights, computed again: only the lse of each row was saved
    dV_j += pᵀ dO                          dp = dO V_jᵀ
    dS = p ∘ (dp - δ),  δ = Σ_D dO ∘ O     dQ += scale dS K_j        dK_j += scale dSᵀ Q

Shapes: dX is the gradient of the loss with respect to X. O is the output, S the scores scale Q Kᵀ, and ∘ multiplies
element by element. q, k, v, out and their gradients are chunks (B, H, C, D); lse and δ are (B, H, C). K and V of a
block make P - 1 hops in their own dtype. So do their gradients, in float32 at least: what a rank finds for its own
block stays at home. In the paper that travels too, and the gradients make P hops.

    $ python -m ringlab.ring.backward
    the failure: every rank uses K and V of block 0, so no rank alone knows their gradients
        after rank 0 its dk is off by 0.0649
        after rank 1 its dk is off by 0.0135
        after rank 2 its dk is off by 0.0025
        after rank 3 its dk is off by 0.0000
    the cure: dk and dv travel with the block, and hop 3 brings them home; on 4 real processes:
    ok    out: largest error 1.8e-15, rounding allows 4.8e-14 (float64 sums)
    ok    dq: largest error 5.2e-15, rounding allows 1.7e-13 (float64 sums)
    ok    dk: largest error 1.4e-16, rounding allows 7.0e-15 (float64 sums)
    ok    dv: largest error 8.3e-17, rounding allows 1.7e-15 (float64 sums)

Before: ../../ring_attn.py, the forward pass. After: overlap.py, messages that travel while a rank computes.
Source: Liu et al. 2024, appendix A, `_ring_attention_bwd`; the steps within a block: Dao et al. 2022, algorithm 4.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_attn import hop, ring_forward
from ringlab.basics.blockwise_attention import TILE
from ringlab.basics.chunks import agree_on_chunks, check_chunks
from ringlab.basics.naive_attention import TOKENS
from ringlab.support.agreement import members
from ringlab.support.timeline import span

Options = ParamSpec("Options")
Result = TypeVar("Result")


def tile_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    future: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one tile of Sq queries and one tile of Sk keys add to dq (B, H, Sq, D), dk and dv (B, H, Sk, D).

    q and d_out are (B, H, Sq, D), k and v (B, H, Sk, D). lse and delta (B, H, Sq) are those of the *whole* rows, and
    the results have their dtype. `future` (Sq, Sk) is True where a query may not look. A row that saw no key adds
    nothing. Dao et al. 2022, algorithm 4, lines 11 to 21.
    """
    q, k, v, d_out = (x.to(lse.dtype) for x in (q, k, v, d_out))
    scores = (q * scale) @ k.transpose(-2, -1)  # (B, H, Sq, Sk)
    if future is not None:
        scores = scores.masked_fill(future, -torch.inf)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])  # the softmax weights
    d_v = p.transpose(-2, -1) @ d_out  # (B, H, Sk, D)
    d_p = d_out @ v.transpose(-2, -1)  # (B, H, Sq, Sk)
    d_scores = p * (d_p - delta[..., None])  # the backward of softmax
    return scale * d_scores @ k, scale * d_scores.transpose(-2, -1) @ q, d_v


def block_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    *,
    causal: bool = False,
    tile: Callable[..., tuple[Tensor, Tensor, Tensor]] = tile_backward,
) -> tuple[Tensor, Tensor, Tensor]:
    """`tile_backward` for a whole block, tile by tile: only one tile of weights exists at a time.

    `causal` hides key j from query i when j > i; both count from the start of the block. A tile that is wholly in the
    future is skipped.
    """
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    for i in range(0, q.shape[2], TILE):
        rows = slice(i, i + TILE)
        for j in range(0, k.shape[2], TILE):
            if causal and j > i:
                break
            keys = slice(j, j + TILE)
            of_rows = (d_out[:, :, rows], lse[:, :, rows], delta[:, :, rows])  # (B, H, tile, D), twice (B, H, tile)
            shape = q[0, 0, rows, 0].shape + k[0, 0, keys, 0].shape  # (tile, tile)
            future = torch.ones(shape, dtype=torch.bool, device=q.device).triu(1) if causal and i == j else None
            parts = tile(q[:, :, rows], k[:, :, keys], v[:, :, keys], *of_rows, scale, future)
            d_q[:, :, rows] += parts[0]
            d_k[:, :, keys] += parts[1]
            d_v[:, :, keys] += parts[2]
    return d_q, d_k, d_v


def ring_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    *,
    scale: float,
    lengths: list[int],
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's chunks (B, H, C, D), in the dtype of `lse`, from what the forward pass saved.

    `lengths` is the chunk length C of every rank. Every rank of `group` must call it. Liu et al. 2024, appendix A.
    """
    rank, world_size = members(group)
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)  # (B, H, C)
    block = torch.stack((k, v))  # (2, B, H, C, D)
    d_q, d_block = (torch.zeros(x.shape, dtype=lse.dtype, device=q.device) for x in (q, block))
    for t in range(world_size):
        k_j, v_j = block
        with span("compute", t, k_j, v_j):
            d_q_j, d_k_j, d_v_j = block_backward(q, k_j, v_j, d_out, lse, delta, scale)
        d_q += d_q_j  # this stays
        d_block[0] += d_k_j
        d_block[1] += d_v_j
        length = lengths[(rank - t - 1) % world_size]
        if t == 0:  # these stay too: they are at home
            d_own, d_block = d_block, d_block.new_zeros(*block.shape[:-2], length, block.shape[-1])
        else:  # these travel with their block, and the last hop brings them home
            d_block = hop(d_block, length, group)
        if t < world_size - 1:
            block = hop(block, length, group)
    d_k, d_v = d_own.add_(d_block)
    return d_q, d_k, d_v


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that raises RuntimeError when a graph of it is asked for, as for a second derivative.

    `torch.autograd.function.once_differentiable` refuses only where d_out itself needs gradients. After a head that is
    linear it does not, and the second derivative would be wrong without an error.
    """

    @wraps(backward)
    def checked(ctx: Any, *d_outs: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True asks for a second derivative; a ring can be differentiated once")
        return backward(ctx, *d_outs)

    return checked


def left_as_it_is(attention: Callable[Options, Result]) -> Callable[Options, Result]:
    """torch.compile ends its graph before the attention, runs it as it is, and begins another graph behind it.

    What is in there are fused kernels, and messages at the right time: nothing for a compiler. fullgraph=True raises.
    """

    @wraps(attention)
    def call(*args: Options.args, **options: Options.kwargs) -> Result:
        if torch.compiler.is_compiling():  # asked first: else every rank would import the compiler, for a second
            torch._dynamo.graph_break(msg="attention over ranks is not compiled; expected fullgraph=False")
            return torch.compiler.disable(attention)(*args, **options)
        return attention(*args, **options)

    return call


class RingAttention(torch.autograd.Function):
    """The ring as one operation of autograd. It saves the chunks q, k, v, out and lse, but no softmax weights."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: list[int], group: ProcessGroup | None
    ) -> Tensor:
        ctx.ring = {"scale": scale, "lengths": lengths, "group": group}
        out, lse = ring_forward(q, k, v, **ctx.ring)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ring_backward(q, k, v, out, lse, d_out, **ctx.ring)
        return *(gradient.to(d_out.dtype) for gradient in gradients), None, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """`ring_attn.ring_attention` with gradients: the same shapes, dtypes and errors.

    Every rank of `group` must call it and run its backward pass. It can be differentiated once, not twice. Raises
    ValueError on every rank also when only some of them need gradients. Liu et al. 2024, appendix A.
    """
    name = f"{__name__}.ring_attention"
    scale, lengths = agree_on_chunks(q, k, v, scale, group, function=name, check=check_chunks)
    return RingAttention.apply(q, k, v, scale, lengths, group)


def main() -> int:
    from ringlab.ring.cases import chunks_of_rank, report_ranks
    from ringlab.support.processes import launch
    from ringlab.support.rounding import exact_attention

    x = TOKENS[None, None]  # (B, H, S, D) = (1, 1, 8, 2)
    d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    right = exact_attention(x, x, x, d_out)

    print("the failure: every rank uses K and V of block 0, so no rank alone knows their gradients")
    lse = torch.logsumexp(x @ x.transpose(-2, -1) * 2**-0.5, dim=-1)
    delta = (d_out * right["out"].exact).sum(dim=-1)
    d_k = torch.zeros(1, 1, 2, 2, dtype=x.dtype)
    for rank in range(4):
        rows, block = slice(2 * rank, 2 * rank + 2), x[:, :, :2]
        of_rows = (d_out[:, :, rows], lse[:, :, rows], delta[:, :, rows])
        d_k += block_backward(x[:, :, rows], block, block, *of_rows, 2**-0.5)[1]
        print(f"    after rank {rank} its dk is off by {(d_k - right['dk'].exact[:, :, :2]).abs().max():.4f}")
    print("the cure: dk and dv travel with the block, and hop 3 brings them home; on 4 real processes:")
    of_ranks = launch(chunks_of_rank, 4, [x, x, x, d_out], ring_attention, "contiguous")
    return 0 if report_ranks(of_ranks, "contiguous", right) else 1


if __name__ == "__main__":
    sys.exit(main())
