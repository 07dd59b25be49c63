"""Every page of the site: it loads without an error and asks nobody else for anything; its links lead somewhere; it is
small; it can be read without a script, with a keyboard and by a screen reader."""

import csv
import re
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from book.conftest import SITE

AXE = Path(__file__).parent / "vendor/axe.min.js"
ROAD = sorted(f"notebooks/{path.name}" for path in SITE.glob("notebooks/0[1-8]_*.html"))
EXPLORERS = ("ring.html", "deadlock.html", "solve.html", "xray.html", "planner.html")
READY = '.explorer[data-ready="yes"]'
LOOKED_AT = [  # in light and dark, in three widths
    *("index.html", *EXPLORERS, "docs/glossary.html", "bench/README.html", "ring_attn.py.html"),
    *("notebooks/04_the_ring.html", "notebooks/07_causal_balance.html", "zh-CN/notebooks/05_backward.html"),
]
WIDTHS = (1280, 768, 390)
TOO_WIDE = """() => Math.max(document.documentElement.scrollWidth - innerWidth,
  ...[...document.querySelectorAll(".content")].map((each) => each.scrollWidth - each.clientWidth))"""  # pixels
FILM = "kv_rotation.gif"
LIMIT, WEIGHT = 1_000_000, 20_000_000  # bytes: of a page, of all


