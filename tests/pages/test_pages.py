"""README, map, glossary: commands print what is shown, numbers are those of the code, links lead somewhere."""

import re
import textwrap
from pathlib import Path

import pytest

import ring_attn
from bench import pages
from notebooks.source import build, paper_tables
from ring_doctor import __main__ as doctor
from tests.basics.test_ring_attn import given_to_the_ring
from tests.commands import ROOT, check_shown, run
from tests.concepts import FOLDERS as HOMES
from tests.concepts import is_concept
from tests.doctor.examined import on_these
from tests.pages.test_notebooks import stated

README = (ROOT / "README.md").read_text()
MAP = (ROOT / "notebooks/README.md").read_text()
USE = (ROOT / "docs/use.md").read_text()
MEASURED = (ROOT / "bench/README.md").read_text()
ERRATA = (ROOT / "notebooks/appendix_errata.md").read_text()

# Commands are lines "$ command" followed by what they print: in the README's blocks ```console, and in the docstring of
# the ring. The set-up and make blocks are ```bash: they are what runs these tests.
BLOCKS = re.findall(r"^```console\n(.*?)^```", README + USE, re.M | re.S)
SHOWN = {}  # by command, what each document shows of its output
for block in [*BLOCKS, "".join(re.findall(r"^    (\$ .*\n)((?:    .*\n)*)", ring_attn.__doc__, re.M)[0])]:
    for command, shown in re.findall(r"^ *\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.M):
        SHOWN.setdefault(command, []).append(textwrap.dedent(shown))


def test_there_are_commands():
    assert len(SHOWN) >= 3
    assert "torchrun --nproc_per_node=4 ring_attn.py" in SHOWN


@pytest.mark.parametrize(
    "command",
    [pytest.param(it, marks=pytest.mark.slow if re.search("torchrun|ring_doctor", it) else ()) for it in SHOWN],
)
def test_a_command_prints_what_is_shown(command, ranks, capsys):
    program, *words = command.split()
    if program == "ring-doctor":  # on ranks that are there already; its patient is sick
        with on_these(ranks):
            assert doctor.main(words) == 1
        printed = capsys.readouterr().out
    elif program == "torchrun":  # on these ranks too: `make demo` starts it
        assert words == ["--nproc_per_node=4", "ring_attn.py"]
        (_, status, printed), *_ = ranks(4, given_to_the_ring, "")
        assert status == 0
    else:
        done = run(command)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    for shown in SHOWN[command]:
        check_shown(shown, printed)


def test_every_picture_has_alt_text():
    assert re.findall(r"!\[\]\(|<img(?![^>]*alt=)", README + MEASURED + USE) == []


def test_the_prose_of_the_readme_is_short():
    """A new row of a table costs nothing, nor does a new command."""
    prose = re.sub(r"^```.*?^```$|^\|[^\n]*$", "", README, flags=re.M | re.S)
    assert len(prose.split()) <= 1000


NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


CORE_PART = MAP.partition("## The core")[2].partition("\n\n**")[0]
CORE = re.findall(r"^\| \[\w+\]\((\S+)\)", CORE_PART, re.M)


def test_the_core_is_as_small_as_the_map_says():
    files = [ROOT / "notebooks" / link for link in CORE]
    number, lines = re.match(r": (\w+) files, ([\d,]+) lines", CORE_PART).groups()
    assert NUMBERS[len(files) - 1] == number
    assert abs(sum(len(file.read_text().splitlines()) for file in files) - int(lines.replace(",", ""))) <= 50
    assert f"is {number} files, {lines} lines" in words(README)


def words(text: str) -> str:
    """The text with single spaces, so that a sentence is found wherever its lines are broken."""
    return " ".join(text.split())


def test_the_measured_tables_are_those_of_the_committed_results():
    assert pages.renewed(MEASURED) == MEASURED, "python -m bench.pages writes them"
    assert pages.renewed(MEASURED.replace("| 0.99 |", "| 1.02 |")) == MEASURED
    with pytest.raises(ValueError, match="the page has no <!-- how_fast -->"):
        pages.renewed(MEASURED.replace("how_fast", ""))


def test_the_minutes_of_the_map_are_those_of_the_chapters_and_add_up():
    minutes = [(int(read), int(more)) for read, more in re.findall(r"\| (\d+) \+ (\d+) \|$", MAP, re.M)]
    assert minutes == [stated(path) for path in build.chapters()]
    read, more = (sum(column) for column in zip(*minutes, strict=True))
    assert f"{read} minutes for all chapters, {read + more} with exercises" in words(MAP)
    assert read <= 6.5 * 60
    of_chapter = dict(zip((path.stem.split("_")[0].lstrip("0") for path in build.chapters()), minutes, strict=True))
    tracks = re.findall(r"^\| \*[a-z ]+\*.* \| ([\dab, ]+) \| (\d+) \|$", MAP, re.M)
    assert len(tracks) == 5
    for numbers, total in tracks:
        assert sum(sum(of_chapter[number]) for number in numbers.split(", ")) == int(total)


def test_every_chapter_stands_in_the_contents_of_the_book():
    contents = (ROOT / "book/pages/index.md").read_text().split()
    assert [path.stem for path in build.chapters() if f"notebooks/{path.stem}" not in contents] == []


def test_every_concept_is_on_the_map():
    for path in [*(path for folder in HOMES for path in ROOT.glob(f"{folder}/[a-z]*.py")), *ROOT.glob("*.py")]:
        assert f"](../{path.relative_to(ROOT)})" in MAP or not is_concept(path), path
    for path in ROOT.glob("notebooks/*.ipynb"):
        assert f"]({path.name})" in MAP, path


# Links ---------------------------------------------------------------------------------------------------------------

# Whatever a reader may click; a notebook's .py source has the same links as its .ipynb.
FOLDERS = ("", "bench/", "book/pages/", "docs/", "examples/", "notebooks/", "ringlab/**/", "ring_doctor/**/")
PAGES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md")] + [*build.chapters(), *build.others()]


def anchors(markdown: str) -> set[str]:
    """The addresses that a forge gives to the headings of a page: small letters, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", markdown, re.M)
    given = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return given | set(re.findall(r'<a id="([^"]+)"></a>', markdown))


def dead_links(page: Path, text: str) -> list[str]:
    """The links and pictures of a page that lead nowhere."""
    dead = []
    for link in re.findall(r"(?:\]\(|src=\")(?!https?:)([^)\s\"]+)[)\"]", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page  # a chapter's links are those of its notebook
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(link)
    return dead


def test_every_link_leads_somewhere():
    for page in PAGES:
        text = page.read_text()
        if page.suffix == ".py":  # a notebook: its text is in comments
            text = "\n".join(re.findall(r"^#.*", text, re.M))
            page = build.pair(page)
        assert dead_links(page, text) == [], page


def test_a_dead_link_is_found():
    page = ROOT / "notebooks/04_the_ring.ipynb"
    assert dead_links(page, "a [hop](../docs/glossary.md#hop) and a [leap](../docs/glossary.md#leap)") == [
        "../docs/glossary.md#leap"
    ]
    assert dead_links(page, '<img src="../figures/none.svg">, ![](../figures/scoreboard.svg)') == [
        "../figures/none.svg"
    ]


# The errata of the paper ----------------------------------------------------------


def test_the_errata_show_what_their_command_prints(capsys):
    command, shown = re.search(r"```console\n\$ (.*?)\n(.*?)```", ERRATA, re.S).groups()
    assert command == "python -m notebooks.source.paper_tables"
    assert paper_tables.main() == 0
    check_shown(shown, capsys.readouterr().out)
