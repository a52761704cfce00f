"""The built site in a real browser: no outside request, no error, axe finds nothing, charts live.

`make test-site` runs this on `_build/site`; without site, Chromium or axe-core the tests skip and
say so (see browsing.py).
"""

import functools
import html
import re
from pathlib import Path

import pytest
from browsing import ROOT, SITE, SIZE, draw, go, need, new_tab, open_page

import annotated
from notebooks import modules

AXE = ROOT / "_build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
CHECKS = ROOT / "tests" / "site_checks.js"
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html")
               if "_static" not in path.parts) or ["index.html"]
CHARTS = [name for name in PAGES
          if (SITE / name).exists() and '<figure class="chart"' in (SITE / name).read_text()]

every_page = pytest.mark.parametrize("name", PAGES)
pages_with_charts = pytest.mark.parametrize("name", CHARTS)  # which skips where there are none


@pytest.fixture(scope="module")
def show(browser, address):
    """A function that loads a page in the one tab of all tests, as at first: light and wide."""
    tab = new_tab(browser)

    def show(name):
        tab.set_viewport_size(SIZE)
        tab.wait_for_function("size => innerWidth === size.width", arg=SIZE)  # the old one slides
        tab.emulate_media(media="screen", color_scheme="light")
        return go(tab, address, name)

    return show


NAVIGATION = ".bd-sidebar-primary"  # the same on every page, but for the one that it marks;
WHOLE = ("index.html", "02_multi_head.html", "api/model.attention.html")  # axe sees it on these


def examine(page, name):
    """All that is wrong with a page: {what: places}; of the reference axe sees one page."""
    beside = () if name in WHOLE else (NAVIGATION,)
    axe = name in WHOLE or not name.startswith("api/")

    def check(name, argument=None):
        return page.evaluate(f"argument => checks.{name}(argument)", argument)

    def wait_for_charts(theme):
        page.wait_for_function("theme => checks.drawn(theme)", arg=theme)
        check("finish")  # the theme fades, sidebars slide

    page.evaluate(CHECKS.read_text() + "; 0")
    places = {"outside": page.outside, "mistakes": page.mistakes, "handlers": check("handlers")}
    check("unfold")
    check("finish")  # what is unfolded fades in
    places |= {name: check(name) for name in ("wide", "cut", "unreached")}
    if axe:
        page.evaluate(AXE.read_text() + "; 0")
        check("thin")
        places["violations"] = check("axe", [[*beside], []])
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    wait_for_charts("dark")
    if axe:
        places["violations"] += check("axe", [[*beside], ["color-contrast"]])
        check("restore")
    check("askCharts")
    # the page's own listeners come first
    page.evaluate("() => addEventListener('resize', () => { window.narrow = innerWidth == 320 })")
    page.set_viewport_size({"width": 320, "height": 800})
    page.wait_for_function("() => window.narrow")
    wait_for_charts("dark")
    places["cut"] += check("cut")
    places["scrolls sideways"] = check("sideways")
    return places


@every_page
def test_page_asks_no_other_host_reports_no_error_fits_its_window_and_satisfies_axe(show, name):
    need(AXE.exists(), "axe-core is not there: run `make axe`")
    assert set(WHOLE) <= set(PAGES)
    assert {what: places for what, places in examine(show(name), name).items() if places} == {}


@every_page
def test_page_is_small_and_forbids_foreign_scripts(site, name):
    text = (site / name).read_text()
    assert len(text.encode()) < 1_500_000
    rules = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)[1]
    assert rules.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert "object-src 'none'" in rules
    assert "unsafe-eval" not in rules and "http" not in rules
    assert rules.count("'unsafe-inline'") == 1 and text.index(rules) < text.index("<script")
    assert not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="(https?:)?//', text)


@functools.cache
def anchors(path):
    names = re.findall(r"""\b(?:id|name)=["']([^"']*)["']""", path.read_text())
    return set(map(html.unescape, names))


