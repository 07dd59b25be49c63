"""The quick examination asks every kind of question, and finds what an examination is for."""

import pytest
import torch

from ring_doctor.examination import examine
from ring_doctor.patient import from_function
from ring_doctor.questions import UNEQUAL, every_question, few_worlds, kind, questions, quick_questions
from ringlab.training.flash_ring import ring_flash_attention
from tests import ci_patients, odd_patients
from tests.examined import on_these
from tests.sick_rings import ALL, sick

F64, BF16 = torch.float64, torch.bfloat16
PATIENTS = {
    "a mask and layouts": from_function(odd_patients.right),
    "every argument": from_function(ring_flash_attention),
    "no argument": from_function(odd_patients.own_chunk),
    "forward only": from_function(odd_patients.right, gradients=False),
    "three ranks": from_function(odd_patients.right, worlds=(1, 2, 3)),
    "one dtype": from_function(odd_patients.right, dtypes=("float64",)),
}


def quick(patient):
    return quick_questions(few_worlds(patient), F64, 0)


@pytest.mark.parametrize("name", PATIENTS)
def test_every_kind_of_question_is_asked_and_each_mask_and_layout_on_each_number_of_ranks(name):
    patient = PATIENTS[name]
    asked, every = quick(patient), every_question(patient, F64, 0)
    assert {kind(question) for question in asked} == {kind(question) for question in every}
    for P in few_worlds(patient).worlds:
        plain = kind(next(questions(patient, P, F64, 0)))
        masks = {(it.case.causal, it.case.layout) for it in questions(patient, P, F64, 0) if kind(it) == plain}
        of_world = [question for question in asked if question.case.world_size == P and kind(question) == plain]
        assert {(question.case.causal, question.case.layout) for question in of_world} == masks
    assert set(asked) <= set(every)
    assert len(set(asked)) == len(asked) < 0.6 * len(every)


@pytest.mark.parametrize(
    ("worlds", "few"), [((1, 2, 3, 4), (3, 4)), ((1, 2, 3), (3,)), ((3, 4, 5, 8), (3, 4)), ((1, 2, 6, 8), (8,))]
)
def test_it_is_asked_on_three_and_four_ranks(worlds, few):
    assert few_worlds(from_function(odd_patients.right, worlds=worlds)).worlds == few


ASKED = {  # what a quick examination must ask of a ring with every argument
    "causal, on three ranks, in zigzag": lambda question, case: case.causal and case.layout == "zigzag",
    "causal, on four ranks, in zigzag": lambda question, case: case.world_size == 4 and case.layout == "zigzag",
    "gradients, twice": lambda question, case: question.how == "twice",
    "views": lambda question, case: question.how == "views",
    "without gradients": lambda question, case: question.how == "without gradients",
    "a part of the job": lambda question, case: question.members is not None,
    "a batch": lambda question, case: case.batch > 1,
    "grouped queries": lambda question, case: 1 < case.kv_heads < case.heads,
    "unequal chunks": lambda question, case: question.feature == UNEQUAL and not case.equal_chunks,
    "one token a rank": lambda question, case: case.one_token_each,
    "a scale": lambda question, case: case.scale is not None,
    "windows": lambda question, case: case.window and case.causal,
    "documents": lambda question, case: case.documents and case.causal,
    "sinks": lambda question, case: case.sinks,
    "large scores": lambda question, case: case.inputs == "large" and case.dtype == F64,
    "float32": lambda question, case: case.dtype == torch.float32 and case.inputs == "normal",
    "bfloat16": lambda question, case: case.dtype == BF16 and case.inputs == "normal",
    "large scores in bfloat16": lambda question, case: case.dtype == BF16 and case.inputs == "large",
    "sums in 16 bits, of four parts": lambda question, case: case.world_size == 4 and case.inputs == "16-bit sums",
    "gradients in 16 bits": lambda question, case: case.world_size == 4 and case.inputs == "16-bit gradients",
}


@pytest.mark.parametrize("what", ASKED)
def test_it_asks(what):
    assert any(ASKED[what](question, question.case) for question in quick(PATIENTS["every argument"]))


MISTAKES = {  # rings that are right but for one kind of question
    "other_way": "three ranks: with two, both ways are the same",
    "halves_swapped": "the zigzag layout",
    "mask_inverted": "a causal mask",
    "dk_dv_exchanged": "gradients",
    "no_gradient/detached": "gradients",
    "lse_in_16_bits": "16 bits",
    "sums_in_16_bits": "16 bits, of four parts",
    "unstabilised": "large scores",
    "heads_interleaved": "grouped queries",
    "window_one_more": "windows",
    "documents_per_chunk": "documents",
    "scale_of_padded_head": "a scale",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_it_finds_a_mistake_that_shows_in_one_kind_of_question(ranks, name):
    ring = ALL[name]
    layouts = ring.layouts if "layout" in ring.takes else ("contiguous",)
    claims = {"layouts": layouts, "grouped": ring.grouped, "gradients": ring.gradients, "heads": ring.heads}
    with on_these(ranks):
        found = examine(from_function(sick(name), **claims), quick=True)
    assert found.verdict == "sick"
    assert {answer.case.world_size for answer in found.answers} == {3, 4}


@pytest.mark.slow
def test_it_finds_that_a_ring_is_for_equal_chunks(ranks):
    with on_these(ranks):
        assert UNEQUAL in examine(from_function(sick("tail_lost")), quick=True).beyond


@pytest.mark.slow
def test_it_finds_a_rank_of_the_job_taken_for_a_rank_of_the_group(ranks):
    with on_these(ranks):
        found = examine(from_function(ci_patients.rank_of_the_job, gradients=False), quick=True)
        whole_job = examine(from_function(ci_patients.rank_of_the_job, gradients=False, worlds=(4,)), quick=True)
    wrong = [answer for answer in found.answers if answer.state == "wrong"]
    assert wrong
    assert all(answer.question.members and answer.case.causal for answer in wrong)
    assert all(answer.state != "wrong" for answer in whole_job.answers)


@pytest.mark.slow
@pytest.mark.parametrize("function", [odd_patients.right, odd_patients.in_float32])
def test_it_says_how_many_questions_it_leaves_out(ranks, function):
    with on_these(ranks):
        found, whole = (examine(from_function(function), quick=quick) for quick in (True, False))
    [remark] = [remark for remark in found.remarks if remark.startswith("quick")]
    in_float64 = function is odd_patients.in_float32  # its first question; then it is asked in float32
    assert remark.startswith(f"quick: {len(found.answers) - in_float64} of {len(whole.answers) - in_float64} questions")
    assert len(found.answers) < 0.6 * len(whole.answers)
    assert not any(remark.startswith("quick") for remark in whole.remarks)
    assert found.verdict == whole.verdict == "healthy"
