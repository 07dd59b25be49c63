"""All-gather: every rank collects the K/V blocks of all ranks, a few heads at a time, and computes its own rows.

    forward     all-gather        K, V of all ranks; then out = attention of this rank's queries over all blocks
    backward    all-gather        K, V of all ranks again; then dK_j, dV_j of every block j, from this rank's queries
                reduce-scatter    dK, dV of this rank's block = the sum of what all ranks found for it

In the ring a block arrives, is used and leaves. Here the blocks of all ranks are in memory at the same time. This
takes room for all S tokens, and more ranks do not make it less. So n heads of K and V are gathered at a time. While a
rank computes with them, the next n heads arrive in a second buffer, and the gradients of the last n heads are summed.

Shapes: B sequences, H query heads, G key/value heads, P ranks, C = S/P tokens on each, D numbers in a head. On each
rank q and out are (B, H, C, D), k and v (B, G, C, D). The two buffers hold 4·B·n·S·D numbers. In the backward pass two
buffers of gradients hold as many, in float32 at least. In the forward pass a rank sends (P-1) · 2·B·G·C·D numbers. In
the backward pass it sends the same again, and as many numbers of gradients.

    $ python -m training.all_gather
    4 ranks, S = 512, 8 query heads on 2, float32, against full attention in float64
    ...

Before: window.py. After: all_to_all.py, where ranks exchange tokens for heads.
Source: Llama 3 (2024), section 3.3.2, context parallelism. It gathers K and V before it computes.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

from basics.naive_attention import accumulation_dtype, naive_attention
from basics.ranks import neighbours
from support.agreement import agree_on_chunks, needs_gradients
from support.processes import RankContext, launch
from support.rounding import exact_attention, report
from support.timeline import span
from training.causal import LAYOUTS, shard, unshard
from training.flash_ring import Round, ring_backward, ring_forward
from training.grouped_query import check_grouped_chunks
from training.masks import Mask

# torch 2.13 gave both another name; this project takes older releases too.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def room_for_all(k: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for the blocks of all ranks with the heads of k (B, n, C, D): (P, 2·B·n·C·D), C the longest chunk."""
    B, heads, _, D = k.shape
    return torch.empty(len(lengths), 2 * B * heads * max(lengths) * D, dtype=dtype, device=k.device)


class Gathered:
    """The blocks of all ranks, n heads of them: a schedule for `ring_forward` and `ring_backward`."""

    def __init__(
        self, k: Tensor, v: Tensor, mask: Mask, scale: float, group: ProcessGroup | None, blocks: Tensor
    ) -> None:
        """Begin to gather k and v (B, n, C, D) of every rank into `blocks`, from `room_for_all`. Return at once."""
        self.k, self.v, self.mask, self.scale, self.group, self.blocks = k, v, mask, scale, group, blocks
        self.rank, self.world_size, _, _ = neighbours(group)
        for own, x in zip(self.block(blocks, 0), (k, v), strict=True):
            own.copy_(x)
        self.gathering = all_gather(blocks.flatten(), blocks[self.rank], group=group, async_op=True)

    def block(self, blocks: Tensor, t: int) -> Tensor:
        """(2, B, n, C_j, D): K and V of block j = (r - t) mod P, or their gradients."""
        B, heads, _, D = self.k.shape
        j = (self.rank - t) % self.world_size
        shape = 2, B, heads, self.mask.lengths[j], D
        return blocks[j, : math.prod(shape)].view(shape)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        """Yield t, k_j, v_j and what this rank r computes of block j = (r - t) mod P. Its own block need not travel."""
        for t in range(self.world_size):
            if t == 1:
                with span("wait", t, k, v):
                    self.gathering.wait()
            k_j, v_j = self.block(self.blocks, t) if t else (k, v)
            yield t, k_j, v_j, self.mask.pieces(self.rank, (self.rank - t) % self.world_size)

    def sums(self, k: Tensor, dtype: torch.dtype) -> "Gathered":
        """Room for what this rank adds to the gradients of every block."""
        self.parts = room_for_all(k, self.mask.lengths, dtype).zero_()
        return self

    def of_round(self, t: int) -> Tensor:
        return self.block(self.parts, t)

    def send_on(self, t: int) -> None:
        """The sums stay here until all rounds are done."""

    def home(self) -> Tensor:
        """dK and dV (2, B, n, C, D) of this rank's block: the sum over the ranks, once `summing` is done."""
        total = torch.empty_like(self.parts[0])
        self.summing = reduce_scatter(total, self.parts.flatten(), group=self.group, async_op=True)
        return total[: 2 * self.k.numel()].view(2, *self.k.shape)


@dataclass(frozen=True)
class Gather:
    """What all the ranks agreed on."""

    mask: Mask
    scale: float
    group: ProcessGroup | None
    at_once: int

    def arriving_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Gathered]]:
        """Yield the query heads of n K/V heads, and the schedule of these n heads. Meanwhile the next n heads travel.

        Compute with each before advancing: its buffer is reused.
        """
        heads = list(zip(k.split(self.at_once, dim=1), v.split(self.at_once, dim=1), strict=True))
        buffers = [room_for_all(heads[0][0], self.mask.lengths, k.dtype) for _ in heads[:2]]

        def begin(n: int) -> Gathered:
            return Gathered(*heads[n], self.mask, self.scale, self.group, buffers[n % 2])

        rows = q.shape[1] // len(heads)  # query heads that share n heads of K and V
        coming = begin(0)
        for n in range(len(heads)):
            here = coming
            if n + 1 < len(heads):
                coming = begin(n + 1)
            yield slice(n * rows, (n + 1) * rows), here


