"""The mistakes of whole models: each is planted in a real ring and gets its name; right models are healthy."""

import json
import math
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import ring_doctor.__main__ as command
from ring_doctor.asking.job import CannotExamine
from ring_doctor.explaining.facts import Finding
from ring_doctor.report import page
from ring_doctor.whole_models.model_calls import ModelPatient, Returned
from ring_doctor.whole_models.model_clues import clue
from ring_doctor.whole_models.model_comparison import ModelDiagnosis, World, explain, judge, same, tolerance, unlike
from ring_doctor.whole_models.model_mistakes import sharding_mistakes
from ring_doctor.whole_models.whole_model import (
    HIDDEN,
    NO_LABELS,
    NOT_ASKED,
    ModelExamination,
    examine_model,
    json_of_model,
    text_of_model,
)
from ringlab.models.transformer import IGNORED
from ringlab.support import processes
from ringlab.support.processes import LostRank
from tests.wrong import sick_models
from tests.wrong.sick_models import blind_step, step


def names(examination):
    return [found.names for found in examination.diagnoses]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("striped", {}),
        ("contiguous", {"dtype": torch.float32}),
        ("zigzag", {"clip": 0.1, "per_token": True}),
    ],
)
def test_a_right_model_is_healthy_and_rounds_much_less_than_allowed(ranks, layout, options):
    examination = examine_model(partial(step, layout=layout, **options), layout=layout, ranks=ranks)
    assert examination.healthy
    assert not examination.diagnoses
    assert bool(examination.notes) == ("clip" in options)
    assert (examination.only, examination.clue, examination.changes) == ("", None, False)
    assert [(world.world_size, world.hidden) for world in examination.worlds] == [
        *((P, "") for P in (1, 2, 3, 4)),
        *((P, words) for words in (HIDDEN, NO_LABELS) for P in (2, 3, 4)),
    ]
    assert max(world.error for world in examination.worlds) < examination.allowed / 10


def named(mistake, layout="zigzag", found=None, *, marks=(), **options):
    """A mistake or several of sick_models.py in a layout, and the names that are found: its own, or these."""
    mistakes = (mistake,) if isinstance(mistake, str) else mistake
    return pytest.param(mistakes, layout, options, found or {mistakes}, id=" and ".join(mistakes), marks=marks)


BY_HAND = {"marks": pytest.mark.exhaustive}
NO_RING = {"layers": 0}  # where messages of K and V play no part


@pytest.mark.parametrize(
    ("mistakes", "layout", "options", "found"),
    [
        named("labels_per_shard", per_token=True, **NO_RING),
        named("labels_per_shard, the last ignored", "striped", {("labels_per_shard",)}, **NO_RING, **BY_HAND),
        named("positions_per_shard", "contiguous"),
        named("positions_missing", per_token=True, **BY_HAND),
        named("rotated_twice", "contiguous", **BY_HAND),
        named("ring_not_called", "striped"),
        named("positions_of_striped", **BY_HAND),
        named("loss_not_reduced", **NO_RING),
        named("gradients_not_reduced", **NO_RING),
        named("DDP", found={("gradients_over_p",)}, **NO_RING),
        named(("labels_per_shard", "positions_per_shard"), **BY_HAND),
        named(("mean_of_means", "loss_times_p"), **NO_RING),
        named(  # rotary distances inside a rank's tokens are the same from 0 and from where contiguous chunks begin
            ("ring_not_called", "positions_per_shard"),
            found={("ring_not_called", "positions_per_shard"), ("ring_not_called", "positions_of_contiguous")},
            **BY_HAND,
        ),
        named("rotated after the ring", "contiguous", {("positions_per_shard",)}, **BY_HAND),
        named("rotated after the ring", found={("keys_rotated_on_arrival",)}),  # by the rank that receives the keys
        named("gradients_over_root_p", clip=0.1, **NO_RING),
        named("clipped_per_rank, its rows", found={("clipped_per_rank",)}, clip=0.1, **NO_RING),
    ],
)
def test_a_mistake_is_named(ranks, mistakes, layout, options, found):
    sick = partial(step, mistakes=mistakes, layout=layout, **options)
    examination = examine_model(sick, layout=layout, ranks=ranks)
    assert set(names(examination)) == found
    assert bool(examination.notes) == ("clip" in options)


