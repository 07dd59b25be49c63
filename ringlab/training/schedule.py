"""A schedule says which block is in hand when. The attention on the blocks is the same, whichever way they come.

    forward pass     a rank asks: which block is next, and what do I compute of it?
    backward pass    the same, and: where do I add this block's dK and dV?

In the ring of P ranks, rank r has block j = (r - t) mod P in hand in round t. So block j visits the ranks j, j + 1, ...
The sums of its dK and dV visit them too, one round behind it. While a rank computes its part, the sums are on their way
to it. After the last round one more message brings them home. When a window hides all blocks after some hop, no rank
sends them on.

Shapes: k (B, G, C, D) and v (B, G, C, Dv) are a rank's own block, k_j and v_j with C_j tokens a block in hand. Its sums
dk_j and dv_j have the same shapes. Dv, the head dimension of v, is D in most models.

    $ python -m ringlab.training.schedule
    block in hand, on ranks 0 to 3, and its sums as they arrive: rank r adds 10^r
    round 0: block 0 + 0     block 1 + 0     block 2 + 0     block 3 + 0
    round 1: block 3 + 1000  block 0 + 1     block 1 + 10    block 2 + 100
    round 2: block 2 + 1100  block 3 + 1001  block 0 + 11    block 1 + 110
    round 3: block 1 + 1110  block 2 + 1101  block 3 + 1011  block 0 + 111
    home:    1111            1111            1111            1111

Before: partition.py. After: flash_ring.py, the attention on these blocks.
Source: Liu et al. 2024, algorithm 1 and appendix A.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from ringlab.basics.chunks import agree_on_chunks, needs_gradients
from ringlab.basics.ranks import neighbours
from ringlab.support.agreement import agree, flat_group
from ringlab.support.processes import RankContext, launch
from ringlab.training.causal import BlockSlice
from ringlab.training.grouped_query import check_grouped_chunks
from ringlab.training.layouts import Layout, is_own, layout_of
from ringlab.training.masks import Mask, lengths_of
from ringlab.training.overlap import arriving_blocks, keys_and_values, post, two_buffers
from ringlab.training.partition import Partition

Group = ProcessGroup | DeviceMesh | None  # of ranks; None: the whole job

Round = tuple[int, Tensor, Tensor, tuple[BlockSlice, ...]]  # t, k_j and v_j in hand, and what to compute of them


class Sums(Protocol):
    """The dK and dV of the blocks in hand. They too travel, so that each rank can add its part."""

    def of_round(self, t: int) -> Sequence[Tensor]:
        """dk_j and dv_j for the block of round t, with what other ranks have added. Waits for them."""
        ...

    def send_on(self, t: int) -> None:
        """Begin to send the sums of round t to where they are needed next. Return at once."""
        ...

    def home(self) -> Sequence[Tensor]:
        """dk (B, G, C, D) and dv (B, G, C, Dv): the whole sums of this rank's own block."""
        ...


