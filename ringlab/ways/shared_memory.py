"""Shared memory: on one host the blocks stay where they are, and the readers go round.

    messages         in round t rank r computes on the block that came from rank r - 1
    shared memory    in round t rank r computes on block j = (r - t) mod P, in the memory of rank j

Every block is computed in the same round as in the ring. But nothing travels except flags: a rank says that its block
can be read, and its readers say that they have read it. GPUs with peer access can do the same over NVLink; this file
is for CPUs.

    ready    rank j to its readers       the block is complete: nobody reads half of it
    read     a reader to rank j          rank j may write its memory again
    turn     rank r to rank r + 1        dK and dV of the block have my part: add yours
    home     the last of them to rank j  they are complete

So one rank at a time adds to dK and dV of a block, in the order j, j + 1, ...: the sums are the same bits in every run.

Shapes: on each rank q and out are (B, H, C, D), k and v (B, G, C, D), as in flash_ring.py. A rank copies its K and V
once into memory that others can read, 2·B·G·C·D numbers. The ring has two buffers of that size. In the backward pass as
many numbers hold dK and dV, in float32 at least. This memory stays for the next pass, until the process group is
destroyed.

    $ python -m ringlab.ways.shared_memory
    auto: SharedMemory, 4 ranks on one host; then two levels, 2 hosts of 2 ranks
    4 ranks, S = 512, 8 query heads on 2, float32, against full attention in float64
    contiguous
    ok    out: largest error 4.3e-07, rounding allows 1.2e-05 (float32 sums)
    ...

In a model, on every rank of a Linux host, `memory_or_messages()` gives SharedMemory if all ranks are on this host, else
Ring, and the reason: `ring_flash_attention(q, k, v, causal=True, layout="zigzag", schedule=schedule)`.

Two levels are the double ring, with shared memory inside each host and messages between hosts. A block that arrives
from another host is copied once more: to where the ranks of this host can read it. With n hosts, each of the P ranks
sends n - 1 blocks in place of P - 1, all of them to another host. Its group is a mesh of hosts x ranks of a host.

Before: double_ring.py. After: ../../ring_planner/hidden_communication.py, how long chunks must be.
Source: Liu et al. 2024, algorithm 1, here with loads in place of messages; memfd_create(2), pipe(7), proc(5); Gu et al.
2024 (LoongTrain), section 4, the double ring.
"""

import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.overlap import keys_and_values, numbers_of_token
from ringlab.ring.schedule import Ring, Round, Schedule, Sums
from ringlab.support.agreement import agree, members
from ringlab.support.host_memory import COPIES, HOME, READ, READY, SUMS, TURN, HostMemory, has_memory, host_memory
from ringlab.support.processes import RankContext, launch
from ringlab.support.timeline import span
from ringlab.ways.all_to_all import OwnSums
from ringlab.ways.double_ring import DoubleRing


def memory_or_messages(group: ProcessGroup | None = None) -> tuple[type[Schedule], str]:
    """(SharedMemory, why) if all ranks of the group can share memory and use gloo, so CPUs; else (Ring, why).

    Every rank must call it.
    """
    members(group)
    if "gloo" not in dist.get_backend(group):
        return Ring, f"the backend is {dist.get_backend(group)}, not gloo"
    try:
        host_memory(group)
    except ValueError as error:  # on every rank, the same
        return Ring, str(error)
    return SharedMemory, f"{members(group)[1]} ranks on one host"


