"""The diagnosis names a mistake with its condition, or explains a part. Everything here is on paper, in one process."""

import itertools
from dataclasses import replace

import pytest
import torch

from ring_doctor.asking.answers import FAILED, OK, WRONG, Answer, Examination
from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import Question
from ring_doctor.asking.state_case import StateCase
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining import diagnosis
from ring_doctor.explaining.conditions import when_it_shows
from ring_doctor.explaining.diagnosis import Diagnosis, Explanation, diagnose
from ring_doctor.explaining.wrong_answer import WrongAnswer
from ring_doctor.mistakes import Mistake
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from ring_doctor.report import Report
from ringlab.ring.flash_ring import ring_flash_attention
from tests.doctor.examined import answer_on_paper, names_of

NAMES = ("last_block_skipped", "scale_missing", "shares_exchanged")
PATIENT = patient_of(ring_flash_attention)


def variant(name):
    return CATALOGUE[name].variants[0]


@pytest.fixture(autouse=True)
def _few_entries(monkeypatch):
    """What is tested here does not need all entries, which take seconds."""
    names = (
        "mask_forgotten",
        "gradients_in_16_bits",
        "own_block_skipped",
        "scale_twice",
        "no_rescale",
        "delta_missing",
        *NAMES,
    )
    monkeypatch.setattr(diagnosis, "CATALOGUE", {name: CATALOGUE[name] for name in names})


def examined(mistake=lambda steps: steps, when=lambda question: True, worlds=(3,)):
    """The examination of a ring on paper that makes the mistake when `when(question)`: few questions, of each kind."""
    answers = []
    for P in worlds:
        full, causal = Case(P, 6 * P), Case(P, 6 * P, True)
        asked = [full, causal, replace(causal, layout="zigzag"), replace(causal, heads=4), Case(P, 7 * P), Case(P, P)]
        for question in [*map(Question, asked), Question(causal, "without gradients")]:
            answers.append(answer_on_paper(question, mistake(RIGHT) if when(question) else RIGHT))
    return Examination(PATIENT, answers)


CONDITIONS = {
    "with 4 ranks": lambda question: question.case.world_size == 4,
    "without gradients": lambda question: question.how == "without gradients",
    "under a causal mask": lambda question: question.case.causal,
    "with 4 ranks and under a causal mask": lambda question: question.case.causal and question.case.world_size == 4,
    "with grouped queries": lambda question: question.case.heads != question.case.kv_heads,
    "with an odd number of tokens a rank": lambda question: len(question.case.positions(0)) % 2 == 1,
}


@pytest.mark.parametrize(("condition", "name"), list(zip(CONDITIONS, itertools.cycle(NAMES), strict=False)))
def test_a_mistake_under_a_condition_is_named_with_it(name, condition):
    found = diagnose(examined(variant(name), CONDITIONS[condition], worlds=(2, 3, 4)))
    assert name in names_of(found)
    assert {explanation.condition for explanation in found.explanations} == {condition}
    assert not found.part


@pytest.mark.parametrize("condition", ["with grouped queries", "with an odd number of tokens a rank"])
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_name_that_fits_all_answers_but_those_with_a_feature_is_told_with_it(name, condition):
    """There the ring is wrong in another way."""
    examination = examined(variant(name), worlds=(3, 4))
    other = CONDITIONS[condition]
    change = lambda case, x: x | {"out": 1.7 * x["out"] + 0.1}  # noqa: E731
    examination.answers = [
        answer_on_paper(it.question, change=change) if other(it.question) else it for it in examination.answers
    ]
    found = diagnose(examination)
    assert names_of(found) == {name}
    assert found.part.startswith("what is wrong with")
    assert not any(said == condition for said in (each.condition for each in found.explanations))
    examination.answers = [answer_on_paper(it.question, change=change) for it in examination.answers]
    assert not names_of(diagnose(examination))


@pytest.mark.parametrize(
    ("name", "words", "ranks"),
    [
        ("last_block_skipped", "on rank 0", lambda P: {0}),
        ("scale_missing", "on the last rank", lambda P: {P - 1}),
        ("no_rescale", "on odd ranks", lambda P: set(range(1, P, 2))),
    ],
)
def test_a_mistake_on_some_ranks_is_named_with_them(name, words, ranks):
    def planted(case, right):
        P, sick = case.world_size, compute(case, variant(name)(RIGHT))
        return right | {
            n: case.join([case.cut((sick if r in ranks(P) else right)[n], r) for r in range(P)]) for n in sick
        }

    examination = examined(worlds=(3, 4))
    examination.answers = [answer_on_paper(it.question, change=planted) for it in examination.answers]
    assert [explanation.words for explanation in diagnose(examination).explanations] == [f"{name} ({words} only)"]


def test_an_unconditional_name_comes_before_a_condition():
    found = diagnose(examined(variant("mask_forgotten"), worlds=(3,)))
    assert [explanation.words for explanation in found.explanations] == ["mask_forgotten"]


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


