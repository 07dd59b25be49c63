"""Everything about one concept, side by side: lint, its tests, its script, and the cells of its chapter.

    $ make one C=causal

runs ruff on ringlab/training/causal.py and its tests, tests/training/test_causal*.py, the module itself, and the tests
of chapter 7, which runs all its cells.
"""

import difflib
import re
import subprocess
import sys
from pathlib import Path

from tests.concepts import is_concept

ROOT = Path(__file__).parent.parent
FOLDERS = ("basics", "training", "planning", "models")  # of ringlab/


def concepts() -> dict[str, Path]:
    """The files that a reader runs, by name."""
    files = [ROOT / "worked_example.py", ROOT / "ring_attn.py"]
    files += [path for folder in FOLDERS for path in sorted((ROOT / "ringlab" / folder).glob("[!_]*.py"))]
    return {path.stem: path for path in files if is_concept(path)}


def chapter(concept: Path) -> str | None:
    """The name of the notebook in whose row of the map, notebooks/README.md, this file is."""
    link = f"](../{concept.relative_to(ROOT)})"
    rows = re.findall(r"^\| \[[^\]]*\]\((\w+)\.ipynb\)(.*)$", (ROOT / "notebooks/README.md").read_text(), re.M)
    return next((name for name, row in rows if link in row), None)


def commands(concept: Path) -> dict[str, list[list[str]]]:
    """What to run for each part, in order: {part: [command, ...]}."""
    python, name, folder = sys.executable, concept.stem, concept.parent.name
    home = "basics" if concept.parent == ROOT else folder
    tests = sorted(map(str, ROOT.glob(f"tests/{home}/test_{name}*.py")))
    ruff = [str(Path(python).parent / "ruff")]
    module = [str(concept)] if concept.parent == ROOT else ["-m", f"ringlab.{folder}.{name}"]
    parts = {"lint": [[*ruff, "check", str(concept), *tests], [*ruff, "format", "--check", str(concept), *tests]]}
    if tests:
        parts["tests"] = [[python, "-m", "pytest", "-q", *tests]]
    parts["script"] = [[python, *module]]
    if notebook := chapter(concept):
        parts["notebook"] = [[python, "-m", "pytest", "-q", "tests/pages/test_notebooks.py", "-k", notebook]]
    return parts


def run(steps: list[list[str]]) -> bool:
    """Whether the commands succeed, one after the other until one fails. What they print is seen at once."""
    return all(subprocess.run(step, cwd=ROOT).returncode == 0 for step in steps)


def main(arguments: list[str]) -> int:
    known = concepts()
    name = arguments[0].removesuffix(".py").split("/")[-1].split(".")[-1] if arguments else ""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"Did you mean C={near[0]}? " if near else ""
        print(f"C={name} is no concept. {meant}Choose one of: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    parts = commands(known[name])
    if "tests" not in parts:
        print("== tests: none of its own; those of another file cover it")
    for part, steps in parts.items():
        print(f"== {part}", flush=True)
        failed += [] if run(steps) else [part]
    print(f"{name}: {'FAILED: ' + ', '.join(failed) if failed else 'all ok'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
