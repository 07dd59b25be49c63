"""What a visit to the doctor comes to: the verdict, the name of the mistake, an X-ray, and every answer.

    visit(patient)    ->    Report: examine, diagnose, take an X-ray
    text(report)            what a terminal shows; the first line is the verdict
    as_json(report)         the same for other programs

    text_of_model(...)      what a terminal shows of a whole model

Before: diagnosis.py, film.py and whole_model.py. After: html.py, the same as a page; __main__.py, the command.
Source: none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ringlab.doctor.case import Case
from ringlab.doctor.diagnosis import Diagnosis, diagnose
from ringlab.doctor.examination import FAILED, OK, REFUSED, SECONDS, WRONG, Examination, Outcome, examine
from ringlab.doctor.film import choose, take
from ringlab.doctor.mistakes import Mistake
from ringlab.doctor.mistakes_of_models import MISTAKES
from ringlab.doctor.patient import Patient
from ringlab.doctor.whole_model import ModelExamination
from ringlab.doctor.xray import XRay

RESULTS = ("out", "lse", "dq", "dk", "dv")
LISTED = 12  # wrong answers that the text lists; the JSON and the page have all


@dataclass(frozen=True)
class Report:
    """All that a visit found out."""

    examination: Examination
    diagnosis: Diagnosis | None  # None: no answer is wrong in its numbers
    film: XRay | str  # or why there is none
    film_of: Case | None

    @property
    def healthy(self) -> bool:
        return self.examination.healthy

    @property
    def verdict(self) -> str:
        """One line: healthy, or sick and of what."""
        name, outcomes = self.examination.patient.name, self.examination.outcomes
        if self.healthy:
            refused = sum(outcome.state == REFUSED for outcome in outcomes)
            worlds = ", ".join(str(P) for P in sorted({it.case.world_size for it in outcomes if it.state == OK}))
            answers = f"HEALTHY: {name}, {len(outcomes) - refused} right answers with {worlds} ranks"
            return answers + (f", {refused} question{'s' * (refused > 1)} refused" if refused else "")
        if failed := [outcome for outcome in outcomes if outcome.state == FAILED and self.diagnosis is None]:
            return f"SICK: {name} fails: {failed[0].says}"
        if self.diagnosis is None or not self.diagnosis.explanations:
            return f"SICK: {name}, but no mistake of the catalogue, nor two together, gives its numbers"
        return f"SICK: {' or '.join(it.name for it in self.diagnosis.explanations)}, in {name}"

    @property
    def mistakes(self) -> list[Mistake]:
        """Those that the verdict names, each once."""
        explanations = self.diagnosis.explanations if self.diagnosis else ()
        return list({it.name: it for explanation in explanations for it in explanation.mistakes}.values())

    @property
    def remarks(self) -> list[str]:
        """What else a reader must know of the verdict."""
        said = list(self.examination.remarks)
        patient = self.examination.patient
        if "causal" not in patient.takes and patient.causal == (False,):
            said.append("its signature has no causal=, so it was asked for full attention only")
        if self.diagnosis and len(self.diagnosis.explanations) > 1:
            said.append("no question tells these explanations apart: they give equal numbers")
        if self.diagnosis and self.diagnosis.forward_only:
            said.append("this explains the output; the gradients are those of no known mistake")
        if watched := [outcome for outcome in self.examination.outcomes if outcome.messages]:
            said.append(f"with {watched[-1].case.world_size} ranks, {watched[-1].messages}")
        if self.diagnosis:
            said.insert(0, f"it shows {self.diagnosis.since}")
        return [f"{words[0].upper()}{words[1:]}." for words in said]


def visit(
    patient: Patient,
    *,
    seconds: float = SECONDS,
    device: str = "cpu",
    seed: int = 0,
    film: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Report:
    """Examine, diagnose, and take an X-ray of wrong weights, or with `film` of any. Raises CannotExamine."""
    examination = examine(patient, seconds=seconds, device=device, seed=seed, progress=progress)
    progress("diagnosis")
    diagnosis = diagnose(examination)
    if diagnosis is None and not film:
        return Report(examination, diagnosis, "none was taken", None)
    progress("X-ray")
    case = choose(examination)
    return Report(examination, diagnosis, take(examination.patient, case, seconds=seconds, device=device), case)


def errors_of(outcome: Outcome) -> dict[str, str]:
    """By result: "ok", or the error in norm as a share of the right result's norm."""
    return {name: f"{outcome.relative[name]:.2g}" if name in outcome.wrong else "ok" for name in outcome.errors}


def rounding_of(outcome: Outcome) -> str:
    """The largest error of a number, beside what rounding allows there: of the result that exceeds it the most."""
    share = {name: error / allowed for name, (error, allowed) in outcome.errors.items()}
    name = max(outcome.wrong or share, key=(outcome.wrong or share).get)
    error, allowed = outcome.errors[name]
    return f"{name} off by {error:.1e}, rounding allows {allowed:.1e}"


