"""The command: options, the processes of torchrun, what is printed and written. The work is in report.py.

    ring-doctor my_package.ring:attention --causal --layout zigzag

Shapes: none here.

Before: report.py and html.py. After: the chapter on rings that were wrong.
Source: none.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ring_doctor import html
from ring_doctor.annotation import annotation, on_github, place_of, summary
from ring_doctor.answers import Answer
from ring_doctor.catalogue import enter
from ring_doctor.examination import SECONDS
from ring_doctor.exit_status import ACCEPTABLE, BAD_INPUT, CANNOT_TELL, STATUS, WRONG_RING, passes
from ring_doctor.job import START, CannotExamine
from ring_doctor.junit import junit
from ring_doctor.model_report import ModelReport, json_of_model, text_of_model
from ring_doctor.names import by_name, named
from ring_doctor.options import add_claims, claims_of
from ring_doctor.patient import Patient, dtype_of, patient_of
from ring_doctor.quick import every_question, few_worlds, quick_questions
from ring_doctor.report import Report, as_json, head, text, visit
from ring_doctor.whole_model import WORLDS, examine_model
from ring_doctor.xray import XRay
from ringlab.support.extras import install
from ringlab.support.pool import Ranks
from ringlab.support.processes import choose_device

OURS = Path(__file__).resolve().parents[1] / "ringlab" / "__init__.py"
LEAST = 3  # ranks: with 2, the next rank is also the previous rank, and many mistakes do not show
WAIT = timedelta(hours=1)  # of torchrun's other ranks for the first

DESCRIPTION = """\
Is your ring attention right, and if not, which mistake is it?

The doctor calls your function on 1 to 5 processes, with many masks, lengths and dtypes. It compares output and
gradients with full attention in float64, names the mistake, and takes an X-ray of the weights."""

EXAMPLES = """\
your function
  module:function, module:Class.method or path/to/file.py:function; each process imports it by this name.
  It is called on each rank with its chunks, f(q, k, v), and returns out, or (out, lse). q is (B, H, C, D), k and v are
  (B, G, C, D), or as --tensors says. Of these options it gets those that its signature has:
    causal     or is_causal                              window     or window_size, flash-attn's (left, right)
    scale      or softmax_scale, sm_scale, scaling       documents  lengths; or cu_seqlens, where they begin and end
    group      or process_group, pg, cp_group, sp_group  layout, sinks

examples
  ring-doctor my_package.ring:attention
  ring-doctor my_package.ring:attention --causal --layout zigzag --html report.html
  ring-doctor my_package.ring:attention --tensors bshd --heads 8 --kv-heads 2 --head-dim 64 --shape 1,8,2,4096,64
  ring-doctor my_package.ring:attention --layout my_package.ring:positions    your own layout: where tokens stand,
                                                              positions(seq_len, rank, world_size) -> (C,)
  ring-doctor ring_doctor.patients.torch_loop              a patient file: a module that adapts a library
  ring-doctor --model my_package.train:step --layout zigzag   a step of a whole model: labels, positions, loss and
                                                              gradients; ring_doctor/whole_model.py says how
  torchrun --nproc_per_node=4 -m ring_doctor my_package.ring:attention

a catalogue of your own, my.py
  from ring_doctor.mistakes import mistake, replaces

  @mistake("Every rank leaves out its own block.", look="where the first block is chosen", chapter=4)
  @replaces("sees")                                    the steps and their arguments: ring_doctor/paper_ring.py
  def own_block_left_out(steps, case, rank, block):
      seen = steps.sees(case, rank, block)
      return seen & (rank != block)

