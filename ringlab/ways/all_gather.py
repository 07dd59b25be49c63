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

    $ python -m ringlab.ways.all_gather
    4 ranks, S = 256, 8 query heads on 2, float32, against full attention in float64
    contiguous
    ok    out: largest error 4.2e-07, rounding allows 1.0e-05 (float32 sums)
    ...

Before: documents.py. After: all_to_all.py, whole attention on a few heads.
Source: Llama 3 (2024), section 3.3.2, context parallelism. It gathers K and V, and then computes.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.overlap import keys_and_values, numbers_of_token
from ringlab.ring.partition import BlockSlice, Partition, cut, every, kept
from ringlab.ring.schedule import Round, Schedule
from ringlab.support.agreement import members
from ringlab.support.exchange import all_gather

# torch 2.13 gave it another name; older releases are supported too.
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def buffer_for_all(k: Tensor, v: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A buffer for one head of the blocks of all ranks: (P, B·C·(D + Dv)), where C is the longest chunk."""
    return torch.empty(len(lengths), max(lengths) * numbers_of_token(k[:, :1], v[:, :1]), dtype=dtype, device=k.device)


@kept  # every head and layer of a model asks the same
def pieces_of_all(partition: Partition, rank: int) -> tuple[BlockSlice, ...]:
    """What `rank` computes of the K and V of all ranks, in the order of the sequence."""
    P = len(partition.lengths)
    if partition.mask.shows_all:
        return partition.pieces(rank, rank)
    if not partition.striped:
        return tuple(piece for run in partition.visible_keys(rank) for piece in cut(*run))
    return tuple(  # rank j's keys are every P-th: a query that is one row down sees one key more of each stripe
        replace(piece, keys=every(P, j, piece.keys)) for j in range(P) for piece in partition.pieces(rank, j)
    )


class AllGather(Schedule):
    """A round for each K/V head, with the keys of all ranks in the order of the sequence. Llama 3, section 3.3.2."""

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        rank, served = members(self.group)[0], self.heads // self.kv_heads
        buffers = [buffer_for_all(k, v, self.partition.lengths, k.dtype) for _ in range(2)]
        in_order = self.whole(k, v, k.dtype)  # K (B, 1, S, D) and V (B, 1, S, Dv) of the head in hand
        coming = self.gather(k[:, :1], v[:, :1], buffers[0])
        for head in range(self.kv_heads):
            arriving, blocks = coming, buffers[head % 2]  # (P, numbers of the longest block)
            if head + 1 < self.kv_heads:
                following = slice(head + 1, head + 2)
                coming = self.gather(k[:, following], v[:, following], buffers[(head + 1) % 2])
            arriving.wait()
            for j in range(len(blocks)):
                for whole, block in zip(in_order, self.block(k, v, blocks, j), strict=True):
                    self.partition.places(j).put(whole, block)
            heads = slice(head * served, (head + 1) * served)
            pieces = pieces_of_all(self.partition, rank)
            yield head, *in_order, tuple(replace(piece, heads=heads) for piece in pieces)

    def gather(self, k: Tensor, v: Tensor, blocks: Tensor) -> Work:
        """Begin to gather k and v (B, 1, C, D) of every rank into `blocks`, from `buffer_for_all`. Return at once."""
        rank = members(self.group)[0]
        for place, x in zip(self.block(k, v, blocks, rank), (k, v), strict=True):
            place.copy_(x)
        return all_gather(blocks.flatten(), blocks[rank], group=self.group, async_op=True)

    def block(self, k: Tensor, v: Tensor, blocks: Tensor, j: int) -> tuple[Tensor, Tensor]:
        """K (B, 1, C_j, D) and V (B, 1, C_j, Dv) of rank j, or their gradients, in one of the `blocks`."""
        numbers = self.partition.lengths[j] * numbers_of_token(k[:, :1], v[:, :1])
        return keys_and_values(blocks[j, :numbers], k[:, :1], v[:, :1])

    def whole(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeros for K and V of all tokens, or their gradients: (B, 1, S, D) and (B, 1, S, Dv)."""
        zeros = torch.zeros(self.partition.seq_len * numbers_of_token(k[:, :1], v[:, :1]), dtype=dtype, device=k.device)
        return keys_and_values(zeros, k[:, :1], v[:, :1])

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> "SumsOfHeads":
        return SumsOfHeads(self, k, v, dtype)


class SumsOfHeads:
    """The sums of a head stay on this rank until its round ends. Then all ranks add up theirs during the next round."""

    def __init__(self, schedule: AllGather, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self.schedule, self.k, self.v, self.dtype = schedule, k, v, dtype
        self.parts: tuple[Tensor, Tensor] | None = None  # dk and dv of the head in hand, for all S tokens
        self.totals: list[tuple[Tensor, Tensor]] = []  # of each head, for C tokens; complete when `adding` is done
        self.adding: Work | None = None

    def of_round(self, t: int) -> tuple[Tensor, Tensor]:
        if self.parts is None:
            self.parts = self.schedule.whole(self.k, self.v, self.dtype)
        return self.parts

    def send_on(self, t: int) -> None:
        """Begin to add up what all ranks found for this rank's block."""
        schedule, (k, v) = self.schedule, (self.k, self.v)
        by_rank, parts = buffer_for_all(k, v, schedule.partition.lengths, self.dtype), self.of_round(t)
        for j in range(len(by_rank)):
            for place, part in zip(schedule.block(k, v, by_rank, j), parts, strict=True):
                place.copy_(schedule.partition.places(j).take(part))
        self.wait()  # for the head before: so no more than two heads of sums take room
        total, self.parts = torch.empty_like(by_rank[0]), None
        self.adding = reduce_scatter(total, by_rank.flatten(), group=schedule.group, async_op=True)
        of_head = total[: k.shape[2] * numbers_of_token(k[:, :1], v[:, :1])]
        self.totals.append(keys_and_values(of_head, k[:, :1], v[:, :1]))

    def wait(self) -> None:
        if self.adding is not None:
            self.adding.wait()

    def home(self) -> list[Tensor]:
        self.wait()
        return [torch.cat(of_heads, dim=1) for of_heads in zip(*self.totals, strict=True)]


def main() -> int:
    from ringlab.ring.cases import random_inputs, report_cases

    whole, attention = random_inputs(1, 8, 2, 256, 64), partial(ring_flash_attention, schedule=AllGather)
    return 0 if report_cases(4, whole, attention) else 1


if __name__ == "__main__":
    sys.exit(main())
