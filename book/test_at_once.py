"""What opens by one link: its address, its first cell and links, in a Colab that is played here."""

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from book import at_once
from book.contents import LANGUAGES, ROOT, readme
from notebooks.source import build
from tests.concepts import needed_by

REPOSITORY = "https://github.com/someone/ring"
ALL = [build.pair(source) for source in [*build.chapters(), *build.others()]]


@pytest.mark.parametrize(
    ("page", "repository", "opens"),
    [
        ("notebooks/04_the_ring.ipynb", REPOSITORY, "github/someone/ring/blob/colab/notebooks/04_the_ring.ipynb"),
        ("docs/use.md", REPOSITORY, ""),
        ("notebooks/04_the_ring.ipynb", "", ""),  # no address, no link
        ("notebooks/04_the_ring.ipynb", "https://gitlab.com/someone/ring", ""),  # Colab cannot open it
    ],
)
def test_the_address_of_a_notebook_in_colab(page, repository, opens):
    assert at_once.in_colab(page, repository).removeprefix("https://colab.research.google.com/") == opens


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_notebook_for_colab_is_the_same_with_a_cell_and_links_that_lead_somewhere(path):
    notebook, before = at_once.for_colab(path, REPOSITORY), json.loads(path.read_text())["cells"]
    assert notebook.cells.pop(1).source.startswith("# Colab needs this cell")
    assert [cell.cell_type for cell in notebook.cells] == [cell["cell_type"] for cell in before]
    for cell, old in zip(notebook.cells, before, strict=True):
        if cell.cell_type == "code":
            assert cell.source == "".join(old["source"])
        for link in re.findall(r"\]\(([^)\s]+)\)", cell.source) if cell.cell_type == "markdown" else ():
            assert link.startswith(("#", "http")), link
            if its := re.search(r"/someone/ring/blob/(?:HEAD|colab)/([^#]*)", link):
                assert (ROOT / its[1]).exists(), link


def test_extras_are_those_that_the_chapters_need():
    assert {path.stem for path in ALL if needed_by(path.stem)} == at_once.EXTRAS.keys()


def run_cell(folder, monkeypatch):
    """The commands of the cell, whose clone makes the folders that it would get; then where Python looks and stands."""
    commands = []

    def run(command, check):
        commands.append(command[1:])
        if command[0] == "git":
            (folder / "ring-attention/notebooks").mkdir(parents=True)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.chdir(folder)
    cell = at_once.for_colab(build.pair(build.chapters()[0]), REPOSITORY).cells[1].source
    exec(cell.replace("/content", str(folder)), {})
    return commands, sys.path, os.path.relpath(os.getcwd(), folder)


def test_the_cell_gets_the_code_once_and_only_in_colab(tmp_path, monkeypatch):
    assert run_cell(tmp_path, monkeypatch) == ([], ["elsewhere"], ".")
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    code = str(tmp_path / "ring-attention")
    clone, install = (
        ["clone", "-q", "--depth=1", REPOSITORY, code],
        ["-m", "pip", "install", "-q", "-e", f"{code}[plots]"],
    )
    where = ([code, "elsewhere"], "ring-attention/notebooks")
    assert run_cell(tmp_path, monkeypatch) == ([clone, install], *where)
    assert run_cell(tmp_path, monkeypatch) == ([install], *where)


def test_readme_links_to_the_puzzles_where_they_have_an_address(tmp_path, monkeypatch):
    for language in LANGUAGES:
        assert "](book/pages/solve.md)" in readme(language)  # on the site
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/README.zh-CN.md"):
        text = (ROOT / name).read_text()
        assert "solve" not in text
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(at_once, "ROOT", tmp_path)
    monkeypatch.setattr(build, "chapters", list)
    monkeypatch.setattr(build, "others", list)
    with pytest.raises(SystemExit, match="nothing was written"):
        at_once.main()
    monkeypatch.setattr(at_once, "REPOSITORY", REPOSITORY)
    monkeypatch.setattr(at_once, "SITE", "https://someone.github.io/ring")
    assert at_once.main() == 0
    assert (
        "[puzzles](https://someone.github.io/ring/solve.html): nothing to install |"
        in (tmp_path / "README.md").read_text()
    )
    assert "(https://someone.github.io/ring/zh-CN/solve.html)" in (tmp_path / "docs/README.zh-CN.md").read_text()
