"""The diagnosis names a mistake with its condition, or explains a part. Everything here is on paper, in one process."""

import itertools
from dataclasses import replace
from functools import reduce
from pathlib import Path
from unittest import mock

import pytest
import torch

from ring_doctor.asking.answers import FAILED, OK, WRONG, Answer, Examination
from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import UNEQUAL, Question
from ring_doctor.asking.state_case import StateCase
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining import diagnosis, explanation
from ring_doctor.explaining.conditions import separated, when_it_shows
from ring_doctor.explaining.diagnosis import diagnose
from ring_doctor.explaining.explanation import Explanation, under_a_condition
from ring_doctor.explaining.facts import WrongAnswer
from ring_doctor.mistakes import Mistake
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from ring_doctor.report import Report
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import LAYOUTS
from tests.doctor.examined import answer_on_paper

NAMES = ("last_block_skipped", "scale_missing", "shares_exchanged")
PATIENT = patient_of(ring_flash_attention)


def variant(name):
    return CATALOGUE[name].variants[0]


def examined(mistake=lambda steps: steps, when=lambda question: True, worlds=(3,)):
    """The examination of a ring on paper that makes the mistake when `when(question)`: few questions, of each kind."""
    answers = []
    for P in worlds:
        full, causal = Case(P, 6 * P), Case(P, 6 * P, True)
        asked = [full, causal, replace(causal, layout="zigzag"), replace(causal, heads=4), Case(P, 7 * P), Case(P, P)]
        for question in [*map(Question, asked), Question(causal, "without gradients")]:
            answers.append(answer_on_paper(question, mistake(RIGHT) if when(question) else RIGHT))
    return Examination(PATIENT, answers)


def but(examination, change, of=lambda question: True):
    """Of these questions other answers."""
    changed = [answer_on_paper(it.question, change=change) if of(it.question) else it for it in examination.answers]
    return replace(examination, answers=changed)


def unknown(name, of):
    """A mistake, and where `of` says another one that has no name."""
    return lambda: but(examined(variant(name), worlds=(3, 4)), lambda case, x: x | {"out": 1.7 * x["out"] + 0.1}, of)


def with_result(name, mistake="scale_missing", other=lambda case, x: 1.7 * x + 0.1, worlds=(3,)):
    """A mistake, and one result changed in a way that has no name."""

    def change(case, _):
        results = compute(case, variant(mistake)(RIGHT))
        return results | {name: other(case, results[name])}

    return lambda: but(examined(worlds=worlds), change)


def unclaimed():
    """From 2 ranks on wrong with a batch of 2. With 5 only chunks of unequal length were asked with one."""
    cases = [Case(P, 6 * P, batch=B) for P in (1, 3, 4, 5) for B in (1, 2) if P * B < 10]
    asked = [*map(Question, cases), Question(Case(5, 31, batch=2), feature=UNEQUAL)]

    def change(case, x):
        return x | {"out": 1.7 * x["out"] + 0.1} if case.batch > 1 < case.world_size else x

    return Examination(PATIENT, [answer_on_paper(question, change=change) for question in asked])


def by_another_way(other=1.0):
    """With 3 ranks out is that of a mistake, and the gradients are not those by formula. With 4, out is another."""

    def change(case, x):
        found = compute(case, variant(NAMES[0])(RIGHT), gradients=True)
        return found | {"dq": 2 * found["dq"]} if case.world_size == 3 else x | {"out": other * x["out"]}

    return lambda: but(examined(worlds=(2, 3, 3, 4)), change, lambda question: question.case.world_size > 2)


def on_ranks(name, ranks):
    def planted(case, right):
        P, sick = case.world_size, compute(case, variant(name)(RIGHT))
        return right | {
            n: case.join([case.cut((sick if r in ranks(P) else right)[n], r) for r in range(P)]) for n in sick
        }

    return lambda: but(examined(worlds=(3, 4)), planted)


def and_fails(feature, **how):
    """A mistake with a name, and a failure: with what a ring may lack, or not."""
    failed = Answer(Question(Case(3, 19), feature=feature), FAILED, "rank 1 died", lost=True, **how)
    return lambda: Examination(PATIENT, [*examined(variant("scale_missing")).answers, failed])


