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
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html")
               if "_static" not in path.parts) or ["index.html"]
CHARTS = [name for name in PAGES
          if (SITE / name).exists() and '<figure class="chart"' in (SITE / name).read_text()]

every_page = pytest.mark.parametrize("name", PAGES)
pages_with_charts = pytest.mark.parametrize("name", CHARTS)  # which skips where there are none

UNFOLD = """() => document.querySelectorAll('details:not(.listing)').forEach(
  details => { details.open = true })"""
# What scrolls, and no key reaches it. The page's scripts mark such boxes when it is loaded, resized
# or changed. This asks what they did when it was loaded; axe looks when the test has changed the
# page, which they may have answered.
UNREACHED = """() => {
  const scrolls = box => {
    const style = getComputedStyle(box), rolls = overflow => ['auto', 'scroll'].includes(overflow);
    return box.scrollWidth - box.clientWidth > 13 && rolls(style.overflowX)
      || box.scrollHeight - box.clientHeight > 13 && rolls(style.overflowY);
  };
  const keys = 'a[href], button, input, select, textarea, summary, [tabindex="0"]';
  return [...document.querySelectorAll('body *')].filter(
    box => box.tabIndex < 0 && scrolls(box) && !box.querySelector(keys)
  ).map(box => box.outerHTML.slice(0, 200));
}"""
# What is wider than its column, by more than rounding.
WIDE = """() => [...document.querySelectorAll(
    '.cell_input pre, .cell_output pre, .pst-scrollable-table-container, div.math')]
  .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 100))"""
# What is cut off: wider than a box around it that does not scroll, or than the window, and in no
# box that scrolls.
CUT = """() => [...document.querySelectorAll(
    'article :is(pre, table, img, svg, mjx-container, figure)')].filter(box => {
  const right = box.getBoundingClientRect().right;
  for (let around = box.parentElement; around; around = around.parentElement) {
    const overflow = getComputedStyle(around).overflowX;
    if (['auto', 'scroll'].includes(overflow)) return false;
    if (['hidden', 'clip'].includes(overflow) && right > around.getBoundingClientRect().right + 1)
      return true;
  }
  return right > innerWidth + 1;
}).map(box => box.outerHTML.slice(0, 150))"""
# While axe looks, what repeats itself is thinned out, which saves minutes: of the many spans of
# highlighted code one of each class stays, of a table's rows that hold nothing but text one of each
# look, and of the formulas the first two. Copies are thinned, and stand in for what comes back.
THIN = """() => {
  const formulas = [...document.querySelectorAll('mjx-container')].slice(2);
  const repeated = [...document.querySelectorAll('.highlight pre, tbody'),
                    ...formulas.filter(own => !own.closest('tbody'))];
  window.thinned = repeated.map(own => [own, own.cloneNode(own.localName !== 'mjx-container')]);
  const spans = new Set();
  for (const [own, copy] of thinned) {
    for (const span of own.localName === 'pre' ? copy.querySelectorAll('span') : []) {
      if (spans.has(span.className)) span.replaceWith(...span.childNodes);
      spans.add(span.className);
    }
    const looks = new Set();
    [...copy.rows ?? []].forEach((row, i) => {
      const parts = [row, ...row.cells].map(
        part => [part.localName, part.className, part.style.cssText]);
      const look = JSON.stringify([i % 2, ...parts]);
      if (looks.has(look) && [...row.cells].every(cell => !cell.childElementCount)) row.remove();
      looks.add(look);
    });
    own.replaceWith(copy);
  }
}"""
RESTORE = "() => thinned.forEach(([own, copy]) => copy.replaceWith(own))"
# What fades or moves arrives at once, so that colours are looked at as they stay.
FINISH = "() => document.getAnimations().forEach(animation => animation.finish())"
# A chart says which theme it is drawn for when it stands; asked again, once it is drawn anew.
ASK_CHARTS = """() => document.querySelectorAll('figure.chart').forEach(
  figure => { delete figure.dataset.theme })"""
DRAWN = """theme => [...document.querySelectorAll('figure.chart')].every(
  figure => figure.dataset.theme === theme)"""
HANDLERS = """() => [...document.querySelectorAll('*')].flatMap(
  element => element.getAttributeNames().filter(name => name.startsWith('on')))"""


@pytest.fixture(scope="module")
def address(site, serve):
    return serve(site)


@pytest.fixture(scope="module")
def tab(browser):
    return new_tab(browser)


@pytest.fixture(scope="module")
def show(tab, address):
    """A function that loads a page in the one tab of all tests, as at first: light and wide."""

    def show(name):
        tab.set_viewport_size(SIZE)
        tab.wait_for_function("size => innerWidth === size.width", arg=SIZE)  # the old one slides
        tab.emulate_media(media="screen", color_scheme="light")
        return go(tab, address, name)

    return show


