"""The command: the processes of torchrun, what is printed and written.

    ring-doctor my_package.ring:attention --causal --layout zigzag

    asked       examination.examination_of: every question; job.Job.ask: one, on processes; answers.judge: the answer
    explained   diagnosis.diagnose: the name; xray.xray_of: where; inference.infer: what is seen without a name
    told        report.Report, as text, JSON or a page

In a workflow of GitHub the verdict is a note at the line of the function, and the report is on the page of the run.

Before: options.py, assertion.py and report.py. After: the chapter on rings that were wrong.
Source: GitHub Docs, "Workflow commands for GitHub Actions"; the escapes are those of its toolkit, core/src/command.ts.
"""

import argparse
import contextlib
import functools
import inspect
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ring_doctor.answers import BAD_INPUT, CANNOT_TELL, SAID, STATUS, WRONG_RING, passes
from ring_doctor.assertion import examine
from ring_doctor.catalogue import enter
from ring_doctor.job import START, CannotExamine
from ring_doctor.names import by_name, named
from ring_doctor.options import claims_of, parse
from ring_doctor.patient import Patient, patient_of
from ring_doctor.report import Report, as_json, head, page
from ring_doctor.whole_model import WORLDS, examine_model, json_of_model, text_of_model
from ring_doctor.xray import XRay
from ringlab.support.extras import install
from ringlab.support.processes import Ranks, choose_device

OURS = Path(__file__).resolve().parents[1]  # the folder of the two packages
QUIET = 20.0  # seconds between two lines about how far it is, where stderr is a file or a pipe
LEAST = 3  # ranks: with 2, the next rank is also the previous rank, and many mistakes do not show
WAIT = timedelta(hours=1)  # of torchrun's other ranks for the first


def admit(args: argparse.Namespace, most: int | None) -> Patient:
    """The patient that the options describe, on at most `most` ranks. Raises ValueError when it cannot be examined."""
    patient = patient_of(args.patient, **claims_of(args))
    worlds = tuple(P for P in patient.worlds if most is None or most >= P)
    if max(worlds, default=0) < LEAST:
        raise ValueError(
            f"{max(worlds, default=most)} ranks at most; expected {LEAST} or more: with 2, the next rank is also the "
            f"previous rank, and many mistakes do not show"
        )
    return replace(patient, worlds=worlds)


@contextlib.contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """What is told what is done now, and writes it on stderr: all the time on a terminal, else now and then."""
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


def run(args: argparse.Namespace, most: int | None = None) -> tuple[int, str]:
    """Examine, print, write. Returns the exit status, and the reason in a line."""
    try:
        find_project(Path.cwd())
        with telling() as tell:
            level, report, first = run_model(args) if args.model else run_attention(args, most, tell)
    except CannotExamine as error:
        level, report, first = CANNOT_TELL, *[f"{SAID[CANNOT_TELL]}: {error}"] * 2
    except ValueError as error:
        print(f"ring-doctor: {error}", file=sys.stderr)
        return BAD_INPUT, f"ring-doctor: {error}"
    passed = passes(level, args.accept)
    function = named(args.patient if ":" in args.patient else f"{args.patient}:attention")
    note = tell_github(function, level, first, report, passed=passed)
    lines = [report, f"accepted: {level}" if passed and STATUS[level] else "", note]
    try:
        print(*filter(None, lines), sep="\n", flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes once more at its end
    return (0 if passed else STATUS[level]), report.splitlines()[0]


def tell_github(function: Callable[..., Any], level: str, head: str, report: str, *, passed: bool) -> str:
    """Write the report on the page of the run. Returns the line that becomes a note at the function.

    "" for a right ring, and where no workflow of GitHub runs this process. The first line of `head`, which belongs to
    the report, becomes the title. A level that the user accepts is a warning, not an error.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return ""
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(f"### ring-doctor: {level}\n\n```text\n{report}\n```\n")
    if STATUS[level] == 0:
        return ""
    verdict, _, others = head.partition("\n")
    properties = {**line_of(function, Path(os.environ.get("GITHUB_WORKSPACE", "."))), "title": verdict}
    listed = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{'warning' if passed else 'error'} {listed}::{_escaped(others.strip() or verdict)}"


def line_of(function: Callable[..., Any], root: Path) -> dict[str, str]:
    """{file, line} where a function is written, the file as seen from `root`; {} outside of it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    try:
        file, (_, line) = Path(inspect.getsourcefile(function) or ""), inspect.getsourcelines(function)
        return {"file": str(file.resolve().relative_to(root.resolve())), "line": str(line)}
    except (OSError, TypeError, ValueError):  # no Python source: a compiled function, an object; or in another folder
        return {}


def _escaped(text: str, others: str = "") -> str:
    for character in f"%\r\n{others}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def run_attention(args: argparse.Namespace, most: int | None, tell: Callable[[str], None]) -> tuple[str, str, str]:
    """(level, report, its head) of an attention. Raises ValueError and CannotExamine."""
    if args.catalogue:
        enter(args.catalogue)
    patient = admit(args, most)
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
        from ring_doctor.xray_picture import svg

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

    A src/ that is a package itself holds no modules of their own. Raises ValueError where a module of the project would
    take the place of the doctor's own package.
    """
    source = folder / "src"
    homes = [folder, source] if source.is_dir() and not (source / "__init__.py").exists() else [folder]
    for home, name in itertools.product(homes, ("ringlab", "ring_doctor")):
        for path in (home / f"{name}.py", home / name / "__init__.py"):
            if path.exists() and path.resolve() != OURS / name / "__init__.py":
                raise ValueError(
                    f"{path} takes the place of the package {name}, which is the doctor; expected another name"
                )
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
    """Examine with processes of its own. Under torchrun, rank 0 does so, and the other ranks wait for it."""
    if "WORLD_SIZE" not in os.environ:
        with ending_in_order():
            return run(parse(argv))[0]
    store, rank, world_size = next(dist.rendezvous("env://", timeout=WAIT))
    if rank:
        store.wait(["the doctor has ended"])
        return 0  # so that torchrun reports rank 0 only
    status = STATUS[WRONG_RING]
    try:
        args = parse(argv)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)  # the doctor's processes are other ranks
        status, reason = run(args, world_size)
        if status and "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun ends its own lines with what is in this file
            reply = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": reply}))
    finally:
        store.set("the doctor has ended", str(status))
    return status


if __name__ == "__main__":
    sys.exit(main())
