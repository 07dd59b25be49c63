"""Every concept runs by itself, and its docstring shows the command, what it prints, and its place in the whole."""

import importlib
import os
import re
import subprocess
import sys
import textwrap

import pytest

from tests.concepts import CONCEPTS, ROOT, run_concept
from tests.needs_jax import with_jax
from tests.shown import check_shown

NAMES = [*CONCEPTS, "ring_attn"]


def docstring(name):
    return importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", with_jax(CONCEPTS))
def test_a_concept_checks_itself(name):
    seen = run_concept(name)
    assert seen.status == 0
    assert seen.printed
    assert "WRONG" not in seen.printed


def test_a_concept_is_a_command():
    done = subprocess.run([sys.executable, "-m", "basics.online_softmax"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_concept("basics.online_softmax").printed


@pytest.mark.parametrize("name", with_jax(NAMES))
@pytest.mark.parametrize("part", ["Shapes: ", "Before: ", "After: ", "Source: "])
def test_a_docstring_has_every_part(name, part):
    assert part in docstring(name)


@pytest.mark.parametrize("name", with_jax(NAMES))
def test_a_docstring_shows_what_its_command_prints(name):
    command, shown = re.search(r"^    \$ (.*)\n((?:    .*\n)*)", docstring(name), flags=re.MULTILINE).groups()
    assert shown, f"the docstring shows no output of {command!r}"
    if name == "ring_attn":
        assert command == "torchrun --nproc_per_node=4 ring_attn.py"
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        done = subprocess.run(torchrun + command.split()[1:], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        assert command == f"python -m {name}"
        printed = run_concept(name).printed
    check_shown(textwrap.dedent(shown), printed)


def test_without_jax_its_command_says_what_is_missing(tmp_path):
    missing = "raise ModuleNotFoundError(\"No module named 'jax'\", name='jax')"
    (tmp_path / "jax.py").write_text(missing)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "training.jax_ring"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"No module named 'jax'; .* pip install -r requirements-jax.txt\n", done.stderr)
