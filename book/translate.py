"""The book in other languages: what a page says, piece by piece, and what a translator says instead.

    python -m book.translate    brings book/locale/*/ up to date with the English, and writes docs/README.zh-CN.md

A piece is a paragraph, a heading, an item of a list, a cell of a table or the words of a picture, on one line. Code,
formulas and numbers are no pieces of their own: they are shared. The pieces of a page are the msgids of its .po file.
A page of which a few pieces are missing shows them in English, and says so. In place of any other page stands a link to
the English one.
"""

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).parent.parent
LOCALE = Path(__file__).parent / "locale"


class Language(NamedTuple):
    """What the book says in a language by itself."""

    title: str
    name: str
    only_english: str  # of pages that are not translated
    partly: str  # of a page of which n pieces are not
    source: str  # a link to the code


LANGUAGES = {
    "en": Language("Ring Attention, step by step", "English", "", "", "The code"),
    "zh_CN": Language("一步一步学 Ring Attention", "中文", "只有英文版", "本页有 {n} 段尚未翻译，以英文显示。", "代码"),
}
PAGES = (  # what is translated, and in this order
    *("index.md", "ring.md", "deadlock.md", "xray.md", "planner.md", "README.md"),
    *(f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("0[1-8]_*.ipynb"))),
    *("docs/your_model.md", "docs/glossary.md"),
)
DATES = re.compile(rb'^"(POT-Creation-Date|PO-Revision-Date|Last-Translator|Generated-By|Report-Msgid).*\n', re.M)

NEW = r" *(?:#{1,6} |[-*] |\d+\. |: |\||:::|:\w+:|</?details|<!--|```|> )"  # a line like this begins a piece
HEAD = re.compile(r"( *(?:#{1,6} |[-*] |\d+\. |: |> |:alt: |<details><summary>)?)(.*?)((?:</summary>)?)", re.S)
SHARED = re.compile(r"`[^`]*`|\$[^$]+\$|\]\([^)]*\)|<[^>]*>|https?://\S+")  # code, formulas, targets of links, tags
NAMES = re.compile(r"\[(\**)([\w.]+)\1\]\([^)]*\b\2(?:\.\w+)?\)")  # links that say the name of a file


def has_words(piece: str) -> bool:
    """Whether there is something to translate in a piece."""
    return bool(re.search(r"[A-Za-z]{2}", SHARED.sub(" ", NAMES.sub(" ", piece))))


def rewrite(text: str, say: Callable[[str], str]) -> str:
    """The Markdown with say(piece) in place of each of its pieces."""
    out: list[str] = []
    lines: list[str] = []  # of the piece so far
    fence = ""

    def end() -> None:
        if not lines:
            return
        quote = lines[0].startswith("> ")
        whole = " ".join(line.removeprefix("> ").strip() if i else line.rstrip() for i, line in enumerate(lines))
        if lines[0].lstrip().startswith("|"):
            cells = re.split(r"(?<!\\)\|", whole)
            out.append("|".join(f" {say(cell.strip())} " if has_words(cell) else cell for cell in cells))
        elif re.match(r"\$\$|<!--|</details|:::|:(?!alt:)\w+:", whole) or not has_words(whole):  # :alt: is an option
            out.extend(lines)
        elif match := HEAD.fullmatch(whole):
            rest = match[2]
            if quote and (inner := re.fullmatch(r"([-*] )(.*)", rest)):
                out.append(f"{match[1]}{inner[1]}{say(inner[2])}")
            else:
                out.append(f"{match[1]}{say(rest)}{match[3]}")
        lines.clear()

    rows = text.split("\n")
    for i, line in enumerate(rows):
        if fence:
            if fence.endswith("}") and (match := re.fullmatch(r"(:caption: )(.*)|(.+)( <\w+>)", line)):  # of a toctree
                line = f"{match[1]}{say(match[2])}" if match[1] else f"{say(match[3])}{match[4]}"
            out.append(line)
            fence = "" if line.strip() == "```" else fence
            continue
        if line.strip().startswith("```"):
            end()
            out.append(line)
            fence = line.strip() if "{toctree}" in line else "```"
        elif not line.strip() or line.strip() == ">":
            end()
            out.append(line)
        elif i + 1 < len(rows) and rows[i + 1].startswith(": ") and not lines:  # the term of a list of definitions
            out.append(line)
        else:
            quoted = bool(lines) and lines[0].startswith("> ") and line.startswith("> ")
            if re.match(NEW, line) and not (quoted and not re.match(r"> (?:[-*] |\*\*)", line)):
                end()
            lines.append(line)
            if re.match(r" *(?:#{1,6} |\||:::|:\w+:|</details)", line) or line.endswith("</summary>"):
                end()
    end()
    return "\n".join(out)


