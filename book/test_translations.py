"""The translations say what the English says: nothing is missing or old; numbers, code, formulas and links are
those of the English. Terms are said as book/locale/*/terms.csv says. None of it needs the built site."""

import re
from collections import Counter

import pytest

pytest.importorskip("babel", reason="needs Babel, which reads .po files: make test-site installs it")

from babel.messages.pofile import read_po

from book.translate import LANGUAGES, NAMES, PAGES, ROOT, SHARED, missing, pieces, po, readme, said, terms, translated

OTHERS = sorted(LANGUAGES.keys() - {"en"})
TIGHT = re.compile(r"[\u4e00-\u9fff][A-Za-z0-9]|[A-Za-z0-9%][\u4e00-\u9fff]")  # no space between Chinese and Latin
HALF = re.compile(r"[\u4e00-\u9fff][,;:?!]|[,;:?!][\u4e00-\u9fff]")  # punctuation of half a width
STUCK = re.compile(r"\*\*[^*]+[，。：；？！）”」)]\*\*\w|\w\*\*[（“「\[][^*]+\*\*")  # not bold in Markdown


def shared(piece):
    """What a translation must keep: code, formulas, links, tags, numbers, and names that a page fills in."""
    words = SHARED.sub(" ", piece)
    numbers = re.findall(r"(?<![A-Za-z_])\d+(?:[.,]\d+)*", words)
    return Counter([*SHARED.findall(piece), *numbers, *re.findall(r"\{\w+\}", words)])


def wrong_terms(piece, own, its_terms):
    """The terms of a piece that its translation says otherwise. A term inside a longer one does not count."""
    left, found = SHARED.sub(" ", NAMES.sub(" ", piece)), []
    for term in sorted(its_terms, key=lambda term: -len(term["English"])):
        pattern = rf"(?<![\w-]){re.escape(term['English'])}(?:s|es)?(?![\w-])"
        if re.search(pattern, left, re.I) and not any(way.lower() in own.lower() for way in term["Chinese"].split("|")):
            found.append(term["English"])
        left = re.sub(pattern, " ", left, flags=re.I)
    return found


def faults(piece, own, its_terms):
    """What is wrong with a translation of a piece."""
    plain = SHARED.sub("", own)
    found = [f"{thing} is not in both" for thing in (shared(piece) - shared(own)) + (shared(own) - shared(piece))]
    found += [f"{term} is said otherwise in terms.csv" for term in wrong_terms(piece, own, its_terms)]
    found += [f"{at} needs a space" for at in TIGHT.findall(plain)]
    found += [f"{at} has punctuation of half a width" for at in HALF.findall(plain)]
    return found + [f"{at} is not bold in Markdown" for at in STUCK.findall(own)]


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("page", PAGES)
def test_a_translation_says_what_the_english_says(page, language):
    its_terms = terms(language)
    wrong = {own: found for piece, own in said(page, language).items() if (found := faults(piece, own, its_terms))}
    assert wrong == {}


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("page", PAGES)
def test_no_piece_is_old_or_new(page, language):
    with po(page, language).open("rb") as file:
        listed = [message.id for message in read_po(file, language) if message.id]
    assert listed == pieces(page), "the English has changed: python -m book.translate brings the .po file up to date"


@pytest.mark.parametrize("language", OTHERS)
def test_these_pages_are_translated(language):
    """A page whose English changed shows the new pieces in English until they are translated: this says which."""
    assert {page: found for page in PAGES if (found := missing(page, language))} == {}
    assert translated(language) == set(PAGES)


@pytest.mark.parametrize("language", OTHERS)
def test_the_readme_is_the_translated_one(language):
    written = (ROOT / f"docs/README.{language.replace('_', '-')}.md").read_text()
    assert written == readme(language), "python -m book.translate writes it"


@pytest.mark.parametrize(
    ("piece", "own", "fault"),
    [
        ("P ranks, 3 hops", "P 个 rank,4 跳", "3 is not in both"),
        ("call `hop`", "调用 `hops`", "`hop` is not in both"),
        ("see [here](a.md)", "见[这里](b.md)", "](a.md) is not in both"),
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
    assert fault in faults(piece, own, terms("zh_CN"))
