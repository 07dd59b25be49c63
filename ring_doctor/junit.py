"""The report as JUnit XML, which GitLab, Jenkins and others show beside a change.

    <testsuite>   the verdict is a test case; so is each mask and layout on each number of ranks

A test case fails with the wrong answers in it. It is skipped where the ring refused all its questions, or where the
user accepts what is wrong.

Shapes: none here.

Before: exit_status.py. After: __main__.py.
Source: the XML that pytest writes with --junit-xml, which those programs read.
"""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from ring_doctor.answers import FAILED, OK, REFUSED, WRONG, Answer
from ring_doctor.exit_status import CANNOT_TELL, STATUS
from ring_doctor.report import errors_of

STATES = (OK, WRONG, FAILED, REFUSED)
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 has no other characters


def junit(name: str, level: str, said: str, answers: Sequence[Answer], *, passed: bool) -> str:
    """The XML of a ring `name` with this level, report `said` and answers. `passed`: the level is right or accepted."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(_group(answer), []).append(answer)
    suite = ElementTree.Element("testsuite", name="ring-doctor")
    verdict = said.splitlines()[0]
    counts = {f"answers {state}": str([answer.state for answer in answers].count(state)) for state in STATES}
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in {"level": level, "verdict": verdict, **counts}.items():
        ElementTree.SubElement(properties, "property", name=key, value=_clean(value))
    outcome = "" if STATUS[level] == 0 else "skipped" if passed else "error" if level == CANNOT_TELL else "failure"
    _case(suite, name, "verdict", outcome, verdict, said)
    for group, some in groups.items():
        bad = [answer for answer in some if answer.state in (WRONG, FAILED)]
        listed = "\n".join(_words(answer) for answer in some if answer.state != OK)
        if bad:
            counted = f"{len(bad)} of {len(some)} answers are wrong; {verdict}"
            _case(suite, name, group, outcome, counted, listed)
        elif all(answer.state == REFUSED for answer in some):
            _case(suite, name, group, "skipped", f"refused: {some[0].says}", listed)
        else:
            _case(suite, name, group, "", "", listed)
    for attribute, tag in {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}.items():
        suite.set(attribute, str(len(list(suite.iter(tag)))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _group(answer: Answer) -> str:
    case = answer.case
    mask = [*["causal"] * case.causal, *["documents"] * bool(case.documents), *["window"] * bool(case.window)]
    ranks = f"{case.world_size} rank{'s' * (case.world_size > 1)}"
    return f"{ranks}, {' '.join(mask) or 'no mask'}, {case.layout}"


def _words(answer: Answer) -> str:
    wrong = ", ".join(f"{name} off by {error}" for name, error in errors_of(answer).items() if error != "ok")
    return f"{answer.state}: {answer.question.words()}: {wrong or answer.says}"


def _case(suite: ElementTree.Element, name: str, group: str, outcome: str, message: str, text: str) -> None:
    """Add a test case. `outcome` is "failure", "error", "skipped", or "" for a test case that passed."""
    case = ElementTree.SubElement(suite, "testcase", classname=_clean(name), name=_clean(group))
    if outcome:
        ElementTree.SubElement(case, outcome, message=_clean(message)).text = _clean(text)
    elif text:
        ElementTree.SubElement(case, "system-out").text = _clean(text)


def _clean(text: str) -> str:
    return NOT_IN_XML.sub("?", text)
