"""The built site in a real browser: no outside request, no error, nothing scrolls sideways, axe finds nothing, charts are alive.

`make test-site` runs this on `_build/site`; without site, Chromium or axe-core the tests skip and say so (see browsing.py).
"""

import re
from pathlib import Path

import pytest
from browsing import ROOT, SITE, draw, need, open_page

AXE = ROOT / "_build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if "_static" not in path.parts) or ["index.html"]
CHARTS = [name for name in PAGES if (SITE / name).exists() and '<figure class="chart"' in (SITE / name).read_text()]
every_page = pytest.mark.parametrize("name", PAGES)
pages_with_charts = pytest.mark.parametrize("name", CHARTS or [pytest.param(None, marks=pytest.mark.skip("no page has a chart"))])

# Before axe looks: folded cells are opened, and of the many spans of highlighted code one of each class stays (which saves minutes).
PREPARE = """() => {
  document.querySelectorAll('details:not(.listing)').forEach(details => { details.open = true });
  const seen = new Set();
  document.querySelectorAll('.highlight span').forEach(span => {
    if (seen.has(span.className)) span.replaceWith(...span.childNodes);
    seen.add(span.className);
  });
}"""
# What fades or moves arrives at once, so that colours are looked at as they stay.
FINISH = "() => document.getAnimations().forEach(animation => animation.finish())"
HANDLERS = """() => [...document.querySelectorAll('*')].flatMap(
  element => [...element.attributes].map(attribute => attribute.name).filter(name => name.startsWith('on')))"""


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
        page.evaluate(FINISH)  # what is unfolded fades in
        page.evaluate(axe + "; 0")
        rules = page.evaluate("() => axe.run({ resultTypes: ['violations'] })")["violations"]
        page.emulate_media(color_scheme="dark")
        page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
        page.evaluate(FINISH)  # the theme fades
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
        shown = figure.query_selector_all(".chart-data .chart-table tbody tr")
        assert len(shown) == min(100, len(lines) - 1) > 0
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
