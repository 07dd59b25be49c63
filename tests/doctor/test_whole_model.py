"""A step of a whole model, asked as a job: what is told of a function. Most names are in test_running_jobs.py."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

import ring_doctor.__main__ as command
from ring_doctor.asking.answers import RIGHT, RIGHT_AS_CLAIMED, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.whole_models import whole_model
from ring_doctor.whole_models.whole_model import RACE, examine_model

HOME = "tests.wrong.sick_models"
SAYS = {  # what the first line of the report begins with, where {} is the function
    "right": (RIGHT, "{}, loss and gradients are those of one process; not asked: dropout"),
    "without_targets": (RIGHT_AS_CLAIMED, "{}, loss and gradients are those of one process"),
    "loss_not_reduced": (WRONG_RING, "loss_not_reduced; the reported loss is "),
    "means_and_sums": (WRONG_RING, "mean_of_means and loss_times_p; the ranks have 8, 14, 16 labels"),
    "divided_by_all_tokens": (WRONG_RING, "every gradient is 0.7917 times the right one"),
    "no_backward_without_labels": (
        WRONG_RING,
        "{} fails with 3 processes, a rank without labels: rank 0 raised LookupError: no labels (tests/wrong/sick",
    ),
    "a_rank_that_waits": (WRONG_RING, "{} fails with 3 processes: rank(s) [0, 1, 2] did not answer in time; rank"),
    "race": (WRONG_RING, f"with 3 processes {{}} {RACE}"),
}
REFUSED = {
    "wrong_result": r"the function returned float; expected \(loss, gradients\)",
    "wrong_gradient": r"the gradient of weight is None; expected \(loss, gradients\)",
    "wrong_shape": r"the loss has shape \(2, 25\); expected a number, or .* \(B, C\) = \(2, 24\)",
    "of_8_tokens_and_seed_5": "on one process rank 0 raised LookupError: another seed",
    "random_step": "two calls on one process return different results; expected weights that are made",
    "deaf_step": "targets= has no effect on the gradients; expected it to take the place of",
    "coarse": "nothing is wrong, but in bfloat16, rounding may change a gradient",
}
SOME = {"a_rank_that_waits", "means_and_sums", "no_backward_without_labels", "random_step", "deaf_step"}


def cases(table):
    """The keys of a table; those that are not in SOME take `make exhaustive`. A right one: tests/pages/test_docs.py."""
    return [pytest.param(key, marks=() if key in SOME else pytest.mark.exhaustive) for key in table]


@pytest.mark.parametrize("function", cases(SAYS))
def test_what_is_told_of_a_function(function):
    level, says = SAYS[function]
    found = examine_model(f"{HOME}:{function}", layout="zigzag")
    said = found.line.partition(": ")[2]
    assert (found.level, said.startswith(says.format(f"{HOME}:{function}"))) == (level, True), said


@pytest.mark.parametrize("function", cases(REFUSED))
def test_what_cannot_be_compared_is_refused_with_a_reason(function):
    with pytest.raises(CannotExamine, match=REFUSED[function]):
        examine_model(f"{HOME}:{function}", layout="zigzag")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "ring"}, "layout is 'ring'"),
        ({"layout": f"{HOME}:nowhere"}, "cannot be imported"),
        ({"vocab": 0}, "vocab is 0; expected 1 or more"),
        ({"name": "os:getcwd"}, "cannot be called with a text alone"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        examine_model(**{"name": f"{HOME}:step", **options})


def command_says(capsys, function, *options):
    """(exit status, what is printed) of ring-doctor --model, in this process."""
    with mock.patch.dict(os.environ):
        os.environ.pop("WORLD_SIZE", None)
        status = command.main(["--model", f"{HOME}:{function}", "--layout=zigzag", *options])
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_each_option_reaches_the_function(capsys, monkeypatch):
    monkeypatch.setattr(whole_model, "WORLDS", (2,))
    assert command_says(capsys, "of_8_tokens_and_seed_5", "--seed=5", "--vocab=8", "--time-limit=9")[0] == 0


def test_the_command_says_the_name_and_both_files_are_written(capsys, tmp_path):
    files = [f"--json={tmp_path / 'report.json'}", f"--html={tmp_path / 'report.html'}"]
    status, printed = command_says(capsys, "labels_per_shard", *files)
    verdict = f"SICK: labels_per_shard; rank 0's label of token 3 is 6; {HOME}:labels_per_shard, with 3 processes"
    assert (status, printed.splitlines()[0]) == (1, verdict)
    report, page = (Path(file.partition("=")[2]).read_text() for file in files)
    said = json.loads(report)
    assert (said["healthy"], said["verdict"], said["mistakes"]) == (False, verdict, ["labels_per_shard"])
    assert {answer["state"] for answer in said["answers"]} == {"wrong"}
    assert f'<h1 class="sick">{verdict.replace(chr(39), "&#x27;")}</h1>' in page
    assert "Labels are shifted inside each shard" in page