@pytest.mark.parametrize(("case", "condition"), [(Case(3, 3), False), (Case(1, 6), False), (Case(3, 18), True)])
def test_a_right_answer_of_one_rank_or_one_token_each_asks_for_no_condition(case, condition):
    entry = Explanation((CATALOGUE["scale_twice"],), variant("scale_twice"))
    wrong = answer_on_paper(Question(Case(3, 18, True)), variant("scale_twice")(RIGHT))
    answers = [WrongAnswer(wrong), WrongAnswer(answer_on_paper(Question(case)))]
    [found] = diagnosis.under_a_condition([entry], answers, ("out",))
    assert bool(found.condition) == condition


@pytest.mark.parametrize(("share", "near"), [(7.5, True), (8.5, False)])
@pytest.mark.parametrize("times", [0.01, 1.0, 100.0])
def test_a_wrong_ring_may_round_eight_times_as_much_as_a_right_one_and_large_numbers_by_more(share, near, times):
    question = Question(Case(3, 18, dtype=torch.float32))
    right = question.case.right()["out"]
    off = share * max(1.0, times) * right.allowed.max()
    found = answer_on_paper(question, change=lambda case, x: x | {"out": times * right.exact + off})
    assert WrongAnswer(found).near("out", times * right.exact) == near


@pytest.mark.parametrize(("name", "part"), [("dk", ""), ("lse", "out")])
def test_wrong_gradients_follow_from_a_wrong_output_and_out_alone_is_told_as_a_part(name, part):
    """The forward mistake has a name; one result is changed in a way that has none."""
    examination = examined(worlds=(3,))
    change = lambda case, results: results | {name: 1.7 * results[name] + 0.1}  # noqa: E731
    sick = variant("scale_missing")(RIGHT)
    examination.answers = [answer_on_paper(it.question, sick, change) for it in examination.answers]
    found = diagnose(examination)
    assert (names_of(found), found.part) == ({"scale_missing"}, part)


@pytest.mark.parametrize(
    ("second", "known", "said"),
    [
        ("own_queries_only", ("other_way", "own_queries_only"), "own_queries_only"),
        ("own_queries_only", ("other_way",), "no known mistake"),
        (None, ("other_way", "own_queries_only"), None),
    ],
)
def test_gradients_that_are_wrong_where_out_is_right_are_another_mistake(monkeypatch, second, known, said):
    """Without a mask the order of the blocks does not show in out, but dk and dv are those of another mistake."""
    monkeypatch.setattr(diagnosis, "CATALOGUE", {name: CATALOGUE[name] for name in known})
    both = variant(second)(variant("other_way")(RIGHT)) if second else variant("other_way")(RIGHT)
    examination = examined(lambda steps: both, worlds=(2, 3))
    found = diagnose(examination)
    assert names_of(found) == {"other_way"}
    words = "Gradients that are wrong where out and lse are right have another cause: "
    remarks = [remark for remark in Report(examination, found, "").remarks if remark.startswith(words)]
    assert remarks == ([f"{words}{said}."] if said else [])
    named = [mistake.name for mistake in Report(examination, found, "").mistakes]
    assert named == ["other_way"] + [second] * (said == second and second is not None)
    assert found.when == "from 3 ranks on (right with 2)"
    three = tuple(Explanation((CATALOGUE[name],), variant(name)) for name in NAMES)
    many = Report(examination, replace(found, besides=three), "")
    assert f"{words}one of 3 known mistakes." in many.remarks
    assert [mistake.name for mistake in many.mistakes] == ["other_way"]


def test_a_name_comes_before_a_failure_with_what_a_ring_may_lack():
    examination = examined(variant("scale_missing"))
    found, case = diagnose(examination), Case(3, 19)
    optional = Answer(Question(case, feature="chunks of unequal length"), FAILED, "rank 1 died", lost=True)
    examination.answers.append(optional)
    verdict = Report(examination, found, "").verdict
    name = examination.patient.name
    assert verdict == f"SICK: scale_missing, in {name}"  # a ring may die there
    examination.answers[-1] = replace(optional, hangs=True)
    verdict = Report(examination, found, "").verdict
    assert verdict == f"SICK: scale_missing, in {name}; it fails with chunks of unequal length: rank 1 died"
    examination.answers.append(replace(optional, question=Question(case), says="rank 2 died"))
    assert Report(examination, found, "").verdict == f"SICK: {name} fails: rank 2 died; its numbers: scale_missing"


def test_numbers_that_cannot_be_computed_confirm_nothing():
    """An entry that has nothing to say about the only wrong answer is no explanation."""
    examination = examined(worlds=(3,))
    odd = next(a for a in examination.answers if len(a.case.positions(0)) == 7 and a.case.layout == "contiguous")
    nan = answer_on_paper(odd.question, change=lambda case, results: results | {"out": results["out"] * torch.nan})
    examination.answers = [nan if answer is odd else answer for answer in examination.answers]
    assert not names_of(diagnose(examination))


