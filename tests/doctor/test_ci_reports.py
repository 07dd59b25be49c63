"""What other programs read: levels, exit statuses, JUnit XML, notes on GitHub; and that no option is lost on its way.

No process is started: the ranks are replaced by answers. tests/doctor/test_in_ci.py runs the commands.
"""

import functools
import json
import math
import re
from dataclasses import replace
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from ring_doctor.annotation import annotation, place_of, summary
from ring_doctor.junit import junit

import ring_doctor.__main__ as command
from ring_doctor import assertion, examination, html
from ring_doctor.answers import (
    CANNOT_TELL,
    FAILED,
    IMPRECISE,
    OK,
    REFUSED,
    RIGHT,
    RIGHT_AS_CLAIMED,
    STATUS,
    WRONG,
    WRONG_RING,
    Answer,
    passes,
)
from ring_doctor.assertion import assert_ring
from ring_doctor.case import Case
from ring_doctor.examination import Examination
from ring_doctor.job import START, CannotExamine, Job
from ring_doctor.on_rank import RankResults
from ring_doctor.patient import from_function
from ring_doctor.questions import UNEQUAL, Question
from ring_doctor.report import Report, as_json
from tests import odd_patients
from tests.commands import ROOT

RIGHT_RING = "tests.odd_patients:right"


def answer(state, dtype=torch.float64, error=0.0, says="", feature="", **case):
    """An answer whose out is off by `error` in norm."""
    wrong = {"wrong": {"out": 9.0}, "ranks": {"out": (0,)}} if state == WRONG else {}
    numbers = {"errors": {"out": (error, 1e-9)}, "relative": {"out": error}} if state in (OK, WRONG) else {}
    return Answer(Question(Case(3, dtype=dtype, **case), feature=feature), state, says, **wrong, **numbers)


def report(*answers, **claims):
    patient = from_function(odd_patients.right, RIGHT_RING, **claims)
    return Report(Examination(patient, list(answers)), None, "none was taken")


BF16, FP16 = torch.bfloat16, torch.float16
LEVELS = {
    "all right": (RIGHT, [answer(OK)]),
    "unequal chunks are wrong": (RIGHT_AS_CLAIMED, [answer(OK), answer(WRONG, error=1.0, feature=UNEQUAL)]),
    "a little off in bfloat16": (IMPRECISE, [answer(OK), answer(WRONG, BF16, 0.1)]),
    "large scores in bfloat16": (IMPRECISE, [answer(OK), answer(WRONG, BF16, 2.0, inputs="large")]),
    "a little off in float16": (IMPRECISE, [answer(OK), answer(WRONG, FP16, 0.01)]),
    "as much as bfloat16 in float16": (WRONG_RING, [answer(OK), answer(WRONG, FP16, 0.1)]),
    "another function in bfloat16": (WRONG_RING, [answer(OK), answer(WRONG, BF16, 2.0)]),
    "NaN in bfloat16": (WRONG_RING, [answer(OK), answer(WRONG, BF16, math.inf)]),
    "NaN for large scores in bfloat16": (WRONG_RING, [answer(OK), answer(WRONG, BF16, math.inf, inputs="large")]),
    "fails in bfloat16": (WRONG_RING, [answer(OK), answer(FAILED, BF16, says="its out is torch.float32")]),
    "a little off in float32": (WRONG_RING, [answer(OK), answer(WRONG, torch.float32, 1e-4)]),
    "off in bfloat16 and in float64": (WRONG_RING, [answer(WRONG, BF16, 0.1), answer(WRONG, error=0.1)]),
}


@pytest.mark.parametrize("name", LEVELS)
def test_the_level_follows_from_the_answers(name):
    level, answers = LEVELS[name]
    assert report(*answers).level == level
    assert as_json(report(*answers))["level"] == level
    assert f"Level: {level}." in html.page(report(*answers))


