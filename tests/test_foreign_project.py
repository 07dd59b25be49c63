"""In another project: the wheel in an environment of torch and numpy only, beside folders with the names of ours."""

import json
import os
import pydoc
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch

import ringlab
from ringlab.support.extras import install
from tests.commands import LIMIT, ROOT
from tests.concepts import needed_by

OPTIONAL = ("IPython", "hypothesis", "jax", "jupyter_core", "matplotlib", "psutil", "tqdm", "transformers")
OPTIONAL += ("accelerate", "datasets", "peft", "tokenizers", "triton", "trl")
THEIRS = ("bench", "figures", "models", "notebooks", "support", "tests", "training", "utils")

WITHOUT = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *args):
        return None if name.partition(".")[0] in {OPTIONAL} else super().find_spec(name, *args)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""

RING = f"""
import {", ".join(THEIRS)}
from ringlab import ring_flash_attention

assert all(package.THEIRS for package in ({", ".join(THEIRS)}))

def attention(q, k, v, causal=False, group=None):
    return ring_flash_attention(q, k, v, causal=causal, group=group)

def scaled_twice(q, k, v, causal=False, group=None):
    return ring_flash_attention(q, k, v, causal=causal, scale=1 / q.shape[-1], group=group)
"""

TEST = """
import pytest
from ring_doctor import assert_ring
from theirs.models import ring

FEW = {"worlds": (3,), "dtypes": ("float32",), "gradients": False}

def test_right():
    assert_ring(ring.attention, **FEW)

def test_fixture(ring_doctor):
    with pytest.raises(pytest.fail.Exception, match="^SICK: scale_twice"):
        ring_doctor(ring.scaled_twice, **FEW)
"""

MODULES = """
import importlib, itertools, json, pkgutil, ring_doctor, ring_planner, ringlab, runpy, sys
missing, one_sentence = {}, []
packages = ringlab, ring_doctor, ring_planner
walks = [pkgutil.walk_packages(package.__path__, f"{package.__name__}.") for package in packages]
for module in itertools.chain(*walks):
    if module.name.endswith((".pytest_plugin", ".jobs.recorder", ".jobs.watching")):
        continue  # pytest loads its plug-in by itself, and the user's job the other two
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        missing[module.name] = str(error)
        try:
            runpy.run_module(module.name, run_name="__main__")
        except SystemExit as end:
            one_sentence += [module.name] * (end.code == str(error))
        except ImportError:
            pass
print(json.dumps([missing, one_sentence, "pytest" in sys.modules]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, which must not leave anything behind there."""
    built, before = tmp_path_factory.mktemp("built"), set(ROOT.iterdir())
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", built]  # hatchling: the extra [test]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, ROOT], check=True, timeout=LIMIT)
    assert {path.name for path in set(ROOT.iterdir()) - before}.isdisjoint({"build", "dist", "ringlab.egg-info"})
    (path,) = built.iterdir()
    return path


