"""A module of an older version says where it is now, however it is imported."""

import importlib
import subprocess
import sys

import pytest

from ringlab.moved import MOVED
from tests.commands import ROOT


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_tells_the_new_one(old):
    with pytest.raises(ImportError, match=f"^{old} is now {MOVED[old]}$"):
        importlib.import_module(old)
    places = [ROOT / f"{MOVED[old].replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    assert any(place.exists() for place in places)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from ringlab.training import flash_ring", "is now ringlab.ring.flash_ring"),
        ("from ringlab.training.flash_ring import ring_flash_attention", "is now ringlab.ring.flash_ring"),
        ("from ringlab.models import hugging_face", "is now ringlab.hugging_face.use"),
        ("import ringlab.planning.cost_model", "is now ring_planner.command"),
        ("import ringlab.training.none", "No module named 'ringlab.training.none'"),
        ("import ringlab.none", "No module named 'ringlab.none'"),
    ],
)
def test_every_form_of_import_is_answered(line, said):
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(said)
