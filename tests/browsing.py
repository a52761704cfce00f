"""What the tests in a browser share: the built site, Chromium, a server on this machine, and a page with all of its charts drawn.

What is missing makes such a test skip and say so; with ANNOTATED_BROWSER=required, as in the gate, it makes it fail.
"""

import functools
import http.server
import importlib.util
import os
import shutil
import sys
import threading

import pytest

sys.path.insert(0, "tools")
from notebooks import ROOT  # noqa: E402

SITE = ROOT / "_build" / "site"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--disable-quic"]  # fmt: skip
SIZE = {"width": 1280, "height": 900}
PATIENCE = 120_000  # milliseconds: for machines that have other work


def need(there, reason):
    if not there:
        (pytest.fail if os.environ.get("ANNOTATED_BROWSER") == "required" else pytest.skip)(reason)


@pytest.fixture(scope="module")
def site():
    need((SITE / "index.html").exists(), "_build/site is not there: run `make site`")
    return SITE


@pytest.fixture(scope="module")
def browser():
    need(importlib.util.find_spec("playwright"), "playwright is not installed")
    from playwright import sync_api

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    need(program, "no Chromium on the PATH: on Debian, `apt-get install chromium`")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield running
        running.close()


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64  # a page asks for dozens of files at once


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # which keeps connections open

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def serve():
    """A function that serves a folder on this machine and returns the address."""
    servers = []

    def start(folder):
        servers.append(Server(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def open_page(browser, address, name, **options):
    """Load a page in a context of its own and draw all of its charts; see `go` for what it keeps."""
    return go(new_tab(browser, **options), address, name)


def new_tab(browser, **options):
    """An empty tab that listens: `go` fills its lists. One for many pages keeps fonts and compiled scripts, which are most of a load."""
    page = browser.new_page(viewport=SIZE, **options)
    page.set_default_timeout(PATIENCE)
    page.on("request", lambda request: request.url.startswith((page.address, "data:", "blob:")) or page.outside.append(request.url))
    page.on("console", lambda message: message.type == "error" and page.mistakes.append(message.text))
    page.on("pageerror", lambda error: page.mistakes.append(str(error)))
    page.on("dialog", lambda dialog: (page.mistakes.append(dialog.message), dialog.dismiss()))
    return page


def go(page, address, name):
    """Load a page in a tab and draw all of its charts; returns the tab with the lists of outside requests and errors since then."""
    page.address, page.outside, page.mistakes = address, [], []
    page.goto(address + name, wait_until="load")
    page.evaluate("() => window.MathJax?.startup?.promise")
    for figure in page.query_selector_all("figure.chart"):
        draw(page, figure)
    return page


def draw(page, figure):
    page.evaluate("figure => { for (let up = figure; up; up = up.parentElement) if (up.localName === 'details') up.open = true }", figure)
    figure.scroll_into_view_if_needed()
    page.wait_for_function("figure => figure.classList.contains('drawn')", arg=figure)
