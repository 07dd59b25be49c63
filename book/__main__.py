"""Build the book: `make site` writes site/, which any web server can serve, and which opens from a file too.

python -m book [--language zh_CN]    the Chinese book is site/zh-CN/
python -m book --translations        bring book/locale/ up to date with the English pages; then fill in what is empty
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from book.contents import ARCHIVE, LANGUAGES, REPOSITORY, ROOT, folder, stage
from book.data import write


def sphinx(builder: str, language: str, to: Path, *options: str) -> int:
    """Lay out the pages of a language and run Sphinx on them. Returns its status: warnings are errors."""
    source = stage(language)
    shutil.rmtree(to, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-b", builder, "-E", "-q", "-W", "--keep-going", "-c", "book", *options]
    places = ["-d", f"build/doctrees/{language}", str(source), str(to)]
    environment = os.environ | {"BOOK_LANGUAGE": language, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *places], cwd=ROOT, env=environment).returncode


def build(language: str) -> int:
    return sphinx("html", language, ROOT / f"build/html/{language}")


def publish(language: str) -> None:
    """Write the pages of a language into site/, with the numbers of the explorers and the archive of the code."""
    built, to = ROOT / f"build/html/{language}", ROOT / "site" / folder(language)
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(built, to, ignore=shutil.ignore_patterns(".*", "objects.inv"))
    if language == "en":
        write(to / "data")
        if not REPOSITORY:
            archive = ["git", "archive", "--prefix=ring-attention/", "-o", str(to / ARCHIVE), "HEAD"]
            subprocess.run(archive, cwd=ROOT, check=True)


def extract(language: str, to: Path) -> int:
    """Write what there is to translate, by Sphinx's own builder: book.pot. The README is docs/README.zh-CN.md."""
    return sphinx("gettext", language, to, "-D", "language=en")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m book", description="Build the book into site/.")
    parser.add_argument("--language", choices=LANGUAGES, help="build the pages of one language (default: all)")
    parser.add_argument("--translations", action="store_true", help="bring book/locale/ up to date, and build nothing")
    options = parser.parse_args()
    if options.translations:
        from sphinx_intl.basic import update

        others = [language for language in LANGUAGES if language != "en"]
        status = max(extract(language, ROOT / "build/gettext") for language in others)
        update(str(ROOT / "book/locale"), str(ROOT / "build/gettext"), others, line_width=120, ignore_obsolete=True)
        return status
    languages = [options.language] if options.language else list(LANGUAGES)
    with ThreadPoolExecutor() as pool:  # a process each
        status = max(pool.map(build, languages))
    for language in languages:  # the English folder is that of the site, with the others in it
        publish(language)
    return status


if __name__ == "__main__":
    sys.exit(main())