@dataclass(frozen=True)
class Schedule:
    """Which block is in hand in which round, and where its sums go. Each way to share a sequence is a schedule."""

    partition: Partition
    scale: float
    group: Any = None  # a process group, or a mesh where `checked_group` returns it; None: the whole job
    heads: int = 1  # of q: H
    kv_heads: int = 1  # G
    softcap: float | None = None  # the largest score, up or down

    cross_attention: ClassVar[bool] = True  # a rank may have another number of queries, where the mask shows all

    @staticmethod
    def checked_group(group: Group, heads: int) -> Group:
        """The group as this way takes it. Raises ValueError for what it cannot take, before the ranks agree."""
        return flat_group(group)

    @staticmethod
    def check_device(device: torch.device) -> None:
        """Raise ValueError for a device of k on which this way does not work."""

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        """Yield the rounds of this rank, whose own block is k and v. Meanwhile the next block travels."""
        raise NotImplementedError

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Sums:
        """The sums of a backward pass, in `dtype`, all zero, for this rank's own block k and v."""
        raise NotImplementedError

    @property
    def own_heads(self) -> slice:
        """Which of the H query heads this rank computes."""
        return slice(None)

    def to_heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        """q, k, v or d_out of this rank -> those that it computes with. Most ways compute with the rank's own."""
        return tensors

    def to_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Undo `to_heads`, for out or for dq, dk, dv."""
        return tensors


def checked_group(schedule: type[Schedule], group: Group, heads: int) -> Group:
    """The group as this way takes it. Raises ValueError for what is no way, and for a group that it cannot take."""
    if not (isinstance(schedule, type) and issubclass(schedule, Schedule)):
        raise ValueError(f"schedule is {schedule!r}; expected the class of a way, such as Ring or SharedMemory")
    return schedule.checked_group(group, heads)


class Ring(Schedule):
    """The schedule of the ring: in round t rank r has block j = (r - t) mod P in hand. Liu et al. 2024, algorithm 1."""

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        rank, world_size, _, _ = neighbours(self.group)
        lengths, hops = self.partition.lengths, self.partition.hops
        for t, (k_j, v_j) in enumerate(arriving_blocks(k, v, lengths=lengths, group=self.group, hops=hops)):
            yield t, k_j, v_j, self.partition.pieces(rank, (rank - t) % world_size)

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> "TravellingSums":
        return TravellingSums(k, v, dtype, lengths=self.partition.lengths, group=self.group, hops=self.partition.hops)


class TravellingSums:
    """The sums of a ring travel one round after their block, and after the last round one more message home.

    So while a rank computes what it adds to the sums of a block, they are on their way to it. Without a mask the
    message home is hop P. figures/backward_timeline.svg shows what travels when. Liu et al. 2024, appendix A.
    """

    def __init__(
        self, k: Tensor, v: Tensor, dtype: torch.dtype, *, lengths: Sequence[int], group: ProcessGroup | None, hops: int
    ) -> None:
        """k and v are this rank's own block, `lengths` the chunk length C of every rank."""
        rank, _, _, _ = neighbours(group)
        self.buffer, self.group, self.hops = two_buffers(k, v, lengths, rank, dtype), group, hops
        self.both = partial(keys_and_values, k=k, v=v)  # dK and dV in a buffer
        self.buffer(0).zero_()
        self.arriving: list[Work] = []  # the messages that bring the sums of the round

    def of_round(self, t: int) -> tuple[Tensor, Tensor]:
        self.wait()
        return self.both(self.buffer(t))

    def send_on(self, t: int) -> None:
        self.wait()
        if t < self.hops:
            self.arriving = post([self.buffer(t)], [self.buffer(t + 1)], self.group)

    def home(self) -> tuple[Tensor, Tensor]:
        coming = self.begin_home()
        self.wait()
        return coming

    def begin_home(self) -> tuple[Tensor, Tensor]:
        """Begin to send the sums of the last round home. Returns where this rank's own arrive; `wait` for them."""
        self.wait()
        if self.hops == 0:
            return self.both(self.buffer(0))
        coming = torch.empty_like(self.buffer(0))
        self.arriving = post([self.buffer(self.hops)], [coming], self.group, distance=-self.hops)
        return self.both(coming)

    def wait(self) -> None:
        """Wait for the messages that are on their way."""
        while self.arriving:
            self.arriving.pop(0).wait()


