"""The house: imports point back along the reading order and in no circle, private names stay in their file, and code
does not grow unnoticed. All of it is read from the text of the files, so imports inside functions and those for type
checkers count. A table of the lines of code: python -m tests.test_house"""

import ast
import subprocess
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.commands import ROOT

ORDER = (  # the reading order: a file imports from its own row and from the rows above it
    ("ringlab.options", "ringlab.support"),
    ("ringlab.basics",),
    ("worked_example", "ring_attn", "trainable_ring"),
    ("ringlab.ring",),
    ("ringlab.ways",),
    ("ringlab.states",),
    ("ringlab.models",),
    ("ringlab.hugging_face",),
    ("ring_planner",),
    ("ring_doctor.asking",),
    ("ring_doctor.mistakes", "ring_doctor.catalogue"),
    ("ring_doctor.explaining",),
    ("ring_doctor",),
    ("ringlab",),  # the package itself, which names what people come for
    ("figures", "notebooks", "bench", "tests", "book"),  # they import from each other: pages show what a bench measured
)
TOOLS = {"ring_planner", "ring_doctor"}  # they stand beside each other
CODE = {  # what is in it, and how many lines of code at most: some more than there are, so that nobody packs a line
    "the ring": ("worked_example.py ring_attn.py trainable_ring.py ringlab/basics ringlab/ring", 2690),
    "the package": ("ringlab/support ringlab/ways ringlab/states ringlab/models ringlab/hugging_face", 4715),
    "the tools": ("ring_doctor ring_planner", 6875),
    "the tests": ("tests", 16770),
    "the pages": ("notebooks figures bench examples book", 8610),
}
LONGEST = 320  # lines of a file of the package
README, FILES, TOP = 110, 430, 20  # lines; files in git; names at the top level but those that begin with a dot
LOADED = 1325  # lines of this project that `import ring_attn` loads
OURS = {home.partition(".")[0] for row in ORDER for home in row}


@dataclass(frozen=True)
class Use:
    """A module that a file imports, and a name of that module."""

    source: str  # the module that the file is
    target: str  # the module that it imports
    name: str  # the name that it takes from there, or ""
    inside: bool = False  # of a function or a condition: it is not loaded with the file


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def uses(root):
    """Every Use of every file of the project."""
    paths = [*root.glob("*.py"), *(path for top in OURS for path in root.glob(f"{top}/**/*.py"))]
    names = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    found = []
    for source, path in names.items():
        tree, modules = tree_of(path), {}  # modules: what the file calls them, and their names
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)):
            for alias in node.names:
                if isinstance(node, ast.Import):
                    target, name = alias.name, ""
                elif f"{node.module}.{alias.name}" in names:
                    target, name = f"{node.module}.{alias.name}", ""
                else:
                    target, name = node.module, alias.name
                found.append(Use(source, target, name, node not in tree.body))
                if target in names and not name:
                    modules[alias.asname or alias.name] = target
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
                found.append(Use(source, modules[ast.unparse(node.value)], node.attr, True))
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


def across(found):
    """Imports from one tool to the other."""
    tops = {use: (use.source.partition(".")[0], use.target.partition(".")[0]) for use in found}
    return {f"{use.source} imports {use.target}" for use, pair in tops.items() if set(pair) == TOOLS}


def for_tests(found):
    """Imports of tests by what is none: chapters, pictures and benches run without them."""
    return {
        f"{use.source} imports {use.target}"
        for use in found
        if is_in(use.target, "tests") and not is_in(use.source, "tests") and "test_" not in use.source
    }


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


@pytest.fixture(scope="module")
def found():
    return uses(ROOT)


@pytest.mark.parametrize("rule", [pointing_on, across, for_tests, in_a_circle, private])
def test_the_house_is_in_order(found, rule):
    assert rule(found) == set()


def lines(path):
    return len(path.read_text().splitlines())


def code_lines(path):
    """How many lines hold code: no docstrings, comments or blank lines. Inside of a string there are none of these."""
    text, told = path.read_text(), set()
    held = {i for i, line in enumerate(text.split("\n"), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno > node.lineno:
            held.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told.update(range(node.lineno, node.end_lineno + 1))
    return len(held - told)


def sizes(root):
    """The lines of code of each part of the house."""
    found = {}
    for part, (places, _) in CODE.items():
        roots = [root / place for place in places.split()]
        files = [path for at in roots for path in ([at] if at.is_file() else at.rglob("*.py"))]
        found[part] = sum(map(code_lines, files))
    return found


def test_the_code_does_not_grow_unnoticed():
    assert {part: size for part, size in sizes(ROOT).items() if size > CODE[part][1]} == {}
    package = [path for top in ("ringlab", "ring_doctor", "ring_planner") for path in ROOT.glob(f"{top}/**/*.py")]
    assert [path for path in [ROOT / "ring_attn.py", *package] if lines(path) > LONGEST] == []
    assert lines(ROOT / "README.md") <= README


def test_files_and_names_are_few():
    if not (ROOT / ".git").exists():
        pytest.skip("needs git's list of files")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert len(names) - 1 <= FILES
    assert len({name.split("/")[0] for name in names if name and not name.startswith(".")}) <= TOP


def loaded_by(module, found):
    """The files of the packages that are loaded when `module` is imported, and the folders that they are in."""
    more, loaded = {module}, set()
    while more:
        loaded |= more
        more = {use.target for use in found if use.source in loaded and not use.inside}
        more = (more | {name.rpartition(".")[0] for name in loaded | more}) - loaded
    paths = [ROOT / name.replace(".", "/") for name in loaded if name.startswith("ring")]
    return [path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py" for path in paths]


def test_the_ring_loads_little(found):
    ours = loaded_by("ring_attn", found)
    assert ROOT / "ring_attn.py" in ours
    assert sum(map(lines, ours)) <= LOADED


if __name__ == "__main__":
    for part, size in sizes(ROOT).items():
        print(f"{part:12} {size:6} lines of code, at most {CODE[part][1]}   {CODE[part][0]}")
