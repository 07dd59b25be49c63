"""The pages of the book, laid out for Sphinx: copies of the Markdown and notebooks, and a page for each concept file.

    stage(folder)    ->  folder/docs/glossary.md, folder/notebooks/04_the_ring.ipynb, folder/ring_attn.py.md, ...

A page keeps its path, so links between pages stay as they are. A link to a file of code leads to a page that shows it
line by line, `ring_attn.py.html#L-51`. Nothing is written here that another file says: only headings and links.
In another language the book has the pages that are translated. Links to all others lead to the English book.
"""

import ast
import base64
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from book.data import scoreboard
from book.translate import LANGUAGES, english, said, translate, translated
from ringlab.planning.plan import digits
from tests.one import commands, concepts

# The one setting: where the code is, and where the book is published. Empty: the book brings the code as an archive.
REPOSITORY, SITE = (os.environ.get(name, "").rstrip("/") for name in ("BOOK_REPOSITORY", "BOOK_SITE"))
ARCHIVE = "ring-attention.tar.gz"
ROOT = Path(__file__).parent.parent
OWN = Path(__file__).parent / "pages"  # the few pages that only the book has
PAGES = (  # what the repository holds already
    *("README.md", "docs/glossary.md", "CONTRIBUTING.md", "docs/*.md", "examples/README.md"),
    *("notebooks/*.ipynb", "notebooks/*/*.ipynb", "notebooks/*.md"),
    *("bench/README.md", "bench/results/*.md", "ringlab/models/*.md"),
    *("ring_doctor/patients/*.md", "ring_doctor/patients/findings/*.md"),
)
AS_CODE = {".py", ".toml", ".yml", ".txt", ".sh", ".yaml", ".sbatch", ".cff", ""}  # a link to it leads to its lines
LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(([^()\s]+)\)")
ROWS = re.compile(r"^\| \[[^\]]*\]\((\d\d_\w+)\.ipynb\) \| (.*?) \| (.*?) \| ", re.M)  # of notebooks/README.md
EXPLORERS = {"learn": "ring.md", "check": "xray.md", "plan": "planner.md"}  # of the landing page's doors
IN_CHAPTERS = {  # an explorer, its settings, and the heading before which it stands
    "notebooks/04_the_ring.ipynb": ("deadlock.md", "P=4&order=RSSS", "## The ring"),
    "notebooks/05_backward.ipynb": ("ring.md", "pass=backward", "## Four mistakes"),
    "notebooks/07_causal_balance.ipynb": ("ring.md", "causal=on&wire=fast", "## What must follow the layout"),
}
FOLDERS = {
    "basics": "What the ring is made of",
    "": "The ring",
    "training": "What training needs",
    "planning": "What it costs",
    "models": "What it is for",
    "doctor": "What is wrong with a ring",
}


