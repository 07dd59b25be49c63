"""Build the book: `make site` writes site/, which any web server can serve.

python -m book [--language zh_CN]    the Chinese book is site/zh-CN/
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from book.data import write
from book.stage import ARCHIVE, REPOSITORY, ROOT, stage
from book.translate import LANGUAGES


def build(to: Path, language: str = "en") -> int:
    """Lay out the pages, run Sphinx on all of them, and write the numbers of the explorers. Returns Sphinx's status."""
    source, built = ROOT / f"build/book/{language}", ROOT / f"build/html/{language}"
    source.mkdir(parents=True, exist_ok=True)
    stage(source, language)
    shutil.rmtree(built, ignore_errors=True)
    sphinx = [sys.executable, "-m", "sphinx", "-b", "html", "-E", "-q", "-W", "--keep-going", "-c", "book"]
    places = ["-d", f"build/doctrees/{language}", str(source), str(built)]
    environment = os.environ | {"BOOK_LANGUAGE": language, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*sphinx, *places], cwd=ROOT, env=environment)
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(built, to, ignore=shutil.ignore_patterns(".*", "objects.inv"))
    if language == "en":
        write(to / "data")
        if not REPOSITORY:
            archive = ["git", "archive", "--prefix=ring-attention/", "-o", str(to / ARCHIVE), "HEAD"]
            subprocess.run(archive, cwd=ROOT, check=True)
    return done.returncode


def folder(language: str) -> Path:
    """Where a language is: the English book is site/, and the others are folders of it."""
    return ROOT / "site" / ("" if language == "en" else language.replace("_", "-"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m book", description="Build the book into site/.")
    parser.add_argument("--language", choices=LANGUAGES, help="build the pages of one language (default: all)")
    language = parser.parse_args().language
    if not shutil.which("node"):
        parser.error("node is missing: formulas are rendered with it; install it (Debian, Ubuntu: apt install nodejs)")
    status = [build(folder(each), each) for each in ([language] if language else LANGUAGES)]
    return max(status)


if __name__ == "__main__":
    sys.exit(main())
