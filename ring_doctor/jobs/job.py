"""Run a user's command until its step N, with recorder.py in each of its processes, and end it.

    run_job("torchrun --nproc_per_node=4 train.py", folder)    ->    Job: what each rank saw, and the files it wrote

A folder of its own, first on PYTHONPATH, has the recorder, as a plugin of torch: "torch.backends" are entry points that
torch calls when it is imported. When all ranks have written, or one has ended too early, or the time is over, every
process is ended.

Before: recorder.py. After: seen.py, what the ranks saw.
Source: the PyTorch manual, "Out-of-tree extension autoloading".
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.job import CannotExamine
from ringlab.support.processes import LOST_CONNECTION

# A shell that ends every process of the job, when the doctor closes a pipe or was killed: those of the job's group, and
# those with the folder in their environment; without /proc, those that imported torch. Before that a launcher has a
# moment to end by itself.
GUARD = """\
exec 2>/dev/null; read _; sleep 0.3; kill -9 -"$1"
if [ -e /proc/self ]
then kill -9 $(grep -lsF "$2" /proc/[0-9]*/environ | tr -dc '0-9\\n')
else kill -9 $(ls "$2" | sed -n 's/^torch-//p'); fi"""
LONGEST = 64  # lines of an error, or of the end of a job's output


@dataclass(frozen=True)
class Job:
    """What was seen of a command."""

    folder: Path
    steps: Sequence[Sequence[dict[str, Any]]]  # what each rank saw of each step: recorder.py

    def gradients(self, kind: str, step: int, name: str) -> dict[int, Tensor]:
        """A weight's gradients by rank, float64: those that optimizers get, or as they were "before" clipping."""
        found = {}
        for rank in range(len(self.steps[step])):
            got, wanted = (self.folder / f"{of}-{step}-{name.replace('/', ':')}-{rank}.pt" for of in ("gradient", kind))
            if got.exists():
                found[rank] = torch.load(wanted if wanted.exists() else got).double()
        return found


def run_job(
    command: str,
    folder: Path,
    *,
    steps: int = 1,
    seconds: float = 600.0,
    move: str = "",
    paths: Sequence[str] = (),
    tell: Callable[[str], None] = lambda words: None,
) -> Job:
    """Run `command` by the shell until its step `steps`. With `move`, a dtype, its weights begin one unit of it off.

    Python finds modules at `paths` too. Raises CannotExamine when a process fails, when no optimizer of torch.optim
    makes a step, or after `seconds`.
    """
    (start := folder / "start/ring_doctor_recorder-0.dist-info").mkdir(parents=True)
    (start / "entry_points.txt").write_text("[torch.backends]\nring_doctor = ring_doctor_recorder:begin\n")
    shutil.copy(Path(__file__).with_name("recorder.py"), start.with_name("ring_doctor_recorder.py"))
    homes = os.pathsep.join(filter(None, [str(start.parent), os.environ.get("PYTHONPATH", ""), *paths]))
    own = {"FOLDER": str(folder), "STEPS": str(steps), "MOVE": move}
    own = {f"RING_DOCTOR_{name}": value for name, value in own.items()} | {"PYTHONPATH": homes}
    tell(f"the {folder.name} job")
    with (folder / "output").open("wb") as file:
        to_file: dict[str, Any] = {"stdout": file, "stderr": file, "start_new_session": True}
        process = subprocess.Popen(command, shell=True, env=os.environ | own, stdin=subprocess.DEVNULL, **to_file)
        guard = ["sh", "-c", GUARD, "sh", str(process.pid), str(folder)]
        end = subprocess.Popen(guard, stdin=subprocess.PIPE, **to_file)
        try:
            late = time.monotonic() + seconds
            while (status := process.poll()) is None and not _all_wrote(folder) and time.monotonic() < late:
                time.sleep(0.05)
            (folder / "end").touch()
        finally:
            end.communicate(b"\n")
            process.wait()
    if not _all_wrote(folder):
        how = f"had not ended after {seconds:.3g} s" if status is None else f"ended too early (status {status})"
        raise _failed(f"the {folder.name} job {how}", folder, steps)
    return Job(folder, [*zip(*(torch.load(file) for file in _wrote(folder)), strict=True)])


def _wrote(folder: Path) -> list[Path]:
    """What the ranks wrote, in their order."""
    return sorted(folder.glob("seen-*-of-*.pt"))


def _all_wrote(folder: Path) -> bool:
    return any(len(_wrote(folder)) == int(file.stem[-5:]) for file in _wrote(folder))


def _failed(how: str, folder: Path, steps: int) -> CannotExamine:
    """How a job failed, with the first error that ended a process, or the last lines of its output.

    An error of a process that was only left by another one is no reason, nor is torchrun's own: the output has both.
    """
    texts = [file.read_text(errors="replace") for file in sorted(folder.glob("error-*"))]
    if errors := [text for text in texts if not (LOST_CONNECTION.search(text) or "ChildFailedError" in text)]:
        return CannotExamine("\n  | ".join([how, *errors[0].splitlines()[:LONGEST]]))
    why = f"no process had made step {steps} of an optimizer of torch.optim after a call of .backward()"
    if not [*folder.glob("torch-*")]:
        why = "no process has imported torch and its plugins of PYTHONPATH (python -I and -E do not read it)"
    if wrote := ", ".join(str(int(file.name[5:10])) for file in _wrote(folder)):
        why = f"only rank {wrote} had made step {steps}; expected optimizer.step() on each rank"
    lines = (folder / "output").read_text(errors="replace").splitlines()[-LONGEST:]
    return CannotExamine("\n  | ".join([f"{how}: {why}", *lines]))
