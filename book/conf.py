"""How Sphinx makes the book of the pages that contents.py lays out."""

import os
import re
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from docutils.utils.math.unichar2tex import uni2tex_table
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

from book import contents
from book.contents import LANGUAGES, REPOSITORY, SITE, codespace, folder, pages

HERE = Path(__file__).parent

language = os.environ.get("BOOK_LANGUAGE", "en")
project = LANGUAGES[language][1]
html_title = project
author = "The authors of Ring Attention, step by step"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # contents.py makes Markdown of notebooks
root_doc = "index"
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_block", "attrs_inline"]
myst_heading_anchors = 4
smartquotes = False
gettext_compact = "book"  # one file holds the pieces of all pages
gettext_location = False
gettext_additional_targets = ["index"]  # words of the glossary, by which the search finds their chapter
gettext_last_translator = gettext_language_team = ""
locale_dirs = [str(HERE / "locale")]  # book.po: our pages; sphinx.po: what the theme says
# MyST does not know anchors that are HTML; test_pages.py follows every link and anchor.
suppress_warnings = ["misc.highlighting_failure", "myst.header", "myst.xref_missing", "toc.not_included"]
exclude_patterns = ["_build"]

html_theme = "furo"
templates_path = [str(HERE / "templates")]
html_static_path = [str(HERE / "static")]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_scaled_image_link = False  # all pictures are links to themselves
html_math_renderer = "mathml"
html_search_scorer = str(HERE / "scorer.js")
html_use_index = False
html_baseurl = SITE
html_favicon = str(HERE / "static/favicon.svg")
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {"top_of_page_buttons": []}  # colours: book.css


def first_sentences(app: Sphinx) -> dict[str, str]:
    """What the glossary says first of each of its words, by anchor, in the language of the book."""
    said = {}
    for section in app.env.get_doctree("docs/glossary").findall(nodes.section):
        first = next((node.astext() for node in section.children if isinstance(node, nodes.paragraph)), "")
        for anchor in (*section["ids"], section.get("slug", "")):
            said[anchor] = re.match(r"(?:.*?(?:[.:] |[。：]|$)){2}", " ".join(first.split()))[0].strip()  # type: ignore[index]
    return said


def other_languages(page: str, names: set[str]) -> Iterator[tuple[str, str, str]]:
    """The same page in the other languages that have it: where it is, the language's tag and name."""
    up = "../" * page.count("/")
    for other in LANGUAGES:
        if other != language and pages(other).keys() & names:
            to = f"{up}../{page}.html" if other == "en" else f"{up}{folder(other)}/{page}.html"
            yield to, other[:2], LANGUAGES[other][0]


def shown(image: re.Match[str]) -> str:
    """A picture that a tap opens; some have a narrow version for phones, and the film a picture that stands still."""
    place, ending = image[1].rsplit(".", 1)
    phone, calm = "(max-width: 40em)", "(prefers-reduced-motion: reduce)"
    sources = {phone: f"{place}-narrow.svg"} if Path(place).name in contents.DRAWN_NARROW.values() else {}
    if ending == "gif":
        sources = {f"{phone} and {calm}": f"{place}-narrow.svg", calm: f"{place}.svg", phone: f"{place}-narrow.gif"}
    others = "".join(f'<source media="{when}" srcset="{file}">' for when, file in sources.items())
    return f'<a class="large" href="{image[1]}"><picture>{others}{image[0]}</picture></a>'