class Staged:
    """A folder of pages that grows: each link of a page brings what it leads to."""

    def __init__(self, folder: Path, language: str) -> None:
        self.folder, self.language = folder, language
        self.translated = translated(language)
        self.readme, self.map = english("README.md"), english("notebooks/README.md").replace("](../", "](")
        self.concepts = {str(path.relative_to(ROOT)): path for path in concepts().values()}
        for name in (
            *(f"notebooks/{n}.py" for n in ("published_example", "paper_tables")),
            *(f"ring_doctor/{n}.py" for n in ("paper_ring", "catalogue", "xray")),
        ):
            self.concepts[name] = ROOT / name
        self.pages = {str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern)}
        self.code: set[str] = set()  # files that a page of lines shows
        self.topics = _topics(self)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # an unchanged page is not built again
            path.write_text(text)

    def copy(self, name: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".svg"):  # without indents, comments and who drew it: 7 % smaller
            text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", (ROOT / name).read_text(), flags=re.S)
            (self.folder / name).write_text(re.sub(r"\n\s+", "\n", text))
            return
        shutil.copy2(ROOT / name, self.folder / name)

    def linked(self, text: str, home: str) -> str:
        """The Markdown of the file `home` with its links to code led to pages of lines."""

        def of(match: re.Match[str]) -> str:
            image, words, target = match.groups()
            if re.match(r"[a-z]+:|#", target):
                return match[0]
            path, _, anchor = target.partition("#")
            name = os.path.normpath(Path(home).parent / path)
            if not (ROOT / name).exists():  # no link: an example in the text
                return match[0]
            if (ROOT / name).is_dir():
                inside = f"{name}/README.md"
                to = inside if inside in self.pages else "bench/README.md" if name.startswith("bench") else None
                if not to:
                    return words[1:-1]
                name, path = to, os.path.relpath(to, Path(home).parent)
                whole, anchor = f"{image}{words}({path})", ""
            else:
                whole = match[0]
            is_page = name in self.pages
            shown = is_page or (Path(name).suffix in AS_CODE and not name.startswith("tests/"))
            if self.language != "en" and not image and shown:
                return whole if name in self.translated else in_english(words[1:-1], name, anchor, home)
            if is_page:
                return whole
            if image:
                self.copy(name)
                return match[0]
            if Path(name).suffix not in AS_CODE or name.startswith("tests/"):  # in the repository only
                return f"[{words[1:-1]}]({REPOSITORY}/blob/HEAD/{name})" if REPOSITORY else words[1:-1]
            self.code.add(name)
            to = os.path.relpath(f"{page_of(name)}.md", Path(home).parent)
            return f"{image}{words}({to}{'#' + anchor if anchor else ''})"

        for picture in re.findall(r"^:+\{figure\} (\S+)", text, re.M):
            self.copy(os.path.normpath(Path(home).parent / picture))
        return LINK.sub(of, text)


def in_english(words: str, name: str, anchor: str, home: str) -> str:
    """A link from the page `home` of another language to a page of the English book, which is one folder further up."""
    html = str(Path(name).with_suffix(".html")) if name.endswith((".md", ".ipynb")) else f"{page_of(name)}.html"
    to = os.path.relpath(html, Path("zh-CN") / Path(home).parent) + (f"#{anchor}" if anchor else "")
    return f'<a href="{to}" hreflang="en">{words}</a>'


def page_of(name: str) -> str:
    """The page of a file of code, without its ending. Servers leave out files and folders that begin with a dot."""
    return re.sub(r"(^|/)\.", r"\1dot-", name)


def stage(folder: Path, language: str = "en") -> None:
    """Write every page below `folder`; pages that are no longer there are removed."""
    staged = Staged(folder, language)
    if language != "en":
        shutil.rmtree(folder)
        _translated(staged)
        return
    before = {path for path in folder.rglob("*") if path.suffix in (".md", ".ipynb")}
    for page in sorted(staged.pages):
        if page.endswith(".ipynb"):
            staged.write(page, _notebook(staged, page))
        else:
            text = english(page)
            more = _TOCTREES.get(page)
            staged.write(page, staged.linked(text, page) + (_toctree(more(staged), page) if more else ""))
    for path in sorted(OWN.glob("*.md")):
        staged.write(path.name, _own(staged, path))
    for name in staged.concepts:
        staged.write(f"{name}.md", _concept(staged, name))
    staged.write("concepts.md", _concepts(staged))
    for name in sorted(staged.code - set(staged.concepts)):
        head = f"---\norphan: true\n---\n\n# {Path(name).name}\n\n`{name}`\n\n"
        staged.write(f"{page_of(name)}.md", head + _lines(name))
    now = {folder / page for page in staged.pages} | {folder / path.name for path in OWN.glob("*.md")}
    now |= {folder / f"{page_of(name)}.md" for name in staged.code | set(staged.concepts)} | {folder / "concepts.md"}
    for path in before - now:
        path.unlink()


def _translated(staged: Staged) -> None:
    """The pages of another language."""
    for page in sorted(staged.translated):
        if (OWN / page).exists():
            staged.write(page, _own(staged, OWN / page))
        elif page.endswith(".ipynb"):
            staged.write(page, _notebook(staged, page))
        else:
            staged.write(page, staged.linked(translate(english(page), page, staged.language), page))


