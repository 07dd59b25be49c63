"""A schedule says which block is in hand when. The attention on the blocks is the same, whichever way they come.

    forward pass     a rank asks: which block is next, and what do I compute of it?
    backward pass    the same, and: where do I add this block's dK and dV?

In the ring of P ranks, rank r has block j = (r - t) mod P in hand in round t: it visits the ranks j, j + 1, ... Sums
of its dK and dV follow it from rank j + 1 on. They arrive while a rank computes its own part. The last of their
P - 1 messages brings them home. Rank j's own part stays where it is computed. No rank sends on what a window hides.

Shapes: k (B, G, C, D) and v (B, G, C, Dv) are a rank's own block, k_j and v_j with C_j tokens a block in hand. Its sums
dk_j and dv_j have the same shapes. Dv, the head dimension of v, is D in most models.

    $ python -m ringlab.ring.schedule
    backward: block in hand, on ranks 0 to 3, and its sums as they arrive: rank r adds 10^r
    round 1: block 3 + 0     block 0 + 0     block 1 + 0     block 2 + 0
    round 2: block 2 + 1000  block 3 + 1     block 0 + 10    block 1 + 100
    round 3: block 1 + 1100  block 2 + 1001  block 3 + 11    block 0 + 110
    round 0: block 0 + 0     block 1 + 0     block 2 + 0     block 3 + 0
    home:    1111            1111            1111            1111

Before: partition.py. After: flash_ring.py, the attention on these blocks.
Source: Liu et al. 2024, algorithm 1 and appendix A.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ringlab.basics.chunks import agree_on_chunks, check_grouped_chunks, needs_gradients, under_autocast
from ringlab.ring.layouts import Layout, is_own, layout_of
from ringlab.ring.masks import Mask
from ringlab.ring.overlap import arriving_blocks, keys_and_values, numbers_of_token, own_last, post, two_buffers
from ringlab.ring.partition import BlockSlice, Partition
from ringlab.support.agreement import Group, agree_same, flat_group, members
from ringlab.support.processes import RankContext, launch

Check = Callable[[Tensor, Tensor, Tensor], None] | None  # of q, k and v

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
    call: int = 0  # the number of the agreement on this call: the same on all ranks, and of no other call

    cross_attention: ClassVar[bool] = True  # a rank may have another number of queries, where the mask shows all

    @staticmethod
    def checked_group(group: Group, heads: int) -> Group:
        """The group as this way takes it. Raises ValueError for what it cannot take, before the ranks agree."""
        return flat_group(group)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        """Yield the rounds of this rank, whose own block is k and v. Meanwhile the next block travels."""
        raise NotImplementedError

    def rounds_back(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        """The rounds of a backward pass, in the order that hides the messages of its sums."""
        return self.rounds(k, v)

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Sums:
        """The sums of a backward pass, in `dtype`, all zero, for this rank's own block k and v."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what the passes need before any message. Raises ValueError on every rank, or on none."""

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


class Ring(Schedule):
    """The schedule of the ring: in round t rank r has block j = (r - t) mod P in hand. Liu et al. 2024, algorithm 1."""

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        rank, world_size = members(self.group)
        lengths, hops = self.partition.lengths, self.partition.hops
        for t, (k_j, v_j) in enumerate(arriving_blocks(k, v, lengths=lengths, group=self.group, hops=hops)):
            yield t, k_j, v_j, self.partition.pieces(rank, (rank - t) % world_size)

    def rounds_back(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        return own_last(self.rounds(k, v))

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> "TravellingSums":
        return TravellingSums(k, v, dtype, lengths=self.partition.lengths, group=self.group, hops=self.partition.hops)


class TravellingSums:
    """The sums of a ring travel one round after their block; what a rank adds to those of its own block stays at home.

    The message home is their last: they make as many hops as their block. figures/backward_timeline.py shows what
    travels when. In Liu et al. 2024, appendix A, and in other public rings, the own share travels too: one hop more.
    """

    def __init__(
        self, k: Tensor, v: Tensor, dtype: torch.dtype, *, lengths: Sequence[int], group: ProcessGroup | None, hops: int
    ) -> None:
        """k and v are this rank's own block, `lengths` the chunk length C of every rank."""
        rank, _ = members(group)
        self.buffer, self.group, self.hops = two_buffers(k, v, lengths, rank, dtype), group, hops
        self.k, self.v, self.dtype, self.length = k, v, dtype, lengths[rank]
        if hops:
            self.buffer(1).zero_()
        self.arriving: list[Work] = []  # the messages that bring the sums of the round, or bring them home

    @cached_property
    def at_home(self) -> Tensor:
        """What this rank adds to the sums of its own block: made when it is first needed."""
        return self.k.new_zeros(numbers_of_token(self.k, self.v) * self.length, dtype=self.dtype)

    def sums_in(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        return keys_and_values(buffer, self.k, self.v)

    def of_round(self, t: int) -> tuple[Tensor, Tensor]:
        if t == 0:
            return self.sums_in(self.at_home)
        self.wait()
        return self.sums_in(self.buffer(t))

    def send_on(self, t: int) -> None:
        if t == 0:
            return
        self.wait()
        here = self.buffer(t)
        if t < self.hops:
            self.arriving = post([here], [self.buffer(t + 1)], self.group)
            return
        self.last = here  # it stays until it is sent
        del self.buffer  # and with it the other one: what comes home takes its room
        self.coming = torch.empty_like(self.at_home)
        self.arriving = post([here], [self.coming], self.group, distance=-t)

    def home(self) -> tuple[Tensor, Tensor]:
        self.wait()
        if self.hops:
            self.at_home.add_(self.coming)
        return self.sums_in(self.at_home)

    def wait(self) -> None:
        """Wait for the messages that are on their way."""
        while self.arriving:
            self.arriving.pop(0).wait()


@dataclass(frozen=True)
class Request:
    """What a call asks for besides its tensors. It checks itself, and must be the same on every rank."""

    mask: Mask
    layout: Layout
    way: type[Schedule]
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.way, type) and issubclass(self.way, Schedule)):
            raise ValueError(f"schedule is {self.way!r}; expected the class of a way, such as Ring or AllGather")
        check_softcap(self.softcap)

    @property
    def facts(self) -> dict[str, Any]:
        """What it asks for, by the names of the options."""
        layout = f"{self.layout}, one of its own" if is_own(self.layout) else self.layout.name
        softcap = None if self.softcap is None else float(self.softcap)
        return {"layout": layout, **vars(self.mask), "schedule": self.way.__name__, "softcap": softcap}


