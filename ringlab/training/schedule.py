"""A schedule says which block is in hand when. The attention on the blocks is the same, whichever way they come.

    forward pass     a rank asks: which block is next, and what do I compute of it?
    backward pass    the same, and: where do I add this block's dK and dV?

In the ring of P ranks, rank r has block j = (r - t) mod P in hand in round t. So block j visits the ranks j, j + 1, ...
The sums of its dK and dV visit them too, one round behind it. While a rank computes its part, the sums are on their way
to it. After the last round one more message brings them home. When a window hides all blocks after some hop, no rank
sends them on.

Shapes: k and v (B, G, C, D) are a rank's own block. A block in hand is (B, G, C_j, D), its sums (2, B, G, C_j, D).

    $ python -m ringlab.training.schedule
    block in hand, on ranks 0 to 3, and its sums as they arrive: rank r adds 10^r
    round 0: block 0 + 0     block 1 + 0     block 2 + 0     block 3 + 0
    round 1: block 3 + 1000  block 0 + 1     block 1 + 10    block 2 + 100
    round 2: block 2 + 1100  block 3 + 1001  block 0 + 11    block 1 + 110
    round 3: block 1 + 1110  block 2 + 1101  block 3 + 1011  block 0 + 111
    home:    1111            1111            1111            1111

Before: masks.py. After: flash_ring.py, the attention on these blocks.
Source: Liu et al. 2024, algorithm 1 and appendix A.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from ringlab.basics.chunks import agree_on_chunks, needs_gradients
from ringlab.basics.ranks import neighbours
from ringlab.support.processes import RankContext, launch
from ringlab.training.causal import BlockSlice
from ringlab.training.grouped_query import check_grouped_chunks
from ringlab.training.masks import Mask
from ringlab.training.overlap import arriving_blocks, post, two_buffers

Round = tuple[int, Tensor, Tensor, tuple[BlockSlice, ...]]  # t, k_j and v_j in hand, and what to compute of them


class Sums(Protocol):
    """The dK and dV of the blocks in hand. They too travel, so that each rank can add its part."""

    def of_round(self, t: int) -> Tensor:
        """(2, B, G, C_j, D): the sums for the block of round t, with what other ranks have added. Waits for them."""

    def send_on(self, t: int) -> None:
        """Begin to send the sums of round t to where they are needed next. Return at once."""

    def home(self) -> Tensor:
        """(2, B, G, C, D): the whole dK and dV of this rank's own block."""


class Schedule(Protocol):
    """Which block is in hand in which round: all in which one way to share a sequence differs from another."""

    mask: Mask
    scale: float

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        """Yield the rounds of this rank, whose own block is k, v (B, G, C, D). Meanwhile the next block travels.

        The own block is in the first round: under any mask each query sees a key of it, and so gets a first result.
        """

    def sums(self, k: Tensor, dtype: torch.dtype) -> Sums:
        """The sums of a backward pass, in `dtype`, all zero."""


@dataclass(frozen=True)
class Ring:
    """The schedule of the ring: in round t rank r has block j = (r - t) mod P in hand. Liu et al. 2024, algorithm 1."""

    mask: Mask
    scale: float
    group: ProcessGroup | None

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        rank, world_size, _, _ = neighbours(self.group)
        blocks = arriving_blocks(k, v, lengths=self.mask.lengths, group=self.group, hops=self.mask.hops)
        for t, (k_j, v_j) in enumerate(blocks):
            yield t, k_j, v_j, self.mask.pieces(rank, (rank - t) % world_size)

    def sums(self, k: Tensor, dtype: torch.dtype) -> "TravellingSums":
        return TravellingSums(k, dtype, lengths=self.mask.lengths, group=self.group, hops=self.mask.hops)


class TravellingSums:
    """The sums of a ring travel one round after their block, and after the last round one more message home.

    So while a rank computes what it adds to the sums of a block, they are on their way to it. Without a mask the
    message home is hop P. figures/backward_timeline.svg shows what travels when. Liu et al. 2024, appendix A.
    """

    def __init__(
        self, k: Tensor, dtype: torch.dtype, *, lengths: Sequence[int], group: ProcessGroup | None, hops: int
    ) -> None:
        """k (B, G, C, D) is this rank's own block, `lengths` the chunk length C of every rank."""
        rank, _, _, _ = neighbours(group)
        self.room, self.group, self.hops = two_buffers(k, lengths, rank, dtype), group, hops
        self.room(0).zero_()
        self.arriving: list[Work] = []  # the messages that bring the sums of the round

    def of_round(self, t: int) -> Tensor:
        self.wait()
        return self.room(t)

    def send_on(self, t: int) -> None:
        self.wait()
        if t < self.hops:
            self.arriving = post([self.room(t)], [self.room(t + 1)], self.group)

    def home(self) -> Tensor:
        coming = self.begin_home()
        self.wait()
        return coming

    def begin_home(self) -> Tensor:
        """Begin to send the sums of the last round home. Returns where this rank's own arrive; `wait` for them."""
        self.wait()
        if self.hops == 0:
            return self.room(0)
        coming = torch.empty_like(self.room(0))
        self.arriving = post([self.room(self.hops)], [coming], self.group, places=-self.hops)
        return coming

    def wait(self) -> None:
        """Wait for the messages that are on their way."""
        while self.arriving:
            self.arriving.pop(0).wait()


def agree_on_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    group: ProcessGroup | DeviceMesh | None,
    *,
    check: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    causal: bool = False,
    **mask: Any,
) -> tuple[Mask, float]:
    """The mask of the whole sequence, and the scale, or the same ValueError on every rank before any block travels.

    q (B, H, C, D), k and v (B, G, C, D) are this rank's chunks. `check` raises ValueError for wrong input; None:
    `check_grouped_chunks`. `mask` are the other arguments of `Mask`. On a mesh, ranks count through host by host.
    """
    mask["causal"] = bool(causal)
    settings = {**mask, "gradients": needs_gradients(q, k, v)}
    check = check or partial(check_grouped_chunks, same_tokens=mask["causal"])
    scale, lengths = agree_on_chunks(q, k, v, scale, group, check=check, **settings)
    return Mask(lengths=tuple(lengths), **mask), scale


def watch(context: RankContext) -> list[tuple[int, int]]:
    """The number of the block in hand and of its sums as they arrive, by round. At last, what is at home."""
    P = context.world_size
    k = torch.full((1, 1, 1, 1), context.rank, dtype=torch.float64, device=context.device)
    ring = Ring(Mask("contiguous", (1,) * P), scale=1.0, group=None)
    sums, seen = ring.sums(k, k.dtype), []
    for t, k_j, _, _ in ring.rounds(k, k):
        d_k, _ = sums.of_round(t)
        seen.append((int(k_j), int(d_k)))
        d_k += 10**context.rank
        sums.send_on(t)
    return [*seen, (context.rank, int(sums.home()[0]))]


def main() -> int:
    P = 4
    *rounds, home = zip(*launch(watch, P, device="cpu"), strict=True)
    print(f"block in hand, on ranks 0 to {P - 1}, and its sums as they arrive: rank r adds 10^r")
    for t, seen in enumerate(rounds):
        print(f"round {t}: " + "  ".join(f"block {block} + {total:<4}" for block, total in seen).rstrip())
    print("home:    " + "            ".join(str(total) for _, total in home))
    ok = all(block == (r - t) % P for t, seen in enumerate(rounds) for r, (block, _) in enumerate(seen))
    return 0 if ok and {total for _, total in home} == {1111} else 1


if __name__ == "__main__":
    sys.exit(main())
