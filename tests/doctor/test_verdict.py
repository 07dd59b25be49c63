"""The verdict follows from the answers, by rule: one table. Without processes."""

import pytest
import torch

from ring_doctor import examination
from ring_doctor.answers import FAILED, IMPRECISE, OK, REFUSED, RIGHT, RIGHT_AS_CLAIMED, WRONG, WRONG_RING, Answer
from ring_doctor.case import Case
from ring_doctor.examination import HEALTHY, LIMITED, SICK, Examination, ask_again, examine
from ring_doctor.job import CannotExamine
from ring_doctor.patient import from_function
from ring_doctor.questions import UNEQUAL, Question
from ring_doctor.report import Report
from ringlab.training.flash_ring import ring_flash_attention

PLAIN, LARGE = Question(Case(3, 18)), Question(Case(3, 900))
UNEQUAL_CHUNKS = Question(Case(3, 19), feature=UNEQUAL)
GROUPED = Question(Case(3, 18, heads=4), feature="grouped queries")
IN_16_BITS = Question(Case(3, 18, dtype=torch.bfloat16), feature="bfloat16")
PATIENT = from_function(ring_flash_attention)


def answer(question, state, error=0.1):
    """An answer; a wrong one has an output that is off by this share."""
    if state in (REFUSED, FAILED):
        return Answer(question, state, "a reason", raised=state == REFUSED)
    wrong = {"out": 9.0} if state == WRONG else {}
    results = {"out": torch.ones(2) if state == OK else torch.zeros(2)}
    return Answer(question, state, wrong=wrong, relative={"out": error}, results=results)


@pytest.mark.parametrize(
    ("second", "verdict", "level"),
    [
        (answer(PLAIN, OK), HEALTHY, RIGHT),
        (answer(PLAIN, WRONG), SICK, WRONG_RING),
        (answer(PLAIN, FAILED), SICK, WRONG_RING),
        (answer(GROUPED, REFUSED), HEALTHY, RIGHT),
        (answer(GROUPED, FAILED), LIMITED, RIGHT_AS_CLAIMED),
        (answer(GROUPED, WRONG), SICK, WRONG_RING),
        (answer(UNEQUAL_CHUNKS, REFUSED), HEALTHY, RIGHT),
        (answer(UNEQUAL_CHUNKS, FAILED), LIMITED, RIGHT_AS_CLAIMED),
        (answer(UNEQUAL_CHUNKS, WRONG), LIMITED, RIGHT_AS_CLAIMED),
        (answer(IN_16_BITS, FAILED), LIMITED, RIGHT_AS_CLAIMED),
        (answer(IN_16_BITS, WRONG, 0.05), SICK, IMPRECISE),
        (answer(IN_16_BITS, WRONG, 0.5), SICK, WRONG_RING),
        (answer(IN_16_BITS, WRONG, float("inf")), SICK, WRONG_RING),
    ],
)
def test_the_verdict_of_a_second_answer(second, verdict, level):
    found = Examination(PATIENT, [answer(PLAIN, OK), second])
    assert (found.verdict, found.healthy) == (verdict, verdict != SICK)
    report = Report(found, None, "")
    assert report.level == level
    of_sick = "IMPRECISE IN 16 BITS" if level == IMPRECISE else "SICK"
    assert report.verdict.startswith(f"{of_sick if verdict == SICK else verdict.upper()}: ")
    if second.question.feature:
        assert (second.question.feature in report.verdict) == (verdict == LIMITED)


def test_a_limit_of_the_signature_is_told():
    report = Report(Examination(PATIENT, [answer(PLAIN, OK)], limits=["bfloat16 only"]), None, "")
    assert report.verdict.startswith("HEALTHY FOR WHAT IT TAKES: ")
    assert report.verdict.endswith("; bfloat16 only")


