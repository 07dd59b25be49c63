"""The house: imports point back along the reading order and in no circle, private names stay in their file, the core
needs torch and numpy alone, and no folder outgrows its budget of lines. All of it is read from the text of the files,
so imports inside functions count."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.commands import ROOT

ORDER = (  # the reading order: a file imports from its own row and from the rows above it
    ("ringlab.support",),
    ("ringlab.basics",),
    ("worked_example", "ring_attn"),
    ("ringlab.training",),
    ("ringlab.planning",),
    ("ringlab.models",),
    ("ring_doctor.asking",),
    ("ring_doctor.mistakes", "ring_doctor.catalogue"),
    ("ring_doctor.explaining",),
    ("ring_doctor",),
    ("ringlab",),  # the package itself, which names what people come for
    ("figures", "notebooks", "bench", "tests", "book"),
)
LINES = {  # of .py files, at most: what was reached so far; raised only by an issue that names the number
    "ringlab/support": 1300,
    "ringlab/basics": 900,
    "ringlab/training": 4240,  # 640 of them a ring of states
    "ringlab/planning": 2600,
    "ringlab/models": 3600,  # 245 and 70 of the ring of states
    "ring_doctor": 6660,  # without the patients; 330 of the ring of states
    "ring_doctor/patients": 1300,
    "figures": 2450,
    "notebooks": 11_900,
    "bench": 4700,
    "examples": 375,
    "tests": 24_420,
    "book": 1600,
}
LONGEST = 320  # lines of a file of the package
README, FILES, TOP = 130, 520, 18  # lines; files in git; names at the top level but those that begin with a dot
LOADED = 1300  # lines of this project that `import ring_attn` loads
OURS = {home.partition(".")[0] for row in ORDER for home in row}
CORE = {"torch", "numpy", *OURS, *sys.stdlib_module_names}
NEED_MORE = (  # modules and folders that need an optional package as soon as they are imported
    "ringlab.training.fused_merge",
    "ringlab.training.jax_block",
    "ringlab.training.jax_ring",
    "ringlab.models.hugging_face",
    "ringlab.models.hugging_face_batch",
    "ringlab.models.hugging_face_generate",
    "ringlab.models.hugging_face_masks",
    "ringlab.models.hugging_face_pass",
    "ringlab.models.hugging_face_proof",
    "ringlab.models.hugging_face_states",
    "ringlab.models.hugging_face_trainer",
    "ringlab.support.drawing",
    "ring_doctor.explaining.xray_picture",
    "ring_doctor.patients",
    "ring_doctor.pytest_plugin",
)


@dataclass(frozen=True)
class Use:
    """A module that a file imports, and a name of that module."""

    source: str  # the module that the file is
    target: str  # the module that it imports
    name: str  # the name that it takes from there, or ""
    at_once: bool  # when the file is imported, not when a function is called


def imports(tree, at_once=True):
    """Every import statement, and whether it runs when the file is imported. Those for type checkers are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_once
        yield from imports(node, at_once and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def uses(root):
    """Every Use of every file of the project."""
    paths = [*root.glob("*.py"), *(path for top in OURS for path in root.glob(f"{top}/**/*.py"))]
    names = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    found = []
    for source, path in names.items():
        tree, modules = ast.parse(path.read_text()), {}  # modules: what the file calls them, and their names
        for node, at_once in imports(tree):
            for alias in node.names:
                if isinstance(node, ast.Import):
                    target, name = alias.name, ""
                elif f"{node.module}.{alias.name}" in names:
                    target, name = f"{node.module}.{alias.name}", ""
                else:
                    target, name = node.module, alias.name
                found.append(Use(source, target, name, at_once))
                if target in names and not name:
                    modules[alias.asname or alias.name] = target
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
                found.append(Use(source, modules[ast.unparse(node.value)], node.attr, at_once=False))
            assert not getattr(node, "level", 0), f"{source} imports by dots: write the whole name"
    return found


def is_in(module, folder):
    return f"{module}.".startswith(f"{folder}.")


def row(module):
    """The row of ORDER that the module is in: the one with the longest name."""
    homes = [(len(home), i) for i, row in enumerate(ORDER) for home in row if is_in(module, home)]
    assert homes, f"{module} has no place in the reading order"
    return max(homes)[1]


def pointing_on(found):
    ours = [use for use in found if use.target.partition(".")[0] in OURS]
    return {f"{use.source} imports {use.target}" for use in ours if row(use.target) > row(use.source)}


def in_a_circle(found):
    graph = {}
    for use in found:
        graph.setdefault(use.source, set()).add(use.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def private(found):
    ours = [use for use in found if use.target.partition(".")[0] in OURS]
    return {f"{use.source}: {use.name}" for use in ours if use.name.startswith("_") and not use.name.endswith("__")}


def needing_more(found):
    """The modules of all rows but the last that need more than torch and numpy, or a module that does."""
    needing, before = set(), None
    while needing != before:
        before = set(needing)
        needing |= {
            use.source
            for use in found
            if use.at_once and (use.target in needing or use.target.partition(".")[0] not in CORE)
        }
    return {module for module in needing if row(module) < len(ORDER) - 1}


@pytest.fixture(scope="module")
def found():
    return uses(ROOT)


@pytest.mark.parametrize("rule", [pointing_on, in_a_circle, private])
def test_the_house_is_in_order(found, rule):
    assert rule(found) == set()


def test_only_these_modules_need_an_optional_package(found):
    homes = {module: [home for home in NEED_MORE if is_in(module, home)] for module in needing_more(found)}
    assert {module for module, of in homes.items() if not of} == set()
    assert {home for of in homes.values() for home in of} == set(NEED_MORE)


HOUSE = {  # a small one, in order
    "ring_attn.py": "import torch.nn._f\nfrom torch import _g\nprint(torch._h)",
    "ringlab/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bench import b",
    "ringlab/support/a.py": "x, _y = 1, 2",
    "ringlab/basics/b.py": "from ringlab.support.a import x as _x",
    "ringlab/models/c.py": "def f():\n    import jax\n    from ringlab.basics import b",
    "bench/b.py": "import jax\nfrom ringlab.models.c import f, __doc__",
}
PLANTED = [  # the rule that is broken; the file that breaks it, and its text; what the test says
    (pointing_on, "ringlab/support/a.py", "def f():\n    from ringlab.basics import b", "a imports ringlab.basics.b"),
    (pointing_on, "ring_doctor/d.py", "import bench.b", "d imports bench.b"),
    (pointing_on, "ring_attn.py", "from ringlab import shard", "ring_attn imports ringlab"),
    (in_a_circle, "ringlab/basics/b.py", "if 1:\n    import ringlab.models.c", "ringlab.models.c"),
    (in_a_circle, "ringlab/models/c.py", "def f():\n    from bench import b", "bench.b"),
    (private, "bench/b.py", "from ringlab.support.a import _y", "bench.b: _y"),
    (private, "bench/b.py", "from ringlab.support import a\nprint(a._y)", "bench.b: _y"),
    (private, "bench/b.py", "import ringlab.support.a\nprint(ringlab.support.a._y)", "bench.b: _y"),
    (needing_more, "ringlab/support/a.py", "import jax", "ringlab.basics.b"),
    (needing_more, "ringlab/models/c.py", "class C:\n    import jax", "ringlab.models.c"),
]


def changed_house(folder, name=None, text=""):
    for each, its in {**HOUSE, **({name: text} if name else {})}.items():
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).write_text(its)
    return uses(folder)


@pytest.mark.parametrize("rule", [pointing_on, in_a_circle, private, needing_more])
def test_a_house_in_order_is_not_blamed(rule, tmp_path):
    assert rule(changed_house(tmp_path)) == set()


@pytest.mark.parametrize(("rule", "name", "text", "said"), PLANTED)
def test_a_broken_rule_is_seen(rule, name, text, said, tmp_path):
    assert said in " ".join(rule(changed_house(tmp_path, name, text)))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [("new.py", "import ringlab", "no place"), ("ringlab/basics/b.py", "from . import a", "imports by dots")],
)
def test_what_cannot_be_placed_is_an_error(name, text, said, tmp_path):
    with pytest.raises(AssertionError, match=said):
        pointing_on(changed_house(tmp_path, name, text))