@pytest.mark.parametrize("name", LEVELS)
def test_assert_ring_raises_unless_the_level_is_right_or_accepted(name):
    """A ring that hangs or raises too, where there is no diagnosis."""
    level, answers = LEVELS[name]
    with mock.patch.object(assertion, "visit", return_value=report(*answers)):
        for accept, passing in ((), {RIGHT, RIGHT_AS_CLAIMED}), (("imprecise",), {RIGHT, RIGHT_AS_CLAIMED, IMPRECISE}):
            if level in passing:
                assert_ring(odd_patients.right, accept=accept)
            else:
                with pytest.raises(
                    AssertionError, match=r"^IMPRECISE IN 16 BITS: " if level == IMPRECISE else r"^SICK: "
                ):
                    assert_ring(odd_patients.right, accept=accept)


STATUSES = {  # by level, the exit status without --accept, and what --accept makes it 0
    RIGHT: (0, ""),
    RIGHT_AS_CLAIMED: (0, ""),
    IMPRECISE: (1, "imprecise"),
    WRONG_RING: (1, ""),
    CANNOT_TELL: (3, "cannot-tell"),
}


@pytest.mark.parametrize("accepted", ["", "imprecise", "cannot-tell", "imprecise,cannot-tell"])
@pytest.mark.parametrize("level", STATUSES)
def test_the_exit_status_follows_from_the_level_and_from_what_is_accepted(capsys, level, accepted):
    status, pardon = STATUSES[level]
    pardoned = bool(pardon) and pardon in accepted.split(",")
    told = command.Told(level, f"{level.upper()}: f\nmore", "head")
    outcome = CannotExamine("it answers nothing") if level == CANNOT_TELL else told
    with mock.patch.object(command, "run_attention", side_effect=[outcome]):
        ended, reason = command.run(command.parse([RIGHT_RING, *([f"--accept={accepted}"] if accepted else [])]))
    assert ended == (0 if pardoned else status)
    printed = capsys.readouterr().out.splitlines()
    assert (
        printed[0] == reason == ("CANNOT TELL: it answers nothing" if level == CANNOT_TELL else f"{level.upper()}: f")
    )
    assert (f"accepted: {level}" in printed) == pardoned


@pytest.mark.parametrize("accept", ["imprecise", ("wrong",), ("imprecise", "sick")])
def test_what_cannot_be_accepted_is_refused_before_anything_is_asked(accept):
    with mock.patch.object(assertion, "visit", side_effect=AssertionError("asked")):
        for ask in (lambda: passes(RIGHT, accept), lambda: assert_ring(odd_patients.right, accept=accept)):
            with pytest.raises(ValueError, match=r"^accept is .*; expected some of imprecise, cannot-tell"):
                ask()


@pytest.mark.parametrize("options", [["--accept=wrong"], ["--accept="], ["--accept=imprecise,wrong"]])
def test_the_command_refuses_it_in_one_sentence(capsys, options):
    with pytest.raises(SystemExit) as end:
        command.parse([RIGHT_RING, *options])
    assert end.value.code == 2
    assert "expected some of imprecise,cannot-tell" in capsys.readouterr().err


MANY = [
    answer(OK),
    answer(OK, causal=True),
    answer(WRONG, error=0.5, causal=True),
    answer(FAILED, says="rank 1 died \x1b[31m<here> & \udcff", layout="zigzag", causal=True),
    answer(REFUSED, says="ValueError: no", layout="striped", causal=True),
    answer(REFUSED, says="ValueError: no", feature="grouped queries"),
    answer(OK, documents=(5, 19)),
    answer(OK, window=3, causal=True),
]
GROUPS = {  # by test case: its outcome, and what its text holds
    "verdict": ("failure", "rank 1 died"),
    "3 ranks, no mask, contiguous": ("system-out", "refused: P = 3"),
    "3 ranks, causal, contiguous": ("failure", "wrong: P = 3, causal, contiguous, C = 8, float64: out off by 0.5"),
    "3 ranks, causal, zigzag": ("failure", "rank 1 died ?[31m<here> & ?"),
    "3 ranks, causal, striped": ("skipped", "ValueError: no"),
    "3 ranks, documents, contiguous": ("", ""),
    "3 ranks, causal window, contiguous": ("", ""),
}


def xml(level, answers, *, passed):
    said = f"{level.upper()}: f\n" + "\n".join(each.says for each in answers)
    return ElementTree.fromstring(junit("m:f", level, said, answers, passed=passed))