class Replies:
    """A job that gives these answers in turn, the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0
        self.size, self.ready, self.lost, self.first_call = 3, True, 0, 0.0

    def ask(self, question):
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def close(self):
        pass


@pytest.mark.parametrize(
    ("replies", "state", "changes", "asked"),
    [
        ([answer(PLAIN, OK)], OK, False, 1),
        ([answer(LARGE, OK)], OK, False, 3),
        ([answer(PLAIN, WRONG)], WRONG, False, 3),
        ([answer(PLAIN, WRONG), answer(PLAIN, OK)], WRONG, True, 2),
        ([answer(PLAIN, WRONG), answer(PLAIN, WRONG), answer(PLAIN, OK)], WRONG, True, 3),
        ([answer(LARGE, OK), answer(LARGE, OK), answer(LARGE, WRONG)], WRONG, True, 3),
        ([answer(PLAIN, WRONG), answer(PLAIN, FAILED)], WRONG, True, 2),
        ([answer(PLAIN, FAILED)], FAILED, False, 1),
    ],
)
def test_a_wrong_answer_and_a_large_one_are_asked_three_times(replies, state, changes, asked):
    job = Replies(*replies)
    found = ask_again(job, replies[0].question)
    assert (found.state, found.changes, job.asked) == (state, changes, asked)


def test_other_numbers_that_are_wrong_too_are_a_change():
    other = answer(PLAIN, WRONG)
    other.results["out"] = torch.full((2,), 5.0)
    assert ask_again(Replies(answer(PLAIN, WRONG), other), PLAIN).changes


@pytest.mark.parametrize(
    ("state", "sentence"), [(REFUSED, "answers no question"), (FAILED, None), (WRONG, None)], ids=lambda x: str(x)
)
def test_cannot_tell_is_for_what_answers_nothing(monkeypatch, state, sentence):
    monkeypatch.setattr(examination, "Job", lambda *args: Replies(answer(PLAIN, state)))
    patient = from_function(ring_flash_attention, worlds=(3,), dtypes=("float64",))
    if sentence is None:
        assert examine(patient).verdict == SICK
        return
    with pytest.raises(CannotExamine, match=sentence):
        examine(patient)


def test_after_two_hangs_nothing_more_is_asked(monkeypatch):
    class Hangs(Replies):
        def ask(self, question):
            self.ready, self.lost = False, 1
            return answer(question, FAILED)

    monkeypatch.setattr(examination, "Job", lambda *args: Hangs(answer(PLAIN, FAILED)))
    found = examine(from_function(ring_flash_attention, worlds=(3, 4)))
    assert [each.state for each in found.answers] == [FAILED] * 2
    assert "after 2 hangs or crashes nothing more was asked" in found.remarks


@pytest.mark.parametrize(
    ("says", "gradients", "limited"),
    [("NotImplementedError: no", False, True), ("ValueError: no", False, True), ("RuntimeError: no", True, False)],
)
def test_what_refuses_gradients_in_a_sentence_is_for_the_forward_pass(monkeypatch, says, gradients, limited):
    class ForwardOnly(Replies):
        def ask(self, question):
            ok = question.how == "without gradients" or not self.patient.gradients
            return answer(question, OK) if ok else Answer(question, FAILED, says, raised=True)

    def job(patient, *args):
        made = ForwardOnly(answer(PLAIN, OK))
        made.patient = patient
        return made

    monkeypatch.setattr(examination, "Job", job)
    found = examine(from_function(ring_flash_attention, worlds=(3,), dtypes=("float64",)))
    assert found.patient.gradients == gradients
    assert any("the forward pass only" in limit for limit in found.limits) == limited
    assert found.verdict == (LIMITED if limited else SICK)
    assert any("--forward-only" in remark for remark in found.remarks) != limited


def test_what_answers_without_gradients_only_is_sick_even_if_it_crashes(monkeypatch):
    """A function that raises whenever gradients are needed: two crashes end the questions, and one answer is right."""

    class Raises(Replies):
        def ask(self, question):
            if question.how == "without gradients":
                return answer(question, OK)
            self.ready = False
            return Answer(question, FAILED, "RuntimeError: no (ring.py, line 3)", raised=True)

    monkeypatch.setattr(examination, "Job", lambda *args: Raises(answer(PLAIN, OK)))
    found = examine(from_function(ring_flash_attention, worlds=(3, 4), dtypes=("float64",)))
    assert [each.state for each in found.answers] == [OK, FAILED, FAILED]
    assert Report(found, None, "").verdict.endswith("fails: RuntimeError: no (ring.py, line 3)")


@pytest.mark.parametrize(("seconds", "worlds"), [(0.1, {1, 2, 3, 4, 5}), (25.0, {3, 4})])
def test_a_slow_first_call_is_made_on_3_and_4_ranks_only(monkeypatch, seconds, worlds):
    def job(patient, size, *args):
        made = Replies(answer(PLAIN, OK))
        made.first_call = seconds
        made.ask = lambda question: answer(question, OK)
        return made

    monkeypatch.setattr(examination, "Job", job)
    found = examine(from_function(ring_flash_attention))
    assert {each.case.world_size for each in found.answers} == worlds
    assert any("its first call took 25 s" in remark for remark in found.remarks) == (seconds > 1)


def test_questions_are_asked_of_the_job_of_their_size_and_every_job_is_closed(monkeypatch):
    made = {}

    class Sized(Replies):
        def __init__(self, patient, size, *args):
            super().__init__()
            self.patient, self.size, self.closed = patient, size, 0
            made[len(made)] = self

        def ask(self, question):
            assert self.size == question.case.world_size + (question.members is not None)
            self.asked += bool(question.members)
            assert not self.closed
            return answer(question, OK)

        def close(self):
            self.closed += 1

    monkeypatch.setattr(examination, "Job", Sized)
    examine(from_function(ring_flash_attention))
    assert all(job.closed for job in made.values())
    assert {job.size for job in made.values() if job.asked} == {4, 5}


@pytest.mark.parametrize("random", [True, False])
def test_one_rank_alone_tells_random_numbers_from_a_race(monkeypatch, random):
    calls = []

    class Changes(Replies):
        def ask(self, question):
            calls.append(question.case.world_size)
            changes = question.case.world_size > 2 or (random and question.case.world_size == 1)
            if not changes:
                return answer(question, OK)
            found = answer(question, WRONG)
            found.results["out"] = torch.full((2,), float(len(calls)))
            return found

    monkeypatch.setattr(examination, "Job", lambda *args: Changes(answer(PLAIN, OK)))
    found = examine(from_function(ring_flash_attention, worlds=(1, 3), dtypes=("float64",)))
    said = " ".join(Report(found, None, "").remarks)
    assert ("One rank alone does it too, so it is no race" in said) == random
    assert ("read before its message is there" in said) != random


def test_a_failure_with_what_was_never_claimed_is_not_the_verdict():
    found = Examination(PATIENT, [answer(UNEQUAL_CHUNKS, FAILED), Answer(PLAIN, FAILED, "rank 1 raised X")])
    assert Report(found, None, "").verdict.endswith("fails: rank 1 raised X")