def on_page(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Words of the glossary explain themselves, pictures open, and the template hears what it shows."""
    level = '<p class="caption" role="heading" aria-level="2"'  # a heading without its level says nothing
    for name in context.keys() & {"body", "furo_navigation_tree"}:
        context[name] = context[name].replace('<p class="caption" role="heading"', level)
    body = context.get("body")
    if not body:
        return
    if not hasattr(app, "said"):
        app.said = first_sentences(app)  # type: ignore[attr-defined]

    def explained(match: re.Match[str]) -> str:
        words = app.said.get(match[2])  # type: ignore[attr-defined]
        return f'<a class="term {match[1]}" data-term="{escape(words)}"' if words else match[0]

    if page != "docs/glossary":
        body = re.sub(r'<a class="([^"]*)"(?= href="[^"]*docs/glossary\.html#([^"]+)")', explained, body)
    body = re.sub(r'<img [^>]*?src="([^"]*)"[^>]*>', shown, body)
    if folder(language):
        body = re.sub(r'(?<=["/])_images/', "../_images/", body)  # the pictures of the English book
    body = re.sub(r'<span class="[wnp]">([^<]*)</span>', r"\1", body)  # colours that no style has: a third of the code
    # Long lines and tables scroll by themselves; a keyboard must reach them.
    for tag in ("<pre", '<div class="table-wrapper'):
        body = body.replace(tag, tag.replace("<pre", '<pre tabindex="0"').replace("<div", '<div tabindex="0"'))
    context["body"] = body

    names = {f"{page}.md", f"{page}.ipynb", page}
    first = next((node.astext() for node in doctree.findall(nodes.paragraph)), "") if doctree else ""
    mixed = ("index", "README", "planner")  # README has a file in each language, the scoreboard is English
    pieces = doctree.findall(nodes.TextElement) if doctree and page not in mixed else ()
    files = [name for name in names if REPOSITORY and (HERE.parent / name).is_file()]
    touched = [name for name in re.findall(r'id="(\w+)" class="explorer"', body) if name != "scoreboard"]
    road = re.match(r"notebooks/0([1-8])_", page)
    context |= {  # for templates/page.html
        "told": " ".join(first.split())[:200],
        "untold": sum(not piece.get("translated", True) for piece in pieces),
        "languages": list(other_languages(page, names)),
        "source": f"{REPOSITORY}/blob/HEAD/{files[0]}" if files else "",
        "codespace": codespace(REPOSITORY) if files and files[0].endswith(".ipynb") else "",
        "road": int(road[1]) if road else 0,
        "scripts": ["explorer", *touched] if touched else [],
    }


class PairsOfCharacters(SearchEnglish):
    """What the search finds in Chinese: each two characters that follow one another, and the words of other letters."""

    lang = "zh"

    def split(self, input: str) -> list[str]:
        pairs = [a + b for run in re.findall(r"[\u4e00-\u9fff]+", input) for a, b in pairwise(run)]
        return pairs + super().split(re.sub(r"[\u4e00-\u9fff]+", " ", input))

    def word_filter(self, word: str) -> bool:
        return bool(word) and super().word_filter(word)


INSIDE = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # braces, and what is between them
TEX = {  # what docutils does not know, and what it does
    r"\\dots\b": r"\\ldots",
    r"\\textstyle\b": "",
    "°": r"^{\\circ}",
    rf"\\underbrace{INSIDE}_{INSIDE}": r"\\underset{\2}{\\underbrace{\1}}",
}


def set_math(writer: Any, node: nodes.Element) -> None:
    """A formula as MathML, which browsers draw by themselves."""
    formula, block = node.astext().translate(uni2tex_table), isinstance(node, nodes.math_block)
    for pattern, instead in TEX.items():
        formula = re.sub(pattern, instead, formula)
    shown = tex2mathml(formula, as_block=block)
    writer.body.append(f'<div class="math" tabindex="0">{shown}</div>' if block else shown)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.code = set()  # type: ignore[attr-defined]  # the files to which pages link
    app.add_html_math_renderer("mathml", (set_math, None), (set_math, None))
    app.add_search_language(PairsOfCharacters)
    app.add_transform(contents.Anchors)
    app.add_post_transform(contents.Links)
    app.connect("source-read", contents.on_source)
    app.connect("html-collect-pages", contents.code_pages)
    app.connect("html-page-context", on_page, priority=900)  # after the theme
