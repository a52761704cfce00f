"""What the tests in a browser share: the built site, Chromium, a server, a page with its charts.

What is missing makes such a test skip and say so; with ANNOTATED_BROWSER=required, as in the gate,
it makes it fail.
"""

import functools
import http.server
import importlib.util
import os
import shutil
import threading

import pytest

from notebooks import ROOT

SITE = ROOT / "_build" / "site"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--disable-quic"]
SIZE = {"width": 1280, "height": 900}
PATIENCE = 120_000  # milliseconds: for machines that have other work


def need(there, reason):
    if not there:
        required = os.environ.get("ANNOTATED_BROWSER") == "required"
        (pytest.fail if required else pytest.skip)(reason)


@pytest.fixture(scope="module")
def site():
    need((SITE / "index.html").exists(), "_build/site is not there: run `make site`")
    return SITE


@pytest.fixture(scope="module")
def browser():
    need(importlib.util.find_spec("playwright"), "playwright is not installed")
    from playwright import sync_api

    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    program = next(filter(None, programs), None)
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


@pytest.fixture(scope="module")
def address(site, serve):
    return serve(site)


def open_page(browser, address, name, **options):
    """Load a page in a context of its own and draw all of its charts; see `go`."""
    return go(new_tab(browser, **options), address, name)


def new_tab(browser, **options):
    """An empty tab that listens. One for many pages keeps fonts and compiled scripts."""
    page = browser.new_page(**{"viewport": SIZE, **options})
    page.set_default_timeout(PATIENCE)
    page.address, page.outside, page.mistakes = "", [], []
    page.on("request", lambda request: request.url.startswith((page.address, "data:", "blob:"))
            or page.outside.append(request.url))
    page.on("console", lambda line: line.type == "error" and page.mistakes.append(line.text))
    page.on("pageerror", lambda error: page.mistakes.append(str(error)))
    page.on("dialog", lambda dialog: (page.mistakes.append(dialog.message), dialog.dismiss()))
    return page


def go(page, address, name):
    """Load a page in a tab and draw all of its charts; its lists hold what happened since then."""
    page.address, page.outside, page.mistakes = address, [], []
    page.goto(address + name, wait_until="load")
    page.evaluate("() => window.MathJax?.startup?.promise")
    for figure in page.query_selector_all("figure.chart"):
        draw(page, figure)
    return page


def draw(page, figure):
    upwards = "let up = figure.closest('details'); up; up = up.parentElement.closest('details')"
    page.evaluate(f"figure => {{ for ({upwards}) up.open = true }}", figure)
    figure.scroll_into_view_if_needed()
    page.wait_for_function("figure => figure.classList.contains('drawn')", arg=figure)
