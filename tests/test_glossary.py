"""The glossary is in order and has the terms of all headings; every link of every page leads somewhere."""

import re
from pathlib import Path

import pytest

from notebooks import build

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/glossary.md").read_text()
TERMS = re.findall(r"^## (.+)$", TEXT, re.M)
PLAIN = """
already an another are ask borders buffers by call code computes costs crosses cure cut dk does dq dv each every
exact example face failure far fast fifth find first five follow for four free from function generation gets goes
gpus grouped have high how hugging idea into is keep known learn lengths let limits links mean measured merging
meshes mistakes model must name need new no not number of often one other own picture plan processes prompts proof
questions reach reaches real results resume right road rotation run same saves second see setting shortest skips
slices slow sources speeds staircase start step stop stores take task test that the this times too train travels two
travel under unequal waits way were what when which while who why will wire work worked wrong you your
"""  # the words of headings that need no entry
# Whatever a reader may click; a notebook's .py source has the same links as its .ipynb.
FOLDERS = ("", "bench/", "docs/", "examples/", "notebooks/", "ringlab/**/", "ring_doctor/**/")
PAGES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md")] + [
    *ROOT.glob("notebooks/[0-9]*.py"),
    *build.others(),
]


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
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(link)
    return dead


def test_terms_are_in_alphabetical_order_and_each_appears_once():
    assert len(TERMS) > 40
    assert sorted(set(TERMS), key=str.lower) == TERMS


def stems(text: str) -> set[str]:
    """The words of a text, singular: "Grouped queries" -> {"grouped", "query"}."""
    return {re.sub("ie$", "y", word.lower().removesuffix("s")) for word in re.findall(r"[^\W\d_]{2,}", text)}


def test_every_word_of_a_heading_is_of_a_term_or_plain():
    """A new word in a heading of the README or of a chapter gets an entry here, or a place in PLAIN."""
    readme = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    chapters = "".join(page.read_text() for page in ROOT.glob("notebooks/[0-9]*.py"))
    headings = re.findall(r"^#+ (.+)$", readme, re.M) + re.findall(r"^# #+ (.+)$", chapters, re.M)
    assert stems(" ".join(headings)) - stems(" ".join(TERMS)) == stems(PLAIN)


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_explained_briefly_and_names_the_file_that_teaches_it(term):
    entry = TEXT.partition(f"\n## {term}\n")[2].partition("\n## ")[0]
    assert 40 < len(entry) < 600
    assert re.search(r"\]\([a-z_/0-9.]+\.(py|ipynb)\)|\]\((\.\./README|use)\.md#", entry)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    text = page.read_text()
    if page.suffix == ".py":  # a notebook: its text is in comments
        text = "\n".join(re.findall(r"^#.*", text, re.M))
    assert dead_links(page, text) == []


def test_a_dead_link_is_found():
    page = ROOT / "notebooks/04_the_ring.py"
    assert dead_links(page, "a [hop](../docs/glossary.md#hop) and a [leap](../docs/glossary.md#leap)") == [
        "../docs/glossary.md#leap"
    ]
    assert dead_links(page, "[hop](docs/glossary.md#hop)") == [
        "docs/glossary.md#hop"
    ]  # there is none beside the notebook
    assert dead_links(page, '<img src="../figures/none.svg">, ![](../figures/memory.svg)') == ["../figures/none.svg"]
