"""examples/cluster: the Slurm script with two ranks, and the command of the Kubernetes job as two "pods".

Both are stopped by a signal in the middle of a run and started again, as after a preemption. The script meets stand-ins
for Slurm's programs. The manifest met no Kubernetes: its fields are compared with each other.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringlab.models.checkpoint import finished, last_checkpoint
from tests.commands import LIMIT, ROOT, wait_for

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