@pytest.fixture(scope="module")
def report(show):
    """A function that visits a page, once, and returns what it found: outside, mistakes, …"""
    need(AXE.exists(), "axe-core is not there: run `make axe`")
    return functools.cache(lambda name: examine(show(name), () if name in WHOLE else (NAVIGATION,)))


NAVIGATION = ".bd-sidebar-primary"  # the same on every page, but for the one that it marks
WHOLE = ("index.html", "02_multi_head.html", "api/attention.html")  # where axe looks at it too


def look(page, *rules, beside=()):
    """What axe finds, in words; with `rules`, by these only; what is in `beside` is left out."""
    options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    run = "([beside, options]) => axe.run({ exclude: beside }, options)"
    return [f"{rule['id']}: {rule['help']}; {len(rule['nodes'])} places, such as "
            f"{rule['nodes'][0]['html'][:200]}"
            for rule in page.evaluate(run, [[*beside], options])["violations"]]


def examine(page, beside):
    found = {"outside": page.outside, "mistakes": page.mistakes}
    found["handlers"] = page.evaluate(HANDLERS)
    page.evaluate(UNFOLD)
    page.evaluate(FINISH)  # what is unfolded fades in
    found["wide"] = page.evaluate(WIDE)
    found["cut"] = page.evaluate(CUT)
    page.evaluate(AXE.read_text() + "; 0")
    found["unreached"] = page.evaluate(UNREACHED)
    page.evaluate(THIN)
    found["violations"] = look(page, beside=beside)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    page.wait_for_function(DRAWN, arg="dark")
    page.evaluate(FINISH)  # the theme fades
    found["violations"] += look(page, "color-contrast", beside=beside)
    page.evaluate(RESTORE)
    page.evaluate(ASK_CHARTS)
    # the page's own listeners come first
    page.evaluate("() => addEventListener('resize', () => { window.narrow = innerWidth == 320 })")
    page.set_viewport_size({"width": 320, "height": 800})
    page.wait_for_function("() => window.narrow")
    page.wait_for_function(DRAWN, arg="dark")
    page.evaluate(FINISH)  # the sidebars slide
    found["cut"] += page.evaluate(CUT)
    width = "() => Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    found["scrolls sideways"] = page.evaluate(width) > 320
    return found


@every_page
def test_page_asks_no_other_host_reports_no_error_fits_its_window_and_satisfies_axe(report, name):
    assert {what: places for what, places in report(name).items() if places} == {}


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
    for link in set(re.findall(r'(?:href|src)="([^"]+)"', (site / name).read_text())):
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


CHANGED = "([figure, before]) => figure.querySelector('.chart-live svg').innerHTML !== before"


@pages_with_charts
def test_every_control_changes_the_drawing_by_keyboard(show, name):
    page = show(name)
    for figure in page.query_selector_all("figure.chart"):
        draw(page, figure)
        for control in figure.query_selector_all(".chart-controls :is(select, input)"):
            before, kind = drawing(figure), control.get_attribute("type")
            keys = {"range": ("ArrowRight", "ArrowLeft"), "checkbox": ("Space", "Space")}
            for key in keys.get(kind, ("ArrowDown", "ArrowUp")):  # in vain if it stands at its end
                control.press(key)
                page.wait_for_timeout(50)
                if drawing(figure) != before:
                    break
            page.wait_for_function(CHANGED, arg=[figure, before])
            assert control.evaluate("e => e.labels[0]?.innerText.trim()"), "no label"
    assert page.mistakes == []


LABEL = "figure => getComputedStyle(figure.querySelector('.chart-live svg text')).fill"


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
def test_the_numbers_of_every_chart_can_be_read(show, name):
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


@pages_with_charts
def test_paper_gets_the_picture_of_every_chart(show, name):
    page = show(name)
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
    page.wait_for_selector("#search-results li a")
    found = [link.get_attribute("href") for link in page.query_selector_all("#search-results li a")]
    assert any("04_embeddings.html" in link for link in found)
    page.close()


@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 360)])
def test_a_page_of_look_asks_no_host_fits_its_window_and_satisfies_axe(
        browser, serve, tmp_path, scheme, width):
    need(AXE.exists(), "axe-core is not there: run `make axe`")
    sentence = "The brothers tidy up the small room because they are tired."
    annotated.look(sentence).save(tmp_path / "page.html")
    page = new_tab(browser, color_scheme=scheme, viewport={"width": width, "height": 800})
    go(page, serve(tmp_path), "page.html")
    for chart in ("#chart", "#chart4"):  # the explorer and the replay
        page.wait_for_selector(f"{chart} svg")
    page.evaluate(AXE.read_text() + "; 0")
    assert look(page) == [] and page.evaluate(UNREACHED) == []
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert (page.outside, page.mistakes) == ([], [])
    page.close()
