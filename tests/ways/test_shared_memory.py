"""Shared memory: what is refused, what a dead rank says, what is left. Numbers: test_schedules."""

import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringlab.support import host_memory, pipes, processes
from ringlab.support.agreement import agree
from ringlab.support.host_memory import READ, READY, TURN
from ringlab.support.processes import launch
from ringlab.ways import shared_memory
from ringlab.ways.shared_memory import SharedMemory, memory_or_messages
from tests.every_way import WAYS
from tests.mistakes import as_on_hosts, assert_refused

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory needs Linux")


# Where it works ------------------------------------------------------------------------------------------------------


def forbidden(path, flags, right=os.open):
    if path.startswith("/proc"):
        raise PermissionError(13, "Permission denied", path)
    return right(path, flags)


FULL = OSError(24, "Too many open files")
CANNOT = {  # what rank 1 cannot do, by a name
    "memory": lambda: mock.patch.object(os, "memfd_create", side_effect=FULL),
    "open": lambda: mock.patch.object(os, "open", forbidden),
}


def choice(context, hosts, backend, cannot):
    agree(lambda: None)  # the pipes are open
    host, group = as_on_hosts(hosts), dist.new_group()
    named = mock.patch.object(shared_memory.dist, "get_backend", return_value=backend) if backend else nullcontext()
    with host, named, CANNOT[cannot]() if cannot and context.rank == 1 else nullcontext():
        schedule, why = memory_or_messages(group)
    return schedule.__name__, why


# fmt: off
CHOICES = [  # the hosts of the ranks, the backend, what rank 1 cannot do; what is taken, and why
    ([("a", "1")] * 3, None, None, "SharedMemory", "3 ranks on one host"),
    ([("a", "1"), ("b", "2"), ("b", "2")], None, None, "Ring", "rank 0 is on host a 1 and rank 1 on b 2"),
    ([("a", "1"), (), ("a", "1")], None, None, "Ring", "rank 1 is not on Linux"),
    ([("a", "1")] * 3, "nccl", None, "Ring", "the backend is nccl, not gloo"),
    ([("a", "1")] * 3, None, "memory", "Ring", "no memory can be shared: rank 1: OSError: [Errno 24] Too many"),
    ([("a", "1")] * 3, None, "open", "Ring", "no memory can be shared: rank 1: PermissionError: [Errno 13]"),
]
# fmt: on


@pytest.mark.parametrize(("hosts", "backend", "cannot", "schedule", "why"), CHOICES)
def test_auto_says_what_it_takes_and_why(ranks, hosts, backend, cannot, schedule, why):
    for taken, said in ranks(3, choice, hosts, backend, cannot):
        assert taken == schedule
        assert why in said


def without_a_pipe(context):
    with CANNOT["open"]() if context.rank == 1 else nullcontext():
        agree(lambda: None)


def test_a_pipe_that_may_not_be_opened_ends_the_job_with_its_reason():
    with pytest.raises(RuntimeError, match="Permission denied: rank 0 has a pipe that cannot be opened"):
        launch(without_a_pipe, 3)


def without_room(context):
    with mock.patch.object(os, "pipe", side_effect=FULL) if context.rank == 1 else nullcontext():
        inbox = pipes.Inbox(dist.new_group())
    dist.barrier()
    return inbox.why_not([0, 1, 2])


def test_all_ranks_know_that_one_can_make_no_pipe(ranks):
    assert (
        ranks(3, without_room)
        == ["rank 1: no pipes can be made ([Errno 24] Too many open files); expected fewer open files"] * 3
    )


def test_a_process_that_may_not_read_its_proc_has_no_pipes():
    here = pipes.host_of_process()
    assert here
    with mock.patch.object(Path, "read_text", return_value="of another boot\n"):
        assert pipes.host_of_process() != here  # a host of the same name
    for own in ("pid", "net", "user"):  # a container with one thing of its own
        with mock.patch.object(os, "readlink", lambda path, own=own, to=os.readlink: to(path)[path.endswith(own) :]):
            assert pipes.host_of_process() != here
    with mock.patch.object(Path, "read_text", side_effect=PermissionError):
        assert pipes.host_of_process() == ()