def _listed(staged: Staged, match: re.Match[str]) -> str:
    """A list of contents in another language: its pages, and links to those that are in English only."""
    head, caption, names = match.groups()
    here, there = [], []
    for line in names.split("\n"):
        files = [f"{name}{ending}" for name in re.findall(r"[\w/]+(?=>?$)", line) for ending in (".md", ".ipynb")]
        if staged.translated & set(files):
            here.append(line)
        else:
            file = next((f for f in files if (ROOT / f).exists()), None)
            title = re.findall(r"^# (.*)", english(file) if file else _concepts(staged), re.M)[0]
            there.append(in_english(title, files[0], "", "index.md"))
    tree = f"```{{toctree}}\n{head}\n\n{chr(10).join(here)}\n```\n" if here else ""
    only = LANGUAGES[staged.language].only_english
    return f"{tree}\n**{caption}** ({only}): {' · '.join(there)}\n" if there else tree


# Notebooks -----------------------------------------------------------------------------------------------------------


def _notebook(staged: Staged, name: str) -> str:
    """The notebook with its outputs, its pictures in fewer colours: they are a third as large."""
    notebook = json.loads((ROOT / name).read_text())
    topics = ", ".join(f"! {term}" for term in staged.topics.get(name, []))
    for i, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            source = "".join(cell["source"])
            page, settings, heading = IN_CHAPTERS.get(name, ("", "", ""))
            _, *after = source.split(f"{heading}\n\n") if page else [source]
            source = staged.linked(translate(source, name, staged.language), name)
            if after:
                at = f"{said(name, staged.language).get(heading[3:], heading[3:])}\n\n"
                source = source.replace(f"## {at}", f"{_explorer_of(page, settings, name, staged.language)}\n\n## {at}")
            if i == 0 and topics:
                source += f"\n\n```{{index}} {topics}\n```"
            cell["source"] = source
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                shown = output["metadata"].get("image/png", {})
                output["data"] = {"image/png": _fewer_colours("".join(output["data"]["image/png"]))}
                cell["metadata"]["mystnb"] = {"image": {"alt": shown.get("alt", ""), "width": f"{shown['width']}px"}}
    return json.dumps(notebook, indent=1, sort_keys=True)


def _explorer_of(page: str, settings: str, home: str, language: str) -> str:
    """The explorer of a page with its words, for another page, set as a chapter needs it."""
    text = translate(english(page), page, language)
    shown = re.search(r"```\{raw\} html\n<div.*?```", text, re.S)
    words = re.search(r"::::\{container\} words\n.*?\n::::", text, re.S)
    assert shown is not None
    assert words is not None
    up = os.path.relpath("_static", Path(home).parent)
    lines = (
        shown[0].replace('"_static/', f'"{up}/').replace(" hidden>", f' hidden data-settings="{escape(settings)}">', 1)
    )
    return re.sub(r"<h2 (.*?)></h2>", r'<p class="heading" \1></p>', lines) + "\n\n" + words[0]


def _topics(staged: Staged) -> dict[str, list[str]]:
    """The words of the glossary, by the chapter that teaches them: the search shows it first."""
    found: dict[str, list[str]] = {}
    for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", english("docs/glossary.md"), re.M):
        files = [os.path.normpath(f"docs/{file}") for file in re.findall(r"\]\(([^()#]+\.(?:py|ipynb))\)", text)]
        own = said("docs/glossary.md", staged.language).get(title, title)
        for file in files[-1:]:
            chapter = file if file.endswith(".ipynb") else f"notebooks/{_of_map(staged, file)[0]}.ipynb"
            names = [re.sub(r" ?(layout|布局)$", "", name) for name in re.split(r"[（）,]", own) if name]
            found.setdefault(chapter, []).extend(re.sub(r"[`;!]", "", name).strip() for name in names)
    return found


def _fewer_colours(png: str) -> str:
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(small := io.BytesIO(), format="png", optimize=True)
    return base64.b64encode(min(small.getvalue(), base64.b64decode(png), key=len)).decode()


# Concept files -------------------------------------------------------------------------------------------------------


