"""The scripts of examples/: each trains as one process does, is short, and has a line in the page's table."""

import re
import sys
from importlib.util import find_spec

import pytest

from tests.commands import ROOT
from tests.extras import MISSING

EXAMPLES = ROOT / "examples"
SHARED = {"tiny", "compare"}
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in SHARED)


IN_CI = ("fsdp2",)  # half a minute; the others are exhaustive: test_models_hugging_face_trainer.py runs Trainer
EACH = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.exhaustive) for name in SCRIPTS]


@pytest.mark.skipif(find_spec("trl") is None, reason=MISSING["trl"])
@pytest.mark.parametrize("name", EACH)
def test_an_example_trains_as_one_process_does(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["compare.py"])
    import compare

    assert all(ok for _, ok in compare.table([name]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_short_and_says_how_it_is_started(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 40
    assert f"torchrun --nproc_per_node=4 examples/{name}.py" in text


def test_the_page_has_a_line_for_each_example():
    page = (EXAMPLES / "README.md").read_text()
    assert sorted({*re.findall(r"^\| \[(\w+)\.py\]", page, flags=re.MULTILINE)}) == SCRIPTS
