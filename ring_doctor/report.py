"""What a visit to the doctor comes to: the verdict, the name of the mistake, an X-ray, and every answer.

    text(report)           what a terminal shows; the first line is the verdict
    as_json(report)        the same for other programs; page(said, text): both, as one page that loads nothing

Before: diagnosis.py and inference.py in explaining/. After: assertion.py, which examines; __main__.py, which prints.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from textwrap import fill, shorten
from typing import Any

import torch

from ring_doctor.asking.answers import FAILED, IMPRECISE, OK, REFUSED, SAID, WRONG, Answer, Examination
from ring_doctor.asking.questions import UNEQUAL, Question
from ring_doctor.explaining.conditions import OUT_FIRST, separated
from ring_doctor.explaining.diagnosis import FEW, Diagnosis
from ring_doctor.explaining.facts import Finding
from ring_doctor.explaining.xray import XRay
from ring_doctor.mistakes import Mistake

WIDTH = 110  # of what the numbers show
LISTED = 12  # kinds of answers that are not right, in the text; the JSON and the page have all
CHANGES = "asked again, or first in new processes, it gave different numbers, as with {}"
EQUAL_CHUNKS = "HEALTHY FOR EQUAL CHUNKS"
BETWEEN_RANKS = "Look for a race (no wait(), a shared buffer), a torch.empty() that is never filled, a counter, a cache"
OF_EARLIER_CALLS = "In new processes this is right: look for a cache or buffer of earlier calls. Mend it and ask again"
UNAWAITED = "A message for which nobody waits is read too early, or taken for the next one. Mend this, then ask again"
ON_ONE_RANK = "One rank alone does it too: look for random numbers, a torch.empty() never filled, a counter, a cache"


@dataclass(frozen=True)
class Report:
    """All that a visit found out."""

    examination: Examination
    diagnosis: Diagnosis | None  # None: no answer is wrong in its numbers
    xray: XRay | str  # or why there is none
    inference: tuple[Finding, ...] = ()  # what the numbers prove where no name explains all of them

    def __str__(self) -> str:
        return text(self)

    @property
    def healthy(self) -> bool:
        """Whether what the function claims is right."""
        return self.examination.healthy

    @property
    def level(self) -> str:
        """How wrong: one of those in asking/answers.py."""
        return self.examination.level

    @property
    def verdict(self) -> str:
        """One line: healthy, or sick and of what."""
        name, answers = self.examination.patient.name, self.examination.answers
        if self.healthy:
            right, patient = [answer.case for answer in answers if answer.state == OK], self.examination.patient
            lengths = sorted(-(-case.seq_len // case.world_size) for case in right) or [0]
            yours = "" if patient.shape or patient.state else " (--shape asks yours)"
            refused = Counter(it.question.feature or "listed below" for it in answers if it.state == REFUSED)
            equal = list(self.examination.beyond) == [UNEQUAL] and not self.examination.limits
            level, worlds = EQUAL_CHUNKS if equal else SAID[self.level], sorted({case.world_size for case in right})
            rightly = "all" if len(right) == len(answers) else len(right)
            asked = f"{len(answers)} question{'s' if answers[1:] else ''} with {', '.join(map(str, worlds))} ranks"
            counts = f"{asked}, {lengths[0]} to {lengths[-1]} tokens on each{yours}, {rightly} answered right"
            if refused:
                listed = ", ".join(f"{n} x {words}" for words, n in refused.most_common())
                counts += f", {refused.total()} refused ({listed})"
            if beyond := len(answers) - len(right) - refused.total():
                counts += f", {beyond} beyond what it takes"
            said = [f"{level}: {name}: {counts}", *self.limits]
            if not_asked := self.examination.not_asked:
                said.append(f"not asked, because it does not take them: {', '.join(not_asked)}")
            said += [f"left at their defaults: {', '.join(patient.others)}"] if patient.others else []
            return "; ".join(said)
        if self.examination.changes:
            lines = self.examination.unawaited
            why = f": nobody waits for the messages of {' and of '.join(lines)}" if lines else ""
            return f"SICK: {name} changes its answers from call to call{why}"
        names = " or ".join(found.words for found in (self.diagnosis.told if self.diagnosis else ()))
        shown = f"{names}, in {name}" if names else f"{name}: {self.finding}"
        shown += ": no gradient comes out. For inference alone? Add --forward-only" if names == "no_gradient" else ""
        if failed := [answer for answer in self.examination.faults if answer.state == FAILED]:
            first = min(failed, key=lambda answer: (bool(answer.question.feature), answer.question.how != "plain"))
            feature, fine = first.question.feature, [answer.question for answer in answers if answer.state == OK]
            where = f"with {feature}" if feature else fine and separated(fine, [it.question for it in failed], 1)
            where = "" if where and where.count(" or ") > 1 else where  # a list of ways says nothing
            fails = f"fails {where}: {first.says}" if where else f"fails: {first.says}"
            special = feature or first.question.how != "plain"  # a ring may lack it, and numbers count more
            if special and self.examination.wrong and (names or self.inference):
                return f"SICK: {shown}; it {fails}"
            return f"SICK: {name} {fails}" + (f"; its numbers: {names}" if names else "")
        return f"{SAID[self.level]}: {shown}"

    @property
    def finding(self) -> str:
        """What the numbers show first, without where to look, and when they do."""
        wrong = self.diagnosis.answers if self.diagnosis else self.examination.faults
        first = next(iter(self.inference), Finding("wrong numbers"))
        shown = self.xray.case if first.says.startswith("X-ray") and isinstance(self.xray, XRay) else wrong[0].question
        when = (self.diagnosis and self.diagnosis.when) or f"as with {shown.words()}"
        return shorten(f"{first.brief or first.says}, {when}", 140, placeholder=" ...")

    @property
    def limits(self) -> list[str]:
        """What the function takes, where a ring may take more."""
        said, fails, faults = list(self.examination.limits), dict[str, list[str]](), self.examination.faults
        usual, sick = {answer.says for answer in faults}, {answer.case for answer in faults}  # without the feature too
        for feature, answer in self.examination.beyond.items():
            if answer.state == FAILED and answer.says not in usual:
                what = "many options at once" if answer.question.together else feature
                fails.setdefault(answer.says.splitlines()[0], []).append(what)
            elif answer.state != FAILED and answer.case not in sick:
                said.append(f"wrong gradients, and no error, of {feature}: let its lse need no gradient")
        return said + [f"it fails with {', '.join(dict.fromkeys(features))} ({why})" for why, features in fails.items()]

    @property
    def mistakes(self) -> list[Mistake]:
        """The mistakes that the verdict and the remarks name, each once."""
        explanations = self.diagnosis.told + self.diagnosis.others if self.diagnosis else ()
        return list(dict.fromkeys(mistake for explanation in explanations for mistake in explanation.mistakes))

    @property
    def remarks(self) -> list[str]:
        """What else a reader must know about the verdict, in sentences."""
        patient, diagnosis, faults, said = self.examination.patient, self.diagnosis, self.examination.faults, []
        if changes := self.examination.changes:
            where = ON_ONE_RANK if any(answer.case.world_size == 1 for answer in changes) else BETWEEN_RANKS
            where = OF_EARLIER_CALLS if all(answer.kept for answer in changes) else where
            where = UNAWAITED if self.examination.unawaited else where
            bad = [name for name in changes[0].results if any(name in answer.wrong for answer in changes)]
            said.append(f"{CHANGES.format(changes[0].question.words())}; wrong in {', '.join(bad)}. {where}")
        if self.level == IMPRECISE:
            right = {(it.case.dtype, it.question.same()) for it in self.examination.answers if it.state == OK}
            sick = {it.question.same() for it in faults}
            wide = " and ".join(n for n in ("float64", "float32") if {(getattr(torch, n), x) for x in sick} <= right)
            said.append(f"it is right in {wide}, and imprecise in 16 bits" if wide else "it is imprecise in 16 bits")
        it = "the first mistake shows" if diagnosis and diagnosis.rest else "it shows"
        it = "numbers are wrong" if any(each.state == FAILED for each in faults) else it
        said += [f"{it} {diagnosis.when}"] if diagnosis and diagnosis.when else []
        said += [*self.examination.remarks, *([] if self.healthy else self.limits)]
        unequal = [answer for answer in faults if answer.question.feature == UNEQUAL]
        others = [answer for answer in faults if answer.state == WRONG and answer not in unequal]
        if unequal and (not others or any(answer.state == FAILED for answer in unequal)):
            said.append("where all ranks always have equally many tokens, ask with --equal-chunks, or unequal=False")
        known = [answer.question.options() for answer in others]
        apart = [it for it in unequal if it.state == WRONG and not any(of <= it.question.options() for of in known)]
        said += [f"it is wrong with {UNEQUAL} too, as with {apart[0].question.words()}"] if known and apart else []
        if faults and all(answer.state == FAILED and not answer.lost for answer in self.examination.answers):
            said.append("it fails in every question: mend this, then ask again")
        if not self.healthy and "causal" not in patient.takes:
            given = "full attention only" if patient.causal == (False,) else "causal attention, without causal=True"
            said.append(f"its signature has no causal=, so it was asked for {given}")
        if not self.healthy and True in patient.causal and "layout" not in patient.takes and not patient.state:
            said.append(f"its signature has no layout=, so it was asked in the {patient.layouts[0]} layout only")
        names = list(dict.fromkeys(it.words for it in (diagnosis.explanations if diagnosis else ())))
        many = f"{len(names)} known mistakes apart" if names[FEW:] else f"these explanations apart: {', '.join(names)}"
        said += [f"no question tells {many}"] if names[1:] else []
        if diagnosis and diagnosis.rest:
            cause = " or ".join(f"{of.words} does" for of in diagnosis.others) or "another mistake may"
            said.append(f"it does not explain {diagnosis.rest} ({diagnosis.count} of the wrong answers): {cause}")
        elif diagnosis and not diagnosis.follow and any("dq" in answer.wrong for answer in diagnosis.answers):
            said.append(OUT_FIRST)
        shown = Question(self.xray.case).options() if isinstance(self.xray, XRay) and not self.xray.right else set()
        other = [it.question.words() for it in faults if it.state == WRONG and not shown <= it.question.options()]
        if other and diagnosis and not (diagnosis.told or diagnosis.when):
            said.append(f"what the X-ray has is missing in {len(other)} of the wrong answers, as with {other[0]}")
        if diagnosis and isinstance(self.xray, XRay) and self.xray.right:
            said.append(f"the X-ray is right: in new processes it asked {self.xray.case.words()}")
        return [f"{words[0].upper()}{words[1:]}." for words in said]


def found_in(answer: Answer) -> str:
    """How wrong each wrong result is, and the worst number beside what rounding allows; or what the answer says."""
    if answer.says or not answer.errors:
        return answer.says
    share = answer.wrong or {name: error / allowed for name, (error, allowed) in answer.errors.items()}
    name = max(share, key=share.__getitem__)
    error, allowed = answer.errors[name]
    lost = [each for each in answer.wrong if math.isinf(answer.relative[each])]
    vast = [each for each in answer.wrong if 1e9 < answer.relative[each] < math.inf]
    shares = [f"{each} {float(f'{100 * x:.2g}'):g} %" for each in answer.wrong if (x := answer.relative[each]) <= 1e9]
    said = [f"{', '.join(lost)}: NaN or infinite"] if lost else []
    said += [f"{', '.join(vast)}: off by more than 1e9 times the norm, as where 0 is right"] if vast else []
    said += [f"off by {', '.join(shares)} of the norm"] if shares else []
    worst = f"one number of {name} is off by {error:.1e}, rounding allows {allowed:.1e}"
    return "; ".join([*said, worst] if math.isfinite(error) else said)


def facts(mistake: Mistake) -> dict[str, str]:
    """What the catalogue says of a mistake: {heading: words}."""
    wild = {"who had it": ", ".join(mistake.wild)} if mistake.wild else {}
    chapter = {"chapter": f"{mistake.chapter or 'appendix_ring_of_states'} of notebooks/"}
    return {"what it is": mistake.what, "where to look": mistake.look} | wild | chapter


def explained(mistakes: Sequence[Mistake]) -> list[str]:
    """Lines that tell what the catalogue says of each mistake."""
    lines = []
    for mistake in mistakes:
        lines += ["", mistake.name, *(f"  {heading:<15}{words}" for heading, words in facts(mistake).items())]
    return lines


def head(report: Report) -> str:
    """The verdict and what explains it, without the answers and the X-ray."""
    patient = report.examination.patient
    words = [each for each in (patient.about, patient.version, *report.remarks) if each]
    lines = [report.verdict, *(f"  {each}" for each in words)]
    lines += ["", "what the numbers show"] if report.inference else []
    lines += [fill(f"- {finding}", WIDTH, subsequent_indent="  ") for finding in report.inference]
    return "\n".join(lines + explained(report.mistakes))


def text(report: Report) -> str:
    """The report for a terminal."""
    lines = [head(report), "", *_table(report.examination.answers)]
    if isinstance(report.xray, XRay) and not (report.diagnosis and report.xray.right):  # of that tells a remark
        lines += ["", f"X-ray, {report.xray.case.words()} (round t: the keys of t ranks before)", report.xray.text()]
    elif report.diagnosis and isinstance(report.xray, str):
        lines += ["", f"X-ray: {report.xray}"]
    return "\n".join(lines)


def _table(answers: list[Answer]) -> list[str]:
    """The number of answers of each kind for each number of ranks, and those that are not right, one of each kind."""
    states = (OK, WRONG, FAILED, REFUSED)
    lines = ["answers   " + "".join(f"{state:>9}" for state in states)]
    for P in sorted({answer.case.world_size for answer in answers}):
        of_world = [answer.state for answer in answers if answer.case.world_size == P]
        world = f"{P} ranks" if P > 1 else "1 rank"
        lines.append(f"{world:<11}" + "".join(f"{of_world.count(state):>9}" for state in states))
    for state in states[1:]:
        kinds: dict[tuple[str, ...], list[Answer]] = {}
        for answer in (answer for answer in answers if answer.state == state):
            kind: tuple[str, ...] = (answer.question.what(), answer.says)
            if state == WRONG:
                kind += (str(answer.case.dtype), *answer.wrong)
            elif state == REFUSED:  # in one line of code, with one sentence: one kind, whatever was asked
                kind = (answer.where, re.split(r"\d", answer.says)[0])
            kinds.setdefault(kind, []).append(answer)
        for first, *others in sorted(kinds.values(), key=lambda of: -len(of[0].wrong))[:LISTED]:
            more = f" and {len(others)} more" if others else ""
            lines.append(f"{state:<10}{first.question.words()}{more}: {found_in(first)}")
        if len(kinds) > LISTED:
            lines.append(f"... and {len(kinds) - LISTED} more kinds: --json or --html lists them")
    return lines


def as_json(report: Report) -> dict[str, Any]:
    """The report as numbers, strings, lists and dicts. An infinite error is null."""
    patient, diagnosis = report.examination.patient, report.diagnosis
    return summary(patient.name, report) | {
        "about": patient.about,
        "version": patient.version,
        "mistakes": [[each.name for each in of.mistakes] for of in (diagnosis.told if diagnosis else ())],
        "when": diagnosis.when if diagnosis else None,
        "inference": list(map(str, report.inference)),
        "answers": [_answer_as_json(answer) for answer in report.examination.answers],
        "xray_of": report.xray.case.words() if isinstance(report.xray, XRay) else report.xray,
        "xray": report.xray.text() if isinstance(report.xray, XRay) else None,
        "grids": report.xray.grids() if isinstance(report.xray, XRay) else [],
    }


def summary(name: str, report: Any) -> dict[str, Any]:
    """What an attention and a whole model both have in JSON."""
    kept = {word: getattr(report, word) for word in ("healthy", "level", "verdict", "remarks")}
    of_mistakes = {mistake.name: facts(mistake) for mistake in report.mistakes}
    return {"name": name, "torch": torch.__version__, **kept, "facts": of_mistakes}


def _answer_as_json(answer: Answer) -> dict[str, Any]:
    case, keys = answer.case, ("largest", "allowed", "relative")
    errors = {name: (*pair, answer.relative[name]) for name, pair in answer.errors.items()}
    finite = {name: [x if math.isfinite(x) else None for x in each] for name, each in errors.items()}
    return {
        "question": answer.question.words(),
        "ranks": case.world_size,
        "causal": case.causal,
        "layout": case.layout,
        "dtype": str(case.dtype).removeprefix("torch."),
        "state": answer.state,
        "says": answer.says,
        "found": found_in(answer),
        "wrong": {name: list(answer.ranks[name]) for name in answer.wrong},
        "errors": {name: dict(zip(keys, each, strict=True)) for name, each in finite.items()},
    }


COLOURS = {OK: "ok", REFUSED: "quiet"}  # of answers; the others are sick
PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def page(said: dict[str, Any], report: str, picture: str = "") -> str:
    """The page, legible in light and dark: the text, the X-ray as an SVG where there is one, and every answer."""
    rows = [(COLOURS.get(it["state"], "sick"), it["state"], it["question"], it["found"]) for it in said["answers"]]
    cells = [(kind, "</td><td>".join(map(escape, words))) for kind, *words in rows]
    return PAGE.substitute(
        name=escape(said["name"]),
        state="ok" if said["healthy"] else "sick",
        verdict=escape(said["verdict"]),
        report=escape(report.partition("\n")[2]),
        picture=f"<figure>{picture[picture.index('<svg') :]}</figure>" if picture else "",
        answers="\n".join(f"<tr><td class={kind!r}>{words}</td></tr>" for kind, words in cells),
        torch=said["torch"],
    )