class SharedMemory(Schedule):
    """The schedule of the ring without its messages: in round t rank r reads block j = (r - t) mod P where it lies."""

    @staticmethod
    def check_device(device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"q is on {device}; shared memory is for tensors on CPUs: use the schedule Ring")

    def prepare(self) -> None:
        if self.partition.hops:
            host_memory(self.group)

    def block(self, memory: HostMemory, j: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """K_j and V_j in the memory of rank j."""
        count = numbers_of_token(k, v) * self.partition.lengths[j]
        return keys_and_values(memory.numbers(COPIES, j, count, k.dtype), k, v)

    def rounds(self, k: Tensor, v: Tensor) -> Iterator[Round]:
        rank, world_size = members(self.group)
        hops, pieces = self.partition.hops, self.partition.pieces
        if hops == 0:
            yield 0, k, v, pieces(rank, rank)
            return
        memory = host_memory(self.group)
        while memory.readers:  # of the pass before
            memory.wait(READ, memory.readers.pop())
        for copy, x in zip(self.block(memory, rank, k, v), (k, v), strict=True):
            copy.copy_(x)
        readers = [(rank + t) % world_size for t in range(1, hops + 1)]
        for reader in readers:
            memory.raise_flag(READY, reader)
        memory.readers += readers
        yield 0, k, v, pieces(rank, rank)
        for t in range(1, hops + 1):
            j = (rank - t) % world_size
            with span("wait", t, k, v):
                memory.wait(READY, j)
            yield t, *self.block(memory, j, k, v), pieces(rank, j)
            memory.raise_flag(READ, j)

    def give_up(self) -> None:
        if has_memory(self.group):
            host_memory(self.group).give_up()

    def sums(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> Sums:
        return SharedSums(self, k, v, dtype) if self.partition.hops else OwnSums(k, v, dtype)


class SharedSums:
    """The sums of a block stay in the memory of its rank. The ranks j, j + 1, ... add to them, one after the other.

    No sum travels, so nothing is saved where the own share stays at home.
    """

    def __init__(self, schedule: SharedMemory, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        """k and v are this rank's own block."""
        self.rank, self.world_size = members(schedule.group)
        self.lengths, self.hops = schedule.partition.lengths, schedule.partition.hops
        self.memory = host_memory(schedule.group)
        self.of_token, self.dtype = numbers_of_token(k, v), dtype
        self.sums_in = partial(keys_and_values, k=k, v=v)  # dK and dV
        self.at_home, self.waited = self.place(self.rank).zero_(), 0

    def place(self, j: int) -> Tensor:
        """dK and dV of block j, side by side."""
        return self.memory.numbers(SUMS, j, self.of_token * self.lengths[j], self.dtype)

    def of_round(self, t: int) -> tuple[Tensor, Tensor]:
        self.wait_for_turn(t)
        return self.sums_in(self.at_home if t == 0 else self.place((self.rank - t) % self.world_size))

    def send_on(self, t: int) -> None:
        self.wait_for_turn(t)
        if t < self.hops:
            self.memory.raise_flag(TURN, (self.rank + 1) % self.world_size)
        else:
            self.memory.raise_flag(HOME, (self.rank - t) % self.world_size)
            self.memory.wait(HOME, (self.rank + t) % self.world_size)
            self.at_home = self.at_home.clone()  # the next turn or backward pass writes the shared memory again

    def wait_for_turn(self, t: int) -> None:
        """Wait until the rank before has added its part to the block of round t."""
        if t > self.waited:
            self.memory.wait(TURN, (self.rank - 1) % self.world_size)
            self.waited = t

    def home(self) -> tuple[Tensor, Tensor]:
        return self.sums_in(self.at_home)


class TwoLevels(DoubleRing):
    """The double ring with shared memory in place of the messages inside a host.

    The group is a mesh of hosts x ranks of a host. Raises ValueError on every rank if a row of it is not on one host.
    """

    inside = SharedMemory
    check_device = staticmethod(SharedMemory.check_device)

    def prepare(self) -> None:
        """Make the memory of each host of the mesh, once. Raises ValueError on every rank if one host cannot."""
        _, inside = self.group.get_all_groups()
        if inside.size() > 1 and not has_memory(inside):  # the same on all ranks: they have made it together
            agree(lambda: bool(host_memory(inside)), self.group)

    def give_up(self) -> None:
        self.turn(0).give_up()


def taken(context: RankContext) -> tuple[type[Schedule], str]:
    """What is taken here, and why."""
    return memory_or_messages()


def main() -> int:
    from ringlab.ring.cases import random_inputs, report_cases

    P, whole, ok = 4, random_inputs(1, 8, 2, 512, 64), True
    schedule, why = launch(taken, P)[0]
    print(f"auto: {schedule.__name__}, {why}; then two levels, 2 hosts of {P // 2} ranks")
    for way, shape in ((schedule, None), (TwoLevels, (2, P // 2))):
        ok &= report_cases(P, whole, partial(ring_flash_attention, schedule=way), shape)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
