"""The command: what is asked, explained and told, and where that is written.

    ring-doctor my_package.ring:attention --causal --layout zigzag

    asked       asking/examination.py, the main loop: every question; asking/job.py: one, on processes of its own;
                asking/answers.py: judge, the answer
    explained   explaining/diagnosis.py: the name; xray.py: where; inference.py: what is seen without a name
    told        report.py, as text, JSON or a page; github.py, a note at a line of code

Before: options.py, assertion.py, which calls these in turn, and report.py. After: the chapter on rings that were wrong.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ring_doctor.asking.answers import BAD_INPUT, CANNOT_TELL, SAID, STATUS, passes
from ring_doctor.asking.job import START, CannotExamine
from ring_doctor.asking.names import by_name, named
from ring_doctor.asking.patient import patient_of
from ring_doctor.assertion import examine
from ring_doctor.catalogue import enter
from ring_doctor.explaining.xray import XRay
from ring_doctor.github import tell_github
from ring_doctor.options import claims_of, parse
from ring_doctor.report import Report, as_json, head, page
from ring_doctor.whole_models.whole_model import WORLDS, examine_model, json_of_model, text_of_model
from ringlab.support.extras import install
from ringlab.support.processes import Ranks, choose_device

QUIET = 20.0  # seconds between two lines about how far it is, where stderr is a file or a pipe


@contextlib.contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """A writer of progress on stderr, all the time on a terminal, else now and then: call it with the present step."""
    now, done, terminal = ["starting"], threading.Event(), sys.stderr.isatty()

    def write() -> None:
        while not done.wait(0.2 if terminal else QUIET):
            start, end = ("\r", "\x1b[K") if terminal else ("ring-doctor: ", "\n")
            print(f"{start}{now[0]:.100}", end=end, file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield lambda words: now.__setitem__(0, words)
    finally:
        done.set()
        writer.join()
        print(end="\r\x1b[K" * terminal, file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    """Examine, print, write. Returns the exit status."""
    try:
        find_project(Path.cwd())
        with telling() as tell:
            level, report, first = run_model(args) if args.model else run_attention(args, tell)
    except CannotExamine as error:
        level, report, first = CANNOT_TELL, *[f"{SAID[CANNOT_TELL]}: {error}"] * 2
    except ValueError as error:
        print(f"ring-doctor: {error}", file=sys.stderr)
        return BAD_INPUT
    passed = passes(level, args.accept)
    function = named(args.patient if ":" in args.patient else f"{args.patient}:attention")
    note = tell_github(function, level, first, report, passed=passed)
    lines = [report, f"accepted: {level}" if passed and STATUS[level] else "", note]
    try:
        print(*filter(None, lines), sep="\n", flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes once more at its end
    return 0 if passed else STATUS[level]


def run_attention(args: argparse.Namespace, tell: Callable[[str], None]) -> tuple[str, str, str]:
    """(level, report, its head) of an attention. Raises ValueError and CannotExamine."""
    if args.catalogue:
        enter(args.catalogue)
    patient = patient_of(args.patient, **claims_of(args))
    choose_device(args.device, max(patient.worlds))
    how = {"seconds": args.time_limit, "device": args.device, "seed": args.seed, "quick": args.quick}
    report = examine(patient, **how, xray=bool(args.html or args.xray), progress=tell)
    write(args, as_json(report), report)
    return report.level, str(report), head(report)


def run_model(args: argparse.Namespace) -> tuple[str, str, str]:
    """(level, report, verdict) of a training step of a whole model. Raises ValueError and CannotExamine."""
    choose_device(args.device, max(WORLDS))
    ranks = Ranks(max(WORLDS), max(START, args.time_limit), args.device)
    try:
        options = {"layout": args.layouts or "contiguous", "vocab": args.vocab, "seed": args.seed}
        options |= {"name": args.patient, "seconds": args.time_limit, "ranks": ranks}
        found = examine_model(by_name(args.patient), **options)
    except CannotExamine as reason:
        raise CannotExamine(f"{args.patient}: {reason}") from reason
    finally:
        ranks.stop()
    write(args, json_of_model(found))
    return found.level, text_of_model(found), found.verdict


def write(args: argparse.Namespace, said: dict[str, Any], report: Report | None = None) -> None:
    """The files that were asked for: a report as JSON, as a page, and the X-ray of an attention."""
    picture = ""
    if report and isinstance(report.xray, XRay) and find_spec("matplotlib"):
        from ring_doctor.explaining.xray_picture import svg

        picture = svg(report.xray)
    if args.json:
        args.json.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(page(said, picture), encoding="utf-8")
    if args.xray and picture:
        args.xray.write_text(picture, encoding="utf-8")
    elif args.xray and report:
        why = f"it needs matplotlib: {install('plots')}" if isinstance(report.xray, XRay) else report.xray
        print(f"ring-doctor: no X-ray in {args.xray}: {why}", file=sys.stderr)


def find_project(folder: Path) -> None:
    """Let modules of the user's project be imported, by the doctor's processes too: from its folder and from its src/.

    A src/ that is a package itself holds no modules of their own.
    """
    source = folder / "src"
    homes = [folder, source] if source.is_dir() and not (source / "__init__.py").exists() else [folder]
    sys.path[:0] = [str(home) for home in homes if str(home) not in sys.path]


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the command by an exception, so that it ends its processes first."""

    def leave(number: int, frame: Any) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: list[str] | None = None) -> int:
    """The exit status of the command."""
    args = parse(argv)
    if os.environ.get("WORLD_SIZE"):
        said = "WORLD_SIZE is set, as torchrun and sbatch scripts set it; expected no torchrun, or WORLD_SIZE unset"
        print(f"ring-doctor: {said}: the doctor starts its own processes", file=sys.stderr)
        return BAD_INPUT
    with ending_in_order():
        return run(args)


if __name__ == "__main__":
    sys.exit(main())