@every_page
def test_links_within_the_site_lead_somewhere(site, name):
    for link in set(re.findall(r'<[a-z][^<>]*\s(?:href|src)="([^"]+)"', (site / name).read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (site / name).parent / target.partition("?")[0] if target else site / name
        assert path.exists(), f"{name} links to {link}"
        if anchor and path.suffix == ".html":
            assert html.unescape(anchor) in anchors(path), f"{name} links to {link}"


def test_every_public_name_is_in_the_reference(site):
    for module, path in modules().items():
        listed = re.search(r"__all__ = \[(.*?)\]", path.read_text(), re.DOTALL)[1]
        names = re.findall(r"'(\w+)'", listed)
        text = (site / "api" / f"{module}.html").read_text()
        assert [name for name in names if f'id="annotated.{module}.{name}"' not in text] == []


def drawing(figure):
    return figure.query_selector(".chart-live svg").inner_html()


VALUE = "control => [control.value, control.checked].join()"
CHANGED = "([figure, before]) => figure.querySelector('.chart-live svg').innerHTML !== before"


@pages_with_charts
def test_every_control_changes_the_drawing_by_keyboard(show, name):
    page = show(name)
    for figure in page.query_selector_all("figure.chart"):
        draw(page, figure)
        for control in figure.query_selector_all(".chart-controls :is(select, input)"):
            before, value = drawing(figure), control.evaluate(VALUE)
            keys = {"range": ("ArrowRight", "ArrowLeft"), "checkbox": ("Space",)}
            kind = control.get_attribute("type")
            for key in keys.get(kind, ("ArrowDown", "ArrowUp")):  # in vain if it stands at its end
                if control.evaluate(VALUE) == value:
                    control.press(key)
            page.wait_for_function(CHANGED, arg=[figure, before])
            assert control.evaluate("e => e.labels[0]?.innerText.trim()"), "no label"
    assert page.mistakes == []


LABEL = """figure => {
  const axis = figure.querySelector('.chart-live svg .role-axis-label text');
  return getComputedStyle(axis || figure.querySelector('.chart-live svg text')).fill;
}"""


def brightness(colour):
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pages_with_charts
def test_dark_mode_changes_the_drawing_and_keeps_what_was_chosen(browser, address, name):
    page = open_page(browser, address, name, color_scheme="light")  # a choice is remembered
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
    assert drawing(figure) != light
    assert brightness(ink) < 100 < 150 < brightness(figure.evaluate(LABEL))
    control = figure.query_selector(".chart-controls select")
    assert (control and control.input_value()) == chosen
    page.close()


@pages_with_charts
def test_the_numbers_of_every_chart_can_be_read_and_paper_gets_its_picture(show, name):
    page = show(name)
    for figure in page.query_selector_all("figure.chart"):
        draw(page, figure)
        figure.query_selector(".chart-data summary").press("Enter")
        figure.wait_for_selector(".chart-table td")
        with page.expect_download() as download:
            figure.query_selector(".chart-data a").click()
        lines = Path(download.value.path()).read_text().splitlines()
        shown = figure.query_selector_all(".chart-data .chart-table tbody tr")
        assert len(shown) == min(100, len(lines) - 1) > 0
    page.emulate_media(media="print")
    for figure in page.query_selector_all("figure.chart"):
        assert figure.query_selector(".chart-still").is_visible()
        assert not figure.query_selector(".chart-view").is_visible()


def test_paper_shows_what_was_folded_but_not_what_only_draws_and_no_scroll_bars(show):
    page = show("02_multi_head.html")
    page.emulate_media(media="print")
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    solution = page.locator("#solutions details .cell_input").first
    assert not page.locator(".tag_drawing > details").first.is_visible() and solution.is_visible()
    opacity = """box => {
      for (var o = 1; box; box = box.parentElement) o *= getComputedStyle(box).opacity;
      return o }"""
    assert solution.evaluate(opacity) == 1  # paper does not wait until what is unfolded fades in
    scrolling = "all => all.filter(box => getComputedStyle(box).overflowX !== 'visible').length"
    formulas = page.locator("mjx-container")
    assert formulas.count() > 20 and formulas.evaluate_all(scrolling) == 0
    page.evaluate("() => dispatchEvent(new Event('afterprint'))")


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_search_finds_the_page_about_a_word(site, browser, address, scheme):
    root = address if scheme == "http" else site.as_uri() + "/"
    page = open_page(browser, root, "search.html?q=softmax")
    page.wait_for_selector("#search-results li a[href*='04_embeddings.html']")
    page.close()


def test_a_page_of_look_asks_no_host_fits_its_window_and_satisfies_axe(browser, serve, tmp_path):
    need(AXE.exists(), "axe-core is not there: run `make axe`")
    news = annotated.load(ROOT / "results" / "models" / "newstest")
    annotated.look("Two men were arrested on Monday.", news).save(tmp_path / "page.html")
    page, place = new_tab(browser), serve(tmp_path)
    for scheme, width in (("light", 1280), ("dark", 360)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        go(page, place, "page.html")
        for chart in ("#chart", "#chart4"):  # the explorer and the replay
            page.wait_for_selector(f"{chart} svg")
        page.evaluate(AXE.read_text() + "; 0")
        page.evaluate(CHECKS.read_text() + "; 0")
        assert page.evaluate("() => [...checks.unreached(), ...checks.handlers()]") == []
        assert page.evaluate("() => checks.axe([[], []])") == []
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        assert (page.outside, page.mistakes) == ([], [])
    page.close()