def test_a_right_ring_has_no_diagnosis():
    examination = examined(worlds=(1, 2, 3))
    assert {answer.state for answer in examination.answers} == {OK}
    assert diagnose(examination) is None
    assert Report(examination, None, "").verdict.startswith("HEALTHY: ")


def test_answers_that_change_get_no_name():
    examination = examined(variant("last_block_skipped"), worlds=(3,))
    examination.answers = [replace(answer, changes=True) for answer in examination.answers]
    found = diagnose(examination)
    assert not names_of(found)
    report = Report(examination, found, "")
    assert report.verdict.endswith("changes its answers from call to call")
    count = len(examination.answers)
    assert report.remarks[0].startswith(f"Asked three times, it gave different numbers to {count} of")


@pytest.mark.parametrize(
    "shows", [lambda question: question.case.world_size > 1, lambda question: not question.case.one_token_each]
)
def test_a_ring_that_is_right_on_one_rank_or_with_one_token_is_named_without_a_condition(shows):
    """Many rings have other code there."""
    found = diagnose(examined(variant("scale_twice"), shows, worlds=(1, 3)))
    assert [explanation.words for explanation in found.explanations] == ["scale_twice"]


def test_when_a_mistake_shows():
    def when(*pairs, wrong="out"):
        out = {wrong: 9.0}
        answers = [
            Answer(Question(case), state, results={"out": 0.0, "dq": 0.0}, wrong=out if state == WRONG else {})
            for case, state in pairs
        ]
        return when_it_shows(answers)

    plain, causal = Case(3, 18), Case(3, 18, True)
    assert (
        when(*[(Case(P, 6 * P), WRONG if P > 2 else OK) for P in (1, 2, 3, 4)]) == "from 3 ranks on (right with 1, 2)"
    )
    assert when(*[(Case(P, 6 * P), (OK, WRONG)[P == 3]) for P in (1, 3, 4)]) == "with 3 ranks (right with 1, 4)"
    assert when((plain, OK), (causal, WRONG)) == "under a causal mask only"
    assert when((causal, WRONG), (replace(plain, seq_len=19), OK)) == ""  # two things differ
    assert when((causal, WRONG)) == "in every question"
    assert when((plain, OK), (replace(plain, seq_len=774), WRONG)) == "with large sizes (C > 128) only"
    assert when((plain, OK), (replace(plain, sinks=True), WRONG), wrong="dsinks") == "with attention sinks only"
    of_states = StateCase(3, 18, True)
    with_state = replace(of_states, from_state=True)
    assert when((of_states, OK), (with_state, WRONG), wrong="dstate") == "with a state before the first token only"
    assert when((causal, OK), (replace(causal, layout="zigzag"), WRONG)) == "in the zigzag layout only"


def test_many_explanations_are_counted():
    entries = tuple(Explanation((Mistake(name, "", "", 1),), lambda steps: steps) for name in "abcdefgh")
    wrong = Answer(Question(Case(3, 18)), WRONG, wrong={"out": 9.0}, relative={"out": 0.5})
    [said] = Report(Examination(PATIENT, [wrong]), Diagnosis(entries, (wrong,), ""), "").remarks
    assert said == "No question tells 8 known mistakes apart."


@pytest.mark.parametrize(("inputs", "names"), [("normal", set()), (UNROUNDED[0], {"another_way_without_gradients"})])
def test_a_way_to_ask_is_blamed_if_the_same_inputs_are_right_when_asked_plainly(inputs, names):
    """Sums in 16 bits are asked without gradients only."""
    case = Case(4, 32, dtype=torch.bfloat16, inputs=UNROUNDED[0])
    wrong = answer_on_paper(Question(case, "without gradients"), change=lambda _, x: x | {"out": x["out"].flip(1) + 1})
    right = answer_on_paper(Question(replace(case, inputs=inputs, dtype=torch.float64)))
    found = Examination(PATIENT, [right, wrong])
    assert (wrong.state, right.state) == (WRONG, OK)
    assert names_of(diagnose(found)) == names


@pytest.mark.parametrize(
    ("under_autocast", "words"),
    [(False, "gradients_in_16_bits"), (True, "gradients_in_16_bits (under autocast only)")],
)
def test_sums_in_16_bits_are_named_alike_under_autocast(under_autocast, words):
    """Autocast gives the ring float32 tensors: that they are summed rightly is no condition."""
    case, wrong = Case(4, 32, dtype=torch.bfloat16, inputs=UNROUNDED[1]), variant("gradients_in_16_bits")(RIGHT)
    steps = {"autocast": wrong if under_autocast else RIGHT, "plain": RIGHT if under_autocast else wrong}
    answers = [answer_on_paper(Question(case, how), of) for how, of in steps.items()]
    assert [found.words for found in diagnose(Examination(PATIENT, answers)).explanations] == [words]
