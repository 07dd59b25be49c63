"""What the book holds, and what Sphinx is told of it: notebooks as Markdown, links to code, pages of code.

A page keeps its path of this repository, so links between pages stay as they are. A link to a file of code leads to a
page that shows it line by line, `ring_attn.py.html#L-51`. In another language the book has the pages that are
translated; links to all others lead to the English book.
"""

import ast
import base64
import json
import os
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, find_lexer_class_for_filename
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.locale import _
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

from bench.scoreboard import Grade, grades
from book.data import WRONG_GRADIENTS, WRONG_OUT
from figures import shapes
from figures.draw_all import NARROW
from ring_doctor.catalogue import CATALOGUE
from ring_planner.plan import digits

# The one setting: where the code is, and where the book is published. Empty: the book brings the code as an archive.
REPOSITORY, SITE = (os.environ.get(name, "").rstrip("/") for name in ("BOOK_REPOSITORY", "BOOK_SITE"))
ARCHIVE = "ring-attention.tar.gz"
ROOT = Path(__file__).parent.parent
OWN = sorted((Path(__file__).parent / "pages").glob("*.md"))  # the few pages that only the book has
PAGES = [  # what the repository holds already
    "README.md",
    "CONTRIBUTING.md",
    "docs/[!R]*.md",
    "examples/README.md",
    "notebooks/*.md",
    "ringlab/README.md",
    "ring_doctor/README.md",
    "ring_planner/README.md",
    "notebooks/*.ipynb",
    "notebooks/*/*.ipynb",
    "bench/README.md",
    "bench/results/*.md",
    "ringlab/hugging_face/*.md",
    "ring_doctor/mistakes/*.md",
    "ring_doctor/whole_models/*.md",
    "ring_doctor/patients/*.md",
    "ring_doctor/patients/findings/*.md",
]
TRANSLATED = [
    "index.md",
    "ring.md",
    "deadlock.md",
    "solve.md",
    "xray.md",
    "planner.md",
    "README.md",
    "notebooks/0[1-8]_*.ipynb",
    "docs/your_model.md",
    "docs/glossary.md",
]
AS_CODE = {".py", ".toml", ".yml", ".txt", ".sh", ".yaml", ".sbatch", ".cff", ""}  # a link to it leads to its lines
# Pictures, code, formulas, targets of links, tags
NO_WORDS = re.compile(r"!\[[^\]]*\]\([^)]*\)|`[^`]*`|\$[^$]+\$|\]\([^)]*\)|<[^>]*>|https?://\S+")
UNITS = {"ms": "ms", "tokens_s_a_gpu": "tokens/s", "peak_gib": "GiB", "s": "s", "us": "µs"}  # of the scoreboard
TREE = re.compile(r"```\{toctree\}\n(.*?)\n\n(.*?)\n```", re.S)
IS_PATH = re.compile(r"[/.]|^[A-Z]+$")  # and not an anchor of the page itself
IN_CHAPTERS = {  # an explorer, its settings, and the heading before which it stands
    "notebooks/04_the_ring": ("deadlock", "P=4&order=RSSS", "## The ring"),
    "notebooks/05_backward": ("ring", "pass=backward", "## Four mistakes"),
    "notebooks/07_causal_balance": ("ring", "causal=on&wire=fast", "## What must follow the layout"),
    "docs/which_way": (
        "planner",
        "model=llama-3.1-8b&gpu=h100&hosts=1&seq_len=131072",
        "## Whole steps, by the planner",
    ),
}
DRAWN_NARROW = {
    shapes.told(module.draw): name for name, module in NARROW.items()
}  # pictures that phones see in a narrow version
BELOW = {  # pages that stand below a page in the contents
    "bench/README": ("results/*",),
    "ring_doctor/patients/results": ("README", "findings/*"),
    "docs/your_model": ("../ringlab/hugging_face/EVERY_MODEL", "../examples/README"),
}
# What a language calls itself, and this book in it. What the book says by itself is translated in sphinx.po.
LANGUAGES = {"en": ("English", "Ring Attention, step by step"), "zh_CN": ("中文", "一步一步学 Ring Attention")}


def codespace(repository: str) -> str:
    """Where .devcontainer.json sets the repository up in a browser; empty where there is no such place."""
    at_home = repository.startswith("https://github.com/")
    return repository.replace("github.com", "codespaces.new") + "?quickstart=1" if at_home else ""