exit status
  0 healthy, or healthy for what it takes    1 sick    2 bad input    3 cannot tell
  torchrun itself ends with 1 for 1, 2 and 3, and prints lines of its own after the report.
  In GitHub's workflows a verdict that is not healthy becomes a note at your function. docs/doctor_in_ci.md has
  workflows to copy."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one sentence, without the usage
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options of the command. Bad options end the process with status 2 and one sentence."""

    def file(suffix: str) -> Callable[[str], Path]:
        def path(words: str) -> Path:
            if not words.endswith(suffix) or Path(words).is_dir() or not Path(words).resolve().parent.is_dir():
                raise argparse.ArgumentTypeError(
                    f"{words!r} given, expected a name ending in {suffix} in a folder that exists"
                )
            return Path(words)

        return path

    def levels(words: str) -> tuple[str, ...]:
        names = tuple(words.split(","))
        if not set(names) <= set(ACCEPTABLE):
            raise argparse.ArgumentTypeError(f"{words!r} given, expected some of {','.join(ACCEPTABLE)}")
        return names

    def seconds(words: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < float(words) < float("inf"):
                return float(words)
        raise argparse.ArgumentTypeError(f"{words!r} given, expected a number of seconds")

    parser = _Parser(
        prog="ring-doctor",
        usage="ring-doctor [options] module:function",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("patient", metavar="module:function", help="the attention, or a module that is a patient file")
    parser.add_argument("--model", action="store_true", help="the function is a training step of a whole model")
    add_claims(parser)
    how = parser.add_argument_group("how")
    how.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda: NCCL, a GPU a rank; untested (auto)"
    )
    how.add_argument(
        "--time-limit", type=seconds, default=SECONDS, metavar="S", help=f"seconds for a question ({SECONDS:g})"
    )
    how.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    how.add_argument("--quick", action="store_true", help="ask each kind of question once, on 3 and 4 ranks")
    how.add_argument(
        "--accept",
        type=levels,
        default=(),
        metavar="LEVELS",
        help=f"end with 0 also for these verdicts: {','.join(ACCEPTABLE)} (none)",
    )
    how.add_argument("--catalogue", metavar="my.py", help="mistakes of your own, to be named too: see below")
    how.add_argument("--vocab", type=int, default=32, metavar="V", help="tokens of a --model are below V (32)")
    written = parser.add_argument_group("what to write, besides the report on the terminal")
    written.add_argument("--json", type=file(".json"), metavar="FILE", help="every answer, for other programs")
    written.add_argument(
        "--junit", type=file(".xml"), metavar="FILE", help="test cases, for GitLab, Jenkins and others"
    )
    written.add_argument("--html", type=file(".html"), metavar="FILE", help="one page, with X-rays")
    written.add_argument(
        "--xray",
        type=file(".svg"),
        metavar="FILE",
        help="the X-ray as a picture, a name ending in .svg; needs matplotlib",
    )
    args = parser.parse_args(argv)
    if args.model and (args.quick or args.xray):
        parser.error("a --model has no X-ray and no shorter way; expected neither --quick nor --xray")
    return args


def admit(args: argparse.Namespace, most: int | None) -> Patient:
    """The patient that the options describe, on at most `most` ranks. Raises ValueError when it cannot be examined."""
    patient = patient_of(args.patient, **claims_of(args))
    if most:
        patient = replace(patient, worlds=tuple(P for P in patient.worlds if P in range(most + 1)))
    if max(patient.worlds, default=0) < LEAST:
        raise ValueError(
            f"{max(patient.worlds, default=most)} ranks at most; expected {LEAST} or more: with 2, the next rank is "
            f"also the previous rank, and many mistakes do not show"
        )
    return patient


@contextlib.contextmanager
def progress_bar(patient: Patient, quick: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, where that is a terminal and tqdm is installed."""
    if find_spec("tqdm") is None:
        yield lambda words: None
        return
    from tqdm import tqdm

    first = dtype_of(patient.dtypes[0])
    asked = quick_questions(few_worlds(patient), first, 0) if quick else every_question(patient, first, 0)
    total = 2 + len(asked)
    with tqdm(
        total=total, disable=None, leave=False, file=sys.stderr, bar_format="{percentage:3.0f}% {bar:20} {desc}"
    ) as bar:

        def show(words: str) -> None:
            bar.total = max(bar.total, bar.n + 1)  # float64 may be refused: then there are more questions
            bar.set_description_str(words, refresh=False)
            bar.update()

        yield show


@dataclass(frozen=True)
class Told:
    """What the command tells of a ring."""

    level: str  # of exit_status.py
    report: str  # as text
    head: str  # of the report: the verdict, and what explains it
    answers: Sequence[Answer] = ()


