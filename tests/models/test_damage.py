"""A damaged folder of a run: one line, never a traceback, never a wait, and nothing is lost that was saved.

The folder has two checkpoints, of steps 2 and 4 of a run on three ranks. Each way changes the folder, or the options of
the command that goes on with it, and names what must come of it: a line in which these words stand, and an outcome.

    resumed     nothing is wrong, or only the log: the run goes on after step 4
    older       the newest checkpoint is passed over: the run goes on after step 2
    refused     exit status 2, before anything is computed or changed
    ended       exit status 2, and the checkpoints are as they were
"""

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ringlab.models import checkpoint, train
from ringlab.models.checkpoint import SUMS, as_text, damage, finished, sha256
from tests.mistakes import assert_refused
from tests.models.test_train import SMALL, losses, run

RUN = [*SMALL, "--data", "text.txt", "--out", "run", "--steps", "5"]
NEWEST, OLDER = ("step-00000004", "step-00000002")
NO_FILE = "cannot be read: No such file or directory"
OTHER_SUM = "does not match its checksum in SHA256SUMS"
NO_LIST = "SHA256SUMS is not the list of checksums"
TEXT = b"the keys and values go round the ring,\n" * 30_000  # 1.2 MB


@dataclass
class Way:
    """A way to damage a run."""

    outcome: str
    said: tuple[str, ...] = ()  # words that stand in the one line about it; none: no such line
    damage: Callable[[Path], Any] = lambda run: None  # what is done to the folder
    options: tuple[str, ...] = ("--resume",)
    disk: int | None = None  # the largest file that can be written, in bytes


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


def instead(path, make):
    """Remove what is there, and make something else in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make(path)


def copied(path, of):
    """`path` becomes a copy of the folder `of`, a checkpoint of the same run or of another."""
    instead(path, lambda path: shutil.copytree(of, path))


def both_without_a_list(run):
    (run / NEWEST / SUMS).write_bytes(b"")
    (run / OLDER / SUMS).write_bytes(bytes(range(256)) * 9)


def damaged_and_its_name_taken(run):
    (run / f"{NEWEST}.damaged").touch()
    (run / NEWEST / SUMS).unlink()


UNWRITTEN = ("the losses could not be written", "the checkpoints hold them")
GOES_ON = f"run/{NEWEST}, where --resume goes on (delete it to go on from run/{OLDER})"
NOT_WRITTEN = ("step-00000005 could not be written", GOES_ON)
BOTH_DAMAGED = ("no whole checkpoint in its place", f"{NEWEST}/{NO_LIST}", f"{OLDER}/{NO_LIST}", "another --out")
GONE = (NEWEST, f".metadata {NO_FILE}", OLDER)
TAKEN = (f"SHA256SUMS {NO_FILE}; move it away, run/{NEWEST}.damaged cannot be made",)
WAYS = {
    "a file is gone": Way("older", GONE, lambda run: (run / NEWEST / ".metadata").unlink()),
    "the lists of both": Way("refused", BOTH_DAMAGED, both_without_a_list),
    "the older one": Way("older", ("run.json is of step 2", OLDER), lambda run: copied(run / NEWEST, run / OLDER)),
    "damaged, and the name is taken": Way("refused", TAKEN, damaged_and_its_name_taken),
    "started again": Way("refused", ("holds an earlier run", "--resume", "--out"), options=()),
    "another batch": Way("refused", (NEWEST, "it has batch 4, here 2; expected"), options=("--resume", "--batch", "2")),
    "loss.svg, a folder": Way("resumed", UNWRITTEN, lambda run: instead(run / "loss.svg", Path.mkdir)),
    "data, one bit": Way("refused", (NEWEST, "sha256 of the data "), lambda run: flip(run.parent / "text.txt", -1)),
    # the largest file that can be written: as on a full disk, some writes fail
    "disk, no byte": Way("refused", ("--out", "cannot be written", "File too large"), disk=0),
    "disk, 100 bytes": Way("ended", NOT_WRITTEN, disk=100),
}


def go_on(folder, options, disk):
    """The exit status, stdout and stderr of `ringlab.models.train` with these options, in this process."""
    os.chdir(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if disk is None else disk, hard))
        try:
            status = train.main(options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return status, out.getvalue(), error.getvalue()


def content(folder):
    """The checksums of the files in a folder, but for the lock."""
    files = [path for path in folder.glob("**/*") if path.is_file() and not path.is_symlink() and path.name != "lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """A folder with a text, a run of 4 steps on 3 ranks in run/, and one of 5 steps on one process in unbroken/."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_bytes(TEXT)
    for world_size, out, steps in ((3, "run", 4), (1, "unbroken", 5)):
        ranks(world_size, run, ["--data", f"{folder}/text.txt", "--out", f"{folder}/{out}", "--steps", steps])
    return folder


