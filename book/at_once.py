"""What one link opens, nothing installed, once the code and the book have addresses: the settings of contents.py.

python -m book.at_once    in this checkout: a cell for Colab in every notebook, a link to the site's puzzles in README

site.yml pushes what this writes as the branch `colab`, to which the pages of the notebooks link.
"""

import os
import re
import sys
from pathlib import Path

import nbformat

from book.contents import NOTHING_TO_INSTALL, REPOSITORY, ROOT, SITE
from notebooks.source import build

GITHUB = "https://github.com/"
BRANCH = "colab"
EXTRAS = {"12_your_own_model": "plots,hf", "appendix_ring_in_jax": "plots,jax"}  # the others need pictures only
CELL = """\
# Colab needs this cell, which takes a few minutes: it gets the code and installs it. Elsewhere it does nothing.
import os, subprocess, sys

if "google.colab" in sys.modules:
    code = "/content/ring-attention"
    if not os.path.exists(code):
        subprocess.run(["git", "clone", "-q", "--depth=1", "{repository}", code], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", code + "[{extras}]"], check=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores
    sys.path.insert(0, code)
    os.chdir(code + "/notebooks")"""


def in_colab(page: str, repository: str = REPOSITORY) -> str:
    """The address that opens a notebook in Colab; empty where there is none."""
    if not repository.startswith(GITHUB) or not page.endswith(".ipynb"):
        return ""
    return f"https://colab.research.google.com/github/{repository.removeprefix(GITHUB)}/blob/{BRANCH}/{page}"


def for_colab(path: Path, repository: str) -> nbformat.NotebookNode:
    """A notebook with the cell that Colab needs, and links that lead out of it."""
    notebook = nbformat.read(path, as_version=4)

    def absolute(link: re.Match[str]) -> str:
        page, hash_, anchor = link[1].partition("#")
        name = os.path.normpath(path.parent.relative_to(ROOT) / page)
        return f"]({in_colab(name, repository) or f'{repository}/blob/HEAD/{name}'}{hash_}{anchor})"

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", absolute, cell.source)
    setup = CELL.format(repository=repository, extras=EXTRAS.get(path.stem, "plots"))
    notebook.cells.insert(1, nbformat.v4.new_code_cell(setup, id="colab"))  # below the head
    return notebook


def main() -> int:
    if not REPOSITORY.startswith(GITHUB) or not SITE:
        sys.exit(f"BOOK_REPOSITORY must be an address of {GITHUB}, and BOOK_SITE one of a site: nothing was written")
    for source in [*build.chapters(), *build.others()]:
        path = build.pair(source)
        nbformat.write(for_colab(path, REPOSITORY), path)
    for language, name in (("en", "README.md"), ("zh_CN", "docs/README.zh-CN.md")):
        link = NOTHING_TO_INSTALL[language].format(f"{SITE}/{'' if language == 'en' else 'zh-CN/'}solve.html")
        (ROOT / name).write_text((ROOT / name).read_text().replace("<!-- puzzles -->", link))
    return 0


if __name__ == "__main__":
    sys.exit(main())
