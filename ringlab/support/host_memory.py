"""Memory that the processes of one host share, and flags between them. Nothing of it is left when they end.

    memory = host_memory(group)                     every rank of the group calls it
    memory.numbers(COPIES, rank, 100, dtype)        a tensor in the memory of a rank: each can read and write it
    memory.raise_flag(READY, to); memory.wait(READY, of)

A reader of the ring may skip this file; ringlab/training/shared_memory.py uses it.
Source: memfd_create(2), pipe(7) and proc(5) of the Linux manual.
"""

import mmap
import os
import platform
import select
import struct
import weakref
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.support.agreement import agree, members
from ringlab.support.processes import TIME_LIMIT

READY, READ, TURN, HOME = range(4)  # flags
FLAG = struct.Struct("<Bq")  # a flag in a pipe: which, and with READY where the block lies
COPIES, KEPT, SUMS = range(3)  # the parts of a rank's memory: copies of K and V, those made there, dK and dV
IN_COPIES = -1  # with READY, in place of where in KEPT
ALIGNED = 64  # bytes: a block begins at a multiple


class HostMemory:
    """Memory of the ranks of one host, which each of them can reach, and flags from each rank to each other.

    None of it has a name in the file system: the others open it by the number that it has in its owner's process. So
    the system frees it when the last rank ends, also after a kill. A flag is a message of a few bytes in a pipe. A rank
    that waits for a flag sleeps, and notices at once when the other rank ends. The system locks a pipe while it is
    written or read, so a rank that has a flag sees all that was written to memory before the flag was raised.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        """Every rank of the group must call this. Raises ValueError on every rank if they are not on one host."""
        self.rank, self.world_size = members(group)
        self.fds: list[int] = []
        weakref.finalize(self, _close, self.fds)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.my_ends: dict[int, int] = {}  # of the pipes for flags, until the other ranks have opened them
        try:
            facts = agree(lambda: self._offer(others), group)
            check_hosts([host for host, *_ in facts])
            agree(lambda: self._take(facts, others), group)  # when this returns, all have opened all
        finally:
            for fd in self.my_ends.values():
                os.close(fd)
        self.views: dict[tuple[int, int], Tensor] = {}  # the bytes of a part of a rank's memory
        self.arrived: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # (flag, rank): what came with it
        self.readers: list[int] = []  # the ranks that may still read the copies
        self.kept: dict[int, tuple[int, Tensor]] = {}  # by address: where a block lies in KEPT, and the block

    def _offer(self, others: list[int]) -> tuple[tuple[str, ...], int, list[int], dict[int, int]]:
        """This rank's host and process, and the numbers of its memory and of the pipes in which it wants its flags."""
        host = host_of_process()
        if not host:
            raise ValueError(f"shared memory needs Linux; this is {platform.system()}: use the schedule Ring")
        self.parts = [os.memfd_create("ring") for _ in (COPIES, KEPT, SUMS)]
        pipes = {rank: os.pipe() for rank in others}
        self.sources = {rank: reading for rank, (reading, _) in pipes.items()}
        self.my_ends = {rank: writing for rank, (_, writing) in pipes.items()}
        for reading in self.sources.values():
            os.set_blocking(reading, False)
        self.fds += [*self.parts, *self.sources.values()]
        return host, os.getpid(), self.parts, self.my_ends

    def _take(self, facts: list[Any], others: list[int]) -> None:
        """Open the memory of the other ranks, and the pipes for their flags."""
        self.parts_of, self.sinks = {self.rank: self.parts}, {}
        try:
            for rank in others:
                _, process, parts, pipes = facts[rank]
                self.parts_of[rank] = [os.open(f"/proc/{process}/fd/{number}", os.O_RDWR) for number in parts]
                self.sinks[rank] = os.open(f"/proc/{process}/fd/{pipes[self.rank]}", os.O_WRONLY)
                self.fds += [*self.parts_of[rank], self.sinks[rank]]
        except OSError as error:
            raise ValueError(
                f"the memory of rank {rank} cannot be opened ({error}); expected processes of one user, in one "
                f"container: use the schedule Ring"
            ) from None

    def part(self, which: int, rank: int, end: int) -> Tensor:
        """The bytes of a part of a rank's memory, `end` of them at least. Its owner makes it longer if need be."""
        if (which, rank) not in self.views or len(self.views[which, rank]) < end:
            fd = self.parts_of[rank][which]
            if rank == self.rank:
                os.ftruncate(fd, end)
            self.views[which, rank] = torch.frombuffer(mmap.mmap(fd, end), dtype=torch.uint8)
        return self.views[which, rank]

    def numbers(self, which: int, rank: int, count: int, dtype: torch.dtype, begin: int = 0) -> Tensor:
        """So many numbers of a part of a rank's memory, from byte `begin` on."""
        end = begin + count * dtype.itemsize
        return self.part(which, rank, end)[begin:end].view(dtype)

    def raise_flag(self, flag: int, to: int, value: int = 0) -> None:
        """Tell rank `to` something. Raises RuntimeError if it has ended."""
        try:
            os.write(self.sinks[to], FLAG.pack(flag, value))
        except BrokenPipeError:
            raise RuntimeError(f"Broken pipe: rank {to} has ended") from None

    def wait(self, flag: int, of: int) -> int:
        """Wait until rank `of` has raised this flag once more. Returns what came with it.

        Raises RuntimeError if the rank has ended, and after the time limit of a message.
        """
        while not self.arrived[flag, of]:
            try:
                came = os.read(self.sources[of], FLAG.size)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.sources[of], select.POLLIN)
                if not poll.poll(1000 * TIME_LIMIT.total_seconds()):
                    raise RuntimeError(f"Timed out waiting for rank {of}, {TIME_LIMIT} long") from None
                continue
            if not came:
                raise RuntimeError(f"Connection closed by peer: rank {of} has ended")
            which, value = FLAG.unpack(came)
            self.arrived[which, of].append(value)
        return self.arrived[flag, of].popleft()

    def wait_for_readers(self) -> None:
        """Wait until no rank reads this rank's block any more."""
        while self.readers:
            self.wait(READ, self.readers.pop())

    def keep(self, count: int, dtype: torch.dtype) -> Tensor:
        """So many new numbers in KEPT, which stay there."""
        begin = sum(-(-block.nbytes // ALIGNED) * ALIGNED for _, block in self.kept.values())
        block = self.numbers(KEPT, self.rank, count, dtype, begin)
        self.kept[block.data_ptr()] = begin, block
        return block

    def kept_at(self, k: Tensor, v: Tensor) -> int | None:
        """Where in KEPT k and v lie, if `shared_keys_and_values` has made them."""
        begin, block = self.kept.get(k.data_ptr(), (0, None))
        together = k.is_contiguous() and v.is_contiguous() and v.data_ptr() == k.data_ptr() + k.nbytes
        return begin if block is not None and together and k.nbytes + v.nbytes == block.nbytes else None


def check_hosts(hosts: list[tuple[str, ...]]) -> None:
    """Raise ValueError unless all ranks are on one host. `hosts` has what `host_of_process` says on each rank."""
    if len(set(hosts)) > 1:
        other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
        raise ValueError(
            f"rank 0 is on host {' '.join(hosts[0])} and rank {other} on {' '.join(hosts[other])}; shared memory needs "
            f"ranks of one host: use the schedule Ring, or DoubleRing"
        )


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


_memories: "weakref.WeakKeyDictionary[ProcessGroup, HostMemory]" = weakref.WeakKeyDictionary()


def host_memory(group: ProcessGroup | None) -> HostMemory:
    """The memory that the ranks of a group share: made when it is first asked for, freed with the group."""
    members(group)
    key = dist.group.WORLD if group is None else group
    assert key is not None  # `members` has refused other processes
    if key not in _memories:
        _memories[key] = HostMemory(group)
    return _memories[key]


def host_of_process() -> tuple[str, ...]:
    """A host's name and what two hosts of one name do not share. Empty where memory cannot be shared as here."""
    if not hasattr(os, "memfd_create"):
        return ()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node(), boot, os.readlink("/proc/self/ns/pid")
