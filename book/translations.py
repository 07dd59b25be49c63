"""What the translations lack: a report for who translates, which no test asks for. A piece without words of its own, as
one whose English has changed, is shown in English.

Of a piece it says where numbers, code, formulas or links are not those of the English, where a term is said otherwise
than in book/locale/*/terms.csv, and where Chinese and Latin letters stand too near.
"""

import csv
import re
from collections import Counter
from pathlib import Path

from babel.messages.pofile import read_po

from book.contents import NO_WORDS

LOCALE = Path(__file__).parent / "locale"
NAMES = re.compile(r"\[(\**)([\w.]+)\1\]\([^)]*\b\2(?:\.\w+)?\)")  # links that say the name of a file
TIGHT = re.compile(r"[\u4e00-\u9fff][A-Za-z0-9]|[A-Za-z0-9%][\u4e00-\u9fff]")  # no space between Chinese and Latin
HALF = re.compile(r"[\u4e00-\u9fff][,;:?!]|[,;:?!][\u4e00-\u9fff]")  # punctuation of half a width
STUCK = re.compile(r"\*\*[^*]+[，。：；？！）”」)]\*\*\w|\w\*\*[（“「\[][^*]+\*\*")  # not bold in Markdown


def shared(piece: str) -> Counter[str]:
    """What a translation must keep: code, formulas, links, tags, numbers, and names that a page fills in."""
    numbers = re.findall(r"(?<![A-Za-z_])\d+(?:[.,]\d+)*", NO_WORDS.sub(" ", piece))
    kept = [each.split("](")[-1] for each in NO_WORDS.findall(piece)]  # of a picture: where it is, not its words
    return Counter([*kept, *numbers, *re.findall(r"\{\w+\}", piece)])


def wrong_terms(piece: str, own: str, terms: list[dict[str, str]]) -> list[str]:
    """The terms of a piece that its translation says otherwise. A term inside a longer one does not count."""
    left, found = NO_WORDS.sub(" ", NAMES.sub(" ", piece)), []
    for term in sorted(terms, key=lambda term: -len(term["English"])):
        pattern = rf"(?<![\w-]){re.escape(term['English'])}(?:s|es)?(?![\w-])"
        if re.search(pattern, left, re.I) and not any(way.lower() in own.lower() for way in term["Chinese"].split("|")):
            found.append(term["English"])
        left = re.sub(pattern, " ", left, flags=re.I)
    return found


def faults(piece: str, own: str, terms: list[dict[str, str]]) -> list[str]:
    """What is wrong with a translation of a piece."""
    plain = NO_WORDS.sub("", own)
    found = [f"{thing} is not in both" for thing in (shared(piece) - shared(own)) + (shared(own) - shared(piece))]
    found += [f"{term} is said otherwise in terms.csv" for term in wrong_terms(piece, own, terms)]
    found += [f"{at} needs a space" for at in TIGHT.findall(plain)]
    found += [f"{at} has punctuation of half a width" for at in HALF.findall(plain)]
    return found + [f"{at} is not bold in Markdown" for at in STUCK.findall(own)]


def report(language: str) -> str:
    """The pieces of a language that have no words, and those with faults, as text."""
    with (LOCALE / language / "terms.csv").open(newline="") as file:
        terms = list(csv.DictReader(file))
    with (LOCALE / language / "LC_MESSAGES/book.po").open("rb") as file:
        pieces = [piece for piece in read_po(file, language) if piece.id]
    empty = [f"    {piece.id}" for piece in pieces if piece.fuzzy or not piece.string]
    wrong = [
        f"    {piece.string}: {'; '.join(faults(piece.id, piece.string, terms))}"
        for piece in pieces
        if piece.string and faults(piece.id, piece.string, terms)
    ]
    return "\n".join(
        [
            f"{language}: {len(empty)} of {len(pieces)} pieces are shown in English",
            *empty,
            f"{len(wrong)} may be wrong",
            *wrong,
        ]
    )
