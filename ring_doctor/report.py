"""What a visit to the doctor comes to: the verdict, the name of the mistake, an X-ray, and every answer.

    visit(patient)    ->    Report: examine, diagnose, take an X-ray
    text(report)            what a terminal shows; the first line is the verdict
    as_json(report)         the same for other programs

Before: diagnosis.py, take_xray.py. After: html.py, the same as a page; __main__.py, the command.
Source: none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ring_doctor.answers import FAILED, OK, REFUSED, WRONG, Answer, answered
from ring_doctor.conditions import FEATURES
from ring_doctor.diagnosis import Diagnosis, diagnose
from ring_doctor.examination import HEALTHY, SECONDS, SICK, Examination, examine, never_claimed
from ring_doctor.exit_status import IMPRECISE, RIGHT, RIGHT_AS_CLAIMED, WRONG_RING
from ring_doctor.inference import infer
from ring_doctor.inference import text as in_lines
from ring_doctor.mistakes import Mistake
from ring_doctor.patient import Patient
from ring_doctor.take_xray import choose_question, take_xray
from ring_doctor.xray import XRay

RESULTS = ("out", "lse", "dq", "dk", "dv")
LISTED = 12  # wrong answers that the text lists; the JSON and the page have all


@dataclass(frozen=True)
class Report:
    """All that a visit found out."""

    examination: Examination
    diagnosis: Diagnosis | None  # None: no answer is wrong in its numbers
    xray: XRay | str  # or why there is none
    inference: tuple[str, ...] = ()  # what the numbers prove where no name explains all of them

    def __str__(self) -> str:
        return text(self)

    @property
    def healthy(self) -> bool:
        """Whether what the function claims is right."""
        return self.state != SICK

    @property
    def state(self) -> str:
        """HEALTHY, LIMITED or SICK. Wrong numbers that have a name are not the limit of a ring for equal chunks."""
        named = self.diagnosis is not None and bool(self.diagnosis.explanations)
        return SICK if named else self.examination.verdict

    @property
    def level(self) -> str:
        """How wrong: one of exit_status.py."""
        if self.state == SICK:
            return IMPRECISE if self.examination.imprecise else WRONG_RING
        return RIGHT if self.state == HEALTHY else RIGHT_AS_CLAIMED

    @property
    def verdict(self) -> str:
        """One line: healthy, or sick and of what."""
        name, answers = self.examination.patient.name, self.examination.answers
        if self.healthy:
            right = [answer for answer in answers if answer.state == OK]
            refused = len([answer for answer in answers if answer.state == REFUSED])
            worlds = ", ".join(str(P) for P in sorted({answer.case.world_size for answer in right}))
            said = f"{self.state.upper()}: {name}, {len(right)} right answers with {worlds} ranks"
            said += f", {refused} question{'s' * (refused > 1)} refused" if refused else ""
            return said + "".join(f"; {words}" for words in self.limits)
        sick = "IMPRECISE IN 16 BITS" if self.level == IMPRECISE else "SICK"
        if self.examination.changes:
            return f"SICK: {name} changes its answers from call to call"
        failed = [answer for answer in answers if answer.state == FAILED and not never_claimed(answer)]
        if failed and self.diagnosis is None:
            return f"SICK: {name} fails: {failed[0].says}"
        if self.diagnosis is None or not self.diagnosis.explanations:
            return f"{sick}: {name}, by a mistake that is not in the catalogue"
        return f"{sick}: {' or '.join(found.words for found in self.diagnosis.explanations)}, in {name}"

    @property
    def limits(self) -> list[str]:
        """What the function takes, where a ring may take more."""
        silent = [feature for feature, answer in self.examination.beyond.items() if answer.state == WRONG]
        said = [f"wrong numbers, and no error, with {feature}: let it refuse them" for feature in silent]
        said += [
            f"it fails with {feature} ({answer.says.splitlines()[0]})"
            for feature, answer in self.examination.beyond.items()
            if answer.state == FAILED
        ]
        return self.examination.limits + said

    @property
    def mistakes(self) -> list[Mistake]:
        """The mistakes that the verdict names, each once."""
        explanations = self.diagnosis.explanations if self.diagnosis else ()
        return list(dict.fromkeys(mistake for explanation in explanations for mistake in explanation.mistakes))

    @property
    def remarks(self) -> list[str]:
        """What else a reader must know about the verdict, in sentences."""
        patient = self.examination.patient
        said = [*self.examination.remarks, *patient.notes]
        if not self.healthy:
            said += self.examination.limits
        if "causal" not in patient.takes and patient.causal == (False,):
            said.append("its signature has no causal=, so it was asked for full attention only")
        if self.diagnosis and len(self.diagnosis.explanations) > 1:
            said.append("no question tells these explanations apart: they give equal numbers")
        if self.diagnosis and self.diagnosis.part:
            said.append(f"this explains {self.diagnosis.part}; no known mistake explains the rest")
        if watched := [answer for answer in self.examination.answers if answer.messages]:
            said.append(f"with {watched[-1].case.world_size} ranks, {watched[-1].messages}")
        if self.diagnosis:
            said.insert(0, f"it shows {self.diagnosis.when}")
        if self.level == IMPRECISE:
            said.insert(0, "it is right in float64 and float32, and imprecise in 16 bits")
        if changes := self.examination.changes:
            where = ON_ONE_RANK if any(answer.case.world_size == 1 for answer in changes) else BETWEEN_RANKS
            said.insert(0, f"{CHANGES.format(len(changes), changes[0].question.words())}. {where}")
        return [f"{words[0].upper()}{words[1:]}." for words in said]


CHANGES = "asked three times, it gave different numbers to {} of the questions, as with {}"
BETWEEN_RANKS = (
    "A buffer is read before its message is there, is written while it is being sent (a race), or is never filled; or "
    "something is kept between calls. Look for a missing wait(), for buffers that two rounds share, for torch.empty() "
    "of another size or dtype than the message, for counters and caches"
)
ON_ONE_RANK = (
    "One rank alone does it too, so it is no race between ranks: look for random numbers, as of dropout, for "
    "torch.empty() that is never filled, for counters and caches"
)


def visit(
    patient: Patient,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    quick: bool = False,
    xray: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Report:
    """Examine, diagnose, and take an X-ray: of a sick ring, and with `xray` of a healthy ring too.

    Raises CannotExamine.
    """
    examination = examine(patient, seconds=seconds, device=device, seed=seed, quick=quick, progress=progress)
    progress("diagnosis")
    diagnosis = diagnose(examination)
    sick = examination.verdict == SICK
    taken: XRay | str = "none was taken"
    if xray or (sick and diagnosis):
        progress("X-ray")
        taken = take_xray(examination.patient, choose_question(examination), seconds=seconds, device=device)
    named = diagnosis and diagnosis.explanations and not diagnosis.part
    told = infer(examination, taken) if sick and not named else []
    return Report(examination, diagnosis, taken, tuple(told))


def asked(answers: Sequence[Answer]) -> list[str]:
    """What was asked, a line for each feature in which questions differ: "with 1, 2, 3, 4 ranks"."""
    lines = []
    for words, feature in FEATURES:
        values = dict.fromkeys(str(feature(answer.question)) for answer in answers)
        lines += [words.format(", ".join(values))] if len(values) > 1 else []
    return lines


def errors_of(answer: Answer) -> dict[str, str]:
    """By result: "ok", or the error in norm as a share of the right result's norm."""
    return {name: f"{answer.relative[name]:.2g}" if name in answer.wrong else "ok" for name in answer.errors}


