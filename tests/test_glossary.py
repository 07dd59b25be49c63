"""The glossary is in order, and every link of every page leads somewhere, into the glossary too."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "GLOSSARY.md").read_text()
TERMS = re.findall(r"^## (.+)$", TEXT, re.M)
# Whatever a reader may click; a notebook's .py source has the same links as its .ipynb.
FOLDERS = ("", "bench/", "notebooks/", "ringlab/**/")
PAGES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md")] + [*ROOT.glob("notebooks/[0-9]*.py")]


def anchors(markdown: str) -> set[str]:
    """The addresses that a forge gives to the headings of a page: small letters, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", markdown, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_explained_briefly_and_names_the_file_that_teaches_it(term):
    entry = TEXT.partition(f"\n## {term}\n")[2].partition("\n## ")[0]
    assert 40 < len(entry) < 600
    assert re.search(r"\]\([a-z_/0-9]+\.(py|ipynb)\)|\]\(README\.md#", entry)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    text = page.read_text()
    if page.suffix == ".py":  # a notebook: its text is in comments
        text = "\n".join(re.findall(r"^#.*", text, re.M))
    assert dead_links(page, text) == []


def test_a_dead_link_is_found():
    page = ROOT / "notebooks/04_the_ring.py"
    assert dead_links(page, "a [hop](../GLOSSARY.md#hop) and a [leap](../GLOSSARY.md#leap)") == ["../GLOSSARY.md#leap"]
    assert dead_links(page, "[hop](GLOSSARY.md#hop)") == ["GLOSSARY.md#hop"]  # there is none beside the notebook
    assert dead_links(page, '<img src="../figures/none.svg">, ![](../figures/memory.svg)') == ["../figures/none.svg"]
