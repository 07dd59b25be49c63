"""Build the book: `make site` writes site/, which any web server can serve, and which opens from a file too.

python -m book                   the Chinese book is site/zh-CN/
python -m book --translations    bring book/locale/ up to date with the English pages, and say what is missing
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from book.contents import ARCHIVE, LANGUAGES, NO_WORDS, REPOSITORY, ROOT, folder, stage
from book.data import write
from ringlab.options import Parser


def sphinx(builder: str, language: str, to: Path) -> int:
    """Run Sphinx on the pages of a language; warnings are errors. The builder gettext writes book.pot, to translate."""
    source = stage(language)
    shutil.rmtree(to, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-b", builder, "-E", "-q", "-W", "--keep-going", "-c", "book"]
    command += ["-D", "language=en"] if builder == "gettext" else []
    places = ["-d", f"build/doctrees/{language}", str(source), str(to)]
    environment = os.environ | {"BOOK_LANGUAGE": language, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *places], cwd=ROOT, env=environment).returncode


def build() -> int:
    """Write the pages of all languages into site/, with the numbers of the explorers and the archive of the code."""
    html, data, site = ROOT / "build/html", ROOT / "build/data", ROOT / "site"
    shutil.rmtree(data, ignore_errors=True)  # of an earlier build
    with ThreadPoolExecutor() as threads:
        built = [threads.submit(sphinx, "html", language, html / language) for language in LANGUAGES]
        write(data)
    shutil.rmtree(site, ignore_errors=True)
    for language in LANGUAGES:
        to = site / folder(language)
        left_out = (".*", "objects.inv", "*.map", "_images" if folder(language) else "")  # see conf.py
        shutil.copytree(html / language, to, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)
    shutil.copytree(data / "narrow", site / "_images", dirs_exist_ok=True)
    shutil.copytree(data, site / "data", ignore=shutil.ignore_patterns("narrow"))
    if not REPOSITORY:
        archive = ["git", "archive", "--prefix=ring-attention/", "-o", str(site / ARCHIVE), "HEAD"]
        subprocess.run(archive, cwd=ROOT, check=True)
    return max(each.result() for each in built)


def kept(piece: str) -> Counter[str]:
    """What a translation must keep: code, formulas, links, tags, numbers, and names that a page fills in."""
    numbers = re.findall(r"(?<![A-Za-z_])\d+(?:[.,]\d+)*|\{\w+\}", NO_WORDS.sub(" ", piece))
    return Counter([*numbers, *(each.split("](")[-1] for each in NO_WORDS.findall(piece))])  # of a picture, its place


def report(language: str) -> str:
    """What a translation lacks, for who translates: a piece without words of its own is shown in English."""
    from babel.messages.pofile import read_po

    with (ROOT / f"book/locale/{language}/LC_MESSAGES/book.po").open("rb") as file:
        pieces = [piece for piece in read_po(file, language) if piece.id]
    empty = [piece.id for piece in pieces if piece.fuzzy or not piece.string]
    wrong = [piece.string for piece in pieces if piece.string and kept(piece.id) != kept(piece.string)]
    count = f"{language}: {len(empty)} of {len(pieces)} pieces are shown in English"
    return "\n    ".join([count, *empty, f"{len(wrong)} have other numbers, code or links:", *wrong])


def main() -> int:
    parser = Parser(prog="python -m book", description="Build the book into site/.")
    parser.add_argument("--translations", action="store_true", help="bring book/locale/ up to date, and build nothing")
    options = parser.parse_args()
    if options.translations:
        from sphinx_intl.basic import update

        others = [language for language in LANGUAGES if language != "en"]
        status = max(sphinx("gettext", language, ROOT / "build/gettext") for language in others)
        (ROOT / "build/gettext/sphinx.pot").unlink()  # words of the theme and its templates: sphinx.po, by hand
        update(str(ROOT / "book/locale"), str(ROOT / "build/gettext"), others, line_width=120, ignore_obsolete=True)
        print(*map(report, others), sep="\n")
        return status
    return build()


if __name__ == "__main__":
    sys.exit(main())