def folder(language: str) -> str:
    """Where a language is below site/: the English book is there itself, and the others are folders of it."""
    return "" if language == "en" else language.replace("_", "-")


def pages(language: str = "en") -> dict[str, Path]:
    """The pages of a language: where they are in the book, and in this repository."""
    found = {str(path.relative_to(ROOT)): path for pattern in PAGES for path in sorted(ROOT.glob(pattern))}
    found |= {path.name: path for path in OWN}
    wanted = ["*"] if language == "en" else TRANSLATED
    return {name: path for name, path in found.items() if any(fnmatch(name, pattern) for pattern in wanted)}


def readme(language: str) -> str:
    """README in a language, its links as from the top folder."""
    if language == "en":
        text = (ROOT / "README.md").read_text().replace("[中文](docs/README.zh-CN.md)\n\n", "")
    else:
        text = (ROOT / f"docs/README.{folder(language)}.md").read_text().replace("[English](../README.md)\n\n", "")
        text = re.sub(r"\]\((?!https?:|#)", "](docs/", text).replace("](docs/../", "](")
    return text


def stage(language: str) -> Path:
    """Copy the pages of a language, and pictures, to where Sphinx reads them."""
    to = ROOT / f"build/book/{language}"
    shutil.rmtree(to, ignore_errors=True)
    for name, path in pages(language).items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        (to / name).write_text(text.replace("../../", "") if path in OWN else text)  # pages of our own go to the top
    (to / "README.md").write_text(readme(language))
    shutil.copytree(ROOT / "figures", to / "figures", ignore=shutil.ignore_patterns("__pycache__", "*.py", "*.json"))
    return to


# What Sphinx reads ---------------------------------------------------------------------------------------------------


def on_source(app: Sphinx, page: str, source: list[str]) -> None:
    """Make Markdown of a notebook, put explorers, parts of README and tables into their places."""
    language, text = os.environ.get("BOOK_LANGUAGE", "en"), source[0]
    if app.env.doc2path(page).suffix == ".ipynb":
        text = markdown(json.loads(text), Path(app.srcdir) / page)
        if words := ", ".join(f"! {word}" for word in topics(Path(page).name) if "," not in word):
            text += f"\n\n```{{index}} {words}\n```\n"
    if page in IN_CHAPTERS:
        name, settings, heading = IN_CHAPTERS[page]
        before, at, after = text.partition(f"{heading}\n")
        if not at:
            raise ValueError(f"{page} has no heading {heading!r}, before which its explorer stands; see IN_CHAPTERS")
        text = f"{before}{explorer(name, settings)}\n\n{at}{after}"
    if page == "ring":
        text = text.replace("<!-- mistakes -->", mistakes())
    if app.builder.name == "gettext":  # what has its translation elsewhere, or none
        text = text.replace("<!-- scoreboard -->", "| – |") if page != "README" else f"# {LANGUAGES['en'][1]}"
    else:
        text = re.sub(r"<!-- (about|code|doors|learn|scoreboard) -->", lambda match: part(match[1], language), text)
    if page == "index":
        text = TREE.sub(lambda match: contents(match[1], match[2], language), text)
    if page in BELOW and language == "en":
        text += "\n\n```{toctree}\n:hidden:\n:glob:\n\n" + "\n".join(BELOW[page]) + "\n```\n"
    # The words of a fold are a piece of their own, for translators.
    text = re.sub(r"<summary>(.*?)</summary>", r"<summary>\n\n\1\n\n</summary>", text, flags=re.S)
    source[0] = text


def contents(options: str, entries: str, language: str) -> str:
    """A list of contents: the pages of this language, and links to those that are in English only."""
    here, there = [], []
    for entry in entries.split("\n"):
        name = re.findall(r"[\w/]+", entry)[-1]
        if {f"{name}.md", f"{name}.ipynb"} & pages(language).keys():
            here.append(entry)
        else:
            there.append(f'<a class="english" href="../{name}.html">{escape(title(name))}</a>')
    tree = "\n".join(("```{toctree}", options, "", *here, "```"))
    return f"{tree}\n\n<p>{_('In English only')}{' · '.join(there)}</p>" if there else tree


