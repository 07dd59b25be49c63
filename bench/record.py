"""What the benches share: machine, peak memory, methods in turn, runs in steps, results as JSON and table."""

import ctypes
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

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


def made(name: str, dtype: str) -> Results:
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
    return {"command": f"python -m bench.{name}", "machine": machine, "dtype": dtype}


def page(title: str, results: Results, *parts: str) -> str:
    """Results as markdown: a title, the command that made them, on what, and when, then texts and tables."""
    on = results["machine"]
    heading = (
        f"Made by `{results['command']}` on {on['cores']} cores ({on['system']}, load {on['load']} before), "
        f"{results['dtype']}, torch {on['torch']}, Python {on['python']}, {on['date']}."
    )
    return "\n\n".join([f"# {title}", heading, *parts]) + "\n"


def grid(heads: str, rows: Iterable[Iterable[Any]]) -> str:
    """A table in markdown. Columns are aligned right; left where a head begins with <, as in "<dtype | S | speed"."""
    names = heads.split(" | ")
    marks = ["---" if name.startswith("<") else "---:" for name in names]
    lines = [[name.removeprefix("<") for name in names], marks, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def save(name: str, results: Results, table: Callable[[Results], str]) -> None:
    """Write results/NAME.json, and the table made from it under its name in results/README.md."""
    lists = re.compile(r"\[[^][{}]+\]")  # those that hold no others are a line each
    text = lists.sub(lambda found: re.sub(r"\n *", " ", found[0]), json.dumps(results, indent=1))
    FOLDER.joinpath(f"{name}.json").write_text(text + "\n")
    readme = FOLDER / "README.md"
    head, *parts = re.split(r"^(?=## )", readme.read_text(), flags=re.MULTILINE)
    sections = {part.split(maxsplit=2)[1]: part for part in parts} | {name: section(name, table(results))}
    readme.write_text(head + "".join(sections[each] for each in sorted(sections)))
    print(table(results))


def section(name: str, table: str) -> str:
    """A table as a section of results/README.md, which is found by the name of its bench."""
    title, rest = table.removeprefix("# ").split("\n", 1)
    return f"## {name}\n\n**{title}.**\n{re.sub(r'^## ', '### ', rest, flags=re.MULTILINE).rstrip()}\n\n"


def run(
    name: str, measure: Callable[..., Results], table: Callable[[Results], str], sizes: Results, quick: Results
) -> None:
    """The command of a bench. With `--quick` it measures the small sizes, prints their table, and keeps nothing."""
    if "--quick" not in sys.argv[1:]:
        save(name, measure(**sizes), table)
        return
    with TemporaryDirectory() as folder, mock.patch(f"{__name__}.FOLDER", Path(folder)):
        print(table(measure(**quick)))


def load(name: str) -> Results:
    """Read what `save` wrote."""
    return json.loads(FOLDER.joinpath(f"{name}.json").read_text())


def in_steps(name: str, settings: Results, steps: dict[str, tuple], measure: Callable[..., Any]) -> Results:
    """Call measure(*arguments) for every step and return the results by name of the step.

    A run that was stopped, by Ctrl-C, goes on where it was. Each result (JSON) is written to NAME.unfinished.json at
    once. If the `settings` (JSON), the machine or a Python file of this project have changed since, all steps are
    measured again. When all steps are done, the file is removed.
    """
    path = FOLDER / f"{name}.unfinished.json"
    sources = sorted([*ROOT.glob("*.py"), *ROOT.glob("bench/*.py"), *ROOT.glob("ringlab/**/*.py")])
    code = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    on = cpu_cores(), torch.__version__
    settings = json.loads(json.dumps({**settings, "steps": list(steps), "code": code, "on": on}))
    seen = json.loads(path.read_text()) if path.exists() else {}
    done: Results = seen["done"] if seen.get("settings") == settings else {}
    with tqdm(steps, desc=name, unit="step", initial=len(done)) as bar:
        for step in [step for step in steps if step not in done]:
            bar.set_postfix_str(step)
            done[step] = measure(*steps[step])
            path.write_text(json.dumps({"settings": settings, "done": done}))
            bar.update()
    path.unlink(missing_ok=True)
    return {step: done[step] for step in steps}


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


def proc_status(field: str) -> int:
    """A size of this process in bytes, by its name in /proc/self/status, such as "VmRSS" (Linux)."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def pin(cores: int) -> None:
    """Limit this process, and those that it starts from now on, to the first `cores` cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def in_turn(
    context: RankContext, methods: dict[str, Method], repetitions: int, *, warm_up: int = 1
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Time all methods in turn. Returns the seconds of every repetition by method, and each method's last result.

    Methods take turns, A B A B ..., so that a disturbance of the machine affects all. The first `warm_up` repetitions
    do not count. A repetition ends when its last rank is done. Ranks that have nothing to do sleep until a message
    comes.
    """
    together = torch.get_num_threads()
    seconds, results = {name: [] for name in methods}, {}

    def note(name: str, work: Callable[[], Any]) -> None:
        results[name] = work()

    for _ in range(warm_up + repetitions):
        for name, (alone, work) in methods.items():
            torch.set_num_threads(cpu_cores() if alone else together)
            time.sleep(PAUSE)
            idle = alone and context.rank > 0
            its_turn = (lambda: None) if idle else partial(note, name, work)
            seconds[name].append(max(laps(its_turn, context.device)).seconds)
    torch.set_num_threads(together)
    return {name: each[warm_up:] for name, each in seconds.items()}, results