@pytest.fixture(scope="module")
def command():
    with get_context("forkserver").Pool(1) as pool:
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


def test_a_plain_command_trains_on_one_process(command, tmp_path):
    """Its data are a folder, in which an earlier run has left its log."""
    (tmp_path / "run").mkdir()
    for name in ("a.txt", "b.md", "run/lock", "run/loss.jsonl"):
        (tmp_path / name).write_text("the keys go round the ring,\n")
    options = [*SMALL, "--data", str(tmp_path), "--steps", "3"]
    status, stdout, stderr = command(tmp_path, options, None)
    assert (status, stderr) == (0, "")
    lines = stdout.splitlines()
    assert lines[:4] == [
        "model     2 layers, 1 of 2 linear, hidden 16, 4 heads on 2, 14,940 parameters, fp32",
        "mesh      dp 1 x cp 1, zigzag layout",
        "step      4 x 24 tokens, 4 x 24 on a rank",
        "data      ., 2 file(s), 56 bytes",
    ]
    assert re.fullmatch(r" +3/3 \[#{20}\] loss \d\.\d{4}, [\d,]+ tokens/s, MFU [^,]+, [\d,]+ MB a rank", lines[-2])
    assert lines[-1].startswith("done      3 steps; the curve is ")


def test_any_flipped_bit_is_found_and_by_one_rank_at_least(small):
    assert [damage(small, rank, 5) for rank in range(5)] == [None] * 5
    for path in sorted(small.iterdir()):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 11):
            path.write_bytes((int.from_bytes(whole, "big") ^ 1 << bit).to_bytes(len(whole), "big"))
            found = damage(small)
            assert found, (path, bit)
            assert found.startswith(str(small))
            assert f"{path.name} {OTHER_SUM}" in found or path.name == SUMS
            assert found in [damage(small, rank, 3) for rank in range(3)]
        path.write_bytes(whole)
    instead(small / ".metadata", Path.mkdir)
    assert ".metadata cannot be read: Is a directory" in damage(small)


def test_the_list_is_that_of_the_command_sha256sum(small):
    (small / "__1_0.distcp").write_bytes(TEXT)
    (small / SUMS).write_text(as_text({path.name: sha256(path) for path in small.iterdir() if path.name != SUMS}))
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=small, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [".metadata: OK", "__0_0.distcp: OK", "__1_0.distcp: OK", "run.json: OK"]


def test_ranks_share_out_the_slices_and_each_is_read_once(small):
    for number in range(8):
        (small / f"__{number}_0.distcp").write_text("")
    (small / SUMS).write_text(as_text({path.name: sha256(path) for path in small.iterdir() if path.name != SUMS}))
    for world_size in (1, 3, 4):
        with mock.patch.object(checkpoint, "sha256", side_effect=sha256) as read:
            assert [damage(small, rank, world_size) for rank in range(world_size)] == [None] * world_size
        slices = [call.args[0].name for call in read.call_args_list if call.args[0].name.startswith("__")]
        assert sorted(slices) == sorted(path.name for path in small.glob("__*")), world_size