def title(page: str) -> str:
    """The English heading of a page."""
    path = next(path for name, path in pages().items() if Path(name).with_suffix("") == Path(page))
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    return re.findall("^# (.*)", text, re.M)[0]


def markdown(notebook: dict[str, Any], page: Path) -> str:
    """A notebook as Markdown, with its outputs; its pictures become files beside the page."""
    blocks = []
    for i, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        block = f"`````python\n{source}\n`````"
        if "hide-input" in cell["metadata"].get("tags", []) or only_imports(source):
            block = f'<details class="code"><summary>The code of this cell</summary>\n\n{block}\n\n</details>'
        blocks.append(block)
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                shown = output["metadata"]["image/png"]
                alt = " ".join(shown.get("alt", "").split())
                name = f"{DRAWN_NARROW.get(alt, f'{page.name}-{i}')}.png"
                page.with_name(name).write_bytes(base64.b64decode("".join(data["image/png"])))
                blocks.append(f":::{{image}} {name}\n:alt: {alt}\n:width: {shown['width']}px\n:::")
            else:
                blocks.append(f":::{{container}} output\n`````text\n{''.join(data['text/plain']).rstrip()}\n`````\n:::")
    return "\n\n".join(blocks)


def chapter(concept: Path) -> str | None:
    """The name of the notebook in whose row of the map, notebooks/README.md, this file is."""
    link = f"](../{concept.relative_to(ROOT)})"
    rows = re.findall(r"^\| \[[^\]]*\]\((\w+)\.ipynb\)(.*)$", (ROOT / "notebooks/README.md").read_text(), re.M)
    return next((name for name, row in rows if link in row), None)


def topics(notebook: str) -> list[str]:
    """The words of the glossary that this chapter teaches: it, or a script of it, is the last link of their entries."""
    found = []
    for word, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", (ROOT / "docs/glossary.md").read_text(), re.M):
        for file in re.findall(r"\]\(\.\./([^()#]+\.(?:py|ipynb))\)", text)[-1:]:
            if notebook == (Path(file).stem if file.endswith(".ipynb") else chapter(ROOT / file)):
                found += [word, word.removesuffix(" layout")]
    return list(dict.fromkeys(found))


def only_imports(source: str) -> bool:
    """Whether a cell does nothing but import: it is folded."""
    try:
        return all(isinstance(line, ast.Import | ast.ImportFrom) for line in ast.parse(source).body)
    except SyntaxError:  # a line of IPython's own
        return False


def mistakes() -> str:
    return "\n\n".join(f"{name}\n: {CATALOGUE[name].what}" for name in (*WRONG_OUT, *WRONG_GRADIENTS))


def explorer(name: str, settings: str) -> str:
    """The explorer of a page with its words, for another page, set as a chapter needs it."""
    text = (Path(__file__).parent / f"pages/{name}.md").read_text().replace("<!-- mistakes -->", mistakes())
    shown = re.findall(r"```\{raw\} html\n.*?```", text, re.S)[0]
    words = re.findall(r"::::\{container\} words\n.*?\n::::", text, re.S)[0]
    shown = shown.replace(" hidden>", f' hidden data-settings="{escape(settings)}">', 1)
    shown = re.sub(r"<h2 (.*?)></h2>", r'<p class="heading" \1></p>', shown)
    return f"## Touch it\n\n{shown}\n\n{words}"


def part(name: str, language: str) -> str:
    """What stands in place of `<!-- name -->` on a page of the book's own."""
    text, english = readme(language), re.findall("^## (.*)", readme("en"), re.M)
    sections = re.split("^## .*\n", text, flags=re.M)
    if name == "about":
        return sections[0].split("\n\n")[1]
    if name == "code":
        here = f"curl -L {SITE or 'ADDRESS'}/{ARCHIVE} | tar xz"
        return f"git clone {REPOSITORY} ring-attention" if REPOSITORY else here
    if name == "doors":
        rows = re.findall(r"^\| (.*?) \| (.*?) \| `(.*?)` \| (.*?) \|$", text, re.M)
        touch = ("[](/ring.md)", "", "[](/xray.md)", "[](/planner.md)")  # the explorer of each door
        found = "::::{container} doors\n\n"
        for (door, want, command, its), explorer_of in zip(rows, touch, strict=True):
            lines_of = (":::{container} door", door, want, f"```console\n$ {command}\n```", its, explorer_of, ":::\n\n")
            found += "\n\n".join(lines_of)
        found += "::::"
    elif name == "scoreboard":
        return "\n".join(map(scored, grades()))
    else:  # learn
        found = sections[1 + english.index("What you will learn")]
    return found.replace("](#", "](README.md#")


