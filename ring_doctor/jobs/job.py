"""Run a user's command until its step N, with recorder.py in each of its processes, and end it.

    run_job("torchrun --nproc_per_node=4 train.py", folder)    ->    Job: what each rank saw, and the files it wrote

A `sitecustomize.py` in a folder of its own, first on PYTHONPATH, starts the recorder. A sitecustomize of the user's
runs after it. When all ranks have written, or one has ended too early, or the time is over, every process is ended.

Before: watching.py. After: seen.py, what the ranks saw.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ring_doctor.asking.job import CannotExamine
from ringlab.support.processes import LOST_CONNECTION

STARTER = """\
import importlib.machinery, importlib.util, os, sys
import ring_doctor_watching
ring_doctor_watching.begin()
others = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
if theirs := importlib.machinery.PathFinder.find_spec("sitecustomize", others):
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(theirs)
    theirs.loader.exec_module(sys.modules["sitecustomize"])
"""
# A shell that ends every process of the job, when the doctor closes a pipe or was killed: those of the job's group, and
# those that wrote their number, unless a later process was given it. Without /proc this is not looked at. A doctor that
# was killed leaves its temporary folder: that is removed.
GUARD = """\
read _; killed=$?; home=${2%/*}
kill -9 -"$1"
for file in "$2"/pid-*; do
  if [ ! -e /proc/self ] || grep -qsF "$2" "/proc/${file##*-}/environ"; then kill -9 "${file##*-}"; fi
done
case $killed${home##*/} in 1ring-doctor-????????) rm -rf "$home"; esac"""
GRACE = 5.0  # seconds in which a launcher ends when its processes have ended
OTHERS = 60.0  # seconds, or a tenth of the limit, that ranks may need after the first has made its step
TAIL = 8  # lines of a job's output
LONGEST = 16  # lines of an error


@dataclass(frozen=True)
class Job:
    """What was seen of a command."""

    command: str
    folder: Path
    ranks: list[dict[str, Any]]  # what each rank wrote: recorder.py

    def tensor(self, kind: str, step: int, name: str, rank: int = 0) -> Tensor | None:
        """A gradient, float64: "before" clipping, or the "gradient" that the optimizer gets. None if there is none."""
        files = [self.folder / f"{of}-{step}-{name.replace('/', ':')}-{rank}.pt" for of in (kind, "before")]
        return next((torch.load(file).double() for file in files if file.exists()), None)


def run_job(
    command: str,
    folder: Path,
    *,
    steps: int = 1,
    seconds: float = 600.0,
    move: str = "",
    tell: Callable[[str], None] = lambda words: None,
) -> Job:
    """Run `command` by the shell until its step `steps`. With `move`, a dtype, its weights begin one unit of it off.

    Raises CannotExamine when a process fails, when no optimizer of torch.optim makes a step, or after `seconds`.
    """
    (start := folder / "start").mkdir(parents=True)
    (start / "sitecustomize.py").write_text(STARTER, encoding="utf-8")
    for name in ("recorder", "watching"):
        shutil.copy(Path(__file__).with_name(f"{name}.py"), start / f"ring_doctor_{name}.py")
    paths = [str(start), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"RING_DOCTOR_FOLDER": str(folder), "RING_DOCTOR_STEPS": str(steps)}
    own |= {"RING_DOCTOR_MOVE": move, "PYTHONPATH": os.pathsep.join(paths)}
    began, output, alone = time.monotonic(), folder / "output", 0.0
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, shell=True, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        guard = ["sh", "-c", GUARD, "sh", str(process.pid), str(folder)]
        end = subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            while process.poll() is None and not _all_wrote(folder):
                passed = time.monotonic() - began
                tell(f"{passed:.0f} s: {command}")
                alone = alone if any(folder.glob("seen-*-of-*.pt")) else passed
                if passed > (limit := min(seconds, alone + max(OTHERS, seconds / 10))):
                    raise failed_job(f"had not ended after {limit:.3g} s: {_who_waits(folder, steps)}", command, folder)
                time.sleep(0.05)
            (folder / "end").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            end.communicate(b"\n")
            process.wait()
    if not _all_wrote(folder):
        raise failed_job(f"ended too early (status {process.returncode}): {_who_waits(folder, steps)}", command, folder)
    ranks = [torch.load(file) for file in folder.glob("seen-*.pt")]
    return Job(command, folder, sorted(ranks, key=lambda seen: seen["rank"]))


def _all_wrote(folder: Path) -> bool:
    wrote = [file.stem for file in folder.glob("seen-*-of-*.pt")]
    return bool(wrote) and len(wrote) == int(wrote[0].rpartition("-")[2])


def _who_waits(folder: Path, steps: int) -> str:
    if not list(folder.glob("pid-*")):
        return "no process of Python that reads PYTHONPATH was seen (python -I and -E do not)"
    if wrote := sorted(int(file.stem.split("-")[1]) for file in folder.glob("seen-*-of-*.pt")):
        return f"only rank {', '.join(map(str, wrote))} had made step {steps}; expected optimizer.step() on each rank"
    return f"no process had made step {steps} of an optimizer of torch.optim after a call of .backward()"


def failed_job(how: str, command: str, folder: Path) -> CannotExamine:
    """How a job failed, with the first error that ended a process, or the last lines of its output.

    An error of a process that was only left by another one is no reason.
    """
    errors = [file.read_text(errors="replace") for file in sorted(folder.glob("error-*"))]
    errors = [error for error in errors if not LOST_CONNECTION.search(error)] or errors
    lines = errors[0].splitlines()[:LONGEST] if errors else (folder / "output").read_text(errors="replace").splitlines()
    return CannotExamine("\n  | ".join([f"the job {how}: {command}", *(lines if errors else lines[-TAIL:])]))