@pytest.fixture(scope="module")
def here(wheel, tmp_path_factory):
    """An environment with the wheel, torch, numpy and pytest: a function that runs one of its commands in a folder."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True, with_pip=True)
    programs = home / "bin"
    subprocess.run([programs / "pip", "install", "--no-deps", "--no-index", wheel], check=True, timeout=LIMIT)
    (installed,) = home.glob("lib/python*/site-packages")
    outer = {str(Path(module.__file__).parents[1]) for module in (torch, numpy, pytest)}
    (installed / "without.py").write_text(WITHOUT)
    (installed / "outer.pth").write_text("\n".join([*outer, "import without"]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no plugins of the outer one

    def run(folder, *command):
        return subprocess.run(
            [programs / command[0], *map(str, command[1:])],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    found = run(tmp_path_factory.mktemp("empty"), "python", "-c", "import ringlab; print(ringlab.__file__)")
    assert found.stdout == f"{installed / 'ringlab' / '__init__.py'}\n", found.stderr
    return run


def project(folder):
    """A project with packages of its own that have the names of our folders."""
    for name in (*THEIRS, "theirs", "theirs/models"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("THEIRS = True\n")
    (folder / "theirs/models/ring.py").write_text(RING)
    return folder


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    folder = project(tmp_path_factory.mktemp("flat"))
    (folder / "tests/test_ring.py").write_text(TEST)
    return folder


def test_the_wheel_holds_four_names_and_their_types(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        about = file.read(f"ringlab-{ringlab.__version__}.dist-info/METADATA").decode().splitlines()
        commands = file.read(f"ringlab-{ringlab.__version__}.dist-info/entry_points.txt").decode()
    of_ours = {"doctor": "ring_doctor.__main__", "plan": "ring_planner.command", "train": "ringlab.models.train"}
    assert all(f"ring-{name} = {home}:main\n" in commands for name, home in of_ours.items())
    tops = {name.partition("/")[0] for name in names}
    assert tops == {
        "ringlab",
        "ring_doctor",
        "ring_planner",
        "ring_attn.py",
        f"ringlab-{ringlab.__version__}.dist-info",
    }
    assert {f"{name}/py.typed" for name in ("ringlab", "ring_doctor", "ring_planner")} | {
        "ring_doctor/pytest_plugin.py"
    } < set(names)
    assert not [name for name in names if "patient" in name.removesuffix("patient.py")]
    data = {"ring_planner/errors.json", "ring_planner/presets.json", "ring_doctor/mistakes/README.md"}
    data |= {"ring_doctor/whole_models/README.md"}
    assert {name for name in names if name.endswith((".json", ".md", ".svg"))} == data
    assert {path.parent.name for path in map(Path, names) if path.suffix == ".py"}.isdisjoint({"findings", "tests"})
    asked = [line.split(": ")[1] for line in about if line.startswith("Requires-Dist")]
    assert [line.partition("<")[0] for line in asked if "extra ==" not in line] == ["numpy", "torch"]
    extras = [line.split(": ")[1] for line in about if line.startswith("Provides-Extra")]
    assert set(extras) == {"hf", "jax", "loops", "plots", "notebooks", "site", "test", "triton"}
    assert f"\nversion: {ringlab.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_package_itself_imports_neither_torch_nor_numpy():
    code = "import sys, ringlab; print([name for name in ('torch', 'numpy') if name in sys.modules], *ringlab.__all__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"[] {' '.join(ringlab.__all__)}\n", done.stderr
    assert {name for name in dir(ringlab) if not name.startswith("__")} <= set(ringlab.__all__)
    assert find_spec("trl") is None or set(ringlab.__all__) <= set(dir(ringlab))
    assert all(getattr(ringlab, name) for name in dir(ringlab))
    assert "join_ring(" in pydoc.render_doc(ringlab, renderer=pydoc.plaintext)


@pytest.mark.slow
def test_what_needs_an_optional_package_names_it_and_nothing_else_does(here, tmp_path):
    done = here(tmp_path, "python", "-c", MODULES)
    assert done.returncode == 0, done.stderr
    said, one_sentence, pytest_too = json.loads(done.stdout)
    extras = {"jax": "jax", "transformers": "hf", "matplotlib": "plots", "trl": "loops", "triton": "triton"}
    paths = [path for folder in ("hugging_face", "ways/jax") for path in ROOT.glob(f"ringlab/{folder}/[!_]*.py")]
    paths += [ROOT / "ringlab/ring/fused_merge.py"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    needed = {name: needed_by(name) for name in names}
    needed |= dict.fromkeys(("ringlab.support.drawing", "ring_doctor.explaining.xray_picture"), "matplotlib")
    assert set(said) == set(needed)
    for name, words in said.items():
        package = needed[name]
        missing = "accelerate" if package == "trl" else package  # the first of those that TRL needs too
        assert words == f"No module named '{missing}'; it comes with: {install(extras[package])}"
    assert set(said) == set(one_sentence)
    assert not pytest_too


@pytest.mark.slow
def test_the_doctor_works_in_their_tests(here, flat):
    done = here(flat, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ringlab", "tests")
    assert done.stdout.splitlines()[-1].startswith("2 passed"), done.stdout


@pytest.mark.slow
def test_a_model_is_trained_without_pictures(here, flat):
    small = "--steps 2 --seq-len 24 --layers 1 --hidden 16 --heads 4 --kv-heads 2"
    done = here(flat, "ring-train", *small.split())
    assert done.returncode == 0, done.stderr
    said = f"done      2 steps; the curve needs matplotlib: {install('plots')}; its numbers are run/loss.jsonl"
    assert done.stdout.splitlines()[-1] == said
    assert len((flat / "run/loss.jsonl").read_text().splitlines()) == 2
    shutil.rmtree(flat / "run")
