"""A damaged folder of a run: one line, never a traceback, never a wait, and nothing is lost that was saved."""

import hashlib
import json
import os
import shutil
import subprocess

import pytest
import torch

from ringlab.models import train
from ringlab.models.checkpoint import SUMS, as_text, damage, finished, sha256
from ringlab.models.loader import Text
from ringlab.support.processes import forkserver
from tests.damage import (
    BAD_LINES,
    FILES,
    GOOD,
    NEWEST,
    OLDER,
    TO_A_CHECKPOINT,
    TO_A_FILE,
    UNWRITTEN,
    WAYS,
    flip,
    go_on,
    reason,
)

SMALL = ["--seq-len=24", "--layers=1", "--hidden=16", "--heads=4", "--kv-heads=2", "--batch=4", "--save-every=2"]
RUN = [*SMALL, "--data", "text.txt", "--out", "run", "--steps", "5"]


def run(context, options):
    train.train(context, train.parse(options))


def losses(folder):
    lines = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return torch.tensor([line["loss"] for line in lines])


def content(folder):
    """The checksums of the files in a folder, but for the lock."""
    files = [path for path in folder.glob("**/*") if path.is_file() and not path.is_symlink() and path.name != "lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A folder with a text, a run of 4 steps on 3 ranks in run/, and one of as long a text in other/."""
    folder = tmp_path_factory.mktemp("whole")
    text = b"the keys and values go round the ring,\n" * 30
    for out, data in (("run", text), ("other", text[::-1])):
        (folder / "text.txt").write_bytes(data)
        ranks(3, run, [*SMALL, "--data", f"{folder}/text.txt", "--out", f"{folder}/{out}", "--steps", "4"])
    (folder / "text.txt").write_bytes(text)
    (folder / "dead").symlink_to("nowhere")
    return folder


@pytest.fixture(scope="module")
def unbroken(ranks, whole, tmp_path_factory):
    """The losses of 5 steps on one process."""
    out = tmp_path_factory.mktemp("unbroken")
    ranks(1, run, [*SMALL, "--data", f"{whole}/text.txt", "--out", str(out), "--steps", "5"])
    return losses(out)


@pytest.fixture(scope="module")
def command():
    with forkserver().Pool(1) as pool:
        yield lambda *args: pool.apply_async(go_on, args).get(timeout=60)


@pytest.fixture
def small(tmp_path):
    """A checkpoint of step 4, with slices of a few bytes."""
    folder = tmp_path / NEWEST
    folder.mkdir()
    for name, text in ((".metadata", "first"), ("run.json", '{"step": 4}'), ("__0_0.distcp", "third")):
        (folder / name).write_text(text)
    (folder / SUMS).write_text(as_text({path.name: sha256(path) for path in folder.iterdir()}))
    return folder


def test_any_flipped_bit_is_found_and_by_one_rank_at_least(small):
    assert [damage(small, rank, 5) for rank in range(5)] == [None] * 5
    for path in sorted(small.iterdir()):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 3):
            path.write_bytes((int.from_bytes(whole, "big") ^ 1 << bit).to_bytes(len(whole), "big"))
            found = damage(small)
            assert found, (path, bit)
            assert found.startswith(str(small))
            assert found in [damage(small, rank, 3) for rank in range(3)]
        path.write_bytes(whole)


def test_the_list_is_that_of_the_command_sha256sum(small):
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=small, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [".metadata: OK", "__0_0.distcp: OK", "run.json: OK"]


@pytest.mark.parametrize("name", TO_A_FILE)
def test_a_damaged_file_is_named_whatever_it_is(whole, tmp_path, name):
    for file in FILES:
        shutil.copytree(whole, tmp_path / file, symlinks=True)
        run = tmp_path / file / "run"
        TO_A_FILE[name](run / NEWEST / file)
        assert reason(file, name) in damage(run / NEWEST), file
        assert damage(run / OLDER) is None


