"""What was proved of the doctor is proved of these very files, and a part of them has a number."""

import sys

import pytest

from tests import proved


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name in ("ring_attn.py", "ring_doctor/deep/judge.py", "ringlab/training/ring.py", "ringlab/support/pool.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    monkeypatch.setattr(proved, "ROOT", tmp_path)
    monkeypatch.setattr(proved, "RECORD", tmp_path / "proved.sha256")
    return tmp_path


def status(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["tests.proved", *options])
    return proved.main()


@pytest.mark.parametrize("changed", ["ring_attn.py", "ring_doctor/deep/judge.py", "ringlab/training/new.py", None])
def test_a_record_holds_until_a_file_changes(files, monkeypatch, capsys, changed):
    assert status(monkeypatch) == 1, "nothing is recorded"
    assert status(monkeypatch, "--record") == 0
    if changed:
        (files / changed).write_text("x = 2\n")
    capsys.readouterr()
    assert status(monkeypatch) == (1 if changed else 0)
    assert capsys.readouterr().out.strip() in ([str(part) for part in range(proved.PARTS)] if changed else [""])


def test_it_looks_at_the_doctor_and_at_the_rings():
    assert all(list(proved.ROOT.glob(pattern)) for pattern in proved.PATTERNS)
