"""What both benches share: the machine's name, the peak of a process's memory, and results as JSON and as a table."""

import ctypes
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from basics.processes import cpu_cores

FOLDER = Path(__file__).parent / "results"
Results = dict[str, Any]


def machine() -> dict[str, Any]:
    """What a reader needs to judge a measurement: cores, how busy they were before it, system, versions, date (UTC)."""
    return {
        "cores": cpu_cores(),
        "load": round(os.getloadavg()[0], 1),  # processes that wanted a core, averaged over the last minute
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def heading(results: Results) -> str:
    """The lines above a table: the command that made it, on what, and when."""
    on = results["machine"]
    return (
        f"Made by `{results['command']}` on {on['cores']} cores ({on['system']}, load {on['load']} before), "
        f"{results['dtype']}, torch {on['torch']}, Python {on['python']}, {on['date']}."
    )


def save(name: str, results: Results, table: Callable[[Results], str]) -> None:
    """Write results/NAME.json and the table made from it, results/NAME.md."""
    FOLDER.joinpath(f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    FOLDER.joinpath(f"{name}.md").write_text(table(results))
    print(table(results))


def load(name: str) -> Results:
    """Read what `save` wrote."""
    return json.loads(FOLDER.joinpath(f"{name}.json").read_text())


def return_freed_memory() -> None:
    """Make this process give every freed tensor of 16 KiB or more back to the system at once (glibc only).

    Left alone, glibc keeps freed memory for later, up to twice the largest tensor and with holes, so that the resident
    size says more about its habits than about the tensors alive.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        M_MMAP_THRESHOLD = -3  # from malloc.h; setting it also stops glibc from raising it by itself
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 16 * 1024)


def peak_extra(work: Callable[[], Any]) -> int | None:
    """Run `work` and return by how many bytes this process's resident memory rose at most; None where not measurable.

    Linux only: elsewhere a process cannot reset its own peak. The kernel counts to about 0.2 MiB. What libraries set
    up once should have been set up before, by a small run.
    """
    if sys.platform != "linux":
        return None
    Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, begins again at the present size
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