def agree_on_partition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    group: Group,
    *,
    layout: str | Layout,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    schedule: type[Schedule] = Ring,
    check: Callable[[Tensor, Tensor, Tensor], None] = lambda q, k, v: None,
    **mask: Any,
) -> tuple[Partition, float]:
    """The partition of the whole sequence, and the scale; or the same ValueError on every rank before a block travels.

    q (B, H, C, D), k (B, G, C, D) and v (B, G, C, Dv) are this rank's chunks, sinks (H,), `mask` the fields of `Mask`.
    `check` raises ValueError for input that the caller does not take. On a mesh, ranks count through host by host.
    """

    def check_all(q: Tensor, k: Tensor, v: Tensor) -> None:
        check(q, k, v)
        any_queries = Mask(**mask).shows_all and schedule.cross_attention
        check_grouped_chunks(q, k, v, same_tokens=not any_queries, same_head_dim=False)
        schedule.check_device(k.device)
        check_sinks(sinks, q)
        check_softcap(softcap)
        layout_of(layout)

    mask = {field.name: mask.get(field.name, field.default) for field in fields(Mask)}  # so that all ranks compare all
    mask["causal"] = bool(mask["causal"])
    mask["documents"] = lengths_of(mask["documents"])
    own = isinstance(layout, Layout) and is_own(layout)
    name = f"{layout}, one of its own" if own else layout
    learned = [sinks] if isinstance(sinks, Tensor) else []
    settings = {"layout": name, **mask, "schedule": schedule.__name__, "sinks": learned[0].dtype if learned else None}
    settings["softcap"] = softcap * 1.0 if isinstance(softcap, int) else softcap
    settings["autocast"] = torch.is_autocast_enabled(q.device.type)
    settings["gradients"] = needs_gradients(q, k, v, *learned)
    scale, lengths = agree_on_chunks(q, k, v, scale, group, check=check_all, **settings)

    def partition() -> Partition:
        return known_partition(Mask(**mask), layout, tuple(lengths))

    if own:  # the ranks may have other functions of this name
        P = len(lengths)
        tables = agree(lambda: hash(tuple(n for rank in range(P) for n in partition().positions(rank).tolist())), group)
        if len(set(tables)) > 1:
            raise ValueError(f"the ranks disagree about the positions of the layout {layout}; expected one function")
    return partition(), scale


known_partition = lru_cache(maxsize=64)(Partition)  # every layer of a model asks for the same


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise ValueError unless the sinks are None, or a logit for each query head of q (B, H, C, D), on its device."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise ValueError(f"sinks is {sinks!r}; expected a tensor ({q.shape[1]},), or None")
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(
            f"sinks is {sinks.dtype} of shape {tuple(sinks.shape)} on {sinks.device}; expected a logit for each query "
            f"head, so a floating dtype, shape ({q.shape[1]},), on {q.device}"
        )


def check_softcap(softcap: float | None) -> None:
    """Raise ValueError unless the softcap is None, or a finite number above 0."""
    if softcap is None:
        return
    if not isinstance(softcap, int | float) or isinstance(softcap, bool) or not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap!r}; expected a finite number above 0, or None for no cap")


def watch(context: RankContext) -> list[tuple[int, int]]:
    """The number of the block in hand and of its sums as they arrive, by round. At last, what is at home."""
    P = context.world_size
    k = torch.full((1, 1, 1, 1), context.rank, dtype=torch.float64, device=context.device)
    ring = Ring(Partition(Mask(), "contiguous", (1,) * P), scale=1.0)
    sums, seen = ring.sums(k, k, k.dtype), []
    for t, k_j, _, _ in ring.rounds(k, k):
        d_k, _ = sums.of_round(t)
        seen.append((int(k_j), int(d_k)))
        d_k += 10**context.rank
        sums.send_on(t)
    return [*seen, (context.rank, int(sums.home()[0]))]


def main() -> int:
    P = 4
    *rounds, home = zip(*launch(watch, P), strict=True)
    print(f"block in hand, on ranks 0 to {P - 1}, and its sums as they arrive: rank r adds 10^r")
    for t, seen in enumerate(rounds):
        print(f"round {t}: " + "  ".join(f"block {block} + {total:<4}" for block, total in seen).rstrip())
    print("home:    " + "            ".join(str(total) for _, total in home))
    ok = all(block == (r - t) % P for t, seen in enumerate(rounds) for r, (block, _) in enumerate(seen))
    return 0 if ok and {total for _, total in home} == {1111} else 1


if __name__ == "__main__":
    sys.exit(main())
