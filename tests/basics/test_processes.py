"""The processes of a ring: places, agreement, chunks, and how a job ends when one of them fails."""

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from ringlab.basics.ranks import gather, scatter
from ringlab.support import processes
from ringlab.support.agreement import agree
from ringlab.support.devices import choose_device, cpu_cores
from ringlab.support.pipes import time_limit
from ringlab.support.processes import TIME_LIMIT, LostRank, Raised, Ranks, join_ring, launch
from tests.commands import ROOT, ends_soon, wait_for
from tests.wrong import failing_ring


def there_and_back(context, x):
    chunk = scatter(x if context.rank == 0 else None, context)
    view = chunk.transpose(2, 3).contiguous().transpose(2, 3)  # the same numbers, in another order in memory
    return chunk.shape[2], chunk.is_contiguous(), view.is_contiguous(), gather(view, context)


@pytest.mark.parametrize("seq_len", [9, 21])
def test_scatter_and_gather(ranks, world_size, seq_len):
    x = torch.arange(2 * 3 * seq_len * 5).view(2, 3, seq_len, 5).bfloat16().transpose(0, 1)
    lengths, contiguous, view_contiguous, wholes = zip(*ranks(world_size, there_and_back, x), strict=True)
    longer = seq_len % world_size
    assert list(lengths) == [seq_len // world_size + (rank < longer) for rank in range(world_size)]
    assert all(contiguous)
    assert list(view_contiguous) == [length == 1 for length in lengths]
    assert torch.equal(wholes[0], x)
    assert wholes[1:] == (None,) * (world_size - 1)


SHARED = "NCCL through sockets, slow, for learning and tests"


@pytest.mark.parametrize(
    ("requested", "gpus", "expected"),
    [
        ("auto", 0, ("cpu", "gloo", "0 GPU(s) for 3 process(es) on this host")),
        ("auto", 2, ("cpu", "gloo", "2 GPU(s) for 3 process(es) on this host; --device cuda shares them")),
        ("cuda", 1, ("cuda", "nccl", f"3 ranks share 1 GPU: {SHARED}")),
    ],
)
def test_choose_device(monkeypatch, requested, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(requested, 3) == expected


def place_and_threads(context, extra):
    of_process = torch.get_num_threads(), time_limit(dist.group.WORLD), signal.getsignal(signal.SIGINT)
    return (context.rank, context.world_size, context.device.type, *of_process), extra


def test_launch_returns_what_every_rank_returned():
    x = torch.ones(2)
    places, extras = zip(*launch(place_and_threads, 2, x), strict=True)
    threads = max(1, cpu_cores() // 2)  # a rank's share of the cores
    assert list(places) == [(rank, 2, "cpu", threads, TIME_LIMIT, signal.SIG_IGN) for rank in range(2)]
    assert all(torch.equal(each, x) for each in extras)


def test_join_ring_without_torchrun_names_its_command(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"expected it of torchrun: torchrun --nproc_per_node=4 "), join_ring():
        pass


def leaves_its_own(context, status):
    dist.destroy_process_group()
    with join_ring("cpu", 1, rank=0, world_size=1, store=dist.HashStore()):
        sys.exit(status)


@pytest.mark.parametrize(("status", "kind"), [(0, "RuntimeError"), (None, "RuntimeError"), (3, "SystemExit")])
def test_a_rank_that_says_too_early_that_all_is_well_has_failed(ranks, status, kind):
    assert ranks.outcomes(1, leaves_its_own, status)[0].kind == kind


@pytest.mark.parametrize(
    ("how", "backwards", "reason"),
    [
        ("raise", True, r"(?s)^rank 1 failed: .*OverflowError: rank 1 gives up"),
        ("kill", False, r"^rank 1 died \(SIGKILL\) before its work was done$"),
    ],
)
def test_a_rank_that_fails_in_mid_ring_ends_a_launched_job(how, backwards, reason):
    with ends_soon(), pytest.raises(RuntimeError, match=reason):
        launch(failing_ring.fail, 3, how, backwards)


LOST, OWN = Raised("RuntimeError", "Connection closed by peer", "closed"), Raised("KeyError", "k", "the reason")
BAD = Raised("ValueError", "the answer is 42", "")


@pytest.mark.parametrize(
    ("outcomes", "kind", "reason"),
    [
        ({"return_value": [LOST, OWN, LOST]}, RuntimeError, "rank 1 failed: the reason"),
        ({"return_value": [LOST, None, BAD]}, ValueError, "the answer is 42"),
        ({"side_effect": LostRank("rank 1 died", {0: LOST})}, RuntimeError, "rank 1 died before its work was done"),
        ({"side_effect": LostRank("rank 1 is silent", {0: LOST}, [1])}, RuntimeError, "rank 0 failed: closed"),
    ],
)
def test_a_job_ends_by_the_error_of_a_rank_and_not_by_what_follows_from_it(outcomes, kind, reason):
    with mock.patch.object(Ranks, "outcomes", **outcomes), pytest.raises(kind, match=f"^{reason}$"):
        launch(len, 3)


def sleeping_rank(context, folder):
    Path(folder, str(context.rank)).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.slow
def test_ranks_end_when_the_process_that_launched_them_is_killed(tmp_path):
    job = "from ringlab.support.processes import launch\nfrom tests.basics.test_processes import sleeping_rank\n"
    job += f"if __name__ == '__main__':\n    launch(sleeping_rank, 2, {str(tmp_path)!r})\n"
    script = tmp_path / "job.py"
    script.write_text(job)
    launcher = subprocess.Popen([sys.executable, script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    ranks = wait_for(lambda: [int(path.read_text()) for path in sorted(tmp_path.glob("[01]")) if path.read_text()], 2)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: [pid for pid in ranks if not psutil.pid_exists(pid)], 2)


# Ranks that stay alive -----------------------------------------------------------------------------------------------


def world_of(context):
    limit = time_limit(dist.group.WORLD).seconds
    return context.rank, context.world_size, dist.get_rank(), dist.get_world_size(), limit


def misbehave(context, how):
    if context.rank == 1:
        if how == "die":
            os._exit(0)  # as if all were well
        if how == "hang":
            time.sleep(60)
        if how == "raise":
            raise OverflowError("too much")
    return context.rank


UNDER_WAY = []  # messages that rank 0 does not wait for


def send_on(context, number, received):
    """Rank 0 sends a number to rank 1, which returns it, or raises before it receives it."""
    message = torch.tensor([number])
    if context.rank == 0:
        UNDER_WAY.append((message, dist.isend(message, 1)))
        return None
    if not received:
        raise OverflowError("too much")
    dist.recv(message, 0)
    return message.item()


def test_a_message_of_a_call_that_raised_is_never_received():
    ranks = Ranks(size=2)
    try:
        assert isinstance(ranks.outcomes(2, send_on, 1, False)[1], Raised)
        assert ranks(2, send_on, 2, True) == [None, 2]
    finally:
        ranks.stop()


def test_the_pool_survives_what_its_ranks_do(monkeypatch):
    def right(world_size):  # a message may take twice as long as a call
        return [(rank, world_size, rank, world_size, 120) for rank in range(world_size)]

    ranks = Ranks(size=3)
    try:
        for world_size in (2, 1, 3):
            assert ranks(world_size, world_of) == right(world_size)

        with pytest.raises(LostRank, match=r"^rank 1 died \(exit status 0\)$"):
            ranks(2, misbehave, "die")
        assert ranks(2, world_of) == right(2)

        with monkeypatch.context() as patch:
            patch.setattr(ranks, "seconds", 1)
            with pytest.raises(LostRank, match=r"rank\(s\) \[1\] did not answer in time"):
                ranks(2, misbehave, "hang")

        outcomes = ranks.outcomes(2, misbehave, "raise")
        assert outcomes[0] == 0
        assert isinstance(outcomes[1], Raised)
        assert (outcomes[1].kind, outcomes[1].message) == ("OverflowError", "too much")
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 raised: .*OverflowError: too much"):
            ranks(2, misbehave, "raise")
        assert ranks(2, world_of) == right(2)
    finally:
        ranks.stop()


def raise_and_hang(context):
    """Rank 0 raises, rank 1 computes for ever, rank 2 answers in between."""
    if context.rank == 0:
        raise OverflowError("too much")
    time.sleep((600, 0.3)[context.rank - 1])


def test_the_grace_after_an_error_does_not_begin_anew(monkeypatch):
    """Else the pool would wait as long as one rank computes, which may be for ever."""
    monkeypatch.setattr(processes, "LOOK", 0.1)
    monkeypatch.setattr(processes, "GRACE", 1.0)
    ranks, looks = Ranks(3, math.inf), []

    def hang(silent):
        looks.append(silent)
        assert len(looks) < 300, "it looked for 30 s"
        return False

    ranks.hang = hang
    try:
        with pytest.raises(LostRank, match=r"rank\(s\) \[1\] did not answer in time") as lost:
            ranks(3, raise_and_hang)
        assert lost.value.raised[0].kind == "OverflowError"
    finally:
        ranks.stop()


def files_of_job(context):
    """The open files of this rank, after an agreement has opened some."""
    agree(lambda: None)
    kinds = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]] += 1
    return kinds


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_a_destroyed_group_leaves_no_file_open():
    """A rank is in six jobs, one after the other: the pipes of each are closed with its group."""
    ranks = Ranks(size=3)
    try:
        counts = [ranks(world_size, files_of_job)[0] for world_size in (2, 3) * 3]
        assert counts[0]["pipe"] == counts[-2]["pipe"], counts
        assert counts[1]["pipe"] == counts[-1]["pipe"], counts
    finally:
        ranks.stop()


def test_a_signal_while_ranks_start_ends_them_in_order(monkeypatch):
    """It ended in "'NoneType' object has no attribute 'kill'"."""
    monkeypatch.setattr(BaseProcess, "start", lambda process: sys.exit(143))
    ranks = Ranks(2)
    for start in (lambda: ranks(2, len), lambda: launch(len, 2)):
        with pytest.raises(SystemExit):
            start()
        ranks.stop()