def scored(grade: Grade) -> str:
    """A line of the scoreboard's table. A whole step and serving have no way: their section stands there."""
    way, source = grade.row.get("way", grade.section), grade.row["source"]
    seen, said = (f"{digits(number)} {UNITS[grade.what]}" for number in (grade.measured, grade.predicted))
    cells = (" ".join(grade.name.split()), way, seen, said, f"{100 * grade.error:+.1f}", source)
    return f"| {' | '.join(cells)} |"


# Where links lead ----------------------------------------------------------------------------------------------------


class Anchors(SphinxTransform):
    """Before a page is translated: its sections keep the anchors of their English headings, words keep their keys, and
    what is code, a formula or a picture and nothing else is no piece to translate."""

    default_priority = 9

    def apply(self) -> None:
        for section in self.document.findall(nodes.section):
            if section.get("slug") and section["slug"] not in section["ids"]:
                section["ids"].append(section["slug"])
        for picture in list(self.document.findall(addnodes.download_reference)):
            picture.replace_self(picture.children)  # no copies for download: pictures open where they are shown
        for text in self.document.findall(nodes.TextElement):
            words = re.search(r"[A-Za-z]{2}", NO_WORDS.sub(" ", text.rawsource))
            if not isinstance(text, nodes.Inline) and (not words or isinstance(text, nodes.term | nodes.math_block)):
                text["translatable"] = False


class Links(SphinxPostTransform):
    """Links to what is no page of this book: lines of code, a page of the English book, a file of the repository."""

    default_priority = 8  # before MyST, which knows pages only

    def run(self) -> None:
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["reftype"] == "myst" and node["refdomain"] != "doc" and IS_PATH.search(node["reftarget"]):
                to = self.address(node["reftarget"])
                words = node[0].deepcopy()
                classes = [] if self.config.language == "en" else ["english"]
                node.replace_self(nodes.reference("", "", words, refuri=to, classes=classes) if to else words)

    def address(self, target: str) -> str | None:
        """Where the link leads, from this page; None for what is on no page."""
        path, _, anchor = target.partition("#")
        here = Path(self.env.docname).parent
        name = os.path.normpath(here / path).removeprefix("book/pages/")
        if name == "book/pages":
            name = "index.md"
        elif (ROOT / name).is_dir():
            name = f"{name}/README.md" if (ROOT / f"{name}/README.md").is_file() else f"{name.split('/')[0]}/README.md"
        up = os.path.relpath(".", here) + ("" if self.config.language == "en" else "/..")
        if name in pages():
            page = str(Path(name).with_suffix(".html"))
        elif (ROOT / name).is_file() and Path(name).suffix in AS_CODE and not name.startswith("tests/"):
            self.app.code.add(name)
            page = f"{page_of(name)}.html"
        else:
            return f"{REPOSITORY}/blob/HEAD/{name}" if REPOSITORY and (ROOT / name).exists() else None
        return f"{up}/{page}{'#' + anchor if anchor else ''}"


def page_of(name: str) -> str:
    """The page of a file of code, without its ending. Servers leave out files and folders that begin with a dot."""
    return re.sub(r"(^|/)\.", r"\1dot-", name)


def code_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page of lines for each file of code that a page links to."""
    for name in sorted(app.code) if app.config.language == "en" else []:  # type: ignore[attr-defined]
        body = f"<h1>{Path(name).name}</h1><p><code>{name}</code></p>"
        if its := chapter(ROOT / name):
            up = os.path.relpath(f"notebooks/{its}.html", Path(name).parent)
            body += f'<p>Its chapter: <a href="{up}">{escape(title(f"notebooks/{its}"))}</a></p>'
        yield page_of(name), {"title": Path(name).name, "body": f"<section>{body}{lines(name)}</section>"}, "page.html"


def lines(name: str) -> str:
    """The lines of a file, each with an anchor: #L-12."""
    lexer = (find_lexer_class_for_filename(name) or TextLexer)()
    look = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, cssclass="highlight lines")
    return highlight((ROOT / name).read_text(), lexer, look)