def facts(mistake: Mistake) -> list[tuple[str, str]]:
    """What the catalogue says of a mistake: (heading, words)."""
    said = [("what it is", mistake.what), ("where to look", mistake.look)]
    said += [("who had it", ", ".join(mistake.wild))] if mistake.wild else []
    return [*said, ("chapter", f"{mistake.chapter} of notebooks/")]


def text(report: Report) -> str:
    """The report for a terminal."""
    examination = report.examination
    lines = [report.verdict]
    lines += [f"  {words}" for words in (examination.patient.about, examination.patient.version) if words]
    lines += [f"  {remark}" for remark in report.remarks]
    for mistake in report.mistakes:
        lines += ["", mistake.name, *(f"  {heading:<15}{words}" for heading, words in facts(mistake))]
    lines += ["", *_table(examination.outcomes)]
    if isinstance(report.film, XRay):
        lines += ["", f"X-ray, {report.film_of.words()}", report.film.text()]
        if report.film.right and not report.healthy:
            lines += [
                "The mistake does not show in this question. An X-ray has one head, small scores, and no 16 bits."
            ]
    elif report.diagnosis:
        lines += ["", f"X-ray: {report.film}"]
    return "\n".join(lines)


def _table(outcomes: list[Outcome]) -> list[str]:
    """The number of answers of each kind for each number of ranks, and those that are not right."""
    states = (OK, WRONG, FAILED, REFUSED)
    lines = ["answers   " + "".join(f"{state:>9}" for state in states)]
    for P in sorted({outcome.case.world_size for outcome in outcomes}):
        counts = [sum(it.case.world_size == P and it.state == state for it in outcomes) for state in states]
        lines.append(f"{P} rank{'s' * (P > 1):<4}" + " " + "".join(f"{count:>9}" for count in counts))
    wrong = [outcome for outcome in outcomes if outcome.state == WRONG]
    if wrong:
        width = max(len(outcome.question.words()) for outcome in wrong[:LISTED])
        lines += [
            "",
            "wrong, and by which share of the right result".ljust(width) + "".join(f"{x:>8}" for x in RESULTS),
        ]
        for outcome in wrong[:LISTED]:
            errors = errors_of(outcome)
            row = "".join(f"{errors.get(name, '-'):>8}" for name in RESULTS)
            lines.append(f"{outcome.question.words():<{width}}{row}   {rounding_of(outcome)}")
        lines += [f"... and {len(wrong) - LISTED} more: --json or --html lists them"] if len(wrong) > LISTED else []
    lines += [f"failed    {it.question.words()}: {it.says}" for it in outcomes if it.state == FAILED]
    refused: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.state == REFUSED:
            refused.setdefault(outcome.says, []).append(outcome)
    for says, same in refused.items():
        others = f" and {len(same) - 1} more" if len(same) > 1 else ""
        lines.append(f"refused   {same[0].question.words()}{others}: {says}")
    return lines


def text_of_model(name: str, examination: ModelExamination) -> str:
    """What a terminal shows of the examination of a whole model."""
    diagnoses = examination.diagnoses
    mistakes = list(dict.fromkeys(mistake for found in diagnoses for mistake in found.names))
    if examination.healthy:
        lines = [f"HEALTHY: {name}, loss and gradients are those of one process"]
    elif diagnoses:
        lines = [f"SICK: {' or '.join(' and '.join(found.names) for found in diagnoses)}, in {name}"]
    else:
        lines = [f"SICK: {name}, but no mistake of the catalogue, nor two together, gives its numbers"]
    lines += [f"  {note[0].upper()}{note[1:]}." for note in examination.notes]
    lines += [f"  {found.detail}" for found in diagnoses if found.detail]
    for mistake in mistakes:
        lines += ["", mistake, *(f"  {heading:<15}{words}" for heading, words in facts(MISTAKES[mistake]))]
    lines += [""]
    for world in examination.worlds:
        asked = f"P = {world.world_size}" + (", some labels hidden" if world.hidden else "")
        error = f"off by {world.error:.1e} of the norm, rounding allows {examination.allowed:.1e}"
        lines.append(f"{'ok    ' if world.right else 'WRONG '} {asked}: {world.failure or error}")
    return "\n".join(lines)


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
        "verdict": report.verdict,
        "mistakes": [[it.name for it in found.mistakes] for found in (diagnosis.explanations if diagnosis else ())],
        "since": diagnosis.since if diagnosis else None,
        "remarks": report.remarks,
        "answers": [
            {
                "question": outcome.question.words(),
                "ranks": outcome.case.world_size,
                "causal": outcome.case.causal,
                "layout": outcome.case.layout,
                "dtype": str(outcome.case.dtype).removeprefix("torch."),
                "state": outcome.state,
                "says": outcome.says,
                "messages": outcome.messages,
                "wrong": {name: list(outcome.ranks[name]) for name in outcome.wrong},
                "errors": {
                    name: {
                        "largest": number(error),
                        "allowed": number(allowed),
                        "relative": number(outcome.relative[name]),
                    }
                    for name, (error, allowed) in outcome.errors.items()
                },
            }
            for outcome in report.examination.outcomes
        ],
        "xray": report.film.text() if isinstance(report.film, XRay) else None,
    }