def outcomes(suite):
    return {case.get("name"): (case[0].tag, case[0].text) if len(case) else ("", "") for case in suite}


def test_junit_has_a_test_case_for_each_mask_and_layout():
    suite = xml(WRONG_RING, MANY, passed=False)
    assert suite.tag == "testsuite"
    properties = {each.get("name"): each.get("value") for each in suite.find("properties")}
    suite.remove(suite.find("properties"))
    found = outcomes(suite)
    assert {name: outcome for name, (outcome, _) in found.items()} == {name: GROUPS[name][0] for name in GROUPS}
    assert all(GROUPS[name][1] in found[name][1] for name in GROUPS)
    assert {case.get("classname") for case in suite} == {"m:f"}
    assert [suite.get(each) for each in ("tests", "failures", "errors", "skipped")] == ["7", "3", "0", "1"]
    counts = {state: properties.pop(f"answers {state}") for state in (OK, WRONG, FAILED, REFUSED)}
    assert counts == {OK: "4", WRONG: "1", FAILED: "1", REFUSED: "2"}
    assert properties == {"level": "wrong", "verdict": "WRONG: f"}


def test_junit_skips_what_the_user_accepts_and_cannot_tell_is_an_error():
    imprecise = [answer(OK), answer(WRONG, BF16, 0.1)]
    for passed, tag in ((False, "failure"), (True, "skipped")):
        suite = xml(IMPRECISE, imprecise, passed=passed)
        assert len(list(suite.iter(tag))) == suite.get("tests").count("2") * 2 == 2
    for passed, tag in ((False, "error"), (True, "skipped")):
        suite = xml(CANNOT_TELL, [], passed=passed)
        assert (suite.get("tests"), suite.get(f"{tag}s".replace("skippeds", "skipped"))) == ("1", "1")


def test_junit_of_a_right_ring_has_no_failure():
    suite = xml(RIGHT_AS_CLAIMED, [answer(OK), answer(REFUSED, says="no", causal=True)], passed=True)
    assert [suite.get(each) for each in ("tests", "failures", "errors", "skipped")] == ["3", "0", "0", "1"]


def test_a_wrong_answer_that_the_function_never_claimed_fails_no_test_case():
    beyond = answer(WRONG, error=1.0, feature=UNEQUAL)
    suite = xml(RIGHT_AS_CLAIMED, [answer(OK), beyond], passed=True)
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "0")
    assert "out off by 1" in outcomes(suite)["3 ranks, no mask, contiguous"][1]


def parsed(line):
    """(kind, properties, message) of a line, as GitHub's runner reads it."""
    kind, listed, message = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line).groups()

    def plain(text, codes):
        for code, character in codes.items():
            text = text.replace(code, character)
        return text.replace("%25", "%")

    codes = {"%0D": "\r", "%0A": "\n"}
    pairs = [pair.split("=", 1) for pair in listed.split(",")]
    return kind, {k: plain(v, codes | {"%3A": ":", "%2C": ","}) for k, v in pairs}, plain(message, codes)


def test_a_note_says_file_line_and_verdict_whatever_they_hold():
    said = "SICK: a, b and 50% of c::d, in m:f\n  It shows\r\n  100%0A: everywhere, always"
    line = annotation(WRONG_RING, said, ("a,b/c:d%.py", 12), passed=False)
    assert "\n" not in line
    assert parsed(line) == (
        "error",
        {"file": "a,b/c:d%.py", "line": "12", "title": "SICK: a, b and 50% of c::d, in m:f"},
        "It shows\r\n  100%0A: everywhere, always",
    )
    assert parsed(annotation(IMPRECISE, said, None, passed=True))[0] == "warning"
    assert parsed(annotation(WRONG_RING, "SICK: f", None, passed=False)) == ("error", {"title": "SICK: f"}, "SICK: f")
    assert annotation(RIGHT, said, ("f.py", 1), passed=True) == ""
    assert annotation(RIGHT_AS_CLAIMED, said, ("f.py", 1), passed=True) == ""


