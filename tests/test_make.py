"""`make` sets up with uv, or with pip where uv cannot or may not.

The interpreter and uv are scripts that note how they were called. What the internet answers is not tried.
"""

import os
import subprocess

import pytest

from tests.commands import ROOT

PYTHON = """#!/bin/bash
echo "python $*" >> "$CALLS"
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *" config list") echo "$CONFIG" ;;
    *" uv") [ "$UV" = absent ] && exit 1
            printf '#!/bin/bash\\necho "uv $*" >> "$CALLS"; [ "$UV" = works ]' > .venv/bin/uv
            chmod +x .venv/bin/uv ;;
    *" -r requirements.txt") [ "$FOUND" != no ] || { echo no such package; exit 1; } ;;
esac
"""
BY_UV = "uv pip install --python .venv/bin/python --torch-backend=auto -r requirements.txt"
BY_PIP = "python -m pip install --disable-pip-version-check --no-compile -r requirements.txt"


@pytest.fixture
def set_up(tmp_path):
    """make, in a folder where nothing has been set up: what it printed and called."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)

    def make(status=0, **environment):
        calls = tmp_path / "calls"
        environment = {"CONFIG": "global.timeout='60'", "UV": "works", "CALLS": str(calls), **environment}
        command = ["make", "PYTHON=./python", ".venv/ready"]
        given = {**os.environ, **environment}
        done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
        assert (done.returncode != 0, (tmp_path / ".venv/ready").exists()) == (status != 0, status == 0), done.stderr
        return done.stdout, calls.read_text().splitlines()

    return make


def test_uv_sets_up(set_up):
    printed, calls = set_up()
    assert calls[-1] == BY_UV
    assert BY_PIP not in calls
    assert "pip installs" not in printed
    assert set_up()[1] == calls  # once


@pytest.mark.parametrize("config", ["global.find-links='/here'", ":env:.extra-index-url='x'", "global.no-index='true'"])
def test_pip_sets_up_where_it_was_told_where_to_look(set_up, config):
    """By a pip.conf, or by PIP_FIND_LINKS and so on."""
    printed, calls = set_up(CONFIG=config)
    assert calls[-2:] == [BY_PIP, "python -m compileall -q -j 0 .venv/lib"]
    assert not any("uv" in call for call in calls)
    assert "pip was told where to look, so pip installs" in printed


@pytest.mark.parametrize("uv", ["absent", "fails"])
def test_pip_sets_up_where_uv_fails(set_up, uv):
    printed, calls = set_up(UV=uv)
    assert BY_PIP in calls
    assert (BY_UV in calls) == (uv == "fails")
    assert "uv cannot (.venv/uv.log says why), so pip installs" in printed


def test_the_demo_is_what_other_tests_run():
    """tests/basics/test_worked_example.py and tests/pages/test_pages.py."""
    printed = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = [line.removeprefix(".venv/bin/") for line in printed.splitlines() if "/python worked" in line]
    assert commands == ["python worked_example.py"]
    assert ".venv/bin/torchrun --nproc_per_node=4 ring_attn.py\n" in printed


def test_a_set_up_that_fails_is_not_ready(set_up):
    assert "no such package" in set_up(status=2, UV="fails", FOUND="no")[0]
