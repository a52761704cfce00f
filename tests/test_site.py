"""The built site in a real browser: no outside request, no error, nothing scrolls sideways, axe finds nothing, charts are alive.

`make test-site` runs this on `_build/site`. What is missing (the site, Chromium, axe-core) makes the tests skip and say so; with
ANNOTATED_BROWSER=required, as in the gate, it makes them fail.
"""

import functools
import http.server
import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "_build" / "site"
AXE = ROOT / "_build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if "_static" not in path.parts) or ["index.html"]
CHARTS = [name for name in PAGES if (SITE / name).exists() and '<figure class="chart"' in (SITE / name).read_text()]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--disable-quic"]  # fmt: skip
PATIENCE = 60_000  # milliseconds: for machines that have other work
every_page = pytest.mark.parametrize("name", PAGES)
pages_with_charts = pytest.mark.parametrize("name", CHARTS or [pytest.param(None, marks=pytest.mark.skip("no page has a chart"))])


def need(there, reason):
    if not there:
        (pytest.fail if os.environ.get("ANNOTATED_BROWSER") == "required" else pytest.skip)(reason)


@pytest.fixture(scope="module")
def site():
    need((SITE / "index.html").exists(), "_build/site is not there: run `make site`")
    return SITE


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    need(program, "no Chromium on the PATH: on Debian, `apt-get install chromium`")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield running
        running.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def serve():
    """A function that serves a folder on this machine and returns the address."""
    servers = []

    def start(folder):
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def open_page(browser, address, name, **options):
    """Load a page and draw all of its charts; returns it with the lists of its outside requests and of its errors."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
    page.set_default_timeout(PATIENCE)
    page.outside, page.mistakes = [], []
    page.on("request", lambda request: request.url.startswith((address, "data:", "blob:")) or page.outside.append(request.url))
    page.on("console", lambda message: message.type == "error" and page.mistakes.append(message.text))
    page.on("pageerror", lambda error: page.mistakes.append(str(error)))
    page.on("dialog", lambda dialog: (page.mistakes.append(dialog.message), dialog.dismiss()))
    page.goto(address + name, wait_until="load")
    page.evaluate("() => window.MathJax?.startup?.promise")
    for figure in page.query_selector_all("figure.chart"):
        draw(page, figure)
    return page


def draw(page, figure):
    page.evaluate("figure => { for (let up = figure; up; up = up.parentElement) if (up.localName === 'details') up.open = true }", figure)
    figure.scroll_into_view_if_needed()
    page.wait_for_function("figure => figure.classList.contains('drawn')", arg=figure)


# Before axe looks: folded cells are opened, and of the many spans of highlighted code one of each class stays (which saves minutes).
PREPARE = """() => {
  document.querySelectorAll('details:not(.listing)').forEach(details => { details.open = true });
  const seen = new Set();
  document.querySelectorAll('.highlight span').forEach(span => {
    if (seen.has(span.className)) span.replaceWith(...span.childNodes);
    seen.add(span.className);
  });
}"""
HANDLERS = "() => [...document.querySelectorAll('*')].flatMap(e => [...e.attributes].map(a => a.name).filter(name => name.startsWith('on')))"


@pytest.fixture(scope="module")
def report(site, browser, serve):
    """A function that visits a page, once, and returns what it found: outside, mistakes, handlers, sideways, violations."""
    address, reports = serve(site), {}
    need(AXE.exists(), "axe-core is not there: run `make axe`")
    axe = AXE.read_text()

    def visit(name):
        if name in reports:
            return reports[name]
        page = open_page(browser, address, name)
        found = reports[name] = {"outside": page.outside, "mistakes": page.mistakes}
        found["handlers"] = page.evaluate(HANDLERS)
        page.evaluate(PREPARE)
        page.evaluate(axe + "; 0")
        rules = page.evaluate("() => axe.run({ resultTypes: ['violations'] })")["violations"]
        page.emulate_media(color_scheme="dark")
        page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
        page.wait_for_timeout(300)  # the theme fades
        rules += page.evaluate("() => axe.run({ runOnly: ['color-contrast'], resultTypes: ['violations'] })")["violations"]
        found["violations"] = [
            f"{rule['id']}: {rule['help']}; {len(rule['nodes'])} places, such as {rule['nodes'][0]['html'][:200]}" for rule in rules
        ]
        page.set_viewport_size({"width": 320, "height": 800})
        page.wait_for_timeout(300)
        found["sideways"] = page.evaluate("() => Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        page.close()
        return found

    return visit


@every_page
def test_page_asks_no_other_host_and_reports_no_error(report, name):
    found = report(name)
    assert found["outside"] == [] and found["mistakes"] == [] and found["handlers"] == []


@every_page
def test_page_does_not_scroll_sideways_at_320_pixels(report, name):
    assert report(name)["sideways"] <= 320


@every_page
def test_axe_finds_nothing(report, name):
    assert report(name)["violations"] == []


@every_page
def test_page_is_small_and_forbids_foreign_scripts(site, name):
    text = (site / name).read_text()
    assert len(text.encode()) < 1_500_000
    rules = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)[1]
    assert rules.startswith("default-src 'none'; script-src 'self' 'sha256-") and "object-src 'none'" in rules
    assert "unsafe-eval" not in rules and "http" not in rules and re.findall("'unsafe-inline'", rules) == ["'unsafe-inline'"]
    assert text.index(rules) < text.index("<script") and not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="(https?:)?//', text)


@every_page
def test_links_within_the_site_lead_somewhere(site, name):
    for link in set(re.findall(r'(?:href|src)="([^"]+)"', (site / name).read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (site / name).parent / target.partition("?")[0] if target else site / name
        assert path.exists(), f"{name} links to {link}"
        if anchor and path.suffix == ".html":
            assert re.search(rf"""(id|name)=["']{re.escape(anchor)}["']""", path.read_text()), f"{name} links to {link}"


def test_every_public_name_is_in_the_reference(site):
    for path in sorted((ROOT / "annotated").glob("[!_]*.py")):
        names = re.findall(r"'(\w+)'", re.search(r"__all__ = \[(.*?)\]", path.read_text(), re.DOTALL)[1])
        text = (site / "api" / f"{path.stem}.html").read_text()
        assert [name for name in names if f'id="annotated.{path.stem}.{name}"' not in text] == []


def drawing(figure):
    return figure.query_selector(".chart-live svg").inner_html()


CHANGED = "([figure, before]) => figure.querySelector('.chart-live svg').innerHTML !== before"


@pages_with_charts
def test_every_control_changes_the_drawing_by_keyboard(site, browser, serve, name):
    page = open_page(browser, serve(site), name)
    for figure in page.query_selector_all("figure.chart"):
        draw(page, figure)
        for control in figure.query_selector_all(".chart-controls :is(select, input)"):
            before, value = drawing(figure), control.input_value()
            keys = {"range": "ArrowRight ArrowLeft", "checkbox": "Space Space"}.get(control.get_attribute("type"), "ArrowDown ArrowUp")
            for key in keys.split():  # the first one is in vain if the control stands at its end
                control.press(key)
                page.wait_for_timeout(50)
                if drawing(figure) != before:
                    break
            page.wait_for_function(CHANGED, arg=[figure, before])
            assert control.evaluate("e => e.labels.length > 0 && e.labels[0].innerText.trim() !== ''"), f"{figure} {value}: no label"
    assert page.mistakes == []
    page.close()


LABEL = "figure => getComputedStyle(figure.querySelector('.chart-live svg text')).fill"


def brightness(colour):
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pages_with_charts
def test_dark_mode_changes_the_drawing_and_keeps_what_was_chosen(site, browser, serve, name):
    page = open_page(browser, serve(site), name, color_scheme="light")
    figure = page.query_selector("figure.chart")
    draw(page, figure)
    light, ink = drawing(figure), figure.evaluate(LABEL)
    control = figure.query_selector(".chart-controls select")
    if control:
        control.select_option(index=1)
    chosen = control and control.input_value()
    page.click(".theme-switch-button")
    page.click(".theme-change-button[data-mode=dark]")
    page.wait_for_function("figure => figure.dataset.theme === 'dark'", arg=figure)
    assert drawing(figure) != light and brightness(ink) < 100 < 150 < brightness(figure.evaluate(LABEL))
    control = figure.query_selector(".chart-controls select")
    assert (control and control.input_value()) == chosen
    page.close()


@pages_with_charts
def test_the_numbers_of_every_chart_can_be_read(site, browser, serve, name):
    page = open_page(browser, serve(site), name)
    for figure in page.query_selector_all("figure.chart"):
        draw(page, figure)
        figure.query_selector(".chart-data summary").press("Enter")
        figure.wait_for_selector(".chart-table td")
        with page.expect_download() as download:
            figure.query_selector(".chart-data a").click()
        lines = Path(download.value.path()).read_text().splitlines()
        shown = figure.query_selector_all(".chart-data .chart-table:first-of-type tbody tr")
        assert len(lines) - 1 >= min(100, len(shown)) > 0
    page.close()


@pages_with_charts
def test_paper_gets_the_picture_of_every_chart(site, browser, serve, name):
    page = open_page(browser, serve(site), name)
    page.emulate_media(media="print")
    for figure in page.query_selector_all("figure.chart"):
        assert figure.query_selector(".chart-still").is_visible() and not figure.query_selector(".chart-view").is_visible()
    page.close()


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_search_finds_the_page_about_a_word(site, browser, serve, scheme):
    address = serve(site) if scheme == "http" else site.as_uri() + "/"
    page = open_page(browser, address, "search.html?q=softmax")
    page.wait_for_selector("#search-results li a")
    found = [link.get_attribute("href") for link in page.query_selector_all("#search-results li a")]
    assert any("04_embeddings_and_softmax.html" in link for link in found)
    page.close()


OWN = "window.owned = true"
TOKENS = [f"</script><script>{OWN}</script>", f'"><img src=x onerror="{OWN}">', f"'><svg onload={OWN}>", f"javascript:{OWN}", f"<!--<script>{OWN}",
          f"--><script>{OWN}</script>", f"]]><script>{OWN}</script>", f"`${{{OWN}}}`", "\u202eright to left\u202c", "null\0byte", "&lt;b&gt;"]  # fmt: skip


def hostile_notebook(path, html):
    """A page whose outputs, alt text and chart are made of the tokens; with `html`, also of HTML that carries scripts."""
    import nbformat

    rows = [{"token": token, "n": n, "link": f"javascript:{OWN}"} for n, token in enumerate(TOKENS)]
    menu = {"name": "chosen", "value": TOKENS[0], "bind": {"input": "select", "options": TOKENS, "name": TOKENS[0]}}
    spec = {"title": TOKENS[0], "data": {"values": rows, "name": "rows"}, "params": [menu], "mark": {"type": "bar", "tooltip": True},
            "encoding": {"y": {"field": "token", "title": TOKENS[1]}, "x": {"field": "n", "type": "quantitative"}, "href": {"field": "link"},
                         "opacity": {"condition": {"test": "datum.token === chosen", "value": 1}, "value": 0.4}}}  # fmt: skip
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    output, text = nbformat.v4.new_output, "\n".join(TOKENS)
    outputs = [output("stream", text=text), output("display_data", {"text/plain": text}), output("display_data", {"image/png": pixel}),
               output("display_data", {"application/vnd.vegalite.v5+json": spec, "image/png": pixel})]  # fmt: skip
    if html:
        outputs += [output("display_data", {"text/html": token}) for token in TOKENS]
    alt = f"# alt: {' '.join(TOKENS)}\n"
    cells = [nbformat.v4.new_markdown_cell("# Hostile\n\n> Tokens."), nbformat.v4.new_code_cell(alt + "show()", execution_count=1, outputs=outputs)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


@pytest.fixture(scope="module")
def hostile_site(tmp_path_factory):
    import sys

    sys.path.insert(0, str(ROOT / "tools"))
    from site_pages import render, stage

    folder = tmp_path_factory.mktemp("hostile")
    source = folder / "source"
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("*.md"))
    (source / "index.md").write_text("# Site\n\n```{toctree}\n01_text\n02_html\n```\n")
    for name, html in (("01_text", False), ("02_html", True)):
        hostile_notebook(folder / f"{name}.ipynb", html)
        stage(folder / f"{name}.ipynb", source)
    render(source, folder / "site")
    return folder / "site"


@pytest.mark.parametrize("name", ["01_text.html", "02_html.html"])
def test_hostile_tokens_are_shown_and_run_nothing(hostile_site, browser, serve, name):
    page = open_page(browser, serve(hostile_site), name)
    figure = page.query_selector("figure.chart")
    figure.query_selector("select").select_option(index=3)
    figure.query_selector("summary").click()
    figure.wait_for_selector(".chart-table td")
    for bar in figure.query_selector_all(".chart-live path[aria-roledescription], .chart-live .mark-rect path")[:4]:
        bar.hover()
        bar.click(force=True)
    page.wait_for_timeout(300)
    assert page.evaluate("() => window.owned") is None and page.url.endswith(name)
    cells = figure.query_selector_all(".chart-table tbody tr td:first-child")
    assert [json.loads(json.dumps(cell.text_content())) for cell in cells] == TOKENS
    if name == "01_text.html":  # here nothing even tries; there the policy stops it, and says so
        assert TOKENS[0] in page.inner_text(".output.stream") and page.mistakes == []
    page.close()