def one_nan():
    """An entry that has nothing to say about the only wrong answer is no explanation."""
    wrong = answer_on_paper(Question(Case(3, 21)), change=lambda _, x: x | {"out": x["out"] * torch.nan})
    return Examination(PATIENT, [answer_on_paper(Question(Case(3, 18))), wrong])


def nan_where_scores_are_far_below_0():
    """Inputs made for 16-bit gradients have such scores too; nothing else is wrong."""
    case = Case(4, 32, inputs="large")
    cases = case, replace(case, dtype=torch.bfloat16, inputs=UNROUNDED[1])
    nan = [answer_on_paper(Question(of), change=lambda _, x: x | {"out": x["out"] * torch.nan}) for of in cases]
    return Examination(PATIENT, [*nan, answer_on_paper(Question(replace(case, inputs="normal")))])


def unclear():
    """dk of rank 1 is wrong, and in 16 bits as near to the right numbers as what rounds: no entry is confirmed."""
    case = Case(4, 24, True, "zigzag", dtype=torch.bfloat16)
    times = torch.ones(24, 1).index_fill(0, case.positions(1), 1.5)
    wrong = answer_on_paper(Question(case), change=lambda _, x: x | {"dk": times * x["dk"]})
    return Examination(PATIENT, [wrong, answer_on_paper(Question(replace(case, dtype=torch.float64)))])


def tile_lost():
    """Two tiles and a part of one: the smallest question that shows it."""
    return Examination(PATIENT, [answer_on_paper(Question(Case(3, 774)), variant("last_tile_lost")(RIGHT))])


def changing():
    found = examined(variant("last_block_skipped"))
    return replace(found, answers=[replace(answer, changes=True) for answer in found.answers])


def two_mistakes(*names):
    """Without a mask the order of the blocks does not show in out, but dk and dv are those of another mistake."""
    steps = reduce(lambda steps, name: variant(name)(steps), names, RIGHT)
    return lambda: examined(lambda _: steps, worlds=(2, 3))


def asked_in_another_way(inputs):
    """A way to ask is blamed if the same inputs are right when asked plainly."""
    case = Case(4, 32, dtype=torch.bfloat16, inputs=UNROUNDED[0])
    wrong = answer_on_paper(Question(case, "without gradients"), change=lambda _, x: x | {"out": x["out"].flip(1) + 1})
    right = answer_on_paper(Question(replace(case, inputs=inputs, dtype=torch.float64)))
    return lambda: Examination(PATIENT, [right, wrong])


def under_autocast(*, only):
    """Autocast gives the ring float32 tensors: that they are summed rightly is no condition."""
    case, wrong = Case(4, 32, dtype=torch.bfloat16, inputs=UNROUNDED[1]), variant("gradients_in_16_bits")(RIGHT)
    steps = {"autocast": wrong if only else RIGHT, "plain": RIGHT if only else wrong}
    return lambda: Examination(PATIENT, [answer_on_paper(Question(case, how), of) for how, of in steps.items()])


def beside_right(case):
    """A right answer of one rank or of one token each asks for no condition."""
    wrong = answer_on_paper(Question(Case(3, 18, True)), variant("scale_twice")(RIGHT))
    return lambda: Examination(PATIENT, [wrong, answer_on_paper(Question(case))])


CONDITIONS = {
    "with 4 ranks": lambda question: question.case.world_size == 4,
    "without gradients": lambda question: question.how == "without gradients",
    "under a causal mask": lambda question: question.case.causal,
    "with 4 ranks and under a causal mask": lambda question: question.case.causal and question.case.world_size == 4,
    "with grouped queries": lambda question: question.case.heads != question.case.kv_heads,
    "with an odd number of tokens a rank": lambda question: len(question.case.positions(0)) % 2 == 1,
}


