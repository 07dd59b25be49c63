"""A step of a whole model, asked as a job: what is told of a function. Most names are in test_running_jobs.py."""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

import ring_doctor.__main__ as command
from ring_doctor.asking.answers import WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.whole_models import whole_model
from ring_doctor.whole_models.whole_model import examine_model

HOME = "tests.wrong.sick_models"
SAYS = {  # what the first line of the report begins with, where {} is the function. A right one: pages/test_docs.py
    "means_and_sums": "loss_times_p; 1 of 4 gradients are wrong (the reported loss), × 3",
    "no_backward_without_labels": "{} fails: the 3-process job ended too early (status",
    "a_rank_that_waits": "{} fails: the 3-process job had not ended after ",
    "another_call": "no output was compared: no module was seen in both, or the jobs pad to other lengths; 1 of 2 ",
}
REFUSED = {
    "random_step": "two calls return different losses; expected new weights in each, and torch's gen",
    "without_targets": r"TypeError: .*got an unexpected keyword argument 'targets'",
    "deaf_step": "targets= has no effect on the loss; expected it to take the place of",
}


@pytest.fixture
def quickly(warm, monkeypatch):
    """Jobs are forks of a process that has imported torch. One that waits would outlive its doctor: it is no fork."""
    monkeypatch.setattr(sys, "executable", str(warm))


@pytest.mark.parametrize("function", SAYS)
def test_what_is_told_of_a_function(function, monkeypatch, request):
    if waits := function == "a_rank_that_waits":
        monkeypatch.setattr(whole_model, "OTHERS", 0.0)
    else:
        request.getfixturevalue("quickly")
    found = examine_model(f"{HOME}:{function}", layout="zigzag", **{"seconds": 1.0} if waits else {})
    assert found.level == WRONG_RING
    assert ("LookupError: no labels" in found.says) == (function == "no_backward_without_labels")
    assert ("called again" in found.says) == (function == "another_call")
    assert found.line.partition(": ")[2].startswith(SAYS[function].format(f"{HOME}:{function}"))


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_compared_is_refused_with_a_reason(function, quickly):
    with pytest.raises(CannotExamine, match=REFUSED[function]):
        examine_model(f"{HOME}:{function}", layout="zigzag")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "ring"}, "'ring' cannot be imported"),
        ({"layout": f"{HOME}:nowhere"}, "cannot be imported"),
        ({"name": f"{HOME}:nothing"}, "cannot be imported"),
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
def test_each_option_reaches_the_function(capsys, monkeypatch, quickly):
    monkeypatch.setattr(whole_model, "WORLDS", (2,))
    assert command_says(capsys, "of_8_tokens_and_seed_5", "--seed=5", "--vocab=8", "--time-limit=9")[0] == 0


def test_the_command_says_the_name_and_both_files_are_written(capsys, tmp_path):
    files = [f"--json={tmp_path / 'report.json'}", f"--html={tmp_path / 'report.html'}"]
    status, printed = command_says(capsys, "labels_per_shard", *files)
    said = "SICK: labels_per_shard; rank 0's label of token 3 is 6, expected 3; "
    verdict = f"{said}{HOME}:labels_per_shard, with 3 processes"
    assert (status, printed.splitlines()[0]) == (1, verdict)
    report, page = (Path(file.partition("=")[2]).read_text() for file in files)
    said = json.loads(report)
    assert (said["healthy"], said["verdict"], said["mistakes"]) == (False, verdict, ["labels_per_shard"])
    assert all(error > said["allowed"][name] for name, error in said["errors"].items())
    assert f'<h1 class="sick">{verdict.replace(chr(39), "&#x27;")}</h1>' in page
    assert "Labels are shifted inside each shard" in page
