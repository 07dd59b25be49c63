"""The command: what is asked, explained and told, and where that is written.

    ring-doctor my_package.ring:attention --causal --layout zigzag

    asked       asking/examination.py, the main loop: every question; asking/job.py: one, on processes of its own;
                asking/answers.py: judge, the answer
    explained   explaining/diagnosis.py: the name; xray.py: where; inference.py: what is seen without a name
    told        report.py, as text, JSON or a page

Before: options.py, assertion.py, which calls these in turn, and report.py. After: the chapter on rings that were wrong.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ring_doctor.asking.answers import BAD_INPUT, CANNOT_TELL, SAID, STATUS, WRONG_RING
from ring_doctor.asking.job import CannotExamine, Tell
from ring_doctor.asking.patient import patient_of
from ring_doctor.assertion import examine
from ring_doctor.explaining.xray import XRay
from ring_doctor.jobs.verdict import examine_job
from ring_doctor.options import claims_of, parse, parse_run
from ring_doctor.report import as_json, page
from ring_doctor.whole_models.whole_model import examine_model
from ringlab.support.devices import choose_device

QUIET = 20.0  # seconds between two lines about how far it is, where stderr is a file or a pipe


@contextlib.contextmanager
def telling() -> Iterator[Tell]:
    """A writer of progress on stderr, all the time on a terminal, else now and then: call it with the present step."""
    now: list[Any] = ["starting", time.monotonic()]
    done, terminal = threading.Event(), sys.stderr.isatty()

    def write() -> None:
        while not done.wait(0.2 if terminal else QUIET):
            start, end = ("\r", "\x1b[K") if terminal else ("ring-doctor: ", "\n")
            print(f"{start}{now[0]:.100}, for {time.monotonic() - now[1]:.0f} s", end=end, file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield lambda words: now.__setitem__(slice(None), (words, time.monotonic()))
    finally:
        done.set()
        writer.join()
        if terminal:
            print(end="\r\x1b[K", file=sys.stderr, flush=True)


Told = tuple[dict[str, Any], str, str]  # a report for programs, as text, and its X-ray as an SVG


def run(args: argparse.Namespace) -> int:
    """Examine, print, write. Returns the exit status."""
    examination = of_jobs if not args.patient else of_model if args.model else of_attention
    try:
        find_project(Path.cwd())
        with telling() as tell:
            said, report, picture = examination(args, tell)
        level = said["level"]
        if args.json:
            args.json.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        if args.html:
            args.html.write_text(page(said, report, picture), encoding="utf-8")
    except CannotExamine as error:
        level, report = CANNOT_TELL, f"{SAID[CANNOT_TELL]}: {error}"
    except ValueError as error:
        print(f"ring-doctor: {error}", file=sys.stderr)
        return BAD_INPUT
    except Exception:  # Python's status of an error, 1, is that of SICK
        traceback.print_exc()
        level, report = CANNOT_TELL, f"{SAID[CANNOT_TELL]}: the doctor itself failed, by the error above"
    try:
        print(report, flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes once more at its end
    return STATUS[level]


def of_attention(args: argparse.Namespace, tell: Tell) -> Told:
    """The examination of an attention. Raises ValueError and CannotExamine."""
    patient = patient_of(args.patient, **claims_of(args))
    choose_device(args.device, max(patient.worlds))
    how = {"seconds": args.time_limit, "device": args.device, "seed": args.seed, "quick": args.quick}
    report = examine(patient, **how, progress=tell)
    picture = ""
    if args.html and isinstance(report.xray, XRay) and find_spec("matplotlib"):
        from ring_doctor.explaining.xray_picture import svg

        picture = svg(report.xray)
    return as_json(report), str(report), picture


def of_model(args: argparse.Namespace, tell: Tell) -> Told:
    """The examination of a training step of a whole model. Raises ValueError and CannotExamine."""
    how = {"layout": args.layouts or "contiguous", "seed": args.seed, "device": args.device}
    how |= {"vocab": args.vocab} if args.vocab else {}
    found = examine_model(args.patient, **how, seconds=args.time_limit, progress=tell)
    said = {"name": args.patient, "torch": version("torch"), "healthy": found.level != WRONG_RING, "answers": []}
    return said | found.as_json(), str(found), ""


def of_jobs(args: argparse.Namespace, tell: Tell) -> Told:
    """The examination of two commands. Raises CannotExamine."""
    found = examine_job(args.one, args.many, steps=args.steps, exact=args.exact, seconds=args.time_limit, tell=tell)
    return found.as_json(), str(found), ""


def find_project(folder: Path) -> None:
    """Let modules of the user's project be imported, by the doctor's processes too: from its folder and from its src/.

    A src/ that is a package itself holds no modules of their own.
    """
    source = folder / "src"
    homes = [folder, source] if source.is_dir() and not (source / "__init__.py").exists() else [folder]
    sys.path[:0] = [str(home) for home in homes if str(home) not in sys.path]


def main(argv: list[str] | None = None) -> int:
    """The exit status of the command."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_run(words[1:]) if words[:1] == ["run"] else parse(words)
    if os.environ.get("WORLD_SIZE"):
        said = "WORLD_SIZE is set, as torchrun and sbatch scripts set it; expected no torchrun, or WORLD_SIZE unset"
        print(f"ring-doctor: {said}: the doctor starts its own processes", file=sys.stderr)
        return BAD_INPUT
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # an exception ends the doctor's processes first
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
