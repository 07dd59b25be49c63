"""All-gather: every rank collects K and V of all ranks, one head at a time, and computes its own rows at once.

    forward     all-gather        K, V of all ranks; then out = attention of this rank's queries over all keys
    backward    all-gather        K, V of all ranks again; then dK, dV of all keys, from this rank's queries
                reduce-scatter    dK, dV of this rank's block = the sum of what all ranks found for it

In the ring a block arrives, is used and leaves. Here K and V of all S tokens are in memory at the same time. They are
put in the order of the sequence, so each query sees one run of keys. A few large rectangles and triangles cover it, in
place of several pieces of each block. But K and V take room for all S tokens, however many ranks there are. So one K/V
head is gathered at a time. While a rank computes with it, the next head arrives in a second buffer. Meanwhile the
gradients of the head before are summed over the ranks.

Shapes: B sequences, H query heads, G key/value heads, P ranks, C = S/P tokens on each, D numbers in a head. On each
rank q and out are (B, H, C, D), k and v (B, G, C, D). Two buffers of K and V, and one in the order of the sequence,
hold 6·B·S·D numbers. In the backward pass three of gradients hold as many, in float32 at least. In the forward pass a
rank sends (P-1) · 2·B·G·C·D numbers. In the backward pass it sends these again, and as many numbers of gradients. (gloo
sends the gradients twice: its reduce-scatter is an all-reduce.) Shorter chunks are padded to the longest.

    $ python -m ringlab.training.all_gather
    4 ranks, S = 512, 8 query heads on 2, float32, against full attention in float64
    contiguous
    ok    out: largest error 3.8e-07, rounding allows 8.8e-06 (float32 sums)
    ok    dq: largest error 9.6e-07, rounding allows 4.1e-05 (float32 sums)
    ok    dk: largest error 8.5e-07, rounding allows 2.4e-04 (float32 sums)
    ok    dv: largest error 4.9e-07, rounding allows 6.2e-05 (float32 sums)
    causal, contiguous
    ...
    the failure, a backward pass that does not add:
        out: off by 0.0000
        dq: off by 0.0000
        dk: off by 0.5881
        dv: off by 0.5227

Before: window.py. After: split_heads.py, which heads a rank can take.
Source: Llama 3 (2024), section 3.3.2, context parallelism. It gathers K and V, and then computes.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

from ringlab.basics.naive_attention import accumulation_dtype, naive_attention
from ringlab.basics.ranks import neighbours
from ringlab.support.processes import launch
from ringlab.support.rounding import exact_attention, report
from ringlab.support.timeline import span
from ringlab.training.causal import LAYOUTS, BlockSlice, unshard
from ringlab.training.flash_ring import chunks_of_rank, ring_backward, ring_forward
from ringlab.training.masks import Mask, cut
from ringlab.training.schedule import Ring, Round, agree_on_mask

# torch 2.13 gave both another name; older releases are supported too.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def room_for_all(k: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for one head of the blocks of all ranks, for k (B, G, C, D): (P, 2·B·C·D), where C is the longest chunk."""
    B, _, _, D = k.shape
    return torch.empty(len(lengths), 2 * B * max(lengths) * D, dtype=dtype, device=k.device)


@lru_cache(maxsize=4096)  # every head and layer of a model asks the same
def pieces_of_all(mask: Mask, rank: int) -> tuple[BlockSlice, ...]:
    """What `rank` computes of the K and V of all ranks, in the order of the sequence."""
    P = len(mask.lengths)
    if not mask.causal:
        return (BlockSlice(slice(None), slice(None), triangle=False),)
    if mask.layout != "striped":
        return tuple(piece for run in mask.visible_keys(mask.place(rank)) for piece in cut(*run))
    return tuple(  # rank j's keys are every P-th: a query that is one row down sees one key more of each stripe
        replace(piece, keys=slice(j + P * piece.keys.start, j + P * piece.keys.stop, P))
        for j in range(P)
        for piece in mask.pieces(rank, j)
    )


class GatheredHead:
    """The schedule of one K/V head: one round, with the keys of all ranks.

    It carries the sums of dK and dV too. They stay on this rank until the end, and then all ranks add them up.
    """

    def __init__(self, k: Tensor, v: Tensor, ring: Ring, blocks: Tensor) -> None:
        """Begin to gather k and v (B, 1, C, D) of every rank into `blocks`, from `room_for_all`. Return at once."""
        self.k, self.v, self.blocks = k, v, blocks
        self.mask, self.scale, self.group = ring.mask, ring.scale, ring.group
        self.rank, self.world_size, _, _ = neighbours(ring.group)
        own = self.block(blocks, self.rank)
        own.copy_(torch.stack([k, v]))
        self.gathering = all_gather(blocks.flatten(), blocks[self.rank], group=self.group, async_op=True)

    def block(self, blocks: Tensor, j: int) -> Tensor:
        """K and V of rank j, or their gradients: (2, B, 1, C_j, D)."""
        B, _, _, D = self.k.shape
        shape = 2, B, 1, self.mask.lengths[j], D
        return blocks[j, : math.prod(shape)].view(shape)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Room for K and V of all tokens, or their gradients: (2, B, 1, S, D)."""
        B, _, _, D = self.k.shape
        return torch.zeros(2, B, 1, self.mask.seq_len, D, dtype=dtype, device=self.k.device)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        with span("wait", 0, k, v):
            self.gathering.wait()
        in_order = self.whole(k.dtype)
        for j in range(self.world_size):
            in_order.index_copy_(3, self.mask.place(j).to(k.device), self.block(self.blocks, j))
        yield 0, *in_order, pieces_of_all(self.mask, self.rank)

    def sums(self, k: Tensor, dtype: torch.dtype) -> "GatheredHead":
        self.parts = self.whole(dtype)
        return self

    def of_round(self, t: int) -> Tensor:
        return self.parts

    def send_on(self, t: int) -> None:
        """Nothing travels before the end."""

    def home(self) -> Tensor:
        """Begin to add up what all ranks found for this rank's block. It is complete when `summing` is done."""
        by_rank = room_for_all(self.k, self.mask.lengths, self.parts.dtype)
        for j in range(self.world_size):
            self.block(by_rank, j).copy_(self.parts[:, :, :, self.mask.place(j).to(self.k.device)])
        total = torch.empty_like(by_rank[0])
        self.summing = reduce_scatter(total, by_rank.flatten(), group=self.group, async_op=True)
        return total[: 2 * self.k.numel()].view(2, *self.k.shape)


