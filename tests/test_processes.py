"""The processes of a ring: neighbours, agreement, chunks, and how a job ends when one of them fails."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from ringlab.basics.ranks import gather, neighbours, scatter
from ringlab.support import pipes
from ringlab.support.agreement import HEAD, MESSAGE, WRONG, agree, of_every_rank
from ringlab.support.processes import choose_device, cpu_cores, launch
from tests import failing_ring
from tests.commands import ROOT, TORCHRUN, ends_soon, run, wait_for
from tests.refusals import refusal


def my_neighbours(context):
    return neighbours()


def test_neighbours(ranks, world_size):
    P = world_size
    assert ranks(P, my_neighbours) == [(rank, P, (rank + 1) % P, (rank - 1) % P) for rank in range(P)]


def my_neighbours_in(context, members):
    group = dist.new_group(members)
    return neighbours(group) if context.rank in members else None


def test_neighbours_are_counted_inside_the_group(ranks):
    assert ranks(5, my_neighbours_in, [1, 3, 4]) == [None, (0, 3, 1, 2), None, (1, 3, 2, 0), (2, 3, 0, 1)]


def agree_on_rank(context):
    return agree(lambda: context.rank**2)


def test_agree_gives_every_rank_the_facts_of_all(ranks, world_size):
    assert ranks(world_size, agree_on_rank) == [[rank**2 for rank in range(world_size)]] * world_size


def agree_on_facts(context, long, hosts, size):
    """The facts of all, and whether they went in one short message from each rank to each, or sizes first."""
    group = dist.new_group()
    with mock.patch.object(pipes, "host_of_process", return_value=(hosts[context.rank],)):
        agree(lambda: None, group)
    sizes_first = mock.patch.object(dist, "all_gather_object", side_effect=dist.all_gather_object)
    collective = mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single)
    with sizes_first as longer, collective as shorter:
        facts = agree(lambda: (context.rank, "x" * size if context.rank in long else "x"), group)
    return facts, longer.called, shorter.called


@pytest.mark.parametrize("long", [(), (0,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("hosts", "size"), [("aaa", pipes.LONGEST), ("aba", MESSAGE)])
def test_facts_of_any_length_arrive_whole(ranks, long, hosts, size):
    """On one host through pipes, else by a collective."""
    facts = [(rank, "x" * size if rank in long else "x") for rank in range(3)]
    assert ranks(3, agree_on_facts, long, hosts, size) == [(facts, bool(long), hosts == "aba")] * 3


LONG = 3 * pipes.LONGEST - HEAD.size  # bytes that are three messages in a pipe


def give(context, hosts, sizes, calls):
    """What all ranks give; `calls` of the ranks. A rank without a call agrees instead."""
    group = dist.new_group()
    with mock.patch.object(pipes, "host_of_process", return_value=(hosts[context.rank],)):
        agree(lambda: None, group)
    mine = torch.arange(sizes[context.rank], dtype=torch.uint8) + context.rank
    if calls[context.rank] is None:
        return agree(lambda: None, group)
    return of_every_rank(mine, group, calls[context.rank])


@pytest.mark.parametrize("size", [0, 1, LONG, LONG + 1])
@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_every_rank_gets_the_numbers_of_all(ranks, hosts, size):
    right = torch.arange(size, dtype=torch.uint8) + torch.arange(3, dtype=torch.uint8)[:, None]
    assert all(torch.equal(found, right) for found in ranks(3, give, hosts, [size] * 3, [size % 7] * 3))


@pytest.mark.parametrize(
    ("hosts", "sizes", "calls", "words"),
    [
        (
            "aaa",
            [LONG] * 3,
            [1, 2, 1],
            f"rank 0: call 1 with {LONG} bytes; rank 1: call 2 with {LONG} bytes; rank 2: c",
        ),
        ("aba", [9] * 3, [1, 2, 1], "rank 0: call 1 with 9 bytes; rank 1: call 2 with 9 bytes; rank 2: call 1"),
        ("aaa", [9, 9, LONG], [0, 0, 0], f"rank 1: call 0 with 9 bytes; rank 2: call 0 with {LONG} bytes; expected"),
        ("aaa", [9] * 3, [WRONG] * 3, "rank 2: other input than agreed; expected the same call on every rank"),
        ("aaa", [9] * 3, [1, None, 1], "rank 1: another function; rank 2: call 1 with 9 bytes; expected"),
        ("aaa", [LONG] * 3, [1, None, 1], f"rank 1: another function; rank 2: call 1 with {LONG} bytes; expected"),
        ("aba", [9] * 3, [4, 4, WRONG], "rank 1: call 4 with 9 bytes; rank 2: other input than agreed; expected"),
    ],
)
def test_ranks_in_other_calls_all_say_so(ranks, hosts, sizes, calls, words):
    assert words in refusal(ranks.outcomes(3, give, hosts, sizes, calls))


def complain_at_length(context):
    agree(lambda: neighbours() if context.rank != 1 else refuse_with("no " * MESSAGE))


def refuse_with(text):
    raise ValueError(text)


def test_a_long_complaint_arrives_whole(ranks):
    outcomes = ranks.outcomes(3, complain_at_length)
    assert [(it.kind, it.message) for it in outcomes] == [("ValueError", "rank 1: " + "no " * MESSAGE)] * 3


def disagree(context, wrong):
    def check():
        if context.rank in wrong:
            raise ValueError(f"{context.rank} is odd")

    agree(check)


def test_agree_raises_everybodys_complaint_on_every_rank(ranks):
    outcomes = ranks.outcomes(4, disagree, [1, 3])
    assert [(it.kind, it.message) for it in outcomes] == [("ValueError", "rank 1: 1 is odd\nrank 3: 3 is odd")] * 4


def there_and_back(context, x):
    chunk = scatter(x if context.rank == 0 else None, context)
    view = chunk.transpose(2, 3).contiguous().transpose(2, 3)  # the same numbers, in another order in memory
    return chunk.shape[2], chunk.is_contiguous(), view.is_contiguous(), gather(view, context)


@pytest.mark.parametrize("seq_len", [8, 9, 21])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_scatter_and_gather(ranks, world_size, seq_len, dtype):
    x = torch.arange(2 * 3 * seq_len * 5).view(2, 3, seq_len, 5).to(dtype).transpose(0, 1)
    lengths, contiguous, view_contiguous, wholes = zip(*ranks(world_size, there_and_back, x), strict=True)
    longer = seq_len % world_size
    assert list(lengths) == [seq_len // world_size + (rank < longer) for rank in range(world_size)]
    assert all(contiguous)
    assert list(view_contiguous) == [length == 1 for length in lengths]
    assert torch.equal(wholes[0], x)
    assert wholes[1:] == (None,) * (world_size - 1)


@pytest.mark.parametrize(
    ("requested", "gpus", "expected"),
    [
        ("auto", 0, ("cpu", "gloo", "0 GPU(s) for 2 process(es) on this host")),
        ("auto", 1, ("cpu", "gloo", "1 GPU(s) for 2 process(es) on this host")),
        ("auto", 2, ("cuda", "nccl", "2 GPU(s) for 2 process(es) on this host")),
        ("cuda", 4, ("cuda", "nccl", "4 GPU(s) for 2 process(es) on this host")),
        ("cpu", 4, ("cpu", "gloo", "as asked")),
    ],
)
def test_choose_device(monkeypatch, requested, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(requested, 2) == expected


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("cuda", r"1 GPU\(s\) for 2 process\(es\).*Start fewer processes or use --device cpu"),
        ("tpu", "'tpu'; expected"),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, requested, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=message):
        choose_device(requested, 2)


def place_and_threads(context, extra):
    return context.rank, context.world_size, context.device.type, torch.get_num_threads(), extra


def test_launch_returns_what_every_rank_returned():
    x = torch.ones(2)
    results = launch(place_and_threads, 2, x)
    threads = max(1, cpu_cores() // 2)  # a rank's share of the cores
    assert [it[:4] for it in results] == [(rank, 2, "cpu", threads) for rank in range(2)]
    assert all(torch.equal(it[4], x) for it in results)


def refuse(context):
    raise ValueError("the answer is 42")


def leave(context, how, status):
    """Rank 1 ends without an error; the others wait for it, one by a message and one by itself."""
    dist.barrier()
    if context.rank == 1:
        how(status)
    if context.rank == 0:
        dist.recv(torch.empty(1), 1)
    time.sleep(60)


def test_launch_raises_bad_input_as_it_is():
    with pytest.raises(ValueError, match=r"^the answer is 42$"):
        launch(refuse, 2)


def much(context):
    return bytes(10_000_000 * context.rank)


def test_a_result_may_have_any_size():
    assert [len(result) for result in launch(much, 3)] == [0, 10_000_000, 20_000_000]


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        (os._exit, 0, r"^rank 1 left with exit status 0 before its work was done$"),
        (os._exit, 3, r"^rank 1 left with exit status 3 before its work was done$"),
        (sys.exit, 0, r"^rank 1 failed: (?s:.*)RuntimeError: sys.exit\(0\) inside join_ring"),
        (sys.exit, 3, r"^rank 1 failed: (?s:.*)SystemExit: 3"),
    ],
    ids=["_exit-0", "_exit-3", "exit-0", "exit-3"],
)
def test_a_rank_that_leaves_ends_a_launched_job(how, status, reason):
    with ends_soon(), pytest.raises(RuntimeError, match=reason):
        launch(leave, 3, how, status)


@pytest.mark.parametrize("where", ["forwards", "backwards"])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", r"(?s)^rank 1 failed: .*OverflowError: rank 1 gives up"),
        ("kill", r"^rank 1 was killed by SIGKILL before its work was done$"),
    ],
    ids=["raise", "kill"],
)
def test_a_rank_that_fails_in_mid_ring_ends_a_launched_job(how, reason, where):
    with ends_soon(), pytest.raises(RuntimeError, match=reason):
        launch(failing_ring.fail, 4, how, where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [("raise", "OverflowError: rank 1 gives up"), ("kill", "SIGKILL"), ("kill backwards", "SIGKILL")],
    ids=["raise", "kill", "kill backwards"],
)
def test_a_rank_that_fails_in_mid_ring_ends_a_torchrun_job(words, reason):
    done = run(*TORCHRUN, "--nproc_per_node=3", failing_ring.__file__, *words.split())
    assert done.returncode != 0
    assert reason in done.stderr


@pytest.mark.slow
def test_torchrun_reports_a_wrong_result_by_its_exit_status():
    """Only rank 0 knows: the status of the job must be its status."""
    done = run(*TORCHRUN, "--nproc_per_node=2", failing_ring.__file__, "wrong")
    assert "WRONG against full attention in float64" in done.stdout
    assert done.returncode != 0


def sleeping_rank(context, folder):
    Path(folder, str(context.rank)).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.slow
def test_ranks_end_when_the_process_that_launched_them_is_killed(tmp_path):
    job = "from ringlab.support.processes import launch\nfrom tests.test_processes import sleeping_rank\n"
    job += f"if __name__ == '__main__':\n    launch(sleeping_rank, 2, {str(tmp_path)!r})\n"
    script = tmp_path / "job.py"
    script.write_text(job)
    launcher = subprocess.Popen([sys.executable, script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    ranks = wait_for(lambda: [int(path.read_text()) for path in sorted(tmp_path.glob("[01]")) if path.read_text()], 2)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: [pid for pid in ranks if not psutil.pid_exists(pid)], 2)