class Callable:
    def __call__(self, q, k, v):
        return q


@functools.wraps(odd_patients.hangs)
def decorated(*args):
    return odd_patients.hangs(*args)


def test_the_place_of_a_function():
    lines = (ROOT / "tests/odd_patients.py").read_text().splitlines()
    for function in (odd_patients.hangs, decorated, functools.partial(functools.partial(odd_patients.hangs))):
        file, line = place_of(function, ROOT)
        assert (file, lines[line - 1]) == ("tests/odd_patients.py", "def hangs(q, k, v):")
    assert place_of(odd_patients.hangs, ROOT / "ringlab") is None  # GitHub knows the files of its checkout only
    assert place_of(len, ROOT) is None
    assert place_of(Callable(), ROOT) is None


@pytest.mark.parametrize("there", [False, True])
def test_github_is_told_where_it_runs_the_command(monkeypatch, capsys, tmp_path, there):
    monkeypatch.setenv("GITHUB_ACTIONS", "true" if there else "false")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "summary.md").write_text("of another step\n")
    told = command.Told(WRONG_RING, "SICK: f\nhead\nX-ray", "SICK: f\nhead")
    with mock.patch.object(command, "run_attention", return_value=told):
        assert command.run(command.parse(["tests.odd_patients:hangs"]))[0] == 1
    *printed, last = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["SICK: f", "head"]
    if not there:
        assert (last, (tmp_path / "summary.md").read_text()) == ("X-ray", "of another step\n")
        return
    kind, properties, message = parsed(last)
    assert (kind, properties["file"], properties["title"], message) == (
        "error",
        "tests/odd_patients.py",
        "SICK: f",
        "head",
    )
    assert (tmp_path / "summary.md").read_text() == "of another step\n" + summary(WRONG_RING, told.report)
    assert summary(WRONG_RING, told.report) == "### ring-doctor: wrong\n\n```text\nSICK: f\nhead\nX-ray\n```\n"


class Answers(Job):
    """Ranks that answer everything rightly, at once; each job and each question is noted."""

    jobs: tuple = ()
    asked: tuple = ()

    def __init__(self, patient, size, seconds, device):
        super().__init__(patient, size, seconds, device)
        self.ready, self.device = True, device
        Answers.jobs += (self,)

    def ask(self, question):
        Answers.asked += (question,)
        return Answer(question, OK)


@pytest.fixture
def asked(monkeypatch):
    """What is asked of `right`: a function of how it is asked. It returns the patients, questions, seconds, devices."""
    monkeypatch.setattr(examination, "Job", Answers)
    monkeypatch.setattr(Answers, "jobs", ())
    monkeypatch.setattr(Answers, "asked", ())

    def ask(how):
        Answers.jobs = Answers.asked = ()
        how()
        seconds, devices = ({getattr(job, name) for job in Answers.jobs} for name in ("seconds", "device"))
        return {job.patient for job in Answers.jobs}, Answers.asked, seconds, devices

    return ask


def by_command(*options):
    return lambda: command.run(command.parse([RIGHT_RING, *options]))


def cases(questions, name):
    return {getattr(question.case, name) for question in questions}


