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
from datetime import timedelta
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


OURS = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_HIGH_PRIORITY", "GLOO_SOCKET_IFNAME")


@pytest.fixture
def job_of_two_hosts(monkeypatch):
    """This process looks like rank 5 of 8, the second of 4 on its host of 12 cores and 4 GPUs; nothing is sent."""
    environment = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    for name in (*environment, *OURS):
        monkeypatch.setenv(name, str(environment.get(name, "noted, so that it is restored after the test")))
    for name in OURS:
        monkeypatch.delenv(name)
    calls = mock.Mock()
    calls.dist.get_rank.return_value = 5
    for name in ("init_process_group", "destroy_process_group", "barrier", "get_rank"):
        monkeypatch.setattr(dist, name, getattr(calls.dist, name))
    monkeypatch.setattr(torch, "set_num_threads", calls.set_num_threads)
    monkeypatch.setattr(processes.gc, "collect", calls.collect)  # of all that other tests have left: 0.3 s
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    uuids = iter(["GPU-a"] * 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid=next(uuids)))
    monkeypatch.setattr(platform, "node", lambda: "here")
    monkeypatch.setattr(processes, "rendezvous", lambda url: iter([(store_of_hosts(), 5, 8)]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    return calls


ALONE, WHOLE = "4 GPU(s) for 4 process(es) on this host", {"LOCAL_WORLD_SIZE": "8"}
NOBODY = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))  # of a pool: nothing of torchrun
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def numbered(number, size):
    """As another launcher numbers the processes."""
    return {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, number: "2", size: "4"}


# fmt: off
JOINS = [  # the environment, the GPUs that are seen, what join_ring is given; the device, why, the environment at init
    ({}, 4, "auto", {}, "cuda:1", ALONE, {"NCCL_HOSTID": None, "TORCH_NCCL_HIGH_PRIORITY": "1"}),
    ({}, 4, "auto", {"rank": 5, "world_size": 8}, "cuda:1", ALONE, {"NCCL_HOSTID": None}),
    ({"TORCH_NCCL_HIGH_PRIORITY": "0"}, 4, "auto", {}, "cuda:1", ALONE, {"TORCH_NCCL_HIGH_PRIORITY": "0"}),
    # NCCL refuses two ranks on one GPU of a host: each says that it is a host of its own
    ({}, 1, "cuda", {"init_method": "env://"}, "cuda:0", "4 ranks share 1 GPU",
     {"NCCL_HOSTID": "here-1", "NCCL_SOCKET_IFNAME": None}),
    ({"LOCAL_RANK": "3"}, 3, "cuda", {}, "cuda:0", "3 GPUs", {"NCCL_HOSTID": "here-3", "NCCL_SOCKET_IFNAME": None}),
    ({"WORLD_SIZE": "4"}, 3, "cuda", {}, "cuda:1", "3 GPUs", {"NCCL_HOSTID": "here-1", "NCCL_SOCKET_IFNAME": "lo"}),
    ({"WORLD_SIZE": "4", "LOCAL_RANK": "2"}, 1, "cuda", {}, "cuda:0", "share 1 GPU", {"NCCL_SOCKET_IFNAME": "lo"}),
    (NOBODY, 2, "cuda", {"local_world_size": 8, "rank": 3, "world_size": 4}, "cuda:1", "share 2 GPUs",
     {"NCCL_HOSTID": "here-3", "NCCL_SOCKET_IFNAME": "lo"}),
    (numbered("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"), 4, "auto", {}, "cuda:2", ALONE, {}),
    (numbered(devices.NUMBER[2], devices.COUNT[2]), 4, "auto", {}, "cuda:2", ALONE, {}),
    ({"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}, 4, "auto", {}, "cuda:1", ALONE, {}),  # srun starts torchrun
    # messages stay in a host only when the whole job is on it, unless the user knows another network
    ({}, 4, "cpu", {}, "cpu", "cpu with gloo: as asked", {"GLOO_SOCKET_IFNAME": None}),
    (WHOLE, 4, "cpu", {}, "cpu", "", {"GLOO_SOCKET_IFNAME": LOOPBACK}),
    ({"GLOO_SOCKET_IFNAME": "eth7"}, 4, "cpu", {}, "cpu", "", {"GLOO_SOCKET_IFNAME": "eth7"}),
    (WHOLE | {"GLOO_SOCKET_IFNAME": "eth7"}, 4, "cpu", {}, "cpu", "", {"GLOO_SOCKET_IFNAME": "eth7"}),
]
# fmt: on


@pytest.mark.parametrize(("environment", "gpus", "asked", "init", "device", "why", "seen"), JOINS)
def test_a_rank_joins_its_job(job_of_two_hosts, monkeypatch, environment, gpus, asked, init, device, why, seen):
    """The cores and the GPUs of a host are shared by the ranks of that host."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    at_init = {}
    job_of_two_hosts.dist.init_process_group.side_effect = lambda *args, **options: at_init.update(os.environ)
    with join_ring(asked, **init) as context:
        assert context.device == torch.device(device)
        assert context.rank == 5
        assert why in context.why
    assert {name: at_init.get(name) for name in seen} == seen
    assert not {"store", "init_method"} <= {*job_of_two_hosts.dist.init_process_group.call_args.kwargs}
    local_ranks = int(environment.get("LOCAL_WORLD_SIZE") or init.get("local_world_size", 4))
    job_of_two_hosts.set_num_threads.assert_called_once_with(12 // local_ranks)
    if device != "cpu":
        job_of_two_hosts.set_device.assert_called_once_with(context.device)
        assert job_of_two_hosts.dist.init_process_group.call_args.kwargs["device_id"] == context.device


def test_each_process_may_see_its_own_gpu_alone(job_of_two_hosts, monkeypatch):
    """As with srun's --gpus-per-task=1: nothing is shared, though there are fewer visible GPUs than processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    store = store_of_hosts("GPU-c", "", "GPU-b", "GPU-d")
    monkeypatch.setattr(processes, "rendezvous", lambda url: iter([(store, 5, 8)]))
    with join_ring() as context:
        assert context.device == torch.device("cuda", 0)
        assert context.why == f"cuda with nccl: {ALONE}"
    init = job_of_two_hosts.dist.init_process_group.call_args.kwargs
    assert (init["store"], init["rank"], init["world_size"]) == (store, 5, 8)
    (few := store_of_hosts("GPU-c", "")).set_timeout(timedelta(seconds=1))
    with join_ring(local_world_size=4, rank=1, world_size=2, store=few):  # two ranks of a pool of four
        assert "NCCL_HOSTID" not in os.environ


@pytest.mark.usefixtures("job_of_two_hosts")
@pytest.mark.parametrize(
    ("gpus", "processes", "chosen", "said"),
    [(2, 4, None, "here-1"), (4, 4, None, None), (0, 4, None, None), (2, 4, "mine", "mine"), (1, None, None, None)],
)
def test_other_libraries_may_share_gpus_too(monkeypatch, gpus, processes, chosen, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
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
    assert [name for name, *_ in job_of_two_hosts.mock_calls][-2:] == ["collect", "dist.destroy_process_group"]


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
