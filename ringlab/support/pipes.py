"""Pipes between the ranks of a host: short messages without a network, and without a thread that must wake up first.

    pipes = pipes_of(group)                     every rank of the group calls it
    pipes.send(FACTS, to, b"..."); pipes.wait(FACTS, of)

A pipe has no name in the file system: the other ranks open it by the number that it has in the process of its reader. A
rank that waits looks for 0.2 ms, then sleeps, and notices at once when the other rank ends. The system locks a pipe
while it is written or read. So a rank that has a message also sees all that the sender wrote to shared memory before.

A reader of the ring may skip this file; agreement.py and host_memory.py use it.
Source: pipe(7) and proc(5) of the Linux manual.
"""

import os
import platform
import select
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout

FACTS = 255  # the kind of message of an agreement; host_memory.py counts its own from 0
HEAD = struct.Struct("<BH")  # of a message: its kind, and how many bytes follow
LONGEST = getattr(select, "PIPE_BUF", 512) - HEAD.size  # bytes of a message: written at once, or not at all
AWAKE = 200e-6  # seconds until a rank that waits sleeps: waking takes time, and the system may choose a busy core
LONGEST_SLEEP = 2**31 - 1  # milliseconds that poll(2) takes: 24 days


class Pipes:
    """A pipe from each rank of a group to each other."""

    def __init__(self, group: ProcessGroup) -> None:
        """Every rank of the group must call this. Raises ValueError on every rank if they are not on one host."""
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.limit = time_limit(group)
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.arrived: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)  # by kind and rank
        self.fds: list[int] = []
        weakref.finalize(self, _close, self.fds)
        self.sources: dict[int, int] = {}
        self.sinks: dict[int, int] = {}
        ends: dict[int, int] = {}  # of this rank's pipes, until the other ranks have opened them
        try:
            facts = everyone((host_of_process(), os.getpid(), self._make(ends), ends), group)
            check_hosts([host for host, *_ in facts])
            said = [wrong for *_, wrong, _ in facts]
            if not any(said):
                said = everyone(self._open(facts), group)
        finally:
            _close(ends.values())
        for rank, wrong in enumerate(said):
            if wrong:
                raise ValueError(f"rank {rank}: {wrong}")

    def _make(self, ends: dict[int, int]) -> str:
        """Make the pipes that this rank reads. Returns why that failed, or nothing."""
        try:
            for rank in self.others:
                self.sources[rank], ends[rank] = os.pipe()
                self.fds.append(self.sources[rank])
                os.set_blocking(self.sources[rank], False)
        except OSError as error:
            return f"no pipes can be made ({error}); expected fewer open files"
        return ""

    def _open(self, facts: list[tuple[tuple[str, ...], int, str, dict[int, int]]]) -> str:
        """Open the pipes in which the other ranks want their messages. Returns why that failed, or nothing."""
        for rank in self.others:
            _, process, _, ends = facts[rank]
            try:
                self.sinks[rank] = os.open(f"/proc/{process}/fd/{ends[self.rank]}", os.O_WRONLY)
            except OSError as error:
                return f"a pipe of rank {rank} cannot be opened ({error}); expected processes of one user and container"
            self.fds.append(self.sinks[rank])
        return ""

    def send(self, kind: int, to: int, message: bytes = b"") -> None:
        """Send at most LONGEST bytes to rank `to`, and return at once. Raises RuntimeError if it has ended."""
        try:
            os.write(self.sinks[to], HEAD.pack(kind, len(message)) + message)
        except BrokenPipeError:
            raise RuntimeError(f"Broken pipe: rank {to} has ended") from None

    def wait(self, kind: int, of: int) -> bytes:
        """The next message of this kind from rank `of`. A rank looks for it again and again at first, and then sleeps.

        Raises RuntimeError if the rank has ended, and after the time limit of the group.
        """
        awake = time.perf_counter() + AWAKE
        while not self.arrived[kind, of]:
            try:
                head = os.read(self.sources[of], HEAD.size)
            except BlockingIOError:
                if time.perf_counter() < awake:
                    os.sched_yield()  # to another rank on this core, if there is one
                    continue
                poll = select.poll()
                poll.register(self.sources[of], select.POLLIN)
                if not poll.poll(min(1000 * self.limit.total_seconds(), LONGEST_SLEEP)):
                    raise RuntimeError(f"Timed out waiting for rank {of}, {self.limit} long") from None
                continue
            if not head:
                raise RuntimeError(f"Connection closed by peer: rank {of} has ended")
            found, size = HEAD.unpack(head)
            self.arrived[found, of].append(os.read(self.sources[of], size) if size else b"")
        return self.arrived[kind, of].popleft()

    def exchange(self, message: bytes) -> list[bytes]:
        """What every rank gives here, in order of rank: at most LONGEST bytes each."""
        for rank in self.others:
            self.send(FACTS, rank, message)
        return [message if rank == self.rank else self.wait(FACTS, rank) for rank in range(self.world_size)]


def everyone(mine: object, group: ProcessGroup | None) -> list:
    """What every rank of the group gives here, in order of rank: by a collective."""
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def time_limit(group: ProcessGroup) -> timedelta:
    """How long a message of the group may take: what init_process_group or new_group was given."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)


def check_hosts(hosts: list[tuple[str, ...]]) -> None:
    """Raise ValueError unless all ranks are on one host. `hosts` has what `host_of_process` says on each rank."""
    if () in hosts:
        raise ValueError(f"rank {hosts.index(())} is not on Linux, or may not read its /proc")
    if len(set(hosts)) > 1:
        other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
        raise ValueError(f"rank 0 is on host {' '.join(hosts[0])} and rank {other} on {' '.join(hosts[other])}")


def host_of_process() -> tuple[str, ...]:
    """A host's name, what two hosts of one name do not share, and its network. Empty where there are no such pipes."""
    if not hasattr(os, "memfd_create"):
        return ()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return platform.node(), boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    except OSError:
        return ()


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _leave_to_the_parent() -> None:
    """Close the pipes in a process that a rank has forked: else the others would not notice the rank's end."""
    for pipes in list(_pipes.values()):
        if isinstance(pipes, Pipes):
            _close(pipes.fds)
            pipes.fds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)

_pipes: "weakref.WeakKeyDictionary[ProcessGroup, Pipes | str]" = weakref.WeakKeyDictionary()


def pipes_of(group: ProcessGroup | None) -> Pipes | str:
    """The pipes of a group, or why it has none: made at the first call, on every rank, and freed with the group."""
    key = dist.group.WORLD if group is None else group
    assert key is not None  # a process group exists
    if key not in _pipes:
        try:
            _pipes[key] = Pipes(key)
        except ValueError as error:  # on every rank, the same
            _pipes[key] = str(error)
    return _pipes[key]