def run(args: argparse.Namespace, most: int | None = None) -> tuple[int, str]:
    """Examine, print, write. Returns the exit status, and the reason in a line."""
    try:
        find_project(Path.cwd())
        told = run_model(args) if args.model else run_attention(args, most)
    except CannotExamine as error:
        told = Told(CANNOT_TELL, f"CANNOT TELL: {error}", f"CANNOT TELL: {error}")
    except ValueError as error:
        print(f"ring-doctor: {error}", file=sys.stderr)
        return BAD_INPUT, f"ring-doctor: {error}"
    passed = passes(told.level, args.accept)
    if args.junit:
        words = junit(args.patient, told.level, told.report, told.answers, passed=passed)
        args.junit.write_text(words, encoding="utf-8")
    lines = [told.report]
    if passed and STATUS[told.level]:
        lines.append(f"accepted: {told.level}")
    if on_github():
        lines += tell_github(args.patient, told, passed=passed)
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes once more at its end
    return (0 if passed else STATUS[told.level]), told.report.splitlines()[0]


def tell_github(name: str, told: Told, *, passed: bool) -> list[str]:
    """Write the report on the page of the run. Returns the line, if any, that becomes a note at the function."""
    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(page).open("a", encoding="utf-8") as file:
            file.write(summary(told.level, told.report))
    function = named(name if ":" in name else f"{name}:attention")
    place = place_of(function, Path(os.environ.get("GITHUB_WORKSPACE", ".")))
    note = annotation(told.level, told.head, place, passed=passed)
    return [note] if note else []


def run_attention(args: argparse.Namespace, most: int | None) -> Told:
    """An attention. Raises ValueError and CannotExamine."""
    if args.catalogue:
        enter(args.catalogue)
    patient = admit(args, most)
    choose_device(args.device, max(patient.worlds))
    options = {"seconds": args.time_limit, "device": args.device, "seed": args.seed, "quick": args.quick}
    with progress_bar(patient, args.quick) as progress:
        report = visit(patient, **options, xray=bool(args.html or args.xray), progress=progress)
    write(report, args)
    return Told(report.level, text(report), head(report), report.examination.answers)


def run_model(args: argparse.Namespace) -> Told:
    """A training step of a whole model. Raises ValueError and CannotExamine."""
    choose_device(args.device, max(WORLDS))
    ranks = Ranks(max(WORLDS), max(START, args.time_limit), args.device)
    try:
        options = {"layout": args.layout or "contiguous", "vocab": args.vocab, "seed": args.seed}
        found = examine_model(by_name(args.patient), **options, seconds=args.time_limit, ranks=ranks)
    except CannotExamine as reason:
        raise CannotExamine(f"{args.patient}: {reason}") from reason
    finally:
        ranks.stop()
    report = ModelReport(args.patient, found)
    if args.json:
        args.json.write_text(json.dumps(json_of_model(report), indent=1) + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(html.page_of_model(report), encoding="utf-8")
    return Told(report.level, text_of_model(report), report.verdict)


def write(report: Report, args: argparse.Namespace) -> None:
    """The files that were asked for."""
    if args.json:
        args.json.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(html.page(report), encoding="utf-8")
    if args.xray:
        picture = html.picture(report)
        if picture:
            args.xray.write_text(picture, encoding="utf-8")
        else:
            why = f"it needs matplotlib: {install('plots')}" if isinstance(report.xray, XRay) else report.xray
            print(f"ring-doctor: no X-ray in {args.xray}: {why}", file=sys.stderr)


def find_project(folder: Path) -> None:
    """Let modules of the user's project be imported, by the doctor's processes too: from its folder and from its src/.

    A src/ that is a package itself holds no modules of their own. Raises ValueError where a module of the project would
    take the place of the doctor's own package.
    """
    source = folder / "src"
    homes = [folder, source] if source.is_dir() and not (source / "__init__.py").exists() else [folder]
    for path in (path for home in homes for path in (home / "ringlab.py", home / "ringlab" / "__init__.py")):
        if path.exists() and path.resolve() != OURS:
            raise ValueError(
                f"{path} takes the place of the package ringlab, which is the doctor; expected another name"
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
