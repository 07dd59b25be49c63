"""What the tests of the site share: the built site, served, and a headless Chromium."""

import functools
import http.server
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

SITE = Path(__file__).parent.parent / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
READY = '.explorer[data-ready="yes"]'


@pytest.fixture(scope="session")
def site():
    if not (SITE / "index.html").exists():
        pytest.skip("there is no site/: make site builds it")
    return SITE


@pytest.fixture(scope="session")
def numbers(site):
    """The numbers of the explorers, by file, as the pages load them."""
    return {path.stem: json.loads(path.read_text().partition(",")[2][:-1]) for path in site.glob("data/*.js")}


@pytest.fixture(scope="session")
def address(site, tmp_path_factory):
    """The site on a port of its own, in a folder of the server, as where it is published."""
    root = tmp_path_factory.mktemp("server")
    (root / "ring").symlink_to(site)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/ring"
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test-site installs it")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.skip("needs Chromium: apt install chromium, or its path in CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Watched:
    """A page of the browser that notes what it asks for and what goes wrong."""

    def __init__(self, page, address):
        self.page, self.address, self.faults = page, address, []
        page.on("console", lambda said: said.type in ("error", "warning") and self.faults.append(said.text))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        ours = (address, "data:", "blob:")
        page.on("request", lambda asked: asked.url.startswith(ours) or self.faults.append(f"asks for {asked.url}"))
        page.on("response", lambda got: got.status >= 400 and self.faults.append(f"{got.status} {got.url}"))

    def open(self, name):
        """Load a page, and its explorer where it has one."""
        if "#" in str(name):
            self.page.goto("about:blank")  # so that another address of the same page loads it again
        self.page.goto(f"{self.address}/{name}")
        if self.page.locator(".explorer").count():
            settle(self.page)
        return self.page


def settle(page):
    """Wait until what was chosen is drawn."""
    page.wait_for_selector(READY, state="attached")


@pytest.fixture(scope="session")
def reader(browser):
    """Who opens all pages: the browser keeps what they share."""
    return browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")


@pytest.fixture
def watched(reader, address):
    """A page that must not say or ask for anything wrong."""
    seen = Watched(reader.new_page(), address)
    yield seen
    seen.page.evaluate("localStorage.clear()")  # which chapters were read
    seen.page.close()
    assert seen.faults == []