class AllGather(torch.autograd.Function):
    """Gathered attention as one operation of autograd. It saves the chunks q, k, v, out and lse, and gathers again."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, gather: Gather) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for rows, heads in gather.arriving_heads(q, k, v):
            out[:, rows], lse[:, rows] = ring_forward(q[:, rows], heads.k, heads.v, heads)
        ctx.gather = gather
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_q, d_kv, summing = torch.empty_like(q), [], None
        for rows, heads in ctx.gather.arriving_heads(q, k, v):
            of_rows = out[:, rows], lse[:, rows], d_out[:, rows]
            d_q[:, rows], *d_kv_of_heads = ring_backward(q[:, rows], heads.k, heads.v, *of_rows, heads)
            d_kv.append(d_kv_of_heads)
            if summing:
                summing.wait()  # the gradients of the heads before: so two buffers of them are enough
            summing = heads.summing
        summing.wait()
        d_k, d_v = (torch.cat(x, dim=1).to(d_out.dtype) for x in zip(*d_kv, strict=True))
        return d_q, d_k, d_v, None


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    layout: str = "contiguous",
    at_once: int = 1,
    scale: float | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """This rank's rows of full attention over the whole sequence, differentiable once.

    The arguments, the result and the errors are those of `training.flash_ring.ring_flash_attention`: q (B, H, C, D),
    k and v (B, G, C, D), this rank's chunks as `training.causal.shard` cuts them. `at_once` heads of K and V are
    gathered at a time; ValueError unless it divides G. Llama 3 2024, section 3.3.2.
    """

    def check(q: Tensor, k: Tensor, v: Tensor) -> None:
        check_grouped_chunks(q, k, v, same_tokens=bool(causal))
        if type(at_once) is not int or at_once < 1 or k.shape[1] % at_once:
            raise ValueError(f"at_once is {at_once!r}; expected a divisor of {k.shape[1]}, the heads of K and V")

    settings = {"layout": layout, "causal": bool(causal), "at_once": at_once, "gradients": needs_gradients(q, k, v)}
    scale, lengths = agree_on_chunks(q, k, v, scale, group, check=check, **settings)
    return AllGather.apply(q, k, v, Gather(Mask(layout, tuple(lengths), bool(causal)), scale, group, at_once))


def gather_that_does_not_add(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The failure. Attention without a mask over gathered K and V; autograd knows this rank's own block only."""
    rank, world_size, _, _ = neighbours()
    blocks = [[torch.empty_like(x) for _ in range(world_size)] for x in (k, v)]
    for parts, x in zip(blocks, (k, v), strict=True):
        dist.all_gather(parts, x.detach())
        parts[rank] = x
    return naive_attention(q, *(torch.cat(parts, dim=2) for parts in blocks))


def chunks_of_rank(context: RankContext, whole: list[Tensor], causal: bool, layout: str | None) -> list[Tensor]:
    """This rank's chunks of out, dq, dk and dv; without a layout, those of the gather that does not add."""
    q, k, v, d_out = (shard(x, layout or "contiguous", context.rank, context.world_size) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()
    out = all_gather_attention(q, k, v, causal=causal, layout=layout) if layout else gather_that_does_not_add(q, k, v)
    out.backward(d_out)
    return [out.detach(), q.grad, k.grad, v.grad]


def main() -> int:
    B, H, G, S, D, P = 1, 8, 2, 512, 64, 4
    generator = torch.Generator().manual_seed(0)
    q, d_out = torch.randn(2, B, H, S, D, generator=generator).unbind()
    k, v = torch.randn(2, B, G, S, D, generator=generator).unbind()
    ok = True
    print(f"{P} ranks, S = {S}, {H} query heads on {G}, float32, against full attention in float64")
    for causal, layout in ((False, "contiguous"), *((True, layout) for layout in LAYOUTS)):
        right = exact_attention(q, k, v, d_out, causal=causal, fused_blocks=P)
        results = zip(*launch(chunks_of_rank, P, [q, k, v, d_out], causal, layout, device="cpu"), strict=True)
        print(f"{'causal, ' if causal else ''}{layout}")
        for name, chunks in zip(("out", "dq", "dk", "dv"), results, strict=True):
            ok &= report(name, unshard(list(chunks), layout), right[name])

    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    right = exact_attention(q, k, v, d_out)
    results = zip(*launch(chunks_of_rank, P, [q, k, v, d_out], False, None, device="cpu"), strict=True)
    print("the failure, a gather whose backward pass does not add:")
    for name, chunks in zip(("out", "dq", "dk", "dv"), results, strict=True):
        x = unshard(list(chunks), "contiguous")
        print(f"    {name}: off by {right[name].error(x).max():.4f}")
        ok &= right[name].accepts(x) == (name in ("out", "dq"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
