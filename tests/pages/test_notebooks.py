"""Every chapter runs, has the form of a chapter, and its committed outputs are current."""

import re

import jupytext
import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbformat.v4 import new_code_cell

from notebooks.source import build
from tests.commands import masked
from tests.concepts import marked

CHAPTERS = build.chapters()
IDS = [source.stem for source in CHAPTERS]
by_chapter = pytest.mark.parametrize("source", CHAPTERS, ids=IDS)
ALL = CHAPTERS + build.others()
ALL_IDS = [source.stem for source in ALL]


def committed(source):
    return nbformat.read(build.pair(source), as_version=4)


@pytest.fixture(scope="module")
def kernel():
    """One kernel for all chapters: a new one for each would spend most of its time on importing torch again."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(**build.KERNEL, extra_arguments=build.QUIET)
    yield manager
    manager.shutdown_kernel(now=True)


# Before each chapter: no names of an earlier one, numpy's own printing, and a picture's words in place of the picture.
# The chapters share one process of which their ranks are forks: it imports what the ranks of later chapters need.
CLEAN = """
%reset -f
__import__("ringlab.support.processes").support.processes.PRELOAD[2:] = [
    "ring_doctor.asking.examination", "notebooks.source.model_workers"
]
__spec__ = None  # multiprocessing looks for it, and reset takes it away
__import__("ringlab.support.drawing").support.drawing.Picture._ipython_display_ = lambda picture: print(picture.alt)
__import__("numpy").set_printoptions(precision=8, floatmode="maxprec", suppress=False)
"""


def text_outputs(notebook) -> list[list[str]]:
    """What each code cell printed or returned as text, and the words of its pictures."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ends = ["\n" * ("image/png" in output.get("data", {})) for output in cell.outputs]
            said = [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]
            texts.append(masked("".join(map("".join, zip(said, ends, strict=True)))))
    return texts


def test_there_are_chapters():
    assert {path.stem for path in build.FOLDER.rglob("*.ipynb")} == {source.stem for source in ALL}


@pytest.mark.parametrize("source", ALL, ids=ALL_IDS)
def test_the_pair_is_in_step(source):
    assert [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells] == [
        (cell.cell_type, cell.source) for cell in committed(source).cells
    ], "the .py and the .ipynb differ: run make notebooks"


@pytest.mark.parametrize("source", marked(ALL), ids=ALL_IDS)
def test_it_runs_and_its_outputs_are_current(source, kernel):
    if (source.parent / "my_ring.py").exists():
        pytest.skip("the outputs are of a workshop without a my_ring.py, and you have written one")
    notebook = jupytext.read(source)
    notebook.cells.insert(0, new_code_cell(CLEAN))
    build.execute(notebook, km=kernel)
    notebook.cells.pop(0)
    for cell, now, before in zip(
        [cell for cell in notebook.cells if cell.cell_type == "code"],
        text_outputs(notebook),
        text_outputs(committed(source)),
        strict=True,
    ):
        assert now == before, f"the output of this cell has changed; run make notebooks:\n{cell.source}"


@by_chapter
def test_it_has_the_form_of_a_chapter(source):
    text = source.read_text()
    for part in ("## The failure", "## The idea", "One number to remember", "## Questions", "## Your turn", "assert "):
        assert part in text, part
    questions = re.search(r"## Questions(.*)## Your turn", text, re.S)[1].count("<details>")
    assert 2 <= questions <= 3
    assert 2 <= len(re.findall(r"print\(check_", text)) <= 4
    assert not re.findall(r"^# #[^#\s].*", text, re.M), "some viewers make a heading of this line"


@pytest.mark.parametrize("source", [*CHAPTERS, build.FOLDER / "puzzles/puzzles.py"], ids=[*IDS, "puzzles"])
def test_its_pictures_are_described(source):
    outputs = [output for cell in committed(source).cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    for picture in pictures:
        assert len(picture.metadata["image/png"].get("alt", "")) > 100, "run make notebooks"
    assert not re.search(r"!\[\]", source.read_text()), "a picture in a text cell needs a description too"


def stated(source):
    """The minutes that a chapter states: to read, and for its exercises."""
    found = re.search(r"(\d+) minutes to read, (\d+) for the exercises", source.read_text())
    return int(found[1]), int(found[2])
