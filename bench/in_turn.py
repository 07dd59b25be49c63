"""A ring in one process: rank after rank computes both passes of flash_ring.py, on K and V that are there already.

It sends nothing, so it times the computing of P ranks on one device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringlab.basics.naive_attention import accumulation_dtype
from ringlab.ring.flash_ring import flash_backward, flash_forward
from ringlab.ring.layouts import shard
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition
from ringlab.ring.schedule import Round, Schedule


@dataclass(frozen=True)
class InTurn(Schedule):
    """The schedule of one rank. All ranks' K and V are there, and the sums of their gradients."""

    rank: int = 0
    blocks: Sequence[Sequence[Tensor]] = ()
    totals: Sequence[Sequence[Tensor]] = ()

    def block(self, t: int) -> int:
        return (self.rank - t) % len(self.blocks)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        for t in range(len(self.blocks)):
            if pieces := self.partition.pieces(self.rank, self.block(t)):
                yield t, *self.blocks[self.block(t)], pieces

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> "InTurn":
        return self

    def of_round(self, t: int) -> Sequence[Tensor]:
        return self.totals[self.block(t)]

    def send_on(self, t: int) -> None:
        pass

    def home(self) -> Sequence[Tensor]:
        return self.totals[self.rank]


def dealt(whole: Sequence[Tensor], layout: str, world_size: int) -> list[list[Tensor]]:
    """q, k, v and d_out of each rank."""
    return [[shard(x, layout, rank, world_size).contiguous() for x in whole] for rank in range(world_size)]


def ring_in_turn(chunks: Sequence[Sequence[Tensor]], layout: str, causal: bool) -> list[list[Tensor]]:
    """out, dq, dk and dv of each rank, from its q, k, v and d_out."""
    partition = Partition(Mask(causal), layout, tuple(q.shape[2] for q, *_ in chunks))
    blocks, found = [each[1:3] for each in chunks], []
    totals = [[torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in each] for each in blocks]
    for rank, (q, k, v, d_out) in enumerate(chunks):
        turn = InTurn(partition, q.shape[-1] ** -0.5, rank=rank, blocks=blocks, totals=totals)
        out, lse = flash_forward(q, k, v, turn)
        found.append((out, flash_backward(q, k, v, out, lse, d_out, turn)[0].to(q.dtype)))
    return [[*each, *(x.to(each[0].dtype) for x in sums)] for each, sums in zip(found, totals, strict=True)]