def _concept(staged: Staged, name: str) -> str:
    """The page of a concept file: its docstring, its pictures and tests, its lines."""
    path = staged.concepts[name]
    here = Path(name).parent
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    blocks = [f"# {path.stem}", f"`{name}`", *_docstring(staged, name, told)]
    chapter, pictures = _of_map(staged, name)
    if chapter:
        title = json.loads((ROOT / f"notebooks/{chapter}.ipynb").read_text())["cells"][0]["source"]
        title = "".join(title).splitlines()[0].lstrip("# ")
        blocks.append(f"Its chapter: [{title}]({os.path.relpath(f'notebooks/{chapter}.ipynb', here)})")
    tests = [os.path.relpath(t, ROOT) for step in commands(path).get("tests", []) for t in step if t.endswith(".py")]
    if tests:
        blocks.append(f"Its tests: {', '.join(f'`{test}`' for test in tests)}")
    for picture in pictures[:1]:
        staged.copy(picture)
        alt = re.search(r"<desc[^>]*>(.*?)</desc>", (ROOT / picture).read_text(), re.S)
        words = " ".join(alt[1].split()).replace("[", r"\[").replace("]", r"\]") if alt else ""
        blocks += ["## Picture", f"![{words}]({os.path.relpath(picture, here)})"]
    blocks += ["## Lines", _lines(name)]
    return "\n\n".join(blocks) + "\n"


def _of_map(staged: Staged, name: str) -> tuple[str | None, list[str]]:
    """The chapter of a concept file and that chapter's pictures, the file's own first: a row of the map."""
    for chapter, scripts, pictures in ROWS.findall(staged.map):
        if f"({name})" in scripts:
            names = re.findall(r"\((figures/\w+\.svg)\)", pictures)
            return chapter, sorted(names, key=lambda picture: Path(picture).stem != Path(name).stem)
    return None, []


def _docstring(staged: Staged, name: str, text: str) -> Iterator[str]:
    """A docstring as Markdown: indented parts are literal, names of files are links."""
    here = Path(name).parent
    for part in re.split(r"\n\n(?=\S)|\n\n(?=    )", text):
        if part.startswith("    "):
            lines = "\n".join(line[4:] for line in part.splitlines())
            yield f"```{'console' if lines.startswith('$ ') else 'text'}\n{lines}\n```"
            continue
        pieces = re.split(r"(`[^`]*`)", part)
        words = "".join(p if p.startswith("`") else re.sub(r"([\\*_\[\]<>$|#~])", r"\\\1", p) for p in pieces)

        def link(match: re.Match[str]) -> str:
            file = match[0].replace("\\", "")
            for at in (here / file, Path(file)):
                target = os.path.normpath(at)
                if target in staged.concepts:
                    return f"[{Path(file).name}]({os.path.relpath(target, here)}.md)"
            return match[0]

        words = re.sub(r"(?:\.\./)*(?:[a-z0-9]|\\_|/)+\.py", link, words)
        yield re.sub(r"\n?(After|Source): ", r"\n\n\1: ", words)


def _lines(name: str) -> str:
    """The lines of a file, each with an anchor: #L-12."""
    try:
        lexer = get_lexer_for_filename(name)
    except ClassNotFound:
        lexer = TextLexer()
    look: dict[str, Any] = {"lineanchors": "L", "anchorlinenos": True, "wrapcode": True}
    shown = highlight((ROOT / name).read_text(), lexer, HtmlFormatter(linenos="inline", **look))
    region = f'<div class="highlight lines" role="region" aria-label="{escape(name)}">'
    shown = shown.replace('<div class="highlight">', region)
    return "```{raw} html\n" + shown + "```\n"


