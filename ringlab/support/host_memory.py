"""Memory that the processes of one host share, and flags between them. Nothing of it is left when they end.

    memory = host_memory(group)                     every rank of the group calls it
    memory.numbers(COPIES, rank, 100, dtype)        a tensor in the memory of a rank: each can read and write it
    memory.raise_flag(READY, to); memory.wait(READY, of)

A reader of the ring may skip this file; ringlab/training/shared_memory.py uses it.
Source: memfd_create(2) and proc(5) of the Linux manual.
"""

import mmap
import os
import struct
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.support.agreement import agree, members
from ringlab.support.pipes import pipes_of

READY, READ, TURN, HOME = range(4)  # flags: kinds of messages in the pipes
VALUES = struct.Struct("<qq")  # what comes with a flag: the number of its pass; with READY, where the block lies
NEW_GROUP = "shared memory is of no more use after an error in a pass; expected a new process group on every rank"
COPIES, KEPT, SUMS = range(3)  # the parts of a rank's memory: copies of K and V, those made there, dK and dV
IN_COPIES = -1  # with READY, in place of where in KEPT
ALIGNED = 64  # bytes: a block begins at a multiple


class HostMemory:
    """Memory of the ranks of one host, which each of them can reach, and flags from each rank to each other.

    None of it has a name in the file system: the others open it by the number that it has in its owner's process. So
    the system frees it when the last rank ends, also after a kill. A flag is a message of a few bytes in a pipe. A rank
    that has a flag sees all that was written to memory before the flag was raised.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        """Every rank of the group must call this. Raises ValueError on every rank if they are not on one host."""
        self.rank, self.world_size = members(group)
        pipes = pipes_of(group)
        if isinstance(pipes, str):
            raise ValueError(f"{pipes}; shared memory needs ranks of one host: use the schedule Ring, or DoubleRing")
        self.pipes = pipes
        self.fds: list[int] = []
        weakref.finalize(self, _close, self.fds)
        self.parts_of: dict[int, tuple[int, ...]] = {}
        facts = agree(self._make, group)
        agree(lambda: self._open(facts), group)  # when this returns, all have opened all
        self.views: dict[tuple[int, int], Tensor] = {}  # the bytes of a part of a rank's memory
        self.passes, self.in_pass = 0, False  # begun so far; whether the last of them has not ended
        self.readers: list[int] = []  # the ranks that may still read the copies
        self.kept: dict[int, tuple[int, Tensor]] = {}  # by address: where a block lies in KEPT, and the block

    def _make(self) -> tuple[int, tuple[int, ...]]:
        """Make this rank's memory. Returns where the others find it."""
        try:
            for _ in (COPIES, KEPT, SUMS):
                self.fds.append(os.memfd_create("ring"))
        except OSError as error:
            raise ValueError(f"no memory that can be shared: {error}; use the schedule Ring") from None
        self.parts_of[self.rank] = tuple(self.fds)
        return os.getpid(), self.parts_of[self.rank]

    def _open(self, facts: list[tuple[int, tuple[int, ...]]]) -> None:
        """Open the memory of the other ranks."""
        for rank in self.pipes.others:
            process, parts = facts[rank]
            try:
                self.parts_of[rank] = tuple(os.open(f"/proc/{process}/fd/{number}", os.O_RDWR) for number in parts)
            except OSError as error:
                raise ValueError(f"memory of rank {rank} cannot be opened: {error}; use the schedule Ring") from None
            self.fds += self.parts_of[rank]

    def part(self, which: int, rank: int, end: int) -> Tensor:
        """The bytes of a part of a rank's memory, `end` of them at least. Its owner makes it longer if need be."""
        if (which, rank) not in self.views or len(self.views[which, rank]) < end:
            fd = self.parts_of[rank][which]
            if rank == self.rank:
                os.ftruncate(fd, end)
            self.views[which, rank] = torch.frombuffer(mmap.mmap(fd, end), dtype=torch.uint8)
        return self.views[which, rank]

    def own_bytes(self) -> int:
        """How many bytes of this rank the others can reach."""
        return sum(os.fstat(fd).st_size for fd in self.parts_of[self.rank])

    def numbers(self, which: int, rank: int, count: int, dtype: torch.dtype, begin: int = 0) -> Tensor:
        """So many numbers of a part of a rank's memory, from byte `begin` on."""
        end = begin + count * dtype.itemsize
        return self.part(which, rank, end)[begin:end].view(dtype)

    def raise_flag(self, flag: int, to: int, value: int = 0) -> None:
        """Tell rank `to` something. Raises RuntimeError if it has ended, but for READ: it writes its memory no more."""
        try:
            self.pipes.send(flag, to, VALUES.pack(self.passes, value))
        except RuntimeError:
            if flag != READ:
                raise

    def wait(self, flag: int, of: int) -> int:
        """Wait until rank `of` has raised this flag once more. Returns what came with it.

        Raises RuntimeError as `Pipes.wait` does, and for a flag of another pass, which was left over when an error
        ended that pass. Only READ may be of an earlier pass.
        """
        number, value = VALUES.unpack(self.pipes.wait(flag, of))
        if flag != READ and number != self.passes:
            raise RuntimeError(f"rank {of} is in pass {number} and this rank in pass {self.passes}; {NEW_GROUP}")
        return value

    def begin_pass(self) -> None:
        """Count a pass. Raises RuntimeError if an error ended the one before here: its flags would be taken for new."""
        if self.in_pass:
            raise RuntimeError(f"pass {self.passes} did not run to its end on rank {self.rank}; {NEW_GROUP}")
        self.passes, self.in_pass = self.passes + 1, True

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


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


_memories: "weakref.WeakKeyDictionary[ProcessGroup, HostMemory]" = weakref.WeakKeyDictionary()


def has_memory(group: ProcessGroup | None) -> bool:
    """Whether `host_memory` has made the memory of a group."""
    return (dist.group.WORLD if group is None else group) in _memories


def host_memory(group: ProcessGroup | None) -> HostMemory:
    """The memory that the ranks of a group share: made when it is first asked for, freed with the group."""
    members(group)
    key = dist.group.WORLD if group is None else group
    assert key is not None  # `members` has refused other processes
    if key not in _memories:
        _memories[key] = HostMemory(group)
    return _memories[key]
