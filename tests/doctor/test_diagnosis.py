"""The diagnosis names a mistake with its condition, or explains a part. Everything here is on paper, in one process."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from ring_doctor import diagnosis
from ring_doctor.answers import OK, WRONG, Answer
from ring_doctor.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.diagnosis import Explanation, diagnose
from ring_doctor.mistakes import Mistake
from ring_doctor.paper_ring import RIGHT
from ring_doctor.questions import Question
from ring_doctor.report import Report
from ring_doctor.wrong_answer import WrongAnswer
from ringlab.training.flash_ring import ring_flash_attention
from tests.on_paper import answer_on_paper, examined_on_paper


def variant(name):
    return CATALOGUE[name].variants[0]


CONDITIONS = {
    "with 4 ranks": lambda question: question.case.world_size == 4,
    "with 2 or 4 ranks": lambda question: question.case.world_size % 2 == 0,
    "without gradients": lambda question: question.how == "without gradients",
    "under a causal mask": lambda question: question.case.causal,
    "in the zigzag layout": lambda question: question.case.layout == "zigzag",
    "with grouped queries": lambda question: question.case.heads != question.case.kv_heads,
    "with an odd number of tokens a rank": lambda question: len(question.case.positions(0)) % 2 == 1,
}


NAMES = ("last_block_skipped", "scale_missing", "shares_exchanged")


@pytest.mark.parametrize(("condition", "name"), zip(CONDITIONS, itertools.cycle(NAMES), strict=False))
def test_a_mistake_under_a_condition_is_named_with_it(name, condition):
    found = diagnose(examined_on_paper(ring_flash_attention, variant(name), CONDITIONS[condition], worlds=(2, 3, 4)))
    assert name in found.names
    assert {explanation.condition for explanation in found.explanations} == {condition}
    assert not found.part


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("on rank 0", lambda P: {0}),
        ("on the last rank", lambda P: {P - 1}),
        ("on odd ranks", lambda P: set(range(1, P, 2))),
        ("on all ranks but the first", lambda P: set(range(1, P))),
    ],
)
@pytest.mark.parametrize("name", ["last_block_skipped", "delta_missing", "no_rescale"])
def test_a_mistake_on_some_ranks_is_named_with_them(name, words, ranks):
    found = diagnose(examined_on_paper(ring_flash_attention, variant(name), ranks=ranks, worlds=(3, 4)))
    assert found.names == {name}
    assert [explanation.ranks for explanation in found.explanations] == [words]
    assert found.explanations[0].words == f"{name} ({words} only)"


def test_an_unconditional_name_comes_before_a_condition():
    found = diagnose(examined_on_paper(ring_flash_attention, variant("mask_forgotten"), worlds=(3,)))
    assert [explanation.words for explanation in found.explanations] == ["mask_forgotten"]


def test_one_rank_and_one_token_each_are_spared():
    """A ring may compute both in other code: right answers there contradict no mistake."""
    sick = lambda question: question.case.world_size > 1 and not question.case.one_token_each  # noqa: E731
    found = diagnose(examined_on_paper(ring_flash_attention, variant("last_block_skipped"), sick, worlds=(1, 3)))
    assert [explanation.words for explanation in found.explanations] == ["last_block_skipped"]


@pytest.mark.parametrize(("spared", "names"), [((2, 1), ["b"]), ((1, 2), ["a"]), ((2, 2), ["a", "b"]), ((0, 1), ["a"])])
def test_the_condition_that_keeps_a_mistake_from_the_fewest_right_answers_is_told(monkeypatch, spared, names):
    """Both mistakes give the numbers of the only wrong answer, and would make so many of the right ones wrong."""
    answers = [WrongAnswer(Answer(Question(Case(3, 18, causal=True)), WRONG, wrong={"out": 9.0}))]
    answers += [WrongAnswer(Answer(Question(Case(3, 18, seed=seed)), OK)) for seed in range(3)]
    would = {name: answers[1 : 1 + n] for name, n in zip("ab", spared, strict=True)}
    monkeypatch.setattr(diagnosis, "_fits", lambda entry, answer, _: answer not in would[entry.name])
    entries = [Explanation((Mistake(name, "", "", 1),), lambda steps: steps) for name in "ab"]
    found = diagnosis.under_a_condition(entries, answers, ("out",))
    assert [each.name for each in found] == names
    assert {each.condition for each in found} == ({"under a causal mask"} if min(spared) else {""})


@pytest.mark.exhaustive
def test_no_condition_fits_what_comes_and_goes():
    coin = random.Random(0)
    when = {}
    examination = examined_on_paper(
        ring_flash_attention,
        variant("last_block_skipped"),
        lambda question: when.setdefault(question, coin.random() < 0.5),
        worlds=(3, 4),
    )
    assert not diagnose(examination).names


def with_changed(name, change):
    """A ring whose forward mistake has a name, and whose result `name` is changed in a way that has none."""

    def planted(case, results):
        return results | {name: change(results[name])}

    examination = examined_on_paper(ring_flash_attention, variant("scale_missing"), worlds=(3,))
    steps = variant("scale_missing")(RIGHT)
    examination.answers = [
        answer_on_paper(answer.question, steps, change=planted if name in answer.results else lambda case, x: x)
        for answer in examination.answers
    ]
    return diagnose(examination)


@pytest.mark.parametrize("change", [lambda x: x.flip(2), lambda x: 1.7 * x + 0.1])
def test_what_explains_the_output_alone_is_told_as_a_part(change):
    found = with_changed("dk", change)
    assert (found.names, found.part) == ({"scale_missing"}, "out and lse")
    found = with_changed("lse", change)
    assert found.names == {"scale_missing"}
    assert found.part in ("out", "")


def test_numbers_that_cannot_be_computed_confirm_nothing():
    """An entry that has nothing to say about the only wrong answer is no explanation."""
    examination = examined_on_paper(ring_flash_attention, worlds=(3,))
    odd = next(a for a in examination.answers if len(a.case.positions(0)) == 7 and a.case.layout == "contiguous")
    nan = answer_on_paper(odd.question, change=lambda case, results: results | {"out": results["out"] * torch.nan})
    examination.answers = [nan if answer is odd else answer for answer in examination.answers]
    assert not diagnose(examination).names


def test_a_right_ring_has_no_diagnosis():
    examination = examined_on_paper(ring_flash_attention, worlds=(1, 2, 3))
    assert {answer.state for answer in examination.answers} == {OK}
    assert diagnose(examination) is None
    assert Report(examination, None, "").verdict.startswith("HEALTHY: ")


def test_answers_that_change_get_no_name():
    examination = examined_on_paper(ring_flash_attention, variant("last_block_skipped"), worlds=(3,))
    examination.answers = [replace(answer, changes=True) for answer in examination.answers]
    found = diagnose(examination)
    assert not found.names
    report = Report(examination, found, "")
    assert report.verdict.endswith("changes its answers from call to call")
    count = len(examination.answers)
    assert report.remarks[0].startswith(f"Asked three times, it gave different numbers to {count} of")


@pytest.mark.parametrize(
    "shows", [lambda question: question.case.world_size > 1, lambda question: not question.case.one_token_each]
)
def test_a_ring_that_is_right_on_one_rank_or_with_one_token_is_named_without_a_condition(shows):
    """Many rings have other code there."""
    found = diagnose(examined_on_paper(ring_flash_attention, variant("scale_twice"), shows, worlds=(1, 3)))
    assert [explanation.words for explanation in found.explanations] == ["scale_twice"]