def _concepts(staged: Staged) -> str:
    """A list of the concept files, in the order of the map, with the sentence that each opens with."""
    order = [script for _, row, _ in ROWS.findall(staged.map) for script in re.findall(r"\(([\w/]+\.py)\)", row)]
    names = sorted(staged.concepts, key=lambda name: order.index(name) if name in order else len(order))
    blocks = ["# One idea a file", "Each file runs by itself and compares itself with full attention in float64."]
    for folder, words in FOLDERS.items():
        home = f"ringlab/{folder}" if folder else "."
        blocks += [f"## {words}"]
        inside = [name for name in names if str(Path(name).parent) == home]
        for name in inside:
            first = (ast.get_docstring(ast.parse((ROOT / name).read_text())) or "").split("\n\n")[0]
            sentence = " ".join(first.split())
            sentence = re.sub(r"([\\*_\[\]<>$|#~])", r"\\\1", sentence)
            blocks.append(f"[{Path(name).stem}]({name}.md)\n: {sentence}")
        blocks.append(_toctree([f"{name}.md" for name in inside], "concepts.md"))
    return "\n\n".join(blocks)


# Pages of the book's own ---------------------------------------------------------------------------------------------


def _own(staged: Staged, path: Path) -> str:
    """A page of book/pages, with what it takes from the README in its place."""
    text = translate(english(path.name), path.name, staged.language)
    if staged.language != "en":
        contents = r"```\{toctree\}\n(:caption: (.*?)\n.*?)\n\n(.*?)\n```\n"
        text = re.sub(contents, lambda match: _listed(staged, match), text, flags=re.S)

    def of_readme(part: str) -> str:
        return translate(part, "README.md", staged.language)

    doors = re.search(r"^\| door .*?\n\n", staged.readme, re.M | re.S)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in (doors[0] if doors else "").split("\n")[2:]]
    cards = [
        f":::{{container}} door\n{door}\n\n{want}\n\n```console\n$ {command.strip('`')}\n```\n\n{page}{touch}\n:::"
        for (door, want, command, page), touch in (
            (map(of_readme, row), _explorer(row[0], staged.language)) for row in rows if len(row) == 4
        )
    ]
    about = re.search(r"^# .*?\n\n(.*?)\n\n", staged.readme, re.S)
    parts = {
        "about": of_readme(about[1]) if about else "",
        "doors": "::::{container} doors\n" + "\n\n".join(cards) + "\n::::",
        "learn": of_readme(section(staged.readme, "What you will learn")),
        "code": f"git clone {REPOSITORY} ring-attention"
        if REPOSITORY
        else f"curl -L {SITE or 'ADDRESS'}/{ARCHIVE} | tar xz",
        "limits": of_readme(section(staged.readme, "Known limits")),
        "scoreboard": "\n".join(map(_scored, scoreboard()["rows"])),
    }
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", re.sub(r"\]\(#", "](README.md#", part))
    return staged.linked(text, path.name)


def _explorer(door: str, language: str) -> str:
    """A link to the explorer of a door, if it has one, with the heading of that page."""
    page = EXPLORERS.get(door.strip("*"))
    if not page:
        return ""
    title = re.search(r"^# (.*)", translate(english(page), page, language))
    assert title
    return f"\n\n[{title[1]}]({page})"


def _scored(row: dict[str, Any]) -> str:
    """A line of the scoreboard's table."""
    times = (f"{digits(row[name])} {row['unit']}" for name in ("measured", "predicted"))
    cells = (row["case"], row["way"], *times, f"{100 * row['error']:+.1f}", row["source"])
    return f"| {' | '.join(cells)} |"


def section(text: str, title: str) -> str:
    """The text below a heading of second order."""
    found = re.search(rf"^## {title}\n\n(.*?)\n(?=^## )", text, re.M | re.S)
    if not found:
        raise ValueError(f"README.md has no section {title!r}; expected one, for the book takes it from there")
    return found[1]


def _toctree(pages: list[str], home: str) -> str:
    names = "\n".join(os.path.relpath(page, Path(home).parent) for page in pages)
    return f"\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


_TOCTREES = {  # the pages below a page
    "bench/README.md": lambda staged: sorted(page for page in staged.pages if page.startswith("bench/results/")),
    "ring_doctor/patients/results.md": lambda staged: [
        "ring_doctor/patients/README.md",
        *sorted(page for page in staged.pages if page.startswith("ring_doctor/patients/findings/")),
    ],
    "docs/your_model.md": lambda staged: ["ringlab/models/EVERY_MODEL.md", "examples/README.md"],
}
