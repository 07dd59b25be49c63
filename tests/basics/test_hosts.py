"""Jobs of several hosts, seen from one, which has torchrun's environment and sends nothing; releases of torch.

And examples/cluster: the Slurm script with two ranks, and the command of the Kubernetes job as two "pods". Both are
stopped by a signal in the middle of a run and started again, as after a preemption. The script meets stand-ins for
Slurm's programs. The manifest met no Kubernetes: its fields are compared with each other.
"""

import contextlib
import importlib
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from ringlab import support
from ringlab.models.checkpoint import finished, last_checkpoint
from ringlab.support import devices, processes, timeline
from ringlab.support.devices import share_gpus
from ringlab.support.processes import TIME_LIMIT, join_ring
from tests.commands import LIMIT, ROOT, wait_for


def store_of_hosts(*uuids):
    """A store in which the other processes of this host have named their GPUs."""
    store = dist.HashStore()
    for i, uuid in enumerate(uuids or ["GPU-a"] * 4):
        store.set(f"GPU of process {i} of {platform.node()}", uuid)
    return store


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
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_HIGH_PRIORITY"):
        monkeypatch.setenv(name, "as above")
        monkeypatch.delenv(name)
    for name in ("init_process_group", "destroy_process_group", "barrier", "get_rank"):
        monkeypatch.setattr(dist, name, getattr(calls.dist, name))
    monkeypatch.setattr(torch, "set_num_threads", calls.set_num_threads)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    uuids = iter(["GPU-a"] * 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid=next(uuids)))
    monkeypatch.setattr(processes, "rendezvous", lambda url: iter([(store_of_hosts(), 5, 8)]))
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


def test_each_process_may_see_its_own_gpu_alone(job_of_two_hosts, monkeypatch):
    """As with srun's --gpus-per-task=1: nothing is shared, though there are fewer visible GPUs than processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    store = store_of_hosts("GPU-c", "", "GPU-b", "GPU-d")
    monkeypatch.setattr(processes, "rendezvous", lambda url: iter([(store, 5, 8)]))
    with join_ring() as context:
        assert context.device == torch.device("cuda", 0)
        assert context.why == "cuda with nccl: 4 GPU(s) for 4 process(es) on this host"
    assert "NCCL_HOSTID" not in os.environ
    init = job_of_two_hosts.dist.init_process_group.call_args.kwargs
    assert (init["store"], init["rank"], init["world_size"]) == (store, 5, 8)


@pytest.mark.parametrize(
    "names", [("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"), devices.NUMBER[2:3] + devices.COUNT[2:3]]
)
def test_slurm_and_mpi_number_processes_too(job_of_two_hosts, monkeypatch, names):
    for name, value in zip((*names, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("2", "4", None, None), strict=True):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with join_ring() as context:
        assert context.device == torch.device("cuda", 2)


@pytest.mark.parametrize("chosen", [None, "0"])
def test_messages_go_first_on_a_gpu(job_of_two_hosts, monkeypatch, chosen):
    """NCCL's kernels, before those of attention; unless somebody has said otherwise."""
    if chosen:
        monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", chosen)
    seen = {}
    job_of_two_hosts.dist.init_process_group.side_effect = lambda *args, **options: seen.update(os.environ)
    with join_ring():
        assert seen["TORCH_NCCL_HIGH_PRIORITY"] == (chosen or "1")


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


# examples/cluster ----------------------------------------------------------------------------------------------------


