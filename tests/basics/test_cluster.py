"""examples/cluster: the Slurm script on a real Slurm of one node, and the command of the Kubernetes job as two "pods".

Both are stopped by a signal in the middle of a run and started again, as after a preemption. Slurm must be installed
for that (Debian, Ubuntu: `apt install slurmctld slurmd slurm-client munge`). The manifest itself met no Kubernetes:
its fields are compared with each other.
"""

import contextlib
import getpass
import os
import re
import shutil
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
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")]
CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
KillWait=60
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


def free_ports(count):
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in listening]
    for each in listening:
        each.close()
    return ports


@pytest.fixture
def slurm(tmp_path):
    """A Slurm of one node with two cores, which ends with the test. A function that runs one of its commands."""
    host = socket.gethostname().partition(".")[0]
    (tmp_path / "slurm.conf").write_text(
        CONFIG.format(host=host, ports=free_ports(2), folder=tmp_path, user=getpass.getuser())
    )
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    (tmp_path / "munge.key").chmod(0o600)
    (tmp_path / "spool").mkdir()
    environment = {**os.environ, **HERE, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    environment["PATH"] += ":/usr/sbin:/sbin"
    munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{option}={tmp_path / name}" for option, name in munge.items())],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    ]
    running = []

    def command(*words, **more):
        done = subprocess.run(words, env=environment | more, capture_output=True, text=True, timeout=LIMIT)
        return done.stdout

    try:
        for daemon in daemons:
            with (tmp_path / f"{daemon[0]}.log").open("w") as log:
                running.append(subprocess.Popen(daemon, env=environment, stdout=log, stderr=log))
            if daemon[0] == "munged":
                wait_for(lambda: [*tmp_path.glob("munge.socket")], 1)
        wait_for(lambda: re.findall("idle", command("sinfo")), 1)
        yield command
        command("scancel", "--user", getpass.getuser())
        wait_for(lambda: [""][: not command("squeue", "--noheader")], 1)
    finally:
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait(LIMIT)


def stops(log):
    """The steps after which the runs of a log were stopped."""
    return [int(step) for step in re.findall(STOPPED, log.read_text())] if log.exists() else []


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {', '.join(MISSING)} missing")
def test_slurm_runs_the_script_and_a_preempted_job_saves_waits_and_resumes(slurm, tmp_path):
    """The signal before the end of the time goes to the steps, as that of `scancel --signal`; a preemption requeues."""
    out, log = tmp_path / "run", tmp_path / "ring.log"
    sizes = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={log}"]

    def submit(steps):
        return slurm("sbatch", "--parsable", *sizes, str(SCRIPT), *SMALL, STEPS=str(steps), OUT=str(out)).strip()

    def waits(job, restarts):
        shown = slurm("scontrol", "show", "job", job)
        return [shown] if "JobState=PENDING" in shown and f"Restarts={restarts} " in shown else []

    job = submit(100_000)
    wait_for(lambda: finished(out), 1)
    slurm("scancel", "--signal=TERM", job)
    wait_for(lambda: waits(job, 1), 1)
    [first] = stops(log)
    assert last_checkpoint(out).name == f"step-{first:08}"

    def resumed():
        slurm("scontrol", "update", f"jobid={job}", "StartTime=now")  # else a job that was requeued waits two minutes
        return [path for path in finished(out) if int(path.name[5:]) > first]

    wait_for(resumed, 1)
    slurm("scontrol", "requeue", job)
    wait_for(lambda: waits(job, 2), 1)
    _, second = stops(log)
    assert f"resumed   after step {first}, from {out}\n" in log.read_text()
    slurm("scancel", job)

    last = submit(second + 1)
    wait_for(lambda: re.findall("JobState=COMPLETED", slurm("scontrol", "show", "job", last)), 1)
    assert last_checkpoint(out).name == f"step-{second + 1:08}"
    assert f"resumed   after step {second}, from {out}\n" in log.read_text()
    assert f"done      {second + 1} steps" in log.read_text()


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
    out, [port] = tmp_path / "run", free_ports(1)
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
