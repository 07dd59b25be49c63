"""Every concept runs by itself, and its docstring shows the command, what it prints, and its place in the whole."""

import importlib
import os
import re
import sys
import textwrap

import pytest

from tests.commands import run
from tests.concepts import CONCEPTS, run_concept
from tests.extras import marked
from tests.shown import check_shown

NAMES = [*CONCEPTS, "ring_attn"]


def test_what_is_run_once_is_run_on_one_worker(request):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@concepts")


def docstring(name):
    return importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", marked(CONCEPTS))
def test_a_concept_checks_itself(name):
    seen = run_concept(name)
    assert seen.status == 0
    assert seen.printed
    assert "WRONG" not in seen.printed


def test_a_concept_is_a_command():
    done = run(sys.executable, "-m", "ringlab.basics.online_softmax")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_concept("ringlab.basics.online_softmax").printed


@pytest.mark.parametrize("name", marked(NAMES))
@pytest.mark.parametrize("part", ["Shapes: ", "Before: ", "After: ", "Source: "])
def test_a_docstring_has_every_part(name, part):
    assert part in docstring(name)


@pytest.mark.parametrize("name", marked(CONCEPTS))
def test_a_docstring_shows_what_its_command_prints(name):
    """That of the ring is in test_readme.py: it starts processes, so it is run once for all that show its output."""
    command, shown = re.search(r"^    \$ (.*)\n((?:    .*\n)*)", docstring(name), flags=re.MULTILINE).groups()
    assert shown, f"the docstring shows no output of {command!r}"
    assert command == f"python -m {name}"
    check_shown(textwrap.dedent(shown), run_concept(name).printed)