def arriving_heads(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[slice, GatheredHead]]:
    """Yield the query heads that share a K/V head, and the schedule of that head. Meanwhile the next head travels.

    Compute with each head before advancing: its buffer is reused.
    """
    H, G = q.shape[1], k.shape[1]
    buffers = [room_for_all(k, ring.mask.lengths, k.dtype) for _ in range(2)]
    coming = GatheredHead(k[:, :1], v[:, :1], ring, buffers[0])
    for head in range(G):
        here, following = coming, slice(head + 1, head + 2)
        if head + 1 < G:
            coming = GatheredHead(k[:, following], v[:, following], ring, buffers[(head + 1) % 2])
        yield slice(head * H // G, (head + 1) * H // G), here


class AllGather(torch.autograd.Function):
    """The attention as one operation of autograd. It saves the chunks q, k, v, out and lse, and gathers again."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for heads, gathered in arriving_heads(q, k, v, ring):
            out[:, heads], lse[:, heads] = ring_forward(q[:, heads], gathered.k, gathered.v, gathered)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_q, d_kv, summing = torch.empty_like(q), [], None
        for heads, gathered in arriving_heads(q, k, v, ctx.ring):
            of_heads = out[:, heads], lse[:, heads], d_out[:, heads]
            d_q[:, heads], *d_kv_of_head = ring_backward(q[:, heads], gathered.k, gathered.v, *of_heads, gathered)
            d_kv.append(d_kv_of_head)
            if summing:  # the sums of the head before: so no more than two heads of them take room
                summing.wait()
            summing = gathered.summing
        summing.wait()
        d_k, d_v = (torch.cat(of_heads, dim=1).to(d_out.dtype) for of_heads in zip(*d_kv, strict=True))
        return d_q, d_k, d_v, None


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    layout: str = "contiguous",
    scale: float | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """`ring_flash_attention` by an all-gather: the same chunks, shapes, dtypes, gradients and errors.

    q (B, H, C, D), k and v (B, G, C, D) -> out (B, H, C, D), of the tokens that `ringlab.training.causal.shard` gives
    to this rank. Raises the same ValueError on every rank before any block travels. Llama 3 2024, section 3.3.2.
    """
    agreed = agree_on_mask(q, k, v, scale, group, layout=layout, causal=causal)
    return AllGather.apply(q, k, v, Ring(*agreed, group))


def gather_that_does_not_add(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The failure, without a mask: to autograd the blocks of the other ranks are constants. All (B, H, C, D)."""
    rank, world_size, _, _ = neighbours()
    gathered = []
    for x in (k, v):
        blocks = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(blocks, x.detach())
        blocks[rank] = x
        gathered.append(torch.cat(blocks, dim=2))
    return naive_attention(q, *gathered)


def main() -> int:
    B, H, G, S, D, P = 1, 8, 2, 512, 64, 4
    generator = torch.Generator().manual_seed(0)
    q, d_out = torch.randn(2, B, H, S, D, generator=generator).unbind()
    k, v = torch.randn(2, B, G, S, D, generator=generator).unbind()
    ok = True
    print(f"{P} ranks, S = {S}, {H} query heads on {G}, float32, against full attention in float64")
    for causal, layout in ((False, "contiguous"), *((True, layout) for layout in LAYOUTS)):
        right = exact_attention(q, k, v, d_out, causal=causal, fused_blocks=P)
        attention = partial(all_gather_attention, causal=causal, layout=layout)
        results = zip(*launch(chunks_of_rank, P, [q, k, v, d_out], attention, layout, device="cpu"), strict=True)
        print(f"{'causal, ' if causal else ''}{layout}")
        for name, chunks in zip(("out", "dq", "dk", "dv"), results, strict=True):
            ok &= report(name, unshard(list(chunks), layout), right[name])

    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    right = exact_attention(q, k, v, d_out)
    wrong = gather_that_does_not_add, "contiguous"
    results = zip(*launch(chunks_of_rank, P, [q, k, v, d_out], *wrong, device="cpu"), strict=True)
    print("the failure, a backward pass that does not add:")
    for name, chunks in zip(("out", "dq", "dk", "dv"), results, strict=True):
        x = unshard(list(chunks), "contiguous")
        print(f"    {name}: off by {right[name].error(x).max():.4f}")
        ok &= right[name].accepts(x) == (name in ("out", "dq"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
