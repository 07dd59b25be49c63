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
ROAD = [source for source in CHAPTERS if source.stem < "08_~"]  # not 08a and 08b
TRACKS = ("plan", "train", "use", "check", "other ways")
LONGEST_SOURCE = 12  # lines of the library that a cell prints at once
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
    assert pictures
    for picture in pictures:
        assert len(picture.metadata["image/png"].get("alt", "")) > 100, "run make notebooks"
    assert not re.search(r"!\[\]", source.read_text()), "a picture in a text cell needs a description too"


def chapters_of(track) -> list[str]:
    """The numbers of a track's chapters, in the map."""
    (row,) = re.findall(rf"^\| \*{track}\*.* \| ([\dab, ]+) \| \d+ \|$", (build.FOLDER / "README.md").read_text(), re.M)
    return row.split(", ")


@by_chapter
def test_its_head_names_its_door(source):
    """Where on the road it is, or its tracks, as the map has them, and the chapters before it."""
    head = next(cell.source for cell in committed(source).cells if cell.cell_type == "markdown")
    if source in ROAD:
        assert f"\nThe road, {int(source.stem[:2])} of {len(ROAD)}. " in head
        return
    found = re.search(r"^Tracks? (\*.*\*)\. Before it: chapters? (\d+(?:(?:, | to | and )\d+)*)\. ", head, re.M)
    number = source.stem.split("_")[0].lstrip("0")
    assert re.findall(r"\*([a-z ]+)\*", found[1]) == [track for track in TRACKS if number in chapters_of(track)]
    assert all(f"{int(each):02}_" < source.stem for each in re.findall(r"\d+", found[2]))


def needed(source) -> set[int]:
    """The chapters before it, by its head, and those before them."""
    text = source.read_text()
    first = re.search(r"Before it: chapters? ([^.]*)\.", text)[1].replace("1 to 8", "8").replace("1 to 9", "8, 9")
    numbers = {int(each) for each in re.findall(r"\d+", first)}
    return numbers.union(*(needed(each) for each in CHAPTERS if int(each.stem[:2]) in numbers - {8}))


@pytest.mark.parametrize("track", TRACKS)
def test_a_track_has_what_its_chapters_need(track):
    known = {8}
    for number in chapters_of(track):
        (source,) = [each for each in CHAPTERS if each.stem.lstrip("0").startswith(f"{number}_")]
        assert needed(source) <= known, source.stem
        known.add(int(source.stem[:2]))


@pytest.mark.parametrize("source", [each for each in CHAPTERS if each not in ROAD], ids=lambda source: source.stem)
def test_it_uses_only_the_chapters_that_it_needs(source):
    used = {int(each) for each in re.findall(r"\bchapter (\d+)\b(?!\])", source.read_text())}
    assert {each for each in used if each < int(source.stem[:2])} <= needed(source) | {*range(1, 9)}


def stated(source):
    """The minutes that a chapter states: to read, and for its exercises."""
    found = re.search(r"(\d+) minutes to read, (\d+) for the exercises", source.read_text())
    return int(found[1]), int(found[2])


@by_chapter
def test_its_minutes_are_few(source):
    read, more = stated(source)
    assert (read + more if source in ROAD else read) <= 30


def test_the_road_takes_four_and_a_half_hours_at_most():
    """Half an hour of them is for the ring that a reader writes in chapter 4."""
    assert sum(sum(stated(source)) for source in ROAD) + 30 <= 4.5 * 60


def printed(cell) -> str:
    """What a cell printed or returned as text."""
    outputs = [output for output in cell.get("outputs", ()) if "image/png" not in output.get("data", {})]
    return "".join(output.get("text") or output["data"]["text/plain"] for output in outputs)


def long_sources(cells) -> list[str]:
    """The cells that print more of the library than a reader takes in at once, or print it without a word above."""
    wrong = []
    for before, cell in zip([None, *cells], cells, strict=False):
        if cell.cell_type == "code" and re.search(r"\b(print_source|getsource)\(", cell.source):
            lines = [line for line in printed(cell).splitlines() if line.strip()]
            if len(lines) > LONGEST_SOURCE or before is None or before.cell_type != "markdown":
                wrong.append(f"{cell.source}: {len(lines)} lines")
    return wrong


@by_chapter
def test_it_prints_no_long_source(source):
    if source.stem == "08_the_trainable_ring":
        return  # it is about the lines of one file, and prints all of them
    assert long_sources(committed(source).cells) == []


@by_chapter
def test_it_says_once_which_file_to_open(source):
    text = source.read_text()
    assert text.count("Open [`") == 1
    assert not re.findall(r"^# .*\bRead \[`", text, re.M)