def test_what_a_step_is_called_with_to_predict_a_mistake():
    """A text of four tokens, 10 to 13, whose last label is 14; zigzag gives rank 0 the tokens 0 and 3."""
    text, right = torch.arange(10, 15)[None], [0, 1, 2, 3]
    asked = ModelPatient(step, text, "zigzag", 0, None, frozenset({"targets", "positions"}), 7.0)
    asked.alone = lambda targets, at: (targets[0].tolist(), at.tolist())
    found = [(names, predict()) for names, predict in sharding_mistakes(asked, 2, [])]
    at = {names: at for names, (targets, at) in found if targets == [11, 12, 13, 14]}
    assert at == {
        (): right,
        ("positions_per_shard",): [0, 0, 1, 1],
        ("positions_of_contiguous",): [0, 2, 3, 1],
        ("positions_of_striped",): [0, 1, 3, 2],
        ("positions_missing",): [0, 0, 0, 0],
        ("rotated_twice",): [0, 2, 4, 6],
    }
    labels = [(names, targets) for names, (targets, at) in found if at == right]
    assert labels[1:] == [(("labels_per_shard",), [13, 12, 11, 10]), (("labels_per_shard",), [13, 12, -100, -100])]
    assert len(found) == 3 * 6  # both together


# Where to look: one sentence, from numbers made by hand --------------------------------------------------------------

NAMES = ("embedding", "wq", "wk", "norm", "head")
TURNED = torch.tensor([2.0, -1.0], dtype=torch.float64)  # the right gradient of each weight is (1, 2)
ALL_TURNED, ALL_LARGER = dict.fromkeys(NAMES, TURNED), dict.fromkeys(NAMES, 1.5)


def of_step(loss=2.0, **factors):
    """What a step returns: of some weights another gradient, or its factor."""
    right = torch.tensor([1.0, 2.0], dtype=torch.float64)
    given = {name: factors.get(name, 1.0) for name in NAMES}
    gradients = {name: x if isinstance(x, torch.Tensor) else x * right for name, x in given.items()}
    return Returned(torch.tensor(loss, dtype=torch.float64), gradients, frozenset({torch.float64}))


def of_tokens(*wrong):
    """The loss of each of six tokens, and with some wrong ones wrong gradients."""
    losses = torch.arange(1.0, 7.0)
    losses[list(wrong)] *= 1.5
    return of_step([losses.tolist()], **(ALL_TURNED if wrong else {}))


def clue_of(*results, exact=None, clipped=False):
    """The clue for these results of ranks, two ranks with the same if there is one; tokens are dealt out in runs."""
    results = list(results) * (1 + (len(results) == 1))
    shards = mock.Mock(shards=lambda P: list(torch.arange(6).chunk(P)), seq_len=6, takes=())
    found = clue(shards, {len(results): results}, exact or of_step(), 1e-9, clipped=clipped)
    return f"{found.says}: look at {found.look}" if found.look else found.says