class Parts(HTMLParser):
    """What a page links to, loads, and where links may lead."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors, self.pictures = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        its = dict(attrs)
        self.anchors |= {its[name] for name in ("id", "name") if its.get(name)}
        if tag == "a" and its.get("href") is not None:
            self.links.append(its["href"])
        if tag in ("img", "script", "source", "iframe", "video") and its.get("src"):
            self.loads.append(its["src"])
        if tag == "link" and its.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(its["href"])
        if tag == "img":
            self.pictures.append((its.get("src"), its.get("alt")))


@pytest.fixture(scope="session")
def parts(site):
    """The parts of every page, by path."""
    return {path: Parts(path.read_text()) for path in sorted(site.rglob("*.html"))}


def test_there_are_pages(parts):
    assert len(ROAD) == 8
    assert len(parts) > 100


def test_every_link_and_anchor_leads_somewhere(parts, site):
    broken = []
    for page, its in parts.items():
        for link in {*its.links, *its.loads}:
            if urlsplit(link).scheme:
                continue
            path, anchor = urldefrag(unquote(unescape(link)))
            target = (page.parent / urlsplit(path).path).resolve() if path else page
            if target.is_dir():
                target /= "index.html"
            if not target.is_file() or not target.is_relative_to(site):
                broken.append(f"{page.relative_to(site)}: {link}")
            elif anchor and target in parts and anchor not in parts[target].anchors:
                broken.append(f"{page.relative_to(site)}: {link} has no such anchor")
    assert broken == []


def test_no_page_loads_anything_from_elsewhere(parts, site):
    foreign = [f"{page}: {load}" for page, its in parts.items() for load in its.loads if "//" in load]
    for sheet in [*site.rglob("*.css"), *site.rglob("*.js")]:
        urls = re.findall(r"(?:url\(|import |fetch\()\s*[\"']?(?:https?:)?//[^\"')]*", sheet.read_text())
        foreign += [f"{sheet}: {url}" for url in urls]
    assert foreign == []


def test_no_page_is_large(parts, site):
    """The page, its styles, scripts and pictures; the film does not count."""
    large = {}
    for page, its in parts.items():
        files = {(page.parent / urlsplit(unquote(load)).path).resolve() for load in its.loads}
        files = {file for file in files if file.name != FILM and file.name != "searchindex.js"}
        size = page.stat().st_size + sum(file.stat().st_size for file in files)
        if size > LIMIT:
            large[str(page.relative_to(site))] = size
    assert large == {}


def test_every_picture_is_described(parts):
    assert [(page, src) for page, its in parts.items() for src, alt in its.pictures if not alt] == []


def test_every_chapter_has_its_neighbours(parts, site):
    for before, after in pairwise(ROAD):
        assert Path(after).name in parts[site / before].links
        assert Path(before).name in parts[site / after].links


def test_every_page_loads_in_silence(parts, site, watched):
    code = [page for page in parts if ".py." in page.name]  # all alike
    for page in parts.keys() - set(code[5:]):
        watched.open(page.relative_to(site))
        assert watched.page.evaluate(TOO_WIDE) <= 0, page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_nothing_is_wider_than_the_window(watched, scheme):
    rules = ["wcag2a", "wcag2aa", "wcag21aa"] if scheme == "light" else ["color-contrast"]
    watched.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    found = {}
    for page in LOOKED_AT:
        shown = watched.open(page, READY if Path(page).name in EXPLORERS else None)
        shown.add_script_tag(path=AXE)
        for width in WIDTHS:
            shown.set_viewport_size({"width": width, "height": 900})
            if (wide := shown.evaluate(TOO_WIDE)) > 0:
                found[page, width] = f"{wide} pixels too wide"
            axe = "(rules) => axe.run(document, { resultTypes: ['violations'], runOnly: rules })"
            for fault in shown.evaluate(axe, rules)["violations"]:
                if fault["impact"] in ("serious", "critical"):
                    found[page, width, fault["id"]] = [node["html"][:150] for node in fault["nodes"][:3]]
    assert found == {}


def test_pages_can_be_read_without_a_script(browser, address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    for name, words in (("index.html", "Four doors"), (ROAD[3], "deadlock")):
        page.goto(f"{address}/{name}")
        assert words in page.inner_text("article")
    for name, still in (
        ("ring.html", "#ring-still img"),
        ("planner.html", "#planner-still img, #scoreboard-table table"),
    ):
        page.goto(f"{address}/{name}")
        assert "Three things" in page.inner_text("article")
        assert all(part.is_visible() for part in page.locator(still).all())
    context.close()


def test_a_word_of_the_glossary_explains_itself(watched):
    page = watched.open("notebooks/04_the_ring.html")
    word = page.locator("a.term[href$='#deadlock']").first
    word.focus()
    assert page.locator("[role=tooltip]").inner_text() == word.get_attribute("data-term")
    page.keyboard.press("Escape")
    assert page.locator("[role=tooltip]").count() == 0


def test_a_chapter_that_was_read_to_its_end_is_marked(watched):
    page = watched.open("notebooks/01_attention_to_online_softmax.html")
    assert page.locator(".sidebar-tree a.read").count() == 0
    page.evaluate("document.documentElement.scrollTo(0, document.documentElement.scrollHeight)")
    page.wait_for_selector(".sidebar-tree a.read", state="attached")
    page = watched.open("index.html")
    assert page.locator(".sidebar-tree a.read").count() == 1


def test_a_page_leads_to_its_translation_and_back(watched):
    page = watched.open("notebooks/04_the_ring.html")
    page.click(".languages a[hreflang]")
    assert page.get_attribute("html", "lang") == "zh-CN"
    page.click(".languages a[hreflang]")
    assert page.url == f"{watched.address}/notebooks/04_the_ring.html"
    assert watched.open("docs/cluster.html").locator(".languages a[hreflang]").count() == 0


def test_the_book_opens_from_a_file(browser, site):
    """Search, explorers and their numbers, with no server."""
    page = browser.new_page()
    for name in EXPLORERS:
        page.goto(f"file://{site}/{name}")
        page.wait_for_selector(READY, state="attached")
    page.goto(f"file://{site}/search.html?q=deadlock")
    page.wait_for_selector("ul.search li")
    page.close()


def test_code_is_copied_and_the_film_stops(watched):
    page = watched.open("index.html")
    still = page.locator("picture img").evaluate("image => image.currentSrc")
    assert still.endswith(".svg")  # the visitor asked for less motion
    page.click("figure button")
    assert page.locator("picture img").evaluate("image => image.currentSrc").endswith(".gif")
    page.evaluate("navigator.clipboard.writeText = (text) => { document.title = text; }")
    page.locator(".door .highlight").first.hover()
    page.locator(".door .highlight button").first.click()
    assert page.title() == "jupyter lab notebooks/01_attention_to_online_softmax.ipynb"


def test_an_explorer_speaks_the_language_of_its_page(watched):
    page = watched.open("zh-CN/ring.html", READY)
    assert page.inner_text("#ring-status").startswith("第 0 轮")
    assert not [words for words in page.locator("[name=mistake] option").all_inner_texts() if words.isascii()]
    page = watched.open("zh-CN/planner.html", READY)
    page.wait_for_selector("#planner-results[aria-busy=false]", state="attached")
    assert page.inner_text("#planner-status").startswith("建议：")
    assert {words for words in page.locator(".explorer [data-say]").all_inner_texts() if words.isascii()} == {"GPU"}


@pytest.mark.parametrize(
    ("chapter", "shown"),
    [("04_the_ring", "#deadlock .rank"), ("05_backward", "#ring .block"), ("07_causal_balance", "#ring .block")],
)
def test_a_chapter_has_its_explorer(watched, chapter, shown):
    for home in ("", "zh-CN/"):
        page = watched.open(f"{home}notebooks/{chapter}.html", READY)
        assert page.locator(shown).count() == 4
        page.locator(".player #step").click()
        assert page.locator(".explorer svg").first.bounding_box()["width"] > 500
    if "ring" in shown:
        assert page.locator("[name=pass]:checked").input_value() == ("backward" if "05" in chapter else "forward")
        assert page.locator("[name=causal]").is_checked() == ("07" in chapter)


def test_a_visitor_finds_the_code(watched):
    """From every page; one command gets it from where this site is. Pages say what they are when they are sent on."""
    page = watched.open("zh-CN/notebooks/04_the_ring.html")
    page.click(".languages a[href$='#get-the-code']")
    page = watched.open("index.html")
    assert f"curl -L {watched.address}/ring-attention.tar.gz | tar xz" in page.inner_text("#get-the-code")
    assert "exact attention" in page.get_attribute("meta[name=description]", "content")
    assert page.get_attribute("meta[property='og:title']", "content").startswith("Ring Attention")


def test_the_site_is_light(site):
    """All pages in both languages; the archive of the code is not counted."""
    sizes = [path.stat().st_size for path in site.rglob("*") if path.is_file() and path.suffix != ".gz"]
    assert sum(sizes) < WEIGHT


def test_the_landing_page_has_a_door_to_the_planner(watched):
    page = watched.open("index.html")
    page.click(".door:has-text('ring-plan') a[href='planner.html']")
    page.wait_for_selector(READY)


def test_a_page_without_translation_is_the_english_one(watched):
    page = watched.open("zh-CN/index.html")
    page.click("article a.english[href$='09_hidden_communication.html']")
    assert page.url == f"{watched.address}/notebooks/09_hidden_communication.html"


FOUND = (
    """(query) => [...new Set(Search._performSearch(...Search._parseQuery(query)).reverse().map(([page]) => page))]"""
)


@pytest.mark.parametrize("language", ["en", "zh_CN"])
def test_the_search_finds_the_right_page_first_or_second(watched, language):
    """queries.csv: what people type, and the page that must come."""
    page = watched.open("search.html" if language == "en" else "zh-CN/search.html")
    page.wait_for_function("() => Search._index !== null")
    rows = [row for row in csv.DictReader((AXE.parents[1] / "queries.csv").open()) if row["language"] == language]
    found = {row["query"]: page.evaluate(FOUND, row["query"])[:2] for row in rows}
    assert len(rows) == 20
    assert {row["query"]: found[row["query"]] for row in rows if row["page"] not in found[row["query"]]} == {}