SCRIPT, MANIFEST = ROOT / "examples/cluster/ring.sbatch", ROOT / "examples/cluster/ring-job.yaml"
SMALL = ["--cp", "2", "--seq-len", "32", "--batch", "2", "--layers", "1", "--hidden", "16", "--save-every", "2"]
HERE = {  # what a cluster would set
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
STOPPED = r"stopped   by a signal after step (\d+), and saved"
TOOLS = {  # what stands in for Slurm's programs: two ranks on this host
    "srun": 'trap : TERM\nfor i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "${@:2}" & done\nwait\nwait',
    "scontrol": '[ $1 = show ] && echo localhost || echo "$@" >> "$OUT.requeued"',
}
JOB = {
    "SLURM_JOB_NODELIST": "this",
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
}


def stops(log):
    """The steps after which the runs of a log were stopped."""
    return [int(step) for step in re.findall(STOPPED, log.read_text())] if log.exists() else []


@pytest.mark.exhaustive
def test_the_slurm_script_saves_goes_back_into_the_queue_and_resumes(tmp_path):
    """On stand-ins for srun and scontrol; the signal goes to the script and to its ranks."""
    out, log = tmp_path / "run", tmp_path / "log"
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | HERE | JOB | {"OUT": str(out), "PATH": f"{tmp_path}:{HERE['PATH']}"}

    def job(steps):
        with log.open("a") as file:
            more = {"env": environment | {"STEPS": str(steps)}, "stdout": file, "stderr": file}
            return subprocess.Popen(["bash", SCRIPT, *SMALL], start_new_session=True, **more)

    first = job(100_000)
    try:
        wait_for(lambda: finished(out), 1)
    finally:
        os.killpg(first.pid, signal.SIGTERM)
    assert first.wait(LIMIT) == 0, log.read_text()
    [step] = stops(log)
    assert last_checkpoint(out).name == f"step-{step:08}"
    assert job(step + 1).wait(LIMIT) == 0
    assert f"resumed   after step {step}, from {out}\n" in log.read_text()
    assert f"done      {step + 1} steps" in log.read_text()
    assert Path(f"{out}.requeued").read_text() == f"requeue {JOB['SLURM_JOB_ID']}\n"  # once


def manifest():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def container():
    return manifest()[1]["spec"]["template"]["spec"]["containers"][0]


def test_the_fields_of_the_manifest_fit_each_other():
    service, job = manifest()
    pod = job["spec"]["template"]["spec"]
    environment = {entry["name"]: entry["value"] for entry in container()["env"]}
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"  # the word, not null: each pod has its name
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(environment["HOSTS"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(environment["PER_HOST"]) == container()["resources"]["limits"]["nvidia.com/gpu"]
    options = dict(zip(container()["args"][::2], container()["args"][1::2], strict=True))
    assert int(options["--dp"]) * int(options["--cp"]) == int(environment["HOSTS"]) * int(environment["PER_HOST"])
    assert {mount["name"] for mount in container()["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert environment["OUT"].startswith(container()["volumeMounts"][0]["mountPath"])
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy allows no other
    assert all(isinstance(word, str) for word in container()["args"] + list(environment.values()))
    assert "$(" not in container()["command"][2].replace("$(<", "")  # Kubernetes has a meaning of its own for $(NAME)


def test_the_options_of_the_script_are_a_mesh_of_its_ranks():
    text = SCRIPT.read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.M))
    dp, cp = (int(number) for number in re.search(r"--dp (\d+) --cp (\d+)", text).groups())
    assert dp * cp == int(asked["nodes"]) * int(asked["ntasks-per-node"])
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert asked["signal"].startswith("TERM@")  # without "B:", which would tell the script alone
    assert "#SBATCH --requeue\n" in text


@pytest.mark.exhaustive
def test_the_pods_of_the_job_save_when_one_is_evicted_and_resume(tmp_path):
    """Its command, in two shells on this host. A pod that ends before the last step must fail, or none replaces it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        out, port = tmp_path / "run", listening.getsockname()[1]
    shell = [*container()["command"][:2], container()["command"][2].replace("29500", str(port)), "ring", *SMALL]
    mine = {"HOSTS": "2", "PER_HOST": "1", "MASTER_ADDR": "localhost", "OUT": str(out), "GLOO_SOCKET_IFNAME": "lo"}

    started = []

    def pods(steps):
        for index in range(2):
            more = {"STEPS": str(steps), "JOB_COMPLETION_INDEX": str(index)}
            environment = os.environ | HERE | mine | more
            started.append(subprocess.Popen(shell, env=environment, stdout=log, stderr=log, start_new_session=True))
        return started[-2:]

    with (tmp_path / "log").open("w") as log:
        try:
            both = pods(100_000)
            wait_for(lambda: finished(out), 1)
            both[1].send_signal(signal.SIGTERM)
            assert [pod.wait(LIMIT) for pod in both] == [1, 1]
            [step] = stops(tmp_path / "log")
            assert last_checkpoint(out).name == f"step-{step:08}"
            assert [pod.wait(LIMIT) for pod in pods(step + 1)] == [0, 0]
        finally:
            for pod in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pod.pid, signal.SIGKILL)
    assert f"resumed   after step {step}, from {out}\n" in (tmp_path / "log").read_text()
    assert last_checkpoint(out).name == f"step-{step + 1:08}"