TOKENS = partial(partial, clue_of, exact=of_tokens())
BACK = "The loss is right, and the gradients of"
SAYS = {
    "On rank 1, the gradient of head is not finite": partial(clue_of, of_step(), of_step(head=math.nan)),
    "On rank 0, the loss is not finite": partial(clue_of, of_step(math.inf), of_step()),
    "Only rank 2 is wrong: look at what the code does": partial(clue_of, of_step(), of_step(), of_step(head=2)),
    "The ranks end with different results": partial(clue_of, of_step(head=2), of_step(head=3)),
    "All gradients are right and the reported loss is wrong (1.25 times): look": partial(clue_of, of_step(2.5)),
    "The loss is 1.5 times the right one, and every gradient is 1.5": partial(clue_of, of_step(3.0, **ALL_LARGER)),
    "The loss is right, and every gradient is 1.5 times the right": partial(clue_of, of_step(**ALL_LARGER)),
    "The loss is right, and of head the gradient is -0.5 times the right one": partial(clue_of, of_step(head=-0.5)),
    "of embedding and head the gradient is 3 and 1.75 times": partial(clue_of, of_step(head=1.75, embedding=3)),
    "The loss is right, and clipped gradients are wrong": partial(clue_of, of_step(head=2), clipped=True),
    "The loss is wrong, and with it the gradients; return the loss": partial(clue_of, of_step(3.0, **ALL_TURNED)),
    "wrong is the gradient of head alone; return the loss of each token, (B, C), to learn which tokens are wrong: "
    "look at a loss that head alone serves": partial(clue_of, of_step(3.0, head=TURNED)),
    "off by the same number: look at a loss that head alone serves, and there at what is added": TOKENS(
        of_step([[*range(3, 9)]], head=TURNED)
    ),
    "look at tokens, labels and the loss": TOKENS(of_tokens(0, 1, 2, 3, 4, 5)),
    "token 1 is wrong, which in a causal model sees keys of its own rank only": TOKENS(of_tokens(1, 2, 3, 4, 5)),
    "the first wrong token is 3, and tokens that see keys of their own": TOKENS(of_tokens(3, 4, 5)),
    "of each run of a rank's tokens only the last token is wrong: look at labels": TOKENS(of_tokens(2)),
    "only the last 2 tokens are wrong: look at labels": TOKENS(of_tokens(1, 2, 5)),
    "of each run of a rank's tokens only the first token is wrong: look at labels": TOKENS(of_tokens(3)),
    "with 2 ranks wrong is token 1, 4, and later ones are right: look at what these": TOKENS(of_tokens(1, 4)),
    "with 2 ranks wrong is token 5: look at what these": TOKENS(of_tokens(5)),
    "label of token 1, 4, 5 has no effect on any rank: look at how the text is shared out": TOKENS(
        of_step([[1.0, 0.0, 3.0, 9.0, 0.0, 0.0]], **ALL_TURNED)
    ),
    "of wk the gradient is 2 (P) times the right one: look at what the loss that wk serves": partial(
        clue_of, of_step(3.0, **ALL_TURNED | {"wk": 2})
    ),
    "and right is the gradient of norm and head; return the loss of each token, (B, C), to learn which tokens are "
    "wrong: look at a loss without norm": partial(clue_of, of_step(3.0, **{name: TURNED for name in NAMES[:3]})),
    f"{BACK} embedding are wrong: look at what happens to embedding": partial(clue_of, of_step(embedding=TURNED)),
    f"{BACK} wk, norm and head and 2 more are wrong: look": partial(clue_of, of_step(**ALL_TURNED)),
    f"{BACK} wq and wk are wrong: look at what happens to wk, the": partial(clue_of, of_step(wq=TURNED, wk=TURNED)),
}


@pytest.mark.parametrize(("too_much", "each_rank"), [((1, 2, 3), True), ((1, 2, 2), False), ((1, 1, 1), False)])
def test_a_part_of_the_loss_that_each_rank_counts_grows_with_them(too_much, each_rank):
    """On 2, 3 and 4 ranks: the loss, and the gradient of one weight in a direction of its own."""
    wide = torch.tensor([0.5, -1.0], dtype=torch.float64)
    results = {
        P: of_step(2.0 + n, head=torch.tensor([1.0, 2.0]) + n * wide) for P, n in zip((2, 3, 4), too_much, strict=True)
    }
    shards = mock.Mock(shards=lambda P: list(torch.arange(6).chunk(P)), seq_len=6, takes=())
    found = clue(shards, {P: [result] * P for P, result in results.items()}, of_step(), 1e-9, clipped=False)
    assert ("a part of it counts P times" in found.says) == each_rank


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({2: (3, 4, 5), 3: (2, 3, 4, 5)}, "the first wrong token is 2, and tokens that see keys of their own"),
        ({2: (4, 5), 3: (4, 5)}, "with 2 and 3 ranks the same tokens are wrong: 4, 5"),
        ({2: (1, 2, 3, 4, 5), 3: (2, 3, 4, 5)}, "the first wrong token is 1, 2 with 2 and 3 ranks"),
    ],
)
def test_what_tokens_show_is_told_if_it_is_so_with_each_number_of_ranks(wrong, says):
    shards = mock.Mock(shards=lambda P: list(torch.arange(6).chunk(P)), seq_len=6, takes=())
    results = {P: [of_tokens(*tokens)] * P for P, tokens in wrong.items()}
    assert says in clue(shards, results, of_tokens(), 1e-9, clipped=False).says


