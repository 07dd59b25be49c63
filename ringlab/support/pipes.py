"""A pipe into each process of a host: short messages without a network, and without a thread that must wake up first.

    inbox = inbox_of_job()                                  on every rank that wants to send or receive
    inbox.send(kind, to, b"..."); inbox.wait(kind, of)      ranks of the job

A pipe has no name: its reader says in the store of the job which number it has in which process, and others open that.
A rank that waits looks for 0.2 ms, then sleeps, and notices at once when the other rank ends.

Source: pipe(7), poll(2) and proc(5) of the Linux manual.
"""

import os
import pickle
import platform
import select
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout

FACTS, REPLY = range(2)  # kinds of messages: what a rank says, and what the first of its host heard from other hosts
HEAD = struct.Struct("<BH?H")  # of a part of a message: its kind, its sender, whether it is the last, how many bytes
LONGEST = getattr(select, "PIPE_BUF", 512) - HEAD.size  # bytes of a part: written at once, or not at all
AWAKE = 200e-6  # seconds until a rank that waits sleeps: waking takes time, and the system may choose a busy core
STALE = 10.0  # seconds for a rank that has joined another job to say where its new pipe is


class Inbox:
    """The pipe into this rank, and those into the other ranks of its host."""

    def __init__(self, job: ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.store = dist.PrefixStore("pipes of ringlab", job.get_group_store())
        self.arrived: dict[int, dict[int, deque[bytes]]] = defaultdict(lambda: defaultdict(deque))  # by kind and sender
        self.begun: dict[tuple[int, int], bytes] = defaultdict(bytes)  # messages whose last part has not arrived
        self.sinks: dict[int, int] = {}  # opened when this rank first sends to another
        self.hosts: dict[int, tuple[str, ...]] = {}
        self.agreements = 0  # the number of the last, as this rank knows
        self.known: dict[bytes, tuple[bytes, dict[int, Any]]] = {}  # what all said when this rank last said this
        self.went_alone = False  # this rank has called in no group of its own, and not all ranks did
        self.speakers: dict[tuple[int, ...], dist.ProcessGroupGloo] = {}  # between hosts, by its ranks
        self.fds: list[int] = []
        weakref.finalize(self, close, self.fds)
        host, place = host_of_process(), ("", 0)
        try:
            self.fds += os.pipe()  # with an end to write: without one, an empty pipe looks as if all ranks had ended
            os.set_blocking(self.fds[0], False)
            place = (f"/proc/{os.getpid()}/fd/{self.fds[0]}", os.fstat(self.fds[0]).st_ino)
        except OSError:  # too many open files
            host = ()
        self.store.set(str(self.rank), pickle.dumps((host, place)))  # type: ignore[arg-type]  # it takes bytes too

    def host(self, rank: int) -> tuple[str, ...]:
        """The host of a rank. Empty if the rank has no pipe."""
        if rank not in self.hosts:
            self.hosts[rank], _ = pickle.loads(self.store.get(str(rank)))
        return self.hosts[rank]

    def hosts_of(self, ranks: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """Those of these ranks that are on this one's host, and the first rank of each host.

        A rank that has no pipe is a host by itself.
        """
        hosts: dict[Any, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(self.host(rank) or rank, []).append(rank)
        here = next((of_host for of_host in hosts.values() if self.rank in of_host), [])
        return here, tuple(first for first, *_ in hosts.values())

    def within_reach(self, limit: timedelta) -> list[int]:
        """The other ranks of the job to which this one can send, or will be able to within the limit."""
        with suppress(dist.DistStoreError):  # some rank has no pipe yet, or never will have
            self.store.wait([str(rank) for rank in range(self.world_size)], limit)
        ready = [rank for rank in range(self.world_size) if self.store.check([str(rank)])]
        return [rank for rank in self.hosts_of(ready)[0] if rank != self.rank]

    def sink(self, rank: int) -> int:
        """The pipe into another rank. Raises RuntimeError if that has ended."""
        until = time.monotonic() + STALE
        while rank not in self.sinks:
            _, (path, number) = pickle.loads(self.store.get(str(rank)))
            if os.path.exists(path) and os.stat(path).st_ino == number:
                self.sinks[rank] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                self.fds.append(self.sinks[rank])
            elif time.monotonic() > until:  # before that, it may be the place in an earlier job on the same store
                raise RuntimeError(f"Connection closed by peer: rank {rank} has ended")
            else:
                time.sleep(0.01)
        return self.sinks[rank]

    def send(self, kind: int, to: int, message: bytes) -> None:
        """Send a message to rank `to`, and return at once. Raises RuntimeError if it has ended, or may not be asked."""
        for begin in range(0, len(message), LONGEST):
            part = message[begin : begin + LONGEST]
            head = HEAD.pack(kind, self.rank, begin + LONGEST >= len(message), len(part))
            while True:
                try:
                    os.write(self.sink(to), head + part)
                    break
                except BlockingIOError:  # the pipe is full. The other rank may wait for room in this one's
                    if not self._read():
                        time.sleep(AWAKE)
                except OSError as error:
                    why = "has ended" if isinstance(error, BrokenPipeError) else "has a pipe that cannot be opened"
                    raise RuntimeError(f"{error.strerror}: rank {to} {why}") from None

    def _read(self) -> bool:
        """Read a part of a message, if one is there."""
        try:
            head = os.read(self.fds[0], HEAD.size)
        except BlockingIOError:
            return False
        kind, sender, last, size = HEAD.unpack(head)
        part = os.read(self.fds[0], size)
        if not last:
            self.begun[kind, sender] += part
        else:
            self.arrived[kind][sender].append(self.begun.pop((kind, sender), b"") + part)
        return True

    def wait(self, kind: int, of: int, limit: timedelta) -> bytes:
        """The next message of this kind from rank `of`. A rank looks for it again and again at first, and then sleeps.

        Raises RuntimeError if the rank has ended, and after the limit.
        """
        begin = time.perf_counter()
        while not self.arrived[kind][of]:
            if self._read():
                continue
            waited = time.perf_counter() - begin
            if waited < AWAKE:
                os.sched_yield()  # to another rank on this core, if there is one
                continue
            poll = select.poll()
            poll.register(self.fds[0], select.POLLIN)
            poll.register(self.sink(of), 0)  # an error there: nobody reads that pipe any more
            ready = poll.poll(max(0, min(1000 * (limit.total_seconds() - waited), 2**31 - 1)))  # it takes 24 days
            if not ready:
                raise RuntimeError(f"Timed out waiting for rank {of}, {limit} long")
            if self.fds[0] not in dict(ready):
                raise RuntimeError(f"Connection closed by peer: rank {of} has ended")
        return self.arrived[kind][of].popleft()


def time_limit(group: ProcessGroup) -> timedelta:
    """How long a message of the group may take: what init_process_group or new_group was given."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)


def host_of_process() -> tuple[str, ...]:
    """A host's name, what two hosts of one name do not share, and who may write here. Empty where there is no pipe."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "user"))
        return platform.node(), boot, *spaces, f"user {os.getuid()}"
    except OSError:
        return ()


def close(fds: Iterable[int]) -> None:
    """Close open files by their numbers."""
    for fd in fds:
        os.close(fd)


def _leave_to_the_parent() -> None:
    """Close the pipes in a process that a rank has forked: else the others would not notice the rank's end."""
    for inbox in list(_inboxes.values()):
        close(inbox.fds)
        inbox.fds.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)

_inboxes: "weakref.WeakKeyDictionary[ProcessGroup, Inbox]" = weakref.WeakKeyDictionary()


def inbox_of_job() -> Inbox:
    """This rank's pipe and those into the others, freed with the process group of the job."""
    job = dist.group.WORLD
    assert job is not None  # a process group exists
    if job not in _inboxes:
        _inboxes[job] = Inbox(job)
    return _inboxes[job]
