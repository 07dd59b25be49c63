"""How Sphinx makes the book of the pages that stage.py laid out."""

import os
import re
import subprocess
import time
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish
from sphinxcontrib import katex
from sphinxcontrib.katex import KaTeXServer

from book.stage import REPOSITORY, SITE
from book.translate import LANGUAGES, missing, translated

HERE = Path(__file__).parent

language = os.environ.get("BOOK_LANGUAGE", "en")
project = LANGUAGES[language].title
html_title = project
author = "The authors of Ring Attention, step by step"

extensions = ["myst_nb", "sphinxcontrib.katex"]
nb_execution_mode = "off"  # the outputs are those that are committed
nb_render_markdown_format = "myst"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_block", "attrs_inline"]
myst_heading_anchors = 4
myst_heading_slug_func = "book.translate.slug"
smartquotes = False
locale_dirs = [str(HERE / "locale")]  # what the theme says: LC_MESSAGES/sphinx.po
# MyST does not know anchors that are HTML; test_pages.py follows every link and anchor.
suppress_warnings = ["misc.highlighting_failure", "myst.header", "myst.xref_missing", "toc.not_included"]
exclude_patterns = ["_build"]

katex_prerender = True
katex_css_path = "katex/katex.min.css"  # of the version that renders, with its fonts: nothing is fetched from elsewhere

html_theme = "furo"
html_static_path = [str(HERE / "static")]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"type": "module"})]
html_search_scorer = str(HERE / "scorer.js")
html_use_index = False  # the index entries of stage.py are for the search
html_baseurl = SITE
html_favicon = str(HERE / "static/favicon.svg")
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {
        "color-brand-primary": "#00558c",
        "color-brand-content": "#00558c",
        "color-brand-visited": "#00558c",
        "color-foreground-primary": "#1B1F24",
        "color-foreground-secondary": "#4a525c",
        "color-foreground-muted": "#57606A",
        "color-background-primary": "#FCFCFA",
        "color-background-secondary": "#F4F5F3",
        "color-background-border": "#D5D9DE",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc4ee",
        "color-brand-content": "#7cc4ee",
        "color-brand-visited": "#7cc4ee",
        "color-foreground-secondary": "#b4bcc6",
        "color-foreground-muted": "#a3acb7",
    },
}

TRANSLATED = translated("zh_CN")
ROAD = re.compile(r"notebooks/(0[1-8])_")


def first_sentences(app: Sphinx) -> dict[str, str]:
    """What the glossary says first of each of its words, by anchor, in the language of the book."""
    said = {}
    for section in app.env.get_doctree("docs/glossary").findall(nodes.section):
        first = next((node.astext() for node in section.children if isinstance(node, nodes.paragraph)), "")
        for anchor in (*section["ids"], section.get("slug", "")):
            said[anchor] = re.match(r"(?:.*?(?:[.:] |[。：]|$)){2}", " ".join(first.split()))[0].strip()  # type: ignore[index]
    return said


def other_languages(page: str) -> str:
    """Links to the same page in the other languages that have it. A translated book is a folder of the English one."""
    up = "../" * page.count("/")
    found = {}
    if language != "en":
        found["en"] = f"{up}../{page}.html"
    elif {f"{page}.md", f"{page}.ipynb"} & TRANSLATED:
        found["zh_CN"] = f"{up}zh-CN/{page}.html"
    links = [
        f'<a href="{to}" rel="alternate" hreflang="{other[:2]}" lang="{other[:2]}">{LANGUAGES[other].name}</a>'
        for other, to in found.items()
    ]
    untold = [p for p in (f"{page}.md", f"{page}.ipynb") if language != "en" and p in translated(language)]
    if untold and (n := len(missing(untold[0], language))):
        links.insert(0, LANGUAGES[language].partly.format(n=n))
    file = next((name for name in (f"{page}.ipynb", f"{page}.md", page) if (HERE.parent / name).is_file()), "")
    if REPOSITORY and file:
        links.append(f'<a href="{REPOSITORY}/blob/HEAD/{file}">{LANGUAGES[language].source}</a>')
    else:
        links.append(f'<a href="{up}index.html#get-the-code">{LANGUAGES[language].source}</a>')
    return f'<p class="languages">{" ".join(links)}</p>'


def on_page(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Words of the glossary explain themselves, pictures load when they come into sight, the road shows how far."""
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
        if not words:
            return match[0]
        words = words.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        return f'<a class="term {match[1]}" data-term="{words}"'

    first = next((node.astext() for node in doctree.findall(nodes.paragraph)), "") if doctree else ""
    told = escape(" ".join(first.split())[:200], quote=True)
    here = {
        "title": escape(re.sub("<[^>]*>", "", context["title"]), quote=True),
        "description": told,
        "type": "article",
    }
    here |= {"url": f"{SITE}/{page}.html"} if SITE else {}
    metas = [f'<meta property="og:{name}" content="{words}">' for name, words in here.items()]
    context["metatags"] += "".join([f'<meta name="description" content="{told}">', *metas])
    if page != "docs/glossary":
        body = re.sub(r'<a class="([^"]*)"(?= href="[^"]*docs/glossary\.html#([^"]+)")', explained, body)
    first, *rest = body.split("<img ")
    body = "<img ".join([first, *(f'loading="{"lazy" if i else "eager"}" {part}' for i, part in enumerate(rest))])
    if at := ROAD.match(page):
        n = int(at[1])
        steps = '<i class="done"></i>' * n + "<i></i>" * (8 - n)
        body = f'<div class="progress" role="img" aria-label="{n} / 8">{steps}</div>{body}'
    body = other_languages(page) + body
    # Long lines and tables scroll by themselves; a keyboard must reach them.
    for tag in ("<pre", '<div class="table-wrapper'):
        body = body.replace(tag, tag.replace("<pre", '<pre tabindex="0"').replace("<div", '<div tabindex="0"'))
    context["body"] = body


class PairsOfCharacters(SearchEnglish):
    """What the search finds in Chinese: each two characters that follow one another, and the words of other letters."""

    lang = "zh"

    def split(self, input: str) -> list[str]:
        pairs = [a + b for run in re.findall(r"[\u4e00-\u9fff]+", input) for a, b in pairwise(run)]
        return pairs + super().split(re.sub(r"[\u4e00-\u9fff]+", " ", input))

    def word_filter(self, word: str) -> bool:
        return bool(word) and super().word_filter(word)


def start_katex(app: Sphinx) -> None:
    """Start the process that renders formulas: its socket may be there before it listens. Each try starts another."""
    started = []

    def popen(*command: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*command, **options))
        return started[-1]

    with mock.patch.object(katex, "Popen", popen):
        for _ in range(50):
            try:
                KaTeXServer.get()
                return
            except ConnectionRefusedError:
                started.pop().kill()  # else it would stay, and hold the output open
                time.sleep(0.1)


def setup(app: Sphinx) -> None:
    app.add_search_language(PairsOfCharacters)
    app.connect("builder-inited", start_katex)
    app.connect("html-page-context", on_page, priority=900)  # after the theme
