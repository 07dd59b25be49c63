"""RingTrainer: every number that it reports, and the weights, are those of a Trainer on one process.

The model has no layer in float32, so weights agree to float64: a gradient off by 1e-17 becomes 1e-9 of a step where
AdamW divides it by its epsilon, 1e-8. Losses are added up in float32, 1e-7 each.
"""

import shutil

import pytest

from ringlab.support.processes import launch
from tests.extras import MISSING

for package in ("accelerate", "peft", "trl"):
    pytest.importorskip(package, reason=MISSING["trl"])

from transformers import Trainer  # noqa: E402
from trl import SFTTrainer  # noqa: E402

from ringlab.models.hugging_face_batch import padded  # noqa: E402
from tests import trainer_runs  # noqa: E402
from tests.trainer_runs import BF16, CASES, FUNCTIONS, REFUSED, SFT, small_model, weights_of  # noqa: E402


def same(result, exact):
    (numbers, weights), (right, right_weights) = result, exact
    for name, values in right.items():
        assert numbers[name] == pytest.approx(values, rel=1e-6, abs=0), name
    if len(weights) == len(weights_of(small_model())):
        moved = right_weights - weights_of(small_model())
        assert (weights - right_weights).norm() <= 1e-9 * moved.norm()
    assert (weights - right_weights).norm() <= 1e-11 * right_weights.norm()


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ring")
    return *launch(trainer_runs.in_a_ring, 3, folder)[0], folder


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_one_process(ring, case):
    same(ring[0][case], trainer_runs.run(Trainer, case))


def test_a_run_goes_on_from_a_checkpoint_and_a_model_without_a_ring_loads_it(ring, tmp_path):
    found, _, folder = ring
    exact = trainer_runs.resumed(Trainer, tmp_path, again=False)
    same(found["first"], exact)
    same(found["again"], trainer_runs.resumed(Trainer, tmp_path, again=True))
    assert (found["again"][1] - exact[1]).norm() <= 1e-11 * exact[1].norm()
    assert (trainer_runs.loaded(folder) - exact[1]).norm() <= 1e-11 * exact[1].norm()
    shutil.rmtree(tmp_path)


def test_autocast_is_as_near_to_float64_as_that_of_one_process(ring):
    (right, weights), start = trainer_runs.run(Trainer, **BF16), weights_of(small_model())
    own, of_ring = trainer_runs.run(Trainer, "bf16", bf16=True, **BF16), ring[0]["bf16"]
    own_error, error = ((each[1] - weights).norm() for each in (own, of_ring))
    assert 0 < error <= 2 * own_error < 0.1 * (weights - start).norm()
    assert of_ring[0]["loss"] == pytest.approx(right["loss"], rel=2**-8)  # bfloat16 rounds by 2^-9


def test_planted_mistakes_are_seen(ring):
    exact = trainer_runs.run(Trainer)
    same(ring[0]["right"], exact)
    for name in ("own ranks", "the batch"):
        with pytest.raises(AssertionError):
            same(ring[0][name], exact)


@pytest.mark.parametrize("name", [*REFUSED, *FUNCTIONS, "model_init"])
def test_what_would_be_wrong_is_refused_by_name(ring, name):
    assert f"{name} is " in ring[1][name]
    assert "expected a Trainer without it" in ring[1][name]


def test_sft_has_the_numbers_and_weights_of_one_process():
    """16 roundings of float32, in which TRL's head computes; num_tokens are whole numbers."""
    found, start = launch(trainer_runs.sft_in_a_ring, 3)[0], weights_of(small_model())
    for case in SFT:
        (numbers, weights), (right, right_weights) = found[case], trainer_runs.sft(SFTTrainer, case)
        assert {"loss", "entropy", "mean_token_accuracy", "num_tokens"} <= {name for name, x in right.items() if x}
        for name, values in right.items():
            assert numbers[name] == pytest.approx(values, rel=1e-6, abs=0), (case, name)
        assert (weights - right_weights).norm() <= 1e-6 * (right_weights - start).norm(), case


def test_what_shards_do_not_have_is_refused(ring):
    assert "51 tokens in the zigzag layout on 3 ranks" in ring[1]["a batch for each rank"]
    for name in ("ShiftsAgain", "AddsToIt"):
        assert f"compute_loss of {name} gives " in ring[1][name]
    assert "predict would collect the logits of shards" in ring[1]["predict"]
    assert "expected input_ids and labels" in ring[1]["labels"]


def test_two_rings_are_a_trainer_on_two_processes():
    same(launch(trainer_runs.on_a_mesh, 4, 2)[0], launch(trainer_runs.on_a_mesh, 2, 2)[0])


def test_weights_that_fsdp2_shares_out_are_those_of_one_process():
    same(launch(trainer_runs.with_fsdp2, 3)[0], trainer_runs.run(Trainer, "accumulation"))


def test_a_trainer_that_was_not_told_of_the_ranks_is_refused():
    assert "accelerate sees 1 process(es) of 2" in launch(trainer_runs.not_told, 2)[0]


def test_a_batch_is_padded_on_the_right():
    batch = trainer_runs.collate(trainer_runs.rows()[1:2])
    longer = padded(batch, 1, 6)
    assert {name: (x.shape[1], x[0, -1].item()) for name, x in longer.items()} == {
        "input_ids": (18, 0),
        "attention_mask": (18, 0),
        "labels": (18, -100),
    }
    assert padded(longer, 18, 6) is longer
    assert batch["input_ids"].shape == (1, 17)