def on_another_device(context):
    x, device = torch.ones(1, 2, 4, 8), torch.device("cuda" if context.rank == 1 else "cpu")
    with mock.patch.object(SharedMemory, "check_device", lambda _, check=SharedMemory.check_device: check(device)):
        WAYS["shared memory"](x, x, x)


def test_another_device_is_refused_on_every_rank(ranks):
    assert_refused(ranks, 2, ["rank 1: q is on cuda", "tensors on CPUs", "Ring"], on_another_device)


# What is left --------------------------------------------------------------------------------------------------------


def gone(context, waits):
    """Rank 1 closes its end of its pipe, as the system does when it ends; rank 0 waits for it, or raises a flag."""
    memory = host_memory.HostMemory(dist.new_group())
    null = os.open(os.devnull, os.O_RDWR)
    if context.rank == 1:
        os.dup2(null, memory.inbox.fds[0])
        return None
    try:
        if waits:
            memory.wait(READY, 1)
        while True:
            memory.raise_flag(TURN, 1)
    except RuntimeError as error:
        memory.raise_flag(READ, 1)  # a rank that has ended needs no permission to write: a program may end so
        return str(error)


@pytest.mark.parametrize(("waits", "said"), [(True, "Connection closed by peer"), (False, "Broken pipe")])
def test_a_rank_that_has_ended_is_noticed_at_once(waits, said):
    found = launch(gone, 2, waits)[0]
    assert found == f"{said}: rank 1 has ended"
    assert processes.Raised("RuntimeError", found, "").lost_connection


def silent(context):
    memory = host_memory.HostMemory(dist.new_group())
    with mock.patch.object(memory, "limit", processes.TIME_LIMIT / 3000):
        if context.rank == 0:
            try:
                memory.wait(READY, 1)
            except RuntimeError as error:
                dist.barrier()
                return str(error)
        dist.barrier()
    return None


def test_a_rank_that_hangs_is_noticed_after_the_time_limit(ranks):
    assert ranks(2, silent)[0].startswith("Timed out waiting for rank 1")


def with_a_child(context):
    """Rank 1 forks a process that goes on, as a loader of data does, and closes its own end of its pipe."""
    agree(lambda: None)
    inbox = pipes.inbox_of_job()
    if context.rank == 1:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, b"forked")  # it has closed its ends by now
            signal.pause()
        os.read(read, 6)
        dist.barrier()
        os.dup2(os.open(os.devnull, os.O_RDWR), inbox.fds[0])
        dist.barrier()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    dist.barrier()
    try:
        inbox.wait(pipes.FACTS, 1, timedelta(seconds=60))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()


def test_a_rank_that_has_ended_is_noticed_though_its_child_lives():
    assert launch(with_a_child, 2) == ["Connection closed by peer: rank 1 has ended", None]


def waits_for_a_late_flag(context, awake, never, limit):
    memory = host_memory.HostMemory(dist.new_group(timeout=limit))
    if context.rank == 1:
        time.sleep(0.05)
        return memory.raise_flag(READY, 0)
    with mock.patch.object(pipes, "AWAKE", awake), mock.patch(never, side_effect=AssertionError(never)):
        return memory.wait(READY, 1)


@pytest.mark.parametrize(("awake", "never", "days"), [(60.0, "select.poll", 1), (0.0, "os.sched_yield", 365)])
def test_a_rank_looks_again_and_again_and_then_sleeps(ranks, awake, never, days):
    """Also where the time limit is longer than the system can sleep."""
    ranks(2, waits_for_a_late_flag, awake, never, timedelta(days=days))
