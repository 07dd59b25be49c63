"""Another release of torch than those tested ends in one sentence that names it."""

import importlib

import pytest
import torch
from torch.torch_version import TorchVersion

from ringlab import support
from tests.commands import ROOT, run


def test_the_project_asks_for_the_releases_that_it_accepts():
    (asked,) = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("dependencies")]
    assert f'"torch>={support.OLDEST},<{support.TOO_NEW}"' in asked


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0+cu130"])
def test_a_release_in_the_range_is_accepted(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    importlib.reload(support)


@pytest.mark.parametrize("version", ["1.13.1", "2.8.0+cpu", "2.16.0", "3.0"])
def test_another_release_is_named(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(ImportError) as raised:
        importlib.reload(support)
    assert str(raised.value) == f"torch {version} found; expected torch>=2.11,<2.16, as in requirements.txt"


@pytest.mark.parametrize("name", ["ring_attn", "ringlab.training.flash_ring"])
def test_no_ring_runs_on_another_release(name):
    fake = f"import torch; torch.__version__ = torch.torch_version.TorchVersion('2.5.1'); import {name}"
    done = run("python", "-c", fake)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: torch 2.5.1 found; expected torch>=")