@pytest.mark.parametrize(
    ("fails", "says"), [(False, "the first wrong token is 3, and tokens that see"), (True, "return the loss of each")]
)
def test_a_step_that_adds_the_losses_is_asked_with_the_labels_of_each_token_alone(fails, says):
    """On two ranks the losses of the second one are wrong."""

    def ask(P, targets):
        seen = (targets != IGNORED)[0]
        losses = torch.arange(1.0, 7.0) * torch.where(torch.arange(6) < 3 * (3 - P), 1.0, 1.5)
        return "it has no labels" if fails and P == 2 else [of_step(float(losses[seen].mean()))] * P

    shards = {"shards": lambda P: list(torch.arange(6).chunk(P)), "seq_len": 6, "labels": torch.ones(1, 6).long()}
    patient = mock.Mock(ask=ask, takes={"targets"}, **shards)
    assert says in clue(patient, {2: [of_step(3.0, **ALL_TURNED)] * 2}, of_step(), 1e-9, clipped=False).says


@pytest.mark.parametrize("says", SAYS)
def test_what_has_no_name_has_a_sentence_that_says_where_to_look(says):
    assert says in SAYS[says]()


@pytest.mark.parametrize(
    ("mistake", "options", "right", "says"),
    [
        ("a little", {"clip": 0.1}, [True, False, False, False], "The loss is right, and clipped gradients are wrong"),
        (
            "divided by all tokens",
            {},
            [True] * 4 + [False] * 3,
            "With some labels hidden no name explains the results: look at what the loss is divided by.",
        ),
        (
            "no backward pass without labels",
            {},
            [True] * 7 + [False] * 3,
            "fails with P = 2, a rank without labels: on rank 0, the function raised LookupError: no labels",
        ),
        ("race", {}, [True, False, False, False], "With 2 ranks it returns other results when it is called again"),
    ],
)
def test_what_gets_no_name_is_told(ranks, mistake, options, right, says, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.5)  # the ranks that wait for rank 0 wait for ever
    found = examine_model(partial(step, mistakes=(mistake,), layers=0, **options), layout="zigzag", ranks=ranks)
    assert [world.right for world in found.worlds] == right
    assert (found.diagnoses, found.changes) == ((), mistake == "race")
    assert says in text_of_model(found)
    assert "did not answer" not in text_of_model(found)  # a rank that raises frees the others at once


def test_without_the_two_options_less_is_named_and_the_notes_say_so(ranks):
    examination = examine_model(partial(blind_step, mistakes=("ring_not_called",)), ranks=ranks)
    assert names(examination) == [("ring_not_called",)]
    assert [note.split("=")[0] for note in examination.notes] == [
        "the function takes no positions",
        "the function takes no targets",
    ]
    assert examination.only == "a label for every token"


