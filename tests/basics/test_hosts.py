"""Jobs of several hosts, seen from one, which has torchrun's environment and sends nothing; releases of torch."""

import importlib
import os
import platform
import sys
from itertools import count
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from ringlab import support
from ringlab.support import processes, timeline
from ringlab.support.devices import share_gpus
from ringlab.support.processes import TIME_LIMIT, join_ring
from tests.commands import ROOT


@pytest.fixture
def job_of_two_hosts(monkeypatch):
    """This process looks like rank 5 of 8, the second of 4 on its host of 12 cores and 4 GPUs; nothing is sent."""
    environment = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "noted, so that it is restored after the test")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    calls = mock.Mock()
    calls.dist.get_rank.return_value = 5
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "as above")
        monkeypatch.delenv(name)
    for name in ("init_process_group", "destroy_process_group", "barrier", "get_rank"):
        monkeypatch.setattr(dist, name, getattr(calls.dist, name))
    monkeypatch.setattr(torch, "set_num_threads", calls.set_num_threads)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(processes, "cpu_cores", lambda: 12)
    return calls


def test_the_cores_of_a_host_are_shared_by_the_ranks_of_that_host(job_of_two_hosts):
    with join_ring("cpu"):
        job_of_two_hosts.set_num_threads.assert_called_once_with(3)  # 12 cores, 4 ranks


@pytest.mark.parametrize("init", [{}, {"rank": 5, "world_size": 8}], ids=str)
def test_a_gpu_is_chosen_by_the_rank_on_its_host(job_of_two_hosts, init):
    with join_ring(**init) as context:
        assert context.device == torch.device("cuda", 1)
        assert (context.rank, context.world_size) == (5, 8)
        assert context.why == "cuda with nccl: 4 GPU(s) for 4 process(es) on this host"
    job_of_two_hosts.set_device.assert_called_once_with(torch.device("cuda", 1))
    assert "NCCL_HOSTID" not in os.environ


@pytest.mark.parametrize(
    ("gpus", "world_size", "number", "index", "network"),
    [(1, 8, 1, 0, None), (3, 8, 3, 0, None), (3, 4, 1, 1, "lo"), (1, 4, 2, 0, "lo")],
)
def test_ranks_that_share_gpus_are_hosts_to_nccl(
    job_of_two_hosts, monkeypatch, gpus, world_size, number, index, network
):
    """It refuses two on one GPU of a host. Each says so before it forms the group, and NCCL reads it there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(platform, "node", lambda: "here")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_RANK", str(number))
    seen = {}
    job_of_two_hosts.dist.init_process_group.side_effect = lambda *args, **options: seen.update(os.environ)
    with join_ring("cuda") as context:
        assert context.device == torch.device("cuda", index)
        assert context.why.startswith(f"cuda with nccl: 4 ranks share {gpus} GPU")
    assert seen["NCCL_HOSTID"] == f"here-{number}"
    assert seen.get("NCCL_SOCKET_IFNAME") == network
    assert job_of_two_hosts.dist.init_process_group.call_args.kwargs["device_id"] == context.device


def test_ranks_of_a_pool_share_gpus(job_of_two_hosts, monkeypatch):
    """It has no environment of torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(platform, "node", lambda: "here")
    with join_ring("cuda", 8, rank=3, world_size=4) as context:
        assert context.device == torch.device("cuda", 1)
    assert (os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"]) == ("here-3", "lo")


@pytest.mark.usefixtures("job_of_two_hosts")
@pytest.mark.parametrize(
    ("gpus", "processes", "chosen", "said"),
    [(2, 4, None, "here-1"), (4, 4, None, None), (0, 4, None, None), (2, 4, "mine", "mine"), (1, None, None, None)],
)
def test_other_libraries_may_share_gpus_too(monkeypatch, gpus, processes, chosen, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(platform, "node", lambda: "here")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    if chosen:
        monkeypatch.setenv("NCCL_HOSTID", chosen)
    share_gpus()
    assert os.environ.get("NCCL_HOSTID") == said


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_no_message_is_waited_for_longer_than_the_limit(job_of_two_hosts, device, backend):
    """With gloo none goes ahead before all are connected: it would close connections that others still open."""
    with join_ring(device):
        on_gpu = {"device_id": torch.device("cuda", 1)} if device == "cuda" else {}
        job_of_two_hosts.dist.init_process_group.assert_called_once_with(backend, timeout=TIME_LIMIT, **on_gpu)
        called = [name for name, *_ in job_of_two_hosts.dist.mock_calls]
        assert called[:2] == ["init_process_group", "barrier" if backend == "gloo" else "get_rank"]
    assert 60 <= TIME_LIMIT.total_seconds() <= 600
    with join_ring(device, timeout="mine"):
        assert job_of_two_hosts.dist.init_process_group.call_args.kwargs["timeout"] == "mine"


@pytest.mark.usefixtures("job_of_two_hosts")
@pytest.mark.parametrize(
    ("on_this_host", "chosen", "expected"),
    [(4, None, None), (8, None, "lo0" if sys.platform == "darwin" else "lo"), (4, "eth7", "eth7"), (8, "eth7", "eth7")],
)
def test_messages_stay_in_a_host_only_when_the_whole_job_is_on_it(monkeypatch, on_this_host, chosen, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_host))
    if chosen:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)  # the user knows this network
    with join_ring("cpu"):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def record_on_hosts(context, hosts, clocks):
    """The events of ranks on these hosts, whose clocks show these numbers of seconds more than ours."""

    k, ticks = torch.full((1, 1, 1, 1), float(context.rank)), count(clocks[context.rank])
    with (
        mock.patch.object(platform, "node", return_value=hosts[context.rank]),
        mock.patch.object(timeline, "time", mock.Mock(perf_counter=lambda: next(ticks))),
        timeline.record(k) as events,
        timeline.span("compute", 0, k),
    ):
        pass
    return events


def test_ranks_of_one_host_share_a_clock_and_those_of_others_are_not_compared(ranks):
    """Rank 2 begins an hour after rank 1 by a clock that both read."""
    for events in ranks(3, record_on_hosts, ["one", "two", "two"], [0, 5000, 8600]):
        assert [(event.rank, event.start, event.end) for event in events] == [(0, 1, 2), (1, 1, 2), (2, 3601, 3602)]


# The release of torch ------------------------------------------------------------------------------------------------


def test_the_project_asks_for_the_releases_that_it_accepts():
    (asked,) = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("dependencies")]
    assert f'"torch>={support.OLDEST},<{support.TOO_NEW}"' in asked


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0+cu130"])
def test_a_release_in_the_range_is_accepted(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    importlib.reload(support)


@pytest.mark.parametrize("version", ["2.8.0+cpu", "2.16.0"])
def test_another_release_is_named(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(ImportError) as raised:
        importlib.reload(support)
    assert str(raised.value) == f"torch {version} found; expected torch>=2.11,<2.16, as in requirements.txt"