ODD, GROUPED = (CONDITIONS[f"with {of}"] for of in ("an odd number of tokens a rank", "grouped queries"))
BOTH = ("other_way", "own_queries_only")
OTHERS = {"two mistakes": BOTH, "two mistakes, one unknown": BOTH[:1], "other_way": BOTH}  # in place of KNOWN
OF_LSE = ("lse_returned_in_base_2", "gradients_travel_other_way")
OTHERS |= {"dv times 3 under a mask": ("gradient_scale_missing", "dk_dv_times_p")}  # with 3 ranks that is times P
OTHERS |= {"of lse": OF_LSE[:1], "of lse and gradients": OF_LSE, "one NaN": ("positions_of_zigzag",)}
KNOWN = (
    "mask_forgotten",
    "gradients_in_16_bits",
    "own_block_skipped",
    "scale_twice",
    "no_rescale",
    "delta_missing",
    "last_tile_lost",
    *NAMES,
)
EXAMINED = {  # what needs no other entries than KNOWN, or what is known
    **{
        f"{name} {of}": lambda name=name, asked=asked: examined(variant(name), asked, worlds=(2, 3, 4))
        for (of, asked), name in zip(CONDITIONS.items(), itertools.cycle(NAMES), strict=False)
    },
    **{
        f"{name}, and with {of} another": unknown(name, it)
        for name in NAMES[:2]
        for of, it in (("odd chunks", ODD), ("grouped queries", GROUPED))
    },
    "gradients by another way": by_another_way(),
    "gradients by another way, and another out": by_another_way(2.0),
    "with 5 ranks where nobody claims it": unclaimed,
    "delta_missing, and another out": unknown("delta_missing", GROUPED),
    "another everywhere": unknown(NAMES[0], lambda question: True),
    "another but without gradients": unknown(NAMES[0], lambda question: question.how == "plain"),
    "last_tile_lost": tile_lost,
    "a little wrong in 16 bits": unclear,
    "last_block_skipped on rank 0": on_ranks("last_block_skipped", lambda P: {0}),
    "scale_missing on the last rank": on_ranks("scale_missing", lambda P: {P - 1}),
    "no_rescale on odd ranks": on_ranks("no_rescale", lambda P: set(range(1, P, 2))),
    "mask_forgotten": lambda: examined(variant("mask_forgotten")),
    "scale_twice, not on one rank": lambda: examined(
        variant("scale_twice"), lambda question: question.case.world_size > 1, worlds=(1, 3)
    ),
    "scale_twice, not of one token each": lambda: examined(
        variant("scale_twice"), lambda question: not question.case.one_token_each, worlds=(1, 3)
    ),
    **{f"right: {case.words()}": beside_right(case) for case in (Case(3, 3), Case(1, 6), Case(3, 18))},
    "another dk": with_result("dk"),
    "another lse": with_result("lse"),
    "another lse, out is right": with_result("lse", "delta_missing", worlds=(3, 4)),
    "dv times 3 under a mask": with_result(
        "dv", "gradient_scale_missing", lambda case, x: 3 * x if case.causal else x, (3, 3, 4)
    ),
    "it dies of unequal chunks": and_fails(UNEQUAL),
    "it hangs of unequal chunks": and_fails(UNEQUAL, hangs=True),
    "it dies": and_fails(""),
    "one NaN": one_nan,
    "NaN of large scores": nan_where_scores_are_far_below_0,
    "a right ring": lambda: examined(worlds=(1, 2, 3)),
    "answers that change": changing,
    "right plainly": asked_in_another_way(UNROUNDED[0]),
    "right plainly with other inputs": asked_in_another_way("normal"),
    "gradients_in_16_bits": under_autocast(only=False),
    "gradients_in_16_bits under autocast": under_autocast(only=True),
    **{name: two_mistakes(*BOTH[: 2 if "two" in name else 1]) for name, of in OTHERS.items() if of[0] in BOTH},
    **{name: two_mistakes(*names) for name, names in OTHERS.items() if names[0] in OF_LSE},
}
DIAGNOSED = Path(__file__).with_name("diagnosed.txt")  # python -m tests.doctor.test_diagnosis writes it