def english(page: str) -> str:
    """The Markdown of a page of the book."""
    own = Path(__file__).parent / "pages" / page
    text = (own if own.exists() else ROOT / page).read_text()
    text = text.replace("[中文](docs/README.zh-CN.md)\n\n", "")  # the book links its languages itself
    if page == "ring.md":
        from book.data import WRONG_GRADIENTS, WRONG_OUT
        from ring_doctor.catalogue import CATALOGUE

        mistakes = [f"{name}\n: {CATALOGUE[name].what}" for name in (*WRONG_OUT, *WRONG_GRADIENTS)]
        return text.replace("<!-- mistakes -->", "\n\n".join(mistakes))
    if not page.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def pieces(page: str) -> list[str]:
    """What there is to translate on a page, in order, each piece once."""
    found: dict[str, None] = {}
    rewrite(english(page), lambda piece: found.setdefault(piece) or piece)
    return list(found)


def po(page: str, language: str) -> Path:
    return LOCALE / language / Path(page).with_suffix(".po")


@cache
def said(page: str, language: str) -> dict[str, str]:
    """The translated pieces of a page."""
    path = po(page, language)
    if not path.exists():
        return {}
    with path.open("rb") as file:
        return {str(m.id): str(m.string) for m in read_po(file, language) if m.id and m.string and not m.fuzzy}


def missing(page: str, language: str) -> list[str]:
    """The pieces of a page that have no translation."""
    return [piece for piece in pieces(page) if piece not in said(page, language)]


@cache
def translated(language: str) -> set[str]:
    """The pages that the book has in this language: those with at least nine tenths of their pieces."""
    if language == "en":
        return set()
    pages = {page for page in PAGES if 10 * len(missing(page, language)) <= len(pieces(page))}
    return pages if "README.md" in pages else pages - {"index.md"}  # the landing page takes its doors from there


def translate(text: str, page: str, language: str) -> str:
    """Markdown of a page in this language; English where the page has no translation."""
    known = said(page, language)
    return rewrite(text, lambda piece: known.get(piece, piece)) if page in translated(language) else text


@cache
def headings(language: str) -> dict[str, str]:
    """The English of each translated heading: links name the English."""
    found = {}
    for page in translated(language):
        for title in re.findall(r"^#{1,4} (.*)", english(page), re.M):
            if title in said(page, language):
                found[plain(said(page, language)[title])] = plain(title)
    return found


def plain(words: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", words)


def slug(title: str) -> str:
    """The anchor of a heading, for MyST: that of the English heading in all languages."""
    from myst_parser.mdit_to_docutils.base import default_slugify

    return default_slugify(headings(os.environ.get("BOOK_LANGUAGE", "en")).get(title, title))


def readme(language: str) -> str:
    """README.md in this language; links inside it lead to its own headings."""
    text = translate(english("README.md"), "README.md", language)
    text = re.sub(r"\]\((?!https?:|#)", "](../", text).replace("](../docs/", "](")  # it lies in docs/
    text = text.replace("\n\n", "\n\n[English](../README.md)\n\n<!-- Made by python -m book.translate -->\n\n", 1)
    to_own = {anchor(title): anchor(own) for own, title in headings(language).items()}
    return re.sub(r"\]\(#([^)]+)\)", lambda match: f"](#{to_own.get(match[1], match[1])})", text)


def anchor(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def terms(language: str) -> list[dict[str, str]]:
    """The terms: how each is said, and why."""
    with (LOCALE / language / "terms.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def update(page: str, language: str) -> None:
    """Bring the .po file of a page up to date: new pieces without words, changed pieces as fuzzy, old pieces gone."""
    path = po(page, language)
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        catalog = read_po(file, language)
    template = Catalog()
    for piece in pieces(page):
        template.add(piece)
    catalog.header_comment, catalog.fuzzy = f"# {page}", False
    catalog.update(template)
    catalog.obsolete.clear()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_po(written := io.BytesIO(), catalog, width=120)
    path.write_bytes(DATES.sub(b"", written.getvalue()))


def main() -> int:
    for language in LANGUAGES.keys() - {"en"}:
        for page in PAGES:
            update(page, language)
        said.cache_clear()
        for page in PAGES:
            left = missing(page, language)
            print(
                f"{language} {page}: {f'{len(left)} pieces to translate' if left else 'complete'}", *left, sep="\n    "
            )
        if "README.md" in translated(language):
            (ROOT / f"docs/README.{language.replace('_', '-')}.md").write_text(readme(language))
    return 0


if __name__ == "__main__":
    sys.exit(main())