OPTIONS = {  # by option: the same as an argument of assert_ring, and what it changes in patients, questions, limits
    "--seed=3": ({"seed": 3}, lambda patients, questions, seconds, devices: cases(questions, "seed") == {3}),
    "--time-limit=7": ({"seconds": 7.0}, lambda patients, questions, seconds, devices: seconds == {7.0}),
    "--device=cuda": ({"device": "cuda"}, lambda patients, questions, seconds, devices: devices == {"cuda"}),
    "--forward-only": (
        {"gradients": False},
        lambda patients, questions, seconds, devices: not any(patient.gradients for patient in patients),
    ),
    "--dtype=bfloat16": (
        {"dtypes": ("bfloat16",)},
        lambda patients, questions, seconds, devices: cases(questions, "dtype") == {torch.bfloat16},
    ),
    "--worlds=2,3": (
        {"worlds": (2, 3)},
        lambda patients, questions, seconds, devices: cases(questions, "world_size") == {2, 3},
    ),
    "--causal": ({"causal": (True,)}, lambda patients, questions, *_: cases(questions, "causal") == {True}),
    "--no-causal": ({"causal": (False,)}, lambda patients, questions, *_: cases(questions, "causal") == {False}),
    "--layout=zigzag": (
        {"layouts": ("zigzag",)},
        lambda patients, questions, *_: cases(questions, "layout") == {"zigzag"},
    ),
    "--equal-chunks": ({"unequal": False}, lambda patients, *_: not any(patient.unequal for patient in patients)),
    "--heads=6": ({"heads": 6}, lambda patients, questions, *_: min(cases(questions, "heads")) == 6),
    "--head-dim=8": ({"head_dim": 8}, lambda patients, questions, *_: min(cases(questions, "head_dim")) == 8),
    "--batch=3": ({"batch": 3}, lambda patients, questions, *_: 3 in cases(questions, "batch")),
    "--quick": ({"quick": True}, lambda patients, questions, *_: cases(questions, "world_size") == {3, 4}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_reaches_the_questions(asked, option):
    """And without it things are otherwise, so that an option that is ignored is seen."""
    claims, seen = OPTIONS[option]
    with mock.patch.object(command, "choose_device"):  # "cuda" needs GPUs
        assert seen(*asked(by_command(option)))
        assert not seen(*asked(by_command()))
    assert seen(*asked(lambda: assert_ring(odd_patients.right, **claims)))
    assert not seen(*asked(lambda: assert_ring(odd_patients.right)))


def test_the_device_is_looked_for_before_any_rank_starts():
    with mock.patch.object(command, "choose_device", side_effect=ValueError("no GPU")) as choose:
        assert command.run(command.parse([RIGHT_RING, "--device=cuda"]))[0] == 2
    choose.assert_called_once_with("cuda", 5)


def test_a_job_gives_its_ranks_the_time_limit():
    """The first call may take longer: it imports the library."""
    limits = []

    class Ranks:
        seconds = 0.0

        def outcomes(self, size, work, patient, question, folder, seconds):
            limits.append((self.seconds, seconds))
            raise RuntimeError("enough")

    job = Job(from_function(odd_patients.right), 3, 7.0, "cpu")
    job.ranks, job.ready, job.called = Ranks(), True, {0, 1, 2}
    with pytest.raises(CannotExamine):
        job.ask(Question(Case(3)))
    assert limits == [(7.0, 7.0)]


def test_another_seed_gives_other_numbers():
    case = Case(3)
    for x, y in zip(case.whole(), replace(case, seed=1).whole(), strict=True):
        assert not torch.isclose(x, y).any()


def test_the_files_that_are_asked_for_are_written(asked, tmp_path):
    files = {name: tmp_path / f"report.{name}" for name in ("json", "html", "junit.xml")}
    with mock.patch("ring_doctor.report.take_xray", return_value="none"):
        asked(by_command(*[f"--{name.removesuffix('.xml')}={path}" for name, path in files.items()]))
    said = json.loads(files["json"].read_text())
    assert said["level"] == RIGHT
    properties = ElementTree.parse(files["junit.xml"]).find("properties")
    counts = {each.get("name"): each.get("value") for each in properties}
    assert counts["answers ok"] == str(len(said["answers"]))
    assert f"<title>ring doctor: {RIGHT_RING}</title>" in files["html"].read_text()
    assert STATUS[RIGHT] == 0


def test_the_first_call_of_each_rank_has_the_time_of_a_set_up():
    """Ranks 1 to 3 are asked first, as a part of the job; then rank 0 has its first call."""
    limits = []

    class Ranks:
        seconds = 0.0

        def outcomes(self, size, *others):
            limits.append(self.seconds)
            return [RankResults({"out": torch.zeros(1, 2, 6, 4)})] * size

    job = Job(from_function(odd_patients.right), 4, 7.0, "cpu")
    job.ranks, job.ready = Ranks(), True
    for members in ((1, 2, 3), (1, 2, 3), None, None):
        job.ask(Question(Case(len(members or range(4)), 6 * len(members or range(4))), members=members))
    assert limits == [START, 7.0, START, 7.0]
