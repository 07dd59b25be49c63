"""Every page of the site is whole, small and readable, asks nobody else for anything, and does what readers ask of it.
played.txt is the table of what is asked and what must be seen."""

import csv
from html import unescape
from html.parser import HTMLParser
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from book.conftest import READY, SITE
from book.contents import REPOSITORY, codespace

AXE = Path(find_spec("axe_playwright_python").origin).parent / "axe.min.js"
ROAD = sorted(f"notebooks/{path.name}" for path in SITE.glob("notebooks/0[1-8]_*.html"))
EXPLORERS = ("ring.html", "deadlock.html", "solve.html", "xray.html", "planner.html")
LOOKED_AT = [  # in light and dark, and in three widths
    *("index.html", *EXPLORERS, "ring_attn.py.html", "notebooks/04_the_ring.html", "zh-CN/notebooks/05_backward.html")
]
TOO_WIDE = """() => Math.max(document.documentElement.scrollWidth - innerWidth,
  ...[...document.querySelectorAll(".content")].map((each) => each.scrollWidth - each.clientWidth))"""  # pixels
TOO_SMALL = """() => [...document.querySelectorAll("article *")].filter((each) => {
  const svg = each.getScreenCTM?.();
  return [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
    && each.getBoundingClientRect().width
    && parseFloat(getComputedStyle(each).fontSize) * (svg ? Math.hypot(svg.a, svg.b) : 1) < 10;
}).map((each) => each.textContent.slice(0, 40))"""  # words in less than 10 pixels
DRAWN_ANEW = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"  # at a new width
RULES = {"light": ["wcag2a", "wcag2aa", "wcag21aa"], "dark": ["color-contrast"]}  # of Axe
UNDONE = "(rules) => axe.run(document, { resultTypes: ['violations'], runOnly: rules })"
LIMIT, WEIGHT = 1_000_000, 19_500_000  # bytes: of a page with all it loads, of all pages


class Parts(HTMLParser):
    """What a page links to, loads, and where links may lead."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors, self.untold = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        its = dict(attrs)
        self.anchors |= {its[name] for name in ("id", "name") if its.get(name)}
        if tag == "a" and its.get("href") is not None:
            self.links.append(its["href"])
        if tag in ("img", "script", "source", "iframe", "video"):
            self.loads += [its[name] for name in ("src", "srcset") if its.get(name)]
        if tag == "link" and its.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(its["href"])
        if tag == "img" and not its.get("alt"):
            self.untold.append(its.get("src"))


@pytest.fixture(scope="session")
def parts(site):
    """The parts of every page, by path."""
    return {path: Parts(path.read_text()) for path in sorted(site.rglob("*.html"))}


def faults(page, its, parts, site):
    """What is wrong with a page: where its links lead, what it loads, what is not described."""
    yield from (f"{load} is from elsewhere" for load in its.loads if "//" in load)
    yield from (f"{picture} is not described" for picture in its.untold)
    for link in {*its.links, *its.loads}:
        if urlsplit(link).scheme:
            continue
        path, anchor = urldefrag(unquote(unescape(link)))
        target = (page.parent / urlsplit(path).path).resolve() if path else page
        if target.is_dir():
            target /= "index.html"
        if not target.is_file() or not target.is_relative_to(site):
            yield f"{link} leads nowhere"
        elif anchor and target in parts and anchor not in parts[target].anchors:
            yield f"{link} has no such anchor"
    files = {(page.parent / urlsplit(unquote(load)).path).resolve() for load in its.loads}
    small = [file for file in files if file.suffix != ".gif" and file.name != "searchindex.js" and file.is_file()]
    if (size := page.stat().st_size + sum(file.stat().st_size for file in small)) > LIMIT:
        yield f"{size} bytes"


def test_every_page_is_whole_and_the_site_is_light(parts, site):
    """The film and the archive of the code do not count."""
    assert len(ROAD) == 8
    assert len(parts) > 100
    its_chapter = '<p>Its chapter: <a href="notebooks/04_the_ring.html">4 · The ring'
    assert its_chapter in (site / "ring_attn.py.html").read_text()
    found = {str(page.relative_to(site)): list(faults(page, its, parts, site)) for page, its in parts.items()}
    assert {page: wrong for page, wrong in found.items() if wrong} == {}
    for before, after in pairwise(ROAD):
        assert Path(after).name in parts[site / before].links
        assert Path(before).name in parts[site / after].links
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file() and path.suffix != ".gz") < WEIGHT


def test_every_piece_of_the_chinese_book_is_translated(site):
    """Before its links a page says how many of its pieces are English: what changed wants new Chinese words."""
    pages = sorted(site.glob("zh-CN/**/*.html"))
    assert [it.name for it in pages if '<p class="languages"><a' not in it.read_text()] == ["search.html"]  # has none


def test_every_page_loads_in_silence_and_can_be_read(watched, site):
    """Nothing is wider than a phone or written too small. Axe finds nothing in LOOKED_AT, which fits all widths."""
    pages, found = {str(path.relative_to(site)) for path in site.rglob("*.html")}, {}
    alike = {page for page in pages if ".py." in page or page.startswith("zh-CN/notebooks/")}  # some are in LOOKED_AT
    for page in sorted(pages - alike | set(LOOKED_AT)):
        shown = watched.open(page)
        for width in (1280, 768, 390) if page in LOOKED_AT else (390,):
            shown.set_viewport_size({"width": width, "height": 900})
            shown.evaluate(DRAWN_ANEW)
            found[page, width] = [shown.evaluate(TOO_WIDE) > 0, *shown.evaluate(TOO_SMALL)]
        for scheme, rules in RULES.items() if page in LOOKED_AT else ():
            shown.emulate_media(color_scheme=scheme)
            shown.add_script_tag(path=AXE)
            serious = [each for each in shown.evaluate(UNDONE, rules)["violations"] if each["impact"] != "minor"]
            found[page, width] += [(each["id"], [node["html"][:150] for node in each["nodes"][:3]]) for each in serious]
    assert {place: wrong for place, wrong in found.items() if wrong != [False]} == {}


SCRIPTS = {  # of played.txt
    "COPIED": "navigator.clipboard.writeText = (text) => { document.body.dataset.copied = text; }",
    "LATE": """  // the numbers of P = 3, S = 8 come after those of S = 12, which the reader asked for later
