"""The doctor asks on, whatever a ring does, and each of its faults is told in a sentence."""

import re
from dataclasses import replace

import pytest
import torch

from ring_doctor.answers import FAILED, OK, REFUSED, WRONG, Answer
from ring_doctor.case import Case, positions
from ring_doctor.conditions import when_it_shows
from ring_doctor.diagnosis import diagnose
from ring_doctor.examination import examine
from ring_doctor.job import CannotExamine, Job
from ring_doctor.patient import from_function
from ring_doctor.questions import Question
from tests import odd_patients
from tests.odd_patients import reversed_positions

P3 = Case(3, 18)
RAISED = r"\(tests/odd_patients.py, line \d+ in raises_on_one_rank\)"


@pytest.fixture(scope="module")
def ask():
    """The answer of one question to a patient, on three ranks."""

    def asked(function, question=None, seconds=5.0, **claims):
        job = Job(from_function(function, **claims), 3, seconds, "cpu")
        try:
            return job.ask(question or Question(P3))
        finally:
            job.close()

    return asked


@pytest.mark.parametrize(
    ("function", "question", "says"),
    [
        (odd_patients.hangs, None, r"did not answer in time; .*; rank 1 in tests/odd_patients.py, line \d+ in hangs"),
        (odd_patients.dies, None, r"^rank 1 died \(exit status 3\)$"),
        (odd_patients.crashes, None, r"^rank 1 died \(SIGSEGV\); rank 1 in tests/odd_patients.py, line \d+ in crashes"),
        (odd_patients.raises_on_one_rank, None, "^rank 1 raised OverflowError: too much " + RAISED),
        (odd_patients.raises_on_the_last_rank, None, "^rank 2 raised OverflowError: too much"),
        (odd_patients.changes_its_input, None, "changed its input k"),
        (odd_patients.other_numbers_each_time, Question(P3, "twice"), "it gave another out"),
        (odd_patients.another_dtype, Question(replace(P3, dtype=torch.float32)), "its out is torch.float64"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_a_ring_must_not_do_is_told(ask, function, question, says):
    seconds = 2.0 if function is odd_patients.hangs else 20.0
    answer = ask(function, question, seconds, gradients=function is not odd_patients.changes_its_input)
    assert answer.state == FAILED
    assert re.search(says, answer.says), answer.says


def test_a_second_backward_pass_is_compared(ask):
    assert ask(odd_patients.backward_once).state == OK
    answer = ask(odd_patients.backward_once, Question(P3, "two backward passes"))
    assert answer.state == WRONG
    assert set(answer.wrong) == {"dq", "dk", "dv"}


def test_nan_is_wrong(ask):
    answer = ask(odd_patients.nan_in_long_rows, Question(replace(P3, seq_len=21)))
    assert answer.state == WRONG
    assert answer.ranks["out"] == (0, 1, 2)


def test_a_shape_that_was_not_asked_for_is_refused(ask):
    answer = ask(odd_patients.another_shape)
    assert "expected the output of this rank's queries, shape (1, 2, 6, 4)" in answer.says


def test_grouped_queries_may_be_refused():
    found = examine(from_function(odd_patients.refuses_grouped_queries, worlds=(3,)))
    assert found.healthy
    refused = [answer.case for answer in found.answers if answer.state == REFUSED]
    assert [(case.heads, case.kv_heads) for case in refused] == [(4, 2), (4, 1)]


def test_a_patient_that_answers_nothing_cannot_be_examined():
    with pytest.raises(CannotExamine, match="answers no question: NotImplementedError: not today"):
        examine(from_function(odd_patients.refuses, worlds=(3,)))


def test_a_patient_for_two_ranks_cannot_be_examined():
    with pytest.raises(CannotExamine, match=r"no plain question on three or more ranks.*two ranks, please"):
        examine(from_function(odd_patients.two_ranks_only, worlds=(2, 3), grouped=False))


def test_an_error_of_all_ranks_is_no_refusal():
    found = examine(from_function(odd_patients.fails_with_three, worlds=(2, 3), grouped=False))
    assert not found.healthy
    assert found.answers[1].state == FAILED
    assert re.fullmatch(
        r"IndexError: list index out of range \(tests/odd_patients.py, line \d+ in fails_with_three\)",
        found.answers[1].says,
    )


def test_float32_inside_is_a_remark_and_no_mistake():
    found = examine(from_function(odd_patients.in_float32, worlds=(3,)))
    assert found.healthy
    assert "it takes float64 and computes in float32; it is examined in float32" in found.remarks
    assert {answer.case.dtype for answer in found.answers} == {torch.float64, torch.float32, torch.bfloat16}
    assert diagnose(found) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["with_sinks", pytest.param("sinks_dropped", marks=pytest.mark.exhaustive), "sinks_per_block"]
)
def test_attention_sinks(name):
    function = getattr(odd_patients, name)
    found = examine(from_function(function, worlds=(3,), grouped=False, unequal=False, dtypes=("float64",)))
    assert found.healthy == (function is odd_patients.with_sinks)
    if not found.healthy:
        assert diagnose(found).names == {function.__name__}
        assert diagnose(found).when == "with attention sinks only"


def test_positions_of_the_user():
    layout = "tests.odd_patients:reversed_positions"
    right = from_function(odd_patients.reversed_ring, layouts=(layout,), causal=(True,), worlds=(3,), gradients=False)
    assert examine(right).healthy
    assert not examine(replace(right, layouts=("contiguous",))).healthy
    with pytest.raises(ValueError, match="expected the positions, 0 to 11, of the tokens of rank 0"):
        positions("builtins:max", 12, 0, 3)
    assert reversed_positions(12, 0, 3).tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(("function", "healthy"), [(odd_patients.right, True), (odd_patients.contiguous, False)])
def test_a_layout_of_the_user(function, healthy):
    pairs = {"layouts": ("tests.odd_patients:PAIRS",), "causal": (True,), "gradients": False}
    assert examine(from_function(function, **pairs, worlds=(3,), dtypes=("float64",))).healthy == healthy


def answers(states):
    return [Answer(Question(case), state) for case, state in states]


def test_when_a_mistake_shows():
    causal = replace(P3, causal=True)
    worlds = [(Case(P, 6 * P), OK if P < 3 else WRONG) for P in (1, 2, 3, 4)]
    assert when_it_shows(answers(worlds)) == "from 3 ranks on (right with 1, 2)"
    assert when_it_shows(answers([(P3, OK), (causal, WRONG)])) == "under a causal mask only"
    assert (
        when_it_shows(answers([(causal, WRONG), (replace(P3, seq_len=19), OK)])) == "in every question"
    )  # two things differ
    layouts = [(causal, OK), (replace(causal, layout="zigzag"), WRONG)]
    assert when_it_shows(answers(layouts)) == "in the zigzag layout only"