def test_a_rank_that_fails_is_a_finding_and_the_next_world_is_examined(ranks):
    examination = examine_model(sick_models.failing_step, layout="zigzag", ranks=ranks)
    plain = [world for world in examination.worlds if not world.hidden]
    assert [world.right for world in plain] == [True, True, False, True]
    failed = r"on rank 0, the function raised OverflowError: three are too many \(.*sick_models.py, line \d+ in .*\)"
    assert re.fullmatch(failed, plain[2].failure)
    assert not examination.healthy


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (sick_models.wrong_result, r"the function returned float; expected \(loss, gradients\)"),
        (sick_models.wrong_shape, r"the loss has shape \(2, 25\); expected a number, or .* \(B, C\) = \(2, 24\)"),
        (
            sick_models.of_8_tokens_and_seed_5,
            r"on one process, the function raised LookupError: another seed \(.*sick_models.py, line",
        ),
        (sick_models.random_step, "two calls on one process return different results; expected weights that are made"),
        (sick_models.deaf_step, "targets= has no effect on the gradients; expected it to take the place of"),
        (sick_models.with_dropout, r"drops numbers at random \(bernoulli_\): .* expected dropout of 0"),
        (partial(step, dtype=torch.bfloat16), "in bfloat16, rounding may move a gradient"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_a_reason(ranks, function, message):
    with pytest.raises(CannotExamine, match=message):
        examine_model(function, layout="zigzag", ranks=ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "ring"}, "layout is 'ring'"),
        ({"layout": "tests.wrong.sick_models:nowhere"}, "cannot be imported"),
        ({"vocab": 0}, "vocab is 0; expected 1 or more"),
        ({"step": lambda: None}, "cannot be called with a text alone"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        examine_model(**{"step": step, **options})


def result(loss, *gradients, dtype=torch.float64):
    """What a rank returned."""
    numbers = (torch.as_tensor(gradient, dtype=torch.float64) for gradient in gradients)
    names = dict(zip("abcdef", numbers, strict=False))
    return Returned(torch.tensor(loss, dtype=torch.float64), names, frozenset({dtype}))


RIGHT = result(2.0, [3.0, 4.0], [1.0])


FACTORS = {"times_p": 3.0, "over_p": 1 / 3, "times_root_p": 3**0.5, "over_root_p": 3**-0.5}
LOSS_2, ROW_2 = result(2.5, [3.0, 4.0], [1.0]), result(2.0, [3.0, 4.5], [1.0])  # wrong in one number
PARTS = [result(0.5, [1.0, 4.0], [0.0]), result(1.5, [2.0, 0.0], [1.0])]


@pytest.mark.parametrize(
    ("results", "names"),
    [
        ([RIGHT] * 3, ()),
        *(([result(2.0, [3 * c, 4 * c], [c])] * 3, (f"gradients_{name}",)) for name, c in FACTORS.items()),
        *(([result(2 * FACTORS[name], [3.0, 4.0], [1.0])] * 3, (f"loss_{name}",)) for name in ("times_p", "over_p")),
        *(([result(2 * FACTORS[name], [3.0, 4.0], [1.0])] * 3, None) for name in ("times_root_p", "over_root_p")),
        (PARTS, ("loss_not_reduced", "gradients_not_reduced")),
        *(([*[RIGHT] * n, wrong, *[RIGHT] * (2 - n)], None) for n in (0, 2) for wrong in (LOSS_2, ROW_2)),
    ],
)
def test_results_of_ranks_are_explained_by_the_reduction(results, names):
    found = explain(results, RIGHT, 1e-12)
    assert (found and found.names) == names


def test_a_factor_of_one_weight_is_named_with_the_weight():
    found = explain([result(2.0, [9.0, 12.0], [1.0])] * 3, RIGHT, 1e-12)
    assert found == ModelDiagnosis(("gradients_times_p",), "gradients_times_p: 1 of 2 weights, a")


def patient(outcomes, **options):
    """A patient whose ranks return these outcomes."""
    ranks = mock.Mock(outcomes=mock.Mock(side_effect=outcomes))
    return ModelPatient(step, torch.zeros(1, 5), "striped", 0, ranks, frozenset(), **{"seconds": 7.0, **options})


def test_losses_of_tokens_are_put_into_the_order_of_the_text():
    of_ranks = [result([[0.0, 2.0]], [1.0]), result([[1.0, 3.0]], [1.0])]
    assert [found.loss.tolist() for found in patient([of_ranks]).ask(2)] == [[[0.0, 1.0, 2.0, 3.0]]] * 2


def test_a_call_on_several_ranks_may_take_its_seconds_and_the_time_of_the_first_call_for_each_rank():
    asked = patient([LostRank("rank 1 died", {})] * 2, first=5.0)
    assert asked.ask(2) == "rank 1 died"
    assert asked.ranks.seconds == 7 + 2 * 5
    with pytest.raises(CannotExamine, match="on one process, rank 1 died; expected it to return"):
        asked.alone()


def judged(results, patterns):
    """What is judged where one process returns RIGHT, and patterns predict without a call: {P: {names: prediction}}."""
    made = {P: [(names, lambda x=x: x) for names, x in of_P.items()] for P, of_P in patterns.items()}
    _, diagnoses, wrong = judge({P: [x] * P for P, x in results.items()}, RIGHT, made.__getitem__, 1e-12, 1e-12)
    return [each.names for each in diagnoses], set(wrong)


def test_a_name_must_explain_every_wrong_number_of_ranks():
    one, other = result(2.0, [3.0, 5.0], [1.0]), result(2.0, [3.0, 6.0], [1.0])
    found = judged({2: one, 3: other}, {2: {("a",): one, ("b",): RIGHT}, 3: {("a",): RIGHT, ("b",): other}})
    assert found == ([], {2, 3})
    found = judged({2: one, 3: other}, {2: {("a",): one, ("b",): one}, 3: {("a",): RIGHT, ("b",): other}})
    assert found[0] == [("b",)]
    found = judged({1: one, 2: one}, {1: {}, 2: {("a",): one}})  # one process cannot show every mistake
    assert found == ([("a",)], {1, 2})


def test_one_mistake_comes_before_two():
    wrong = result(2.0, [3.0, 5.0], [1.0])
    half = result(2.0, [1.5, 2.5], [0.5])
    found = judged({2: wrong}, {2: {("a",): wrong, ("b",): half, ("c", "d"): wrong}})
    assert found[0] == [("a",)]
    found = judged({2: wrong}, {2: {("b",): half, ("c", "d"): RIGHT}})
    assert found[0] == [("b", "gradients_times_p")]


@pytest.mark.parametrize(("error", "right"), [(0.9e-12, True), (1.1e-12, False), (math.nan, False)])
def test_a_world_is_right_within_what_is_allowed(error, right):
    for wrong in (result(2.0 * (1 + error), [3.0, 4.0], [1.0]), result(2.0, [3.0, 4.0], [1.0 + error])):
        for rank in range(3):
            of_ranks = [*[RIGHT] * rank, wrong, *[RIGHT] * (2 - rank)]
            [world], *_ = judge({3: of_ranks}, RIGHT, lambda P: [], 1e-12, 1e-12)
            assert world.right == right


def test_a_small_gradient_is_compared_with_a_hundredth_of_an_average_gradient():
    right = result(1.0, [100.0] * 10, [0.5])  # the average of one number is 95; a hundredth of it is 0.95
    for error, fits in ((0.0009, True), (0.0011, False)):
        found = explain([result(1.0, [100.0] * 10, [0.5 + error])], right, 1e-3)
        assert (found == ModelDiagnosis(())) == fits


def test_results_are_the_same_within_what_is_allowed_and_nan_is_like_nan():
    assert same(result(1.0, [1.0, math.nan]), result(1.0, [1.0, math.nan]), 1e-12)
    assert not same(result(1.0, [1.0, 2.0]), result(1.0, [1.0, 2.1]), 1e-3)
    assert not same(result(1.1, [1.0, 2.0]), result(1.0, [1.0, 2.0]), 1e-3)


def test_gradients_of_other_weights_cannot_be_compared():
    assert unlike([RIGHT], RIGHT) == ""
    for rank, other, said in (
        (1, result(2.0, [3.0, 4.0]), "the gradient of b is missing; expected the names of one process"),
        (0, result(2.0, [3.0, 4.0], [1.0], [1.0]), "the gradient of c is there too;"),
        (2, result(2.0, [3.0], [1.0]), "the gradient of a has shape (1,); expected (2,) as on one process: gather"),
        (1, result([[2.0]], [3.0, 4.0], [1.0]), "the loss has shape (1, 1); expected () as on one process"),
    ):
        assert unlike([RIGHT] * rank + [other], RIGHT).startswith(f"on rank {rank}, {said}")
        [world], *_ = judge({rank + 2: [RIGHT] * (rank + 1) + [other]}, RIGHT, lambda P: [], 1e-12, 1e-12)
        assert (world.state, world.failure.startswith(f"on rank {rank + 1}, {said}")) == ("failed", True)


def test_the_tolerance_grows_with_the_roundings():
    weights = {"a": torch.ones(30, 20), "b": torch.ones(30)}
    double, single = (Returned(torch.tensor(1.0), weights, frozenset({x})) for x in (torch.float64, torch.float32))
    assert tolerance(double, 20) == pytest.approx(2 * 2 * 2 * (1 + 30**0.5) * 20**0.5 * 2**-53, abs=0)
    assert tolerance(single, 20) == pytest.approx(tolerance(double, 20) * 2**29, abs=0)
    assert tolerance(double, 40) > tolerance(double, 20)


def command_says(capsys, function, *options):
    """(exit status, what is printed) of ring-doctor --model, in this process."""
    with mock.patch.dict(os.environ):
        os.environ.pop("WORLD_SIZE", None)
        status = command.main(["--model", f"tests.wrong.sick_models:{function}", *options])
    return status, capsys.readouterr().out


def test_each_option_reaches_the_examination_and_the_limit_of_the_processes_stays(capsys, ranks):
    with mock.patch.object(command, "examine_model", return_value=examination(FINE)) as examine:
        options = ["--seed=5", "--vocab=8", "--time-limit=2", "--layout=zigzag"]
        status, printed = command_says(capsys, "of_8_tokens_and_seed_5", *options)
    assert (status, printed.startswith("HEALTHY")) == (0, True)
    given = examine.call_args.kwargs | {"ranks": ranks}
    assert (given["seconds"], given["layout"]) == (2, "zigzag")
    before = ranks.seconds
    assert examine_model(*examine.call_args.args, **given).healthy
    assert ranks.seconds == before


def test_a_prediction_that_fails_is_left_out_and_both_files_are_written(capsys, tmp_path):
    files = [f"--json={tmp_path / 'report.json'}", f"--html={tmp_path / 'report.html'}"]
    status, printed = command_says(capsys, "other_positions_fail", "--layout", "zigzag", *files)
    verdict = "SICK: labels_per_shard, in tests.wrong.sick_models:other_positions_fail"
    assert (status, printed.splitlines()[0]) == (1, verdict)
    assert re.search(r"^WRONG  P = 1: off by .*\nWRONG  P = 2: off by", printed, flags=re.MULTILINE)

    report, page = (Path(file.partition("=")[2]).read_text() for file in files)
    said = json.loads(report)
    assert (said["healthy"], said["verdict"], said["mistakes"]) == (False, verdict, [["labels_per_shard"]])
    assert [(answer["ranks"], answer["state"]) for answer in said["answers"]] == [(P, "wrong") for P in (1, 2, 3, 4)]
    assert f'<h1 class="sick">{verdict}</h1>' in page
    assert "Labels are shifted inside each shard" in page
    assert "$" not in page


def examination(*worlds, **found):
    """An examination of these worlds."""
    return ModelExamination(**{"name": "f", "worlds": worlds, "diagnoses": (), "allowed": 1e-12, "notes": ()} | found)


FINE, WRONG = World(1, "", True, 0.0), World(3, HIDDEN, False, 0.5)
FAILED = World(2, "", False, math.inf, "rank 1 died")


ALIKE = "loss and gradients are those of one process"
VERDICTS = {
    f"HEALTHY: f, {ALIKE}; {NOT_ASKED}": examination(FINE),
    f"HEALTHY FOR WHAT IT TAKES: f, {ALIKE}; a label a token; {NOT_ASKED}": examination(FINE, only="a label a token"),
    "SICK: f fails with P = 2: rank 1 died": examination(FINE, FAILED),
    f"SICK: f fails with P = 2, {NO_LABELS}: rank 1 died": examination(FINE, replace(FAILED, hidden=NO_LABELS)),
    "SICK: f: wrong numbers that no mistake of the catalogue gives": examination(FINE, FAILED, WRONG),
    "SICK: f: The loss is wrong": examination(WRONG, clue=Finding("The loss is wrong", "it")),
    "SICK: f changes its results from call to call": examination(WRONG, changes=True),
    "SICK: a and b or c, in f": examination(WRONG, diagnoses=(ModelDiagnosis(("a", "b")), ModelDiagnosis(("c",)))),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_verdict_of_a_model(verdict):
    found = VERDICTS[verdict]
    assert found.verdict == verdict
    assert found.healthy == verdict.startswith("HEALTHY")
    assert found.level == ("right for what it takes" if found.only else "right" if found.healthy else "wrong")


def test_a_report_says_first_where_to_look_and_lists_every_number_of_ranks():
    found = examination(FINE, FAILED, WRONG, notes=("it has a note",), clue=Finding("It is wrong", "the ring"))
    assert text_of_model(found).splitlines()[1:] == [
        "  Look at the ring.",
        "  It has a note.",
        "",
        "ok     P = 1: off by 0.0e+00 of the norm, rounding allows 1.0e-12",
        "FAILED P = 2: rank 1 died",
        "WRONG  P = 3, some labels hidden: off by 5.0e-01 of the norm, rounding allows 1.0e-12",
    ]
    said = json_of_model(replace(found, name="<f>"))
    assert (said["inference"], said["remarks"]) == (["It is wrong. Look at the ring."], ["It has a note."])
    assert [answer["labels_hidden"] for answer in said["answers"]] == [False, False, True]
    assert [answer["errors"]["largest"] for answer in said["answers"]] == [0.0, None, 0.5]  # JSON has no infinity
    shown = page(said, text_of_model(found))
    assert "<pre>  Look at the ring.\n" in shown
    assert "&lt;f&gt;" in shown
    assert (shown.count("<tr>"), shown.count('<h1 class="sick">'), shown.count("<td class='sick'>")) == (4, 1, 2)
