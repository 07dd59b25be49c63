"""Build the book: `make site` writes site/, which any web server can serve.

    python -m book [--language zh_CN]
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from book.data import write
from book.stage import ROOT, stage


def build(to: Path, language: str = "en") -> int:
    """Lay out the pages, write the data of the explorers, and run Sphinx. Returns its exit status."""
    source = ROOT / "build/book"
    source.mkdir(parents=True, exist_ok=True)
    stage(source)
    sphinx = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-c", "book"]
    built, doctrees = ROOT / f"build/html/{language}", ["-d", f"build/doctrees/{language}"]
    environment = os.environ | {"BOOK_LANGUAGE": language, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*sphinx, *doctrees, str(source), str(built)], cwd=ROOT, env=environment)
    shutil.copytree(built, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "objects.inv"))
    if language == "en":
        write(to / "data")
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m book", description="Build the book into site/.")
    parser.add_argument("--language", default="en", help="the language of the pages, for example zh_CN (default: en)")
    language = parser.parse_args().language
    return build(ROOT / "site" / ("" if language == "en" else language), language)


if __name__ == "__main__":
    sys.exit(main())