def diagnosed(name):
    """The names with their conditions, what they explain and when it shows; the report's first line and remarks."""
    known = {each: CATALOGUE[each] for each in OTHERS.get(name, KNOWN)}
    with mock.patch.object(diagnosis, "CATALOGUE", known):
        examination = EXAMINED[name]()
        found = diagnose(examination)
    report = Report(examination, found, "")
    lines = [name, report.verdict, *report.remarks, f"mistakes: {[mistake.name for mistake in report.mistakes]}"]
    lines += [f"names: {', '.join(it.words for it in found.explanations)}"] if found else []
    return "\n    ".join(lines) + "\n\n"


@pytest.mark.parametrize("name", EXAMINED)
def test_what_a_diagnosis_says(name):
    assert diagnosed(name) in DIAGNOSED.read_text()


@pytest.mark.parametrize(("spared", "names"), [((2, 1), ["b"]), ((1, 2), ["a"]), ((2, 2), ["a", "b"]), ((0, 1), ["a"])])
def test_the_condition_that_keeps_a_mistake_from_the_fewest_right_answers_is_told(monkeypatch, spared, names):
    """Both mistakes give the numbers of the only wrong answer, and would make so many of the right ones wrong."""
    answers = [WrongAnswer(Answer(Question(Case(3, 18, causal=True)), WRONG, wrong={"out": 9.0}))]
    answers += [WrongAnswer(Answer(Question(Case(3, 18, seed=seed)), OK)) for seed in range(3)]
    would = {name: answers[1 : 1 + n] for name, n in zip("ab", spared, strict=True)}
    monkeypatch.setattr(explanation, "fits", lambda entry, answer, _: answer not in would[entry.name])
    entries = [Explanation((Mistake(name, "", "", 1),), lambda steps: steps) for name in "ab"]
    found = under_a_condition(entries, answers, ("out",))
    assert [each.name for each in found] == names
    assert {each.condition for each in found} == ({"under a causal mask"} if min(spared) else {""})
    would |= {"a": answers[:1], "b": []}  # of a second wrong answer both give the numbers: for a, half of them
    answers += [WrongAnswer(Answer(Question(Case(4, 24)), WRONG, wrong={"out": 9.0}))]
    most = [under_a_condition(of, answers, ("out",), most=True) for of in (entries[:1], entries)]
    assert [[each.name for each in of] for of in most] == [[], ["b"]]


@pytest.mark.parametrize(("share", "near"), [(7.5, True), (8.5, False)])
@pytest.mark.parametrize("times", [0.01, 1.0, 100.0])
def test_a_wrong_ring_may_round_eight_times_as_much_as_a_right_one_and_large_numbers_by_more(share, near, times):
    question = Question(Case(3, 18, dtype=torch.float32))
    right = question.case.right()["out"]
    off = share * max(1.0, times) * right.allowed.max()
    found = answer_on_paper(question, change=lambda case, x: x | {"out": times * right.exact + off})
    assert WrongAnswer(found).near("out", times * right.exact) == near