@pytest.mark.parametrize("name", TO_A_CHECKPOINT)
def test_a_damaged_checkpoint_is_named(whole, tmp_path, name):
    shutil.copytree(whole, tmp_path / "all", symlinks=True)
    make, said = TO_A_CHECKPOINT[name]
    make(tmp_path / "all" / "run" / NEWEST)
    assert said in damage(tmp_path / "all" / "run" / NEWEST)


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_is_no_text_is_named(tmp_path, name):
    path = tmp_path / "text.jsonl"
    path.write_bytes(b"\n".join((GOOD, BAD_LINES[name], GOOD)))
    with pytest.raises(ValueError, match=r"text\.jsonl, line 2: expected an object"):
        Text(path)


def test_the_ways_have_every_outcome():
    assert {way.outcome for way in WAYS.values()} == {"resumed", "older", "refused", "ended"}


@pytest.mark.parametrize("name", WAYS)
def test_a_damaged_run_says_one_line_and_loses_nothing(command, whole, unbroken, tmp_path, name):
    way = WAYS[name]
    shutil.copytree(whole, tmp_path, symlinks=True, dirs_exist_ok=True)
    out = tmp_path / "run"
    way.damage(out)
    before = content(out)
    status, stdout, stderr = command(tmp_path, [*RUN, *way.options], way.disk)
    lines = stdout.splitlines()
    if way.outcome in ("refused", "ended"):
        assert status == 2
        (line,) = stderr.splitlines()
        assert line.startswith("ringlab.models.train: ")
        assert [word for word in way.said if word not in line] == [], line
        assert way.outcome == "ended" or (lines, content(out)) == ([], before)
        checkpoints = {name: digest for name, digest in before.items() if name.startswith((NEWEST, OLDER))}
        assert checkpoints.items() <= content(out).items()
        return
    assert (status, stderr) == (0, "")
    notes = {line for line in lines if line.startswith(("damaged ", "log "))}
    assert len(notes) == bool(way.said), notes
    assert [word for word in way.said if word not in "".join(notes)] == [], notes
    assert f"resumed   after step {2 if way.outcome == 'older' else 4}, from run" in lines
    newest = json.loads((out / "step-00000005" / "run.json").read_text())
    torch.testing.assert_close(torch.tensor(newest["losses"]), unbroken, rtol=1e-5, atol=0)
    if way.said != UNWRITTEN:
        torch.testing.assert_close(losses(out), unbroken, rtol=1e-5, atol=0)
    if way.outcome == "older" and way.said:
        assert os.path.lexists(out / f"{NEWEST}.damaged")  # nothing is thrown away
    assert damage(finished(out)[0]) is None


def test_all_ranks_pass_over_what_one_of_them_finds(ranks, whole, tmp_path):
    for file in (".metadata", "__2_0.distcp"):
        out = tmp_path / file
        shutil.copytree(whole / "run", out)
        flip(out / NEWEST / file, 30)
        options = [*SMALL, "--data", f"{whole}/text.txt", "--out", str(out), "--steps", "3", "--resume"]
        ranks(3, run, options)
        assert [path.name for path in finished(out)] == ["step-00000003", OLDER]
        flip(out / OLDER / file, 30)
        flip(out / "step-00000003" / file, 30)
        outcomes = ranks.outcomes(3, run, options)
        assert len({outcome.message for outcome in outcomes}) == 1
        assert "no whole checkpoint in its place: " in outcomes[0].message


def run_with_others(context, options, option, values):
    """The value of an option differs from rank to rank."""
    run(context, [*options, option, values[context.rank]])


def test_ranks_with_other_data_or_another_folder_are_refused(ranks, whole, tmp_path):
    (tmp_path / "text.txt").write_bytes((whole / "text.txt").read_bytes()[::-1])
    here, there = str(whole / "text.txt"), str(tmp_path / "text.txt")
    for name, values, said in (
        ("--data", [here, here, there], "rank 2 has sha256 of the data "),
        ("--seq-len", ["24", "24", "36"], "rank 2 has seq_len 36, here 24"),
        ("--out", [str(tmp_path / each) for each in "aab"], f"--out {tmp_path / 'b'} has no lock of rank 0"),
    ):
        options = [*SMALL, "--data", here, "--out", str(tmp_path / "run")]
        for outcome in ranks.outcomes(3, run_with_others, options, name, values):
            assert (outcome.kind, said in outcome.message) == ("ValueError", True), outcome.message