known_partition = lru_cache(maxsize=64)(Partition)  # every layer of a model asks for the same


def agree_on_schedule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    group: Group,
    name: str,
    check: Check = None,
    same: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Schedule:
    """The schedule of this call; or the same ValueError on every rank before a block travels.

    q (B, H, C, D), k (B, G, C, D) and v (B, G, C, Dv) are this rank's chunks. `options` are those of the function of
    this name. `check` raises ValueError for input that it does not take. What `same` returns must be the same on all
    ranks too. On a mesh, ranks count host by host.
    """
    asked = {field.name: options[field.name] for field in fields(Mask) if field.name in options}
    sinks = options.get("sinks")
    request: Request
    taken: Group

    def check_all(q: Tensor, k: Tensor, v: Tensor) -> None:
        nonlocal request, taken  # made here, once: they may refuse what is given
        if check is not None:
            check(q, k, v)
        mask, layout = Mask(**asked), layout_of(options["layout"])
        request = Request(mask, layout, options["schedule"], options.get("softcap"))
        taken = request.way.checked_group(group, q.shape[1:2].numel() if isinstance(q, Tensor) else 0)
        any_queries = mask.shows_all and request.way.cross_attention
        check_grouped_chunks(q, k, v, same_tokens=not any_queries, same_head_dim=False)
        check_sinks(sinks, q)

    def settings() -> dict[str, Any]:
        gradients = needs_gradients(q, k, v, *([] if sinks is None else [sinks]))
        of_tensors = {"sinks": None if sinks is None else str(sinks.dtype), "gradients": gradients}
        return request.facts | of_tensors | {"autocast": under_autocast(q), **same()}

    scale, lengths = agree_on_chunks(q, k, v, scale, group, check=check_all, function=name, settings=settings)

    def partition() -> Partition:
        return known_partition(request.mask, request.layout, tuple(lengths))

    if is_own(request.layout):  # the ranks may have other functions of this name

        def places() -> tuple[None, dict[str, int]]:
            return None, {f"the positions of the layout {request.layout}": partition().order}

        agree_same(places, group, expected="one function")
    agreed = request.way(partition(), scale, taken, q.shape[1], k.shape[1], request.softcap, lengths.number)
    agreed.prepare()
    return agreed


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


def watch(context: RankContext) -> list[tuple[int, int, int]]:
    """t, the number of the block in hand and of its sums as they arrive, by round. At last, what is at home."""
    P = context.world_size
    k = torch.full((1, 1, 1, 1), context.rank, dtype=torch.float64, device=context.device)
    ring = Ring(Partition(Mask(), "contiguous", (1,) * P), scale=1.0)
    sums, seen = ring.sums(k, k, k.dtype), []
    for t, k_j, _, _ in ring.rounds_back(k, k):
        d_k, _ = sums.of_round(t)
        seen.append((t, int(k_j), int(d_k)))
        d_k += 10**context.rank
        sums.send_on(t)
    return [*seen, (P, context.rank, int(sums.home()[0]))]


def main() -> int:
    P = 4
    *rounds, home = zip(*launch(watch, P), strict=True)
    print(f"backward: block in hand, on ranks 0 to {P - 1}, and its sums as they arrive: rank r adds 10^r")
    for seen in rounds:
        print(f"round {seen[0][0]}: " + "  ".join(f"block {block} + {total:<4}" for _, block, total in seen).rstrip())
    print("home:    " + "            ".join(str(total) for _, _, total in home))
    ok = all(block == (r - t) % P for seen in rounds for r, (t, block, _) in enumerate(seen))
    return 0 if ok and {total for _, _, total in home} == {1111} else 1


if __name__ == "__main__":
    sys.exit(main())