def rounding_of(answer: Answer) -> str:
    """The largest error of the most wrong result, beside what rounding allows there."""
    share = {name: error / allowed for name, (error, allowed) in answer.errors.items()}
    name = max(answer.wrong or share, key=(answer.wrong or share).__getitem__)
    error, allowed = answer.errors[name]
    return f"{name} off by {error:.1e}, rounding allows {allowed:.1e}"


def facts(mistake: Mistake) -> list[tuple[str, str]]:
    """What the catalogue says of a mistake: (heading, words)."""
    said = [("what it is", mistake.what), ("where to look", mistake.look)]
    said += [("who had it", ", ".join(mistake.wild))] if mistake.wild else []
    return [*said, ("chapter", f"{mistake.chapter} of notebooks/")]


def head(report: Report) -> str:
    """The verdict and what explains it, without the answers and the X-ray."""
    patient = report.examination.patient
    lines = [report.verdict]
    lines += [f"  {words}" for words in (patient.about, patient.version) if words]
    lines += [f"  {remark}" for remark in report.remarks]
    if report.inference:
        lines += ["", "what the numbers show", in_lines(report.inference)]
    for mistake in report.mistakes:
        lines += ["", mistake.name, *(f"  {heading:<15}{words}" for heading, words in facts(mistake))]
    return "\n".join(lines)


