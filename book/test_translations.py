"""The translations say what the English says: nothing is missing or old; numbers, code, formulas and links are those
of the English, and terms are said as book/locale/*/terms.csv says."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("sphinx_intl", reason="needs what builds the site: make test-site installs it")

from babel.messages.pofile import read_po

from book.__main__ import sphinx
from book.contents import LANGUAGES, NO_WORDS, readme

LOCALE = Path(__file__).parent / "locale"
OTHERS = sorted(LANGUAGES.keys() - {"en"})
NAMES = re.compile(r"\[(\**)([\w.]+)\1\]\([^)]*\b\2(?:\.\w+)?\)")  # links that say the name of a file
TIGHT = re.compile(r"[\u4e00-\u9fff][A-Za-z0-9]|[A-Za-z0-9%][\u4e00-\u9fff]")  # no space between Chinese and Latin
HALF = re.compile(r"[\u4e00-\u9fff][,;:?!]|[,;:?!][\u4e00-\u9fff]")  # punctuation of half a width
STUCK = re.compile(r"\*\*[^*]+[，。：；？！）”」)]\*\*\w|\w\*\*[（“「\[][^*]+\*\*")  # not bold in Markdown


def catalog(path, language=None):
    with path.open("rb") as file:
        return [message for message in read_po(file, language) if message.id]


@pytest.fixture(scope="module", params=OTHERS)
def said(request):
    """A language, and its pieces."""
    return request.param, catalog(LOCALE / request.param / "LC_MESSAGES/book.po", request.param)


def shared(piece):
    """What a translation must keep: code, formulas, links, tags, numbers, and names that a page fills in."""
    numbers = re.findall(r"(?<![A-Za-z_])\d+(?:[.,]\d+)*", NO_WORDS.sub(" ", piece))
    kept = [each.split("](")[-1] for each in NO_WORDS.findall(piece)]  # of a picture: where it is, not its words
    return Counter([*kept, *numbers, *re.findall(r"\{\w+\}", piece)])


def wrong_terms(piece, own, terms):
    """The terms of a piece that its translation says otherwise. A term inside a longer one does not count."""
    left, found = NO_WORDS.sub(" ", NAMES.sub(" ", piece)), []
    for term in sorted(terms, key=lambda term: -len(term["English"])):
        pattern = rf"(?<![\w-]){re.escape(term['English'])}(?:s|es)?(?![\w-])"
        if re.search(pattern, left, re.I) and not any(way.lower() in own.lower() for way in term["Chinese"].split("|")):
            found.append(term["English"])
        left = re.sub(pattern, " ", left, flags=re.I)
    return found


def faults(piece, own, terms):
    """What is wrong with a translation of a piece."""
    plain = NO_WORDS.sub("", own)
    found = [f"{thing} is not in both" for thing in (shared(piece) - shared(own)) + (shared(own) - shared(piece))]
    found += [f"{term} is said otherwise in terms.csv" for term in wrong_terms(piece, own, terms)]
    found += [f"{at} needs a space" for at in TIGHT.findall(plain)]
    found += [f"{at} has punctuation of half a width" for at in HALF.findall(plain)]
    return found + [f"{at} is not bold in Markdown" for at in STUCK.findall(own)]


def terms_of(language):
    with (LOCALE / language / "terms.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_translation_says_what_the_english_says(said):
    language, pieces = said
    terms = terms_of(language)
    found = {piece.string: faults(piece.id, piece.string, terms) for piece in pieces}
    assert {own: wrong for own, wrong in found.items() if wrong} == {}


def test_no_piece_is_old_new_or_empty(said, tmp_path):
    language, pieces = said
    assert sphinx("gettext", language, tmp_path) == 0
    wanted, found = {piece.id for piece in catalog(tmp_path / "book.pot")}, {piece.id for piece in pieces}
    assert (wanted - found, found - wanted) == (set(), set()), "python -m book --translations brings it up to date"
    assert [piece.id for piece in pieces if piece.fuzzy or not piece.string] == []


@pytest.mark.parametrize("language", OTHERS)
def test_the_readme_has_the_same_code_numbers_and_links(language):
    """Where the English changed and the translation did not, this says where. Headings have anchors of their own."""
    its, own = (
        re.split("^## .*\n", re.sub(r"<a id=.*\n|\]\(#[^)]*\)", "", readme(each)), flags=re.M)
        for each in ("en", language)
    )
    assert len(its) == len(own)
    for english, translated in zip(its, own, strict=True):
        assert shared(english) == shared(translated)
        assert re.findall("^```.*?^```", english, re.M | re.S) == re.findall("^```.*?^```", translated, re.M | re.S)


@pytest.mark.parametrize(
    ("piece", "own", "fault"),
    [
        ("P ranks, 3 hops", "P 个 rank,4 跳", "3 is not in both"),
        ("call `hop`", "调用 `hops`", "`hop` is not in both"),
        ("see [here](a.md)", "见[这里](b.md)", "a.md) is not in both"),
        ("the term $P - 1$", "这一项 $P$", "$P - 1$ is not in both"),
        ("rank {r}", "rank {n}", "{r} is not in both"),
        ("a deadlock", "锁死", "deadlock is said otherwise in terms.csv"),
        ("two hops", "两步", "hop is said otherwise in terms.csv"),
        ("8 tokens", "8个 token", "8个 needs a space"),
        ("yes, it is", "是,正确", "是, has punctuation of half a width"),
        ("**Why?** So", "**为什么？**因为", "**为什么？**因 is not bold in Markdown"),
    ],
)
def test_planted_mistakes_are_found(piece, own, fault):
    assert fault in faults(piece, own, terms_of("zh_CN"))
