"""In another project: the wheel, beside torch and numpy only."""

import json
import os
import pydoc
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import ringlab
from ringlab.support.extras import install
from tests.commands import LIMIT, ROOT
from tests.concepts import needed_by

OPTIONAL = ("IPython", "hypothesis", "jax", "jupyter_core", "matplotlib", "psutil", "tqdm", "transformers")
OPTIONAL += ("accelerate", "datasets", "peft", "tokenizers", "triton", "trl")

WITHOUT = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *args):
        return None if name.partition(".")[0] in {OPTIONAL} else super().find_spec(name, *args)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""

MODULES = """
import importlib, itertools, json, pkgutil, ring_doctor, ring_planner, ringlab, runpy, sys
missing, one_sentence = {}, []
packages = ringlab, ring_doctor, ring_planner
walks = [pkgutil.walk_packages(package.__path__, f"{package.__name__}.") for package in packages]
for module in itertools.chain(*walks):
    if module.name.endswith((".pytest_plugin", ".jobs.recorder")):
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
print(json.dumps([missing, one_sentence, "pytest" in sys.modules, ringlab.__file__]))
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


def test_the_wheel_holds_four_names_and_their_types(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        about = file.read(f"ringlab-{ringlab.__version__}.dist-info/METADATA").decode().splitlines()
        commands = file.read(f"ringlab-{ringlab.__version__}.dist-info/entry_points.txt").decode()
    of_ours = {"doctor": "ring_doctor.__main__", "plan": "ring_planner.command", "train": "ringlab.models.train"}
    assert all(f"ring-{name} = {home}:main\n" in commands for name, home in of_ours.items())
    assert "[pytest11]\nringlab = ring_doctor.pytest_plugin\n" in commands
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
def test_what_needs_an_optional_package_names_it_and_nothing_else_does(wheel, tmp_path):
    home = tmp_path / "home"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", home, wheel]
    subprocess.run(pip, check=True, timeout=LIMIT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(home)}
    script = [sys.executable, "-c", WITHOUT + MODULES]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    said, one_sentence, pytest_too, place = json.loads(done.stdout)
    assert place == str(home / "ringlab/__init__.py")
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
