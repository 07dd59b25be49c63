"""Run a user's command until its step N, with recorder.py in each of its processes, and end it.

    run_job("torchrun --nproc_per_node=4 train.py", folder)    ->    Job: what each rank saw, and the files it wrote

A folder of its own, first on PYTHONPATH, has watching.py as the `sitecustomize.py`, and the recorder. When all ranks
have written, or one has ended too early, or the time is over, every process is ended.

Before: watching.py. After: seen.py, what the ranks saw.
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
# those that wrote their number, unless a later process was given it. Without /proc this is not looked at. Before that
# a launcher has a moment to end by itself.
GUARD = """\
read _; sleep 0.3; kill -9 -"$1"
for file in "$2"/pid-*; do
  if [ ! -e /proc/self ] || grep -qsF "$2" "/proc/${file##*-}/environ"; then kill -9 "${file##*-}"; fi
done"""
LONGEST = 16  # lines of an error, or of the end of a job's output


@dataclass(frozen=True)
class Job:
    """What was seen of a command."""

    command: str
    folder: Path
    ranks: list[dict[str, Any]]  # what each rank wrote: recorder.py

    def tensor(self, kind: str, step: int, name: str, rank: int = 0) -> Tensor | None:
        """A gradient, float64: "before" it was clipped, if it was, or the "gradient" that the optimizer gets."""
        files = [self.folder / f"{of}-{step}-{name.replace('/', ':')}-{rank}.pt" for of in (kind, "gradient", "before")]
        return next((torch.load(file).double() for file in files if file.exists()), None)


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
    (start := folder / "start").mkdir(parents=True)
    for here, there in (("watching", "sitecustomize"), ("recorder", "ring_doctor_recorder")):
        shutil.copy(Path(__file__).with_name(f"{here}.py"), start / f"{there}.py")
    homes = os.pathsep.join(filter(None, [str(start), os.environ.get("PYTHONPATH", ""), *paths]))
    own = {"RING_DOCTOR_FOLDER": str(folder), "RING_DOCTOR_STEPS": str(steps), "RING_DOCTOR_MOVE": move}
    tell(command)
    with (folder / "output").open("wb") as file:
        process = subprocess.Popen(
            command, shell=True, env={**os.environ, **own, "PYTHONPATH": homes}, stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, start_new_session=True,
        )  # fmt: skip
        guard = ["sh", "-c", GUARD, "sh", str(process.pid), str(folder)]
        end = subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
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
        raise failed_job(how, command, folder, steps)
    return Job(command, folder, [torch.load(file) for file in _wrote(folder)])


def _wrote(folder: Path) -> list[Path]:
    """What the ranks wrote, in their order."""
    return sorted(folder.glob("seen-*-of-*.pt"))


def _all_wrote(folder: Path) -> bool:
    return any(len(_wrote(folder)) == int(file.stem[-5:]) for file in _wrote(folder))


def failed_job(how: str, command: str, folder: Path, steps: int) -> CannotExamine:
    """How a job failed, with the first error that ended a process, or the last lines of its output.

    An error of a process that was only left by another one is no reason.
    """
    why = f"no process had made step {steps} of an optimizer of torch.optim after a call of .backward()"
    if not list(folder.glob("pid-*")):
        why = "no process of Python that reads PYTHONPATH was seen (python -I and -E do not)"
    if wrote := ", ".join(str(int(file.name[5:10])) for file in _wrote(folder)):
        why = f"only rank {wrote} had made step {steps}; expected optimizer.step() on each rank"
    errors = [file.read_text(errors="replace") for file in sorted(folder.glob("error-*"))]
    errors = [error for error in errors if not LOST_CONNECTION.search(error)] or errors
    lines = errors[0].splitlines()[:LONGEST] if errors else (folder / "output").read_text(errors="replace").splitlines()
    return CannotExamine("\n  | ".join([f"the job {how}: {why}: {command}", *(lines if errors else lines[-LONGEST:])]))