def text(report: Report) -> str:
    """The report for a terminal."""
    lines = [head(report), "", *_table(report.examination.answers)]
    if isinstance(report.xray, XRay) and report.xray.right and not report.healthy:
        lines += ["", "X-ray: right. The mistake does not show where there is one head, small scores, and no 16 bits."]
    elif isinstance(report.xray, XRay):
        lines += ["", f"X-ray, {report.xray.case.words()}", report.xray.text()]
    elif report.diagnosis:
        lines += ["", f"X-ray: {report.xray}"]
    return "\n".join(lines)


def _table(answers: list[Answer]) -> list[str]:
    """The number of answers of each kind for each number of ranks, and those that are not right."""
    states = (OK, WRONG, FAILED, REFUSED)
    lines = ["answers   " + "".join(f"{state:>9}" for state in states)]
    for P in sorted({answer.case.world_size for answer in answers}):
        of_world = [answer.state for answer in answers if answer.case.world_size == P]
        counts = [of_world.count(state) for state in states]
        lines.append(f"{P} rank{'s' * (P > 1):<4}" + " " + "".join(f"{count:>9}" for count in counts))
    wrong = [answer for answer in answers if answer.state == WRONG]
    if wrong:
        width = max(len(answer.question.words()) for answer in wrong[:LISTED])
        lines += [
            "",
            "wrong, and by which share of the right result".ljust(width) + "".join(f"{x:>8}" for x in RESULTS),
        ]
        for answer in wrong[:LISTED]:
            errors = errors_of(answer)
            row = "".join(f"{errors.get(name, '-'):>8}" for name in RESULTS)
            lines.append(f"{answer.question.words():<{width}}{row}   {rounding_of(answer)}")
        lines += [f"... and {len(wrong) - LISTED} more: --json or --html lists them"] if len(wrong) > LISTED else []
    lines += [f"failed    {answer.question.words()}: {answer.says}" for answer in answers if answer.state == FAILED]
    refused: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.state == REFUSED:
            refused.setdefault(answer.says, []).append(answer)
    for says, same in refused.items():
        others = f" and {len(same) - 1} more" if len(same) > 1 else ""
        lines.append(f"refused   {same[0].question.words()}{others}: {says}")
    return lines


def as_json(report: Report) -> dict[str, Any]:
    """The report as numbers, strings, lists and dicts. An infinite error is null."""
    patient, diagnosis = report.examination.patient, report.diagnosis

    def number(x: float) -> float | None:
        return x if math.isfinite(x) else None

    return {
        "name": patient.name,
        "about": patient.about,
        "version": patient.version,
        "torch": torch.__version__,
        "healthy": report.healthy,
        "level": report.level,
        "verdict": report.verdict,
        "mistakes": [
            [mistake.name for mistake in found.mistakes] for found in (diagnosis.explanations if diagnosis else ())
        ],
        "when": diagnosis.when if diagnosis else None,
        "inference": list(report.inference),
        "remarks": report.remarks,
        "asked": asked(report.examination.answers),
        "answered": [
            {"what": what, "mask": mask, "dtype": dtype, "ranks": list(ranks)}
            for (what, mask, dtype), ranks in answered(report.examination.answers).items()
        ],
        "answers": [
            {
                "question": answer.question.words(),
                "ranks": answer.case.world_size,
                "causal": answer.case.causal,
                "layout": answer.case.layout,
                "dtype": str(answer.case.dtype).removeprefix("torch."),
                "state": answer.state,
                "says": answer.says,
                "messages": answer.messages,
                "wrong": {name: list(answer.ranks[name]) for name in answer.wrong},
                "errors": {
                    name: {
                        "largest": number(error),
                        "allowed": number(allowed),
                        "relative": number(answer.relative[name]),
                    }
                    for name, (error, allowed) in answer.errors.items()
                },
            }
            for answer in report.examination.answers
        ],
        "xray": report.xray.text() if isinstance(report.xray, XRay) else None,
    }
