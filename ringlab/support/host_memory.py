"""Memory that the processes of one host share, and flags between them. Nothing of it is left when they end.

    memory = host_memory(group)                     every rank of the group calls it
    memory.numbers(COPIES, rank, 100, dtype)        a tensor in the memory of a rank: each can read and write it
    memory.raise_flag(READY, to); memory.wait(READY, of)

Source: memfd_create(2) and proc(5) of the Linux manual.
"""

import mmap
import os
import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringlab.support.agreement import agree, groups_of, members
from ringlab.support.pipes import KINDS, close, inbox_of_job, time_limit

READY, READ, TURN, HOME, GAVE_UP = range(5)  # flags: kinds of messages in the pipes
COPIES, SUMS = range(2)  # the parts of a rank's memory: copies of K and V, and dK and dV


class HostMemory:
    """Memory and flags of the ranks of a host. A flag is a message without a text in a pipe.

    No memory has a name in the file system: the others open it by the number that it has in its owner's process. So the
    system frees it when the last rank ends, also after a kill.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        """Every rank of the group must call this. Raises ValueError on every rank if they are not on one host."""
        (self.rank, _), self.ranks = members(group), dist.get_process_group_ranks(group)  # in the group; in the job
        self.inbox, self.limit = inbox_of_job(), time_limit(groups_of(group)[0])
        if why := self.inbox.why_not(self.ranks):
            raise ValueError(f"{why}; shared memory needs ranks of one host: use the schedule Ring, or DoubleRing")
        self.fds: list[int] = []
        weakref.finalize(self, close, self.fds)
        try:
            places = agree(self._make, group)
            self.number = places.number  # the same on all of them, and that of no other memory
            self.parts: dict[tuple[int, int], int] = {}  # the open file of a part of a rank's memory
            agree(lambda: self._open(places), group)  # when this returns, all have opened all
        except ValueError as error:  # on every rank
            raise ValueError(f"no memory can be shared: {error}; use the schedule Ring") from None
        self.views: dict[tuple[int, int], Tensor] = {}  # the bytes of a part of a rank's memory
        self.readers: list[int] = []  # the ranks that may still read the copies

    def _make(self) -> list[str]:
        """Make this rank's memory. Returns where each rank finds it."""
        self.fds += (os.memfd_create("ring") for _ in (COPIES, SUMS))
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self.fds]

    def _open(self, places: list[list[str]]) -> None:
        """Open the memory of all ranks."""
        for rank, of_rank in enumerate(places):
            for which, place in enumerate(of_rank):
                self.fds.append(os.open(place, os.O_RDWR))
                self.parts[which, rank] = self.fds[-1]

    def numbers(self, which: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many numbers of a part of a rank's memory. Its owner makes it longer if need be."""
        size, part = count * dtype.itemsize, (which, rank)
        if part not in self.views or len(self.views[part]) < size:
            if rank == self.rank:
                os.ftruncate(self.parts[part], size)
            self.views[part] = torch.frombuffer(mmap.mmap(self.parts[part], size), dtype=torch.uint8)
        return self.views[part][:size].view(dtype)

    def raise_flag(self, flag: int, to: int) -> None:
        """Tell rank `to` something. Raises RuntimeError if it has ended, but for READ: it writes its memory no more."""
        try:
            self.inbox.send(self.number * KINDS + flag, self.ranks[to])
        except RuntimeError:
            if flag not in (READ, GAVE_UP):
                raise

    def wait(self, flag: int, of: int) -> None:
        """Wait until rank `of` has raised this flag once more.

        Raises RuntimeError as `Inbox.wait` does, and when a rank of the group has given up its pass.
        """
        self.inbox.wait(self.number * KINDS + flag, self.ranks[of], self.limit, self.number * KINDS + GAVE_UP)

    def give_up(self) -> None:
        """Tell the other ranks that an error has ended the pass here: none of them waits for it."""
        for rank in range(len(self.ranks)):
            if rank != self.rank:
                self.raise_flag(GAVE_UP, rank)


_memories: "weakref.WeakKeyDictionary[ProcessGroup, HostMemory]" = weakref.WeakKeyDictionary()


def has_memory(group: ProcessGroup | None) -> bool:
    """Whether `host_memory` has made the memory of a group."""
    return groups_of(group)[0] in _memories


def host_memory(group: ProcessGroup | None) -> HostMemory:
    """The memory that the ranks of a group share: made when it is first asked for, freed with the group."""
    [key] = groups_of(group)
    if key not in _memories:
        _memories[key] = HostMemory(group)
    return _memories[key]