def test_all_that_are_damaged_are_set_aside_and_so_is_the_same_step_again(ranks, whole, tmp_path):
    out, newer = tmp_path / "run", "step-00000006"
    shutil.copytree(whole / "run", out)
    copied(out / newer, out / NEWEST)
    options = ["--data", f"{whole}/text.txt", "--out", out, "--steps", 4, "--resume"]
    for again in (False, True):
        for name in (NEWEST,) if again else (newer, NEWEST):
            (out / name / "run.json").write_text(f"damage {again}")
        ranks(2, run, options)
        assert [path.name for path in finished(out)] == [NEWEST, OLDER]
        assert damage(finished(out)[0]) is None
        assert sorted(path.name for path in out.glob("*.damaged")) == [f"{NEWEST}.damaged", f"{newer}.damaged"]
        assert (out / f"{NEWEST}.damaged" / "run.json").read_text() == f"damage {again}"


@pytest.mark.parametrize("name", WAYS)
def test_a_damaged_run_says_one_line_and_loses_nothing(command, whole, tmp_path, name):
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
        assert line.startswith("ring-train: ")
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
    newest, unbroken = json.loads((out / "step-00000005" / "run.json").read_text()), losses(whole / "unbroken")
    torch.testing.assert_close(torch.tensor(newest["losses"]), unbroken, rtol=1e-5, atol=0)
    if way.said != UNWRITTEN:
        torch.testing.assert_close(losses(out), unbroken, rtol=1e-5, atol=0)
    if way.outcome == "older" and way.said:
        assert os.path.lexists(out / f"{NEWEST}.damaged")  # nothing is thrown away
    assert damage(finished(out)[0]) is None


def test_all_ranks_pass_over_what_one_of_them_finds(ranks, whole, tmp_path):
    out, of_rank_0, of_rank_2 = tmp_path / "run", "__2_0.distcp", "__1_0.distcp"  # by who checks them
    shutil.copytree(whole / "run", out)
    flip(out / NEWEST / of_rank_2, 30)
    options = ["--data", f"{whole}/text.txt", "--out", out, "--steps", 3, "--resume"]
    ranks(3, run, options)
    assert [path.name for path in finished(out)] == ["step-00000003", OLDER]
    flip(out / OLDER / of_rank_0, 30)
    flip(out / "step-00000003" / of_rank_2, 30)
    assert_refused(ranks, 3, "no whole checkpoint in its place: ", run, options)


def run_with_others(context, options, option, values):
    """The value of an option differs from rank to rank; or the errors, when they write."""
    if option:
        return run(context, [*options, option, values[context.rank]])
    with mock.patch.object(checkpoint.tempfile, "TemporaryFile", side_effect=values[context.rank]):
        return run(context, options)


def test_ranks_with_other_data_or_another_folder_are_refused(ranks, whole, tmp_path):
    (tmp_path / "text.txt").write_bytes((whole / "text.txt").read_bytes()[::-1])
    here, there = str(whole / "text.txt"), str(tmp_path / "text.txt")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/lock").write_text("process 7")  # of an earlier run
    for name, values, said in (
        ("--data", [here, here, there], "the ranks disagree about sha256 of the data; expected"),
        ("--seq-len", ["24", "24", "36"], "rank 2: seq_len=36"),
        ("", [None, None, PermissionError("no")], f"rank 2: --out {tmp_path / 'run'} cannot be written: no; expected"),
        ("--out", [str(tmp_path / each) for each in "aab"], f"--out {tmp_path / 'b'} has no lock of rank 0"),
        ("--out", [str(tmp_path / each) for each in "aac"], f"--out {tmp_path / 'c'} has no lock of rank 0"),
    ):
        options = ["--data", here, "--out", tmp_path / "run"]
        assert_refused(ranks, 3, said, run_with_others, options, name, values)