def test_when_a_mistake_shows():
    def when(*pairs, wrong="out", more=()):
        off = {OK: {}, WRONG: {wrong: 9.0}}
        answers, unclaimed = (
            [
                Answer(Question(case), state, results={"out": 0.0, "dq": 0.0}, wrong=off[state], relative=off[state])
                for case, state in some
            ]
            for some in (pairs, more)
        )
        return when_it_shows(answers, unclaimed)[0]

    plain, causal = Case(3, 18), Case(3, 18, True)
    from_3 = [(Case(P, 6 * P), WRONG if P > 2 else OK) for P in (1, 2, 3, 4)]
    assert when(*from_3) == "from 3 ranks on (right with 1, 2)"
    assert when(*[(Case(P, 6 * P), (OK, WRONG)[P == 3]) for P in (2, 3, 4)]) == "with 3 ranks (right with 2, 4)"
    batches = [(Case(P, 6 * P, batch=B), (OK, WRONG)[P + B > 4]) for P, B in ((1, 1), (1, 2), (2, 1), (3, 1), (3, 2))]
    assert when(*batches) == "with 3 ranks (right with 1; no answer with 2), with a batch of 2 only"
    unequal = [(Case(2, 13, batch=B), WRONG) for B in (1, 2)]
    assert when(*batches, more=unequal[1:]) == "from 2 ranks on (right with 1), with a batch of 2 only"
    assert when(*batches, more=unequal[:1]) == when(*batches)  # that is another mistake
    kinds = [replace(plain, batch=B, scale=x, heads=H) for B in (1, 2) for x in (None, 0.3) for H in (2, 4)]
    others = [replace(it, layout=of, window=n) for it in kinds for of in LAYOUTS for n in (None, 3)]
    with_sinks = [(replace(it, sinks=True), WRONG) for it in kinds]
    mostly = [(replace(causal, sinks=True, batch=3), OK), *((it, OK) for it in others)]
    assert when(*with_sinks, *mostly) == "sometimes, with attention sinks only"
    assert when(*with_sinks[:1], *mostly) == ""  # luck
    rounded = [replace(plain, dtype=torch.bfloat16, inputs=inputs) for inputs in (*UNROUNDED, "normal")]  # luck
    rounded = [(rounded[0], WRONG), *((replace(it, causal=True), OK) for it in rounded)]
    assert when(*rounded, (replace(rounded[0][0], dtype=torch.float64), OK)) == "in bfloat16 only"
    assert when((causal, WRONG), (replace(plain, seq_len=19), OK)) == ""  # two things differ
    assert when((plain, OK), (causal, WRONG), (Case(4, 24), WRONG)) == "with 4 ranks or under a causal mask only"
    assert when((causal, WRONG)) == "in every question"
    either = [(replace(causal, window=3), WRONG), (replace(causal, documents=(7, 11)), WRONG)]
    assert when((causal, OK), *either) == "with a window or with documents only"
    two_more = (replace(causal, batch=2, heads=4), OK)  # no feature that was found is false of it
    assert when((plain, OK), (causal, WRONG), two_more) == ""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32)
    asked = [(replace(causal, dtype=dtype, batch=1 + i // 4), (WRONG, OK)[i > 2]) for i, dtype in enumerate(dtypes)]
    assert when(*asked) == "everywhere but in float16 or int32"
    windows = [(replace(causal, window=1), WRONG), (replace(causal, window=3), OK)]
    assert when(*windows) == "with a window of one key only"
    windows = [(replace(causal, window=1), OK), (replace(causal, window=3), WRONG), (causal, WRONG)]
    assert when(*windows) == "everywhere but with a window of one key"
    assert when((plain, OK), (replace(plain, sinks=True), WRONG), wrong="dsinks") == "with attention sinks only"
    with_state = StateCase(3, 18, True, from_state=True)
    said = when((replace(with_state, from_state=False), OK), (with_state, WRONG), wrong="dstate")
    assert said == "with a state before the first token only"


FEATURES = {  # what differs from a causal question of three ranks, and when it shows
    "without a mask": {"causal": False},
    "in the zigzag layout": {"layout": "zigzag"},
    "with large scores": {"inputs": "large"},
    "in bfloat16": {"dtype": torch.bfloat16},
    "with grouped queries": {"heads": 4},
    "with one K/V head, with a batch of 2": {"heads": 1, "kv_heads": 1, "batch": 2},
    "with a given scale": {"scale": 0.0},
    "with a window": {"window": 3},
    "with a V narrower than K": {"value_dim": 2},
    "with a V wider than K": {"value_dim": 8},
    "with documents": {"documents": (7, 11)},
    "with large sizes (C > 128)": {"seq_len": 3 * 130},
    "with an odd number of tokens a rank": {"seq_len": 3 * 9},
}


@pytest.mark.parametrize("words", FEATURES)
def test_the_feature_that_a_wrong_question_has_is_told(words):
    right, wrong = (Question(Case(3, 18, True)), Question(replace(Case(3, 18, True), **FEATURES[words])))
    assert separated([right], [wrong], 1) == words.partition(", ")[0]


if __name__ == "__main__":
    DIAGNOSED.write_text("".join(map(diagnosed, EXAMINED)))
