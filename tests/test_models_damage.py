"""A damaged folder of a run: one line, never a traceback, never a wait, and nothing is lost that was saved."""

import hashlib
import json
import shutil

import pytest
import torch

from ringlab.models import train
from ringlab.support.processes import forkserver
from tests.damage import NEWEST, OLDER, WAYS, go_on

SMALL = ["--seq-len=24", "--layers=1", "--hidden=16", "--heads=4", "--kv-heads=2", "--batch=4", "--save-every=2"]
RUN = [*SMALL, "--data", "text.txt", "--out", "run", "--steps", "5"]


def run(context, options):
    train.train(context, train.parse(options))


def losses(folder):
    lines = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return torch.tensor([line["loss"] for line in lines])


def content(folder, pattern="**/*"):
    """The checksums of the files in a folder, but for the lock."""
    files = (path for path in folder.glob(pattern) if path.is_file() and path.name != "lock")
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


def test_there_are_more_than_a_hundred_ways():
    assert len(WAYS) > 200
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
        assert [word for word in way.said if word not in line] == []
        assert len(line) < 600
        if way.outcome == "refused":
            assert lines == []
            assert content(out) == before
        for step in (NEWEST, OLDER):
            assert content(out / step).items() >= content(whole / "run" / step).items() or "disk" not in name
        return
    assert (status, stderr) == (0, "")
    notes = {line for line in lines if line.startswith(("damaged ", "log "))}
    assert len(notes) == bool(way.said), notes
    assert [word for word in way.said if word not in "".join(notes)] == []
    assert f"resumed   after step {2 if way.outcome == 'older' else 4}, from run" in lines
    if (out / "loss.jsonl").is_file() and (out / "loss.unfinished").is_file() is (out / "loss.unfinished").exists():
        torch.testing.assert_close(losses(out), unbroken, rtol=1e-5, atol=0)
    kept = json.loads((out / "step-00000005" / "run.json").read_text())["losses"]
    torch.testing.assert_close(torch.tensor(kept), unbroken, rtol=1e-5, atol=0)
    if way.outcome == "older" and way.said:
        assert (out / f"{NEWEST}.damaged").exists() or (out / f"{NEWEST}.damaged").is_symlink()
    again = command(tmp_path, [*RUN, *way.options, "--steps", "5"], None)
    assert (again[0], again[2]) == (0, "")
    assert "damaged " not in again[1]