const append = HTMLHeadElement.prototype.append;
const wait = (script) => script.src.endsWith("ring-3-8.js") ? 500 : 0;
document.head.append = (script) => setTimeout(() => append.call(document.head, script), wait(script));
"set"
""",
    "TO_THE_END": "document.documentElement.scrollTo(0, document.documentElement.scrollHeight)",
    "GET": f"git clone {REPOSITORY} ring-attention" if REPOSITORY else "curl -L ADDRESS/ring-attention.tar.gz | tar xz",
}


def played():
    """Of played.txt: a page, and what a reader does and sees there, one after the other."""
    for text in Path(__file__).with_name("played.txt").read_text().split("\n\n"):
        page, *steps = text.splitlines()
        yield page, *([SCRIPTS.get(word, word) for word in step.strip().split(" | ")] for step in steps)


TO = codespace(REPOSITORY)
CHAPTER = ("sees", f"a[href='{TO}']", "Open in a Codespace") if TO else ("lacks", "a[href*=codespaces]")
PLAYED = [*played(), ("notebooks/04_the_ring.html", CHAPTER)]
if not REPOSITORY:
    steps = ("click", ".languages a[href$='#get-the-code']"), ("sees", "#get-the-code", SCRIPTS["GET"])
    PLAYED.append(("zh-CN/notebooks/04_the_ring.html", *steps))


@pytest.mark.parametrize("play", PLAYED, ids=lambda play: play[0])
def test_a_page_does_what_it_is_asked(watched, play):
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)  # on a busy machine

    name, *steps = play
    page = watched.open(name)
    for verb, *told in steps:
        if verb == "sees":
            words = "".join(told[1:]).replace("ADDRESS", watched.address)
            expect(page.locator(told[0]).first).to_contain_text(words)
        elif verb == "lacks":
            expect(page.locator(told[0])).to_have_count(0)
        elif verb == "is_at":
            expect(page).to_have_url(f"{watched.address}/{told[0]}")
        else:
            page.evaluate(DRAWN_ANEW)  # a click misses what still moves
            getattr(page, verb)(*told)


@pytest.mark.parametrize(
    ("repository", "opens"),
    [
        ("https://github.com/someone/ring", "https://codespaces.new/someone/ring?quickstart=1"),
        ("https://gitlab.com/someone/ring", ""),
        ("", ""),
    ],
)
def test_the_address_that_opens_a_codespace(repository, opens):
    assert codespace(repository) == opens


def test_the_film_fits_the_window_and_stands_still_for_who_asks(watched):
    for motion, kind in (("reduce", ".svg"), ("no-preference", ".gif")):
        for width, narrow in ((1280, ""), (390, "-narrow")):
            watched.page.emulate_media(reduced_motion=motion)
            watched.page.set_viewport_size({"width": width, "height": 900})
            image = watched.open("index.html").locator("figure img").first
            assert image.evaluate("image => image.currentSrc").endswith(f"kv_rotation{narrow}{kind}")


def test_pages_can_be_read_without_a_script_and_from_a_file(browser, site):
    still = browser.new_context(java_script_enabled=False).new_page()
    for name, words in (("index", "Four doors"), ("notebooks/04_the_ring", "deadlock"), ("ring", "Three things")):
        still.goto(f"file://{site}/{name}.html")
        assert words in still.inner_text("article")
    assert still.is_visible("#ring-still img")
    page = browser.new_page()
    for name in EXPLORERS:
        page.goto(f"file://{site}/{name}")
        page.wait_for_selector(READY, state="attached")
    page.goto(f"file://{site}/search.html?q=deadlock")
    page.wait_for_selector("ul.search li")


FOUND = "(query) => [...new Set(Search._performSearch(...Search._parseQuery(query)).reverse().map(([page]) => page))]"


@pytest.mark.parametrize("language", ["en", "zh_CN"])
def test_the_search_finds_the_right_page_first_or_second(watched, language):
    """queries.csv: what people type, and the page that must come."""
    page = watched.open("search.html" if language == "en" else "zh-CN/search.html")
    page.wait_for_function("() => Search._index !== null")
    asked = csv.DictReader((Path(__file__).parent / "queries.csv").open())
    rows = [row for row in asked if row["language"] == language]
    found = {row["query"]: page.evaluate(FOUND, row["query"])[:2] for row in rows}
    assert len(rows) == 20
    missed = {row["query"]: found[row["query"]] for row in rows if row["page"] not in found[row["query"]]}
    assert len(missed) <= (0 if language == "en" else 5), missed  # a piece whose English changed shows its English
