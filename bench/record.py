"""What the benches share: machine, peak memory, methods in turn, results as JSON."""

import ctypes
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ringlab.support.devices import cpu_cores
from ringlab.support.processes import RankContext
from ringlab.support.timeline import laps

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "bench" / "results"
Results = dict[str, Any]
PAUSE = 0.05  # seconds before each turn, in which the threads of the last turn stop spinning

Method = tuple[bool, Callable[[], Any]]  # (rank 0 only?, the function to time); rank 0 alone uses all the cores


@dataclass(frozen=True)
class Bench:
    """What one result in bench/results is made of: `python -m bench NAME` measures it."""

    measure: Callable[..., Results]  # what it found, for the sizes
    tables: Callable[[Results], list[str]]  # the same in markdown, for bench/results/README.md
    dtype: str
    sizes: Results

    def run(self, **sizes: Any) -> Results:
        """Measure, with these sizes in place of its own."""
        on = made(f"python -m bench {self.measure.__name__}", self.dtype)
        sizes = {**self.sizes, **sizes}
        return {**on, **sizes, **self.measure(**sizes)}


BENCHES: dict[str, Bench] = {}  # by name, when the files of bench/ are imported


def bench(
    tables: Callable[[Results], list[str]], *, dtype: str = "float32", **sizes: Any
) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Make a function that measures the Bench of its name."""

    def known(measure: Callable[..., Results]) -> Callable[..., Results]:
        BENCHES[measure.__name__] = Bench(measure, tables, dtype, sizes)
        return measure

    return known


def made(command: str, dtype: str) -> Results:
    """What all results begin with, and what a reader needs to judge them: the command, and the machine: cores, system,
    versions, date (UTC), and how busy it was, so call it before measuring.
    """
    path = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    machine = {
        "cores": cpu_cores(),
        "cpu": named[1] if named else platform.processor(),  # such as "AMD EPYC 9B45"; "" where the system says nothing
        "load": round(os.getloadavg()[0], 1),  # processes that wanted a core, averaged over the last minute
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return {"command": command, "machine": machine, "dtype": dtype}


def heading(results: Results) -> str:
    """The command that made the results, on what, and when."""
    on = results["machine"]
    return (
        f"Made by `{results['command']}` on {on['cores']} cores ({on['system']}, load {on['load']} before), "
        f"{results['dtype']}, torch {on['torch']}, Python {on['python']}, {on['date']}."
    )


def grid(heads: str, rows: Iterable[Iterable[Any]]) -> str:
    """A table in markdown. Columns are aligned right; left where a head begins with <, as in "<dtype | S | speed"."""
    names = heads.split(" | ")
    marks = ["---" if name.startswith("<") else "---:" for name in names]
    lines = [[name.removeprefix("<") for name in names], marks, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def save(name: str, results: Results) -> None:
    """Write results/NAME.json."""
    lists = re.compile(r"\[[^][{}]+\]")  # those that hold no others are a line each
    text = lists.sub(lambda found: re.sub(r"\n *", " ", found[0]), json.dumps(results, indent=1))
    FOLDER.joinpath(f"{name}.json").write_text(text + "\n")


def load(name: str) -> Results:
    """Read what `save` wrote."""
    return json.loads(FOLDER.joinpath(f"{name}.json").read_text())


def rows(name: str, cases: Sequence[Results], measure: Callable[..., Results]) -> list[Results]:
    """A row for each case: the case, and what measure(**case) found."""
    return [{**case, **measure(**case)} for case in tqdm(cases, desc=name)]


def return_freed_memory() -> None:
    """Make this process give every freed tensor of 16 KiB or more back to the system at once (glibc only).

    By default glibc keeps freed memory for later, up to twice the largest tensor and with holes. Then the resident size
    counts more than the tensors alive.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        M_MMAP_THRESHOLD = -3  # from malloc.h; setting it also stops glibc from raising it by itself
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 16 * 1024)


def peak_extra(work: Callable[[], Any]) -> int | None:
    """Run `work` and return the largest rise of this process's resident memory, in bytes; None if not measurable.

    Linux only: elsewhere a process cannot reset its own peak. The kernel counts to about 0.2 MiB. Run something small
    first, so that what libraries set up once does not count.
    """
    if sys.platform != "linux":
        return None
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM, to the present size
    before = proc_status("VmRSS")
    work()
    return proc_status("VmHWM") - before


def most(peaks: Sequence[int | None]) -> int | None:
    """The peak of the rank that needs most; None where it can't be measured."""
    return None if None in peaks else max(peaks)


def proc_status(field: str) -> int:
    """A size of this process in bytes, by its name in /proc/self/status, such as "VmRSS" (Linux)."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def pin(cores: int) -> None:
    """Limit this process, and those that it starts from now on, to the first `cores` cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def in_turn(
    context: RankContext, methods: dict[str, Method], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Time all methods in turn. Returns the seconds of every repetition by method, and each method's last result.

    Methods take turns, A B A B ..., so that a disturbance of the machine affects all. The first repetition does
    not count. A repetition ends when its last rank is done. Ranks that have nothing to do sleep until a message
    comes.
    """
    together = torch.get_num_threads()
    seconds, results = {name: [] for name in methods}, {}

    def note(name: str, work: Callable[[], Any]) -> None:
        results[name] = work()

    for _ in range(1 + repetitions):
        for name, (alone, work) in methods.items():
            torch.set_num_threads(cpu_cores() if alone else together)
            time.sleep(PAUSE)
            idle = alone and context.rank > 0
            its_turn = (lambda: None) if idle else partial(note, name, work)
            seconds[name].append(max(laps(its_turn, context.device)))
    torch.set_num_threads(together)
    return {name: each[1:] for name, each in seconds.items()}, results
