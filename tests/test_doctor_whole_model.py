"""The mistakes of whole models: each is planted in a real ring and gets its name; right models are healthy."""

from functools import partial

import pytest
import torch

from ringlab.doctor.catalogue import CATALOGUE
from ringlab.doctor.mistakes_of_models import MISTAKES
from ringlab.doctor.model_calls import Returned
from ringlab.doctor.model_comparison import tolerance
from ringlab.doctor.whole_model import examine_model
from tests import sick_models
from tests.sick_models import blind_step, step

SHARDED = ("labels_per_shard", "positions_per_shard", "ring_not_called")
SCALED = (
    "loss_times_p",
    "loss_over_p",
    "loss_not_reduced",
    "gradients_times_p",
    "gradients_times_root_p",
    "gradients_not_reduced",
    "mean_of_means",
)


def names(examination):
    return [found.names for found in examination.diagnoses]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param("zigzag", {}, marks=pytest.mark.exhaustive),
        pytest.param("striped", {"per_token": True}, marks=pytest.mark.exhaustive),
        pytest.param("contiguous", {"dtype": torch.float32}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_right_model_is_healthy_and_rounds_much_less_than_allowed(ranks, layout, options):
    examination = examine_model(partial(step, layout=layout, **options), layout=layout, ranks=ranks)
    assert examination.healthy
    assert not examination.diagnoses
    assert not examination.notes
    assert [(world.world_size, world.hidden) for world in examination.worlds] == [
        *((P, False) for P in (1, 2, 3, 4)),
        *((P, True) for P in (2, 3, 4)),
    ]
    assert max(world.error for world in examination.worlds) < examination.allowed / 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "per_token"), [("contiguous", False), ("zigzag", True), ("striped", False)])
@pytest.mark.parametrize("mistake", [*SHARDED, "labels_per_shard, the last ignored"])
def test_a_mistake_of_the_shards_is_named(ranks, layout, per_token, mistake):
    sick = partial(step, mistakes=(mistake,), layout=layout, per_token=per_token)
    assert names(examine_model(sick, layout=layout, ranks=ranks)) == [(mistake.partition(",")[0],)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "other"),
    [("zigzag", "contiguous"), ("zigzag", "striped"), ("striped", "zigzag"), ("contiguous", "zigzag")],
)
def test_positions_of_another_layout_are_named(ranks, layout, other):
    sick = partial(step, mistakes=(f"positions_of_{other}",), layout=layout)
    assert names(examine_model(sick, layout=layout, ranks=ranks)) == [(f"positions_of_{other}",)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", SCALED)
def test_a_wrong_factor_is_named(ranks, mistake):
    assert names(examine_model(partial(step, mistakes=(mistake,)), layout="zigzag", ranks=ranks)) == [(mistake,)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mistakes", "found"),
    [
        (("DDP",), {("gradients_over_p",)}),
        (("labels_per_shard", "positions_per_shard"), {("labels_per_shard", "positions_per_shard")}),
        (("labels_per_shard", "DDP"), {("labels_per_shard", "gradients_over_p")}),
        (("mean_of_means", "loss_times_p"), {("mean_of_means", "loss_times_p")}),
        # Rotary distances inside a rank's tokens are the same from 0 and from where contiguous chunks begin.
        (
            ("ring_not_called", "positions_per_shard"),
            {("ring_not_called", "positions_per_shard"), ("ring_not_called", "positions_of_contiguous")},
        ),
    ],
)
def test_mistakes_together_are_named_together(ranks, mistakes, found):
    assert set(names(examine_model(partial(step, mistakes=mistakes), layout="zigzag", ranks=ranks))) == found


@pytest.mark.exhaustive
def test_a_factor_of_one_weight_is_named_with_the_weight(ranks):
    [found] = examine_model(partial(step, mistakes=("embedding twice",)), layout="zigzag", ranks=ranks).diagnoses
    assert found.names == ("gradients_times_p",)
    assert found.detail == "gradients_times_p: 1 of 21 weights, embedding.weight"


@pytest.mark.exhaustive
def test_an_unknown_mistake_has_no_name(ranks):
    examination = examine_model(sick_models.unknown_mistake, layout="zigzag", ranks=ranks)
    assert not examination.healthy
    assert not examination.diagnoses
    assert [world.right for world in examination.worlds] == [True, False, False, False]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", ["loss_over_p", "gradients_times_p", "ring_not_called"])
def test_without_the_two_options_less_is_named_and_the_notes_say_so(ranks, mistake):
    examination = examine_model(partial(blind_step, mistakes=(mistake,)), ranks=ranks)
    assert names(examination) == [(mistake,)]
    assert [note.split("=")[0] for note in examination.notes] == [
        "the function takes no positions",
        "the function takes no targets",
    ]


@pytest.mark.exhaustive
def test_a_rank_that_fails_is_a_finding_and_the_next_world_is_examined(ranks):
    examination = examine_model(sick_models.failing_step, layout="zigzag", ranks=ranks)
    plain = [world for world in examination.worlds if not world.hidden]
    assert [world.right for world in plain] == [True, True, False, True]
    assert plain[2].failure == "on rank 0, the function raised OverflowError: three are too many"
    assert not examination.healthy


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (sick_models.wrong_result, r"returned float; expected \(loss, gradients\)"),
        (sick_models.wrong_shape, r"the loss has shape \(2, 25\); expected a number, or .* \(B, C\) = \(2, 24\)"),
        (sick_models.random_step, "two calls on one process return different results; expected no dropout"),
        (sick_models.deaf_step, "targets= has not the expected effect; expected it to take the place of"),
        (partial(step, dtype=torch.bfloat16), "in bfloat16, rounding may move a gradient"),
        (lambda: None, "cannot be called with a text alone"),
    ],
)
def test_what_cannot_be_examined_is_refused_with_a_reason(ranks, function, message):
    with pytest.raises(ValueError, match=message):
        examine_model(function, layout="zigzag", ranks=ranks)


@pytest.mark.parametrize(
    ("options", "message"), [({"layout": "ring"}, "layout is 'ring'"), ({"seq_len": 20}, "multiple of 24")]
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        examine_model(step, **options)


def test_the_tolerance_grows_with_the_roundings():
    weights = {"a": torch.ones(30, 20), "b": torch.ones(30)}
    double, single = (Returned(torch.tensor(1.0), weights, frozenset({x})) for x in (torch.float64, torch.float32))
    assert tolerance(double, 20) == pytest.approx(2 * 2 * 2 * (1 + 30**0.5) * 20**0.5 * 2**-53)
    assert tolerance(single, 20) == pytest.approx(tolerance(double, 20) * 2**29)
    assert tolerance(double, 40) > tolerance(double, 20)


def test_every_entry_is_a_sentence_and_names_a_chapter_that_exists():
    for name, mistake in MISTAKES.items():
        assert name == mistake.name
        assert name not in CATALOGUE or name.startswith(("positions_of", "gradients_"))  # an attention has these too
        assert mistake.what.endswith(".")
        assert not mistake.look.endswith(".")
        assert len(list(sick_models.ROOT.glob(f"notebooks/{mistake.chapter:02}_*.py"))) == 1