def lines(path):
    return len(path.read_text().splitlines())


def over_budget(root):
    """Each folder with more lines than its budget. A folder with a budget of its own does not count in another."""
    sizes = dict.fromkeys(LINES, 0)
    for path in root.rglob("*.py"):
        homes = [folder for folder in LINES if path.is_relative_to(root / folder)]
        if homes:
            sizes[max(homes, key=len)] += lines(path)
    return {folder: size for folder, size in sizes.items() if size > LINES[folder]}


def too_long(root):
    """Each file of the package with more lines than a reader holds."""
    paths = {*root.glob("ringlab/**/*.py"), *root.glob("ring_doctor/**/*.py"), root / "ring_attn.py"}
    return {path.name: lines(path) for path in paths if lines(path) > LONGEST}


def test_no_folder_and_no_file_outgrows_its_budget():
    assert (over_budget(ROOT), too_long(ROOT)) == ({}, {})
    assert lines(ROOT / "README.md") <= README


def test_the_map_tells_the_budgets():
    told = re.findall(r"^\| `([a-z_/]+)/` \| ([\d,]+) \|", (ROOT / "notebooks/README.md").read_text(), re.M)
    assert {folder: int(size.replace(",", "")) for folder, size in told} == LINES


def test_files_and_names_are_few():
    if not (ROOT / ".git").exists():
        pytest.skip("needs git's list of files")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert len(names) - 1 <= FILES
    assert len({name.split("/")[0] for name in names if name and not name.startswith(".")}) <= TOP


def test_the_ring_loads_little():
    script = "import sys, ring_attn; print(*(getattr(m, '__file__', '') for m in sys.modules.values()), sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours = [Path(name) for name in loaded.split("\n") if name.startswith(f"{ROOT}/ring")]
    assert ROOT / "ring_attn.py" in ours
    assert sum(map(lines, ours)) <= LOADED


def test_a_house_that_is_too_large_is_seen(tmp_path):
    full = {folder: LINES[folder] for folder in ("ringlab/basics", "ring_doctor", "ring_doctor/patients")}
    for folder, size in full.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "a.py").write_text("\n" * size)
    assert over_budget(tmp_path) == {}
    (tmp_path / "ring_doctor/b.py").write_text("\n")
    (tmp_path / "ringlab/basics/b.py").write_text("x")  # a last line without its end counts
    more = ("ringlab/basics", "ring_doctor")
    assert over_budget(tmp_path) == {folder: LINES[folder] + 1 for folder in more}
    (tmp_path / "ring_attn.py").write_text("\n" * LONGEST)
    assert too_long(tmp_path).keys() == {"a.py"}
    (tmp_path / "ring_attn.py").write_text("\n" * (LONGEST + 1))
    assert too_long(tmp_path).keys() == {"a.py", "ring_attn.py"}
