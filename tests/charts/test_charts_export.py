"""Pages of charts are whole, and no token in them becomes an element, a script or a handler."""

import csv
import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from browsing import new_tab
from drawing import HOSTILE, SCRIPT, shown
from matplotlib import pyplot as plt

from annotated import charts
from annotated.charts import attention, explorer, theme
from annotated.charts.export import chart_page


class Reader(HTMLParser):
    """Tags, scripts, attributes and cells of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], {"script": [], "td": []}
        self.feed(page)
        self.scripts, self.cells = self.texts.values()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.texts.get(tag, []).append("")

    def handle_data(self, data):
        if self.texts.get(self.tags[-1] if self.tags else ""):
            self.texts[self.tags[-1]][-1] += data


def test_what_has_no_numbers_has_no_table():
    with pytest.raises(ValueError, match="chart holds no table"):
        theme.table(plt.figure())
    with pytest.raises(ValueError, match="of Altair charts only those with records as data"):
        theme.table({"mark": "point"})
    assert "<table>" not in chart_page({"": plt.figure()})
    with pytest.raises(ValueError, match="charts is empty"):
        chart_page({})


def test_axes_stand_for_their_figure():
    axes = charts.bars_chart({"a": 1.0})
    assert chart_page({"": axes}) == chart_page({"": axes.figure})


# ---- hostile tokens

def values_of(reader):
    """The values of the parameters of an Altair chart's page."""
    start = reader.scripts[1].index("{")
    spec = json.JSONDecoder().raw_decode(reader.scripts[1][start:])[0]
    return {param["name"]: param.get("value") for param in spec["params"]}


INERT = {"html", "head", "meta", "title", "style", "body", "main", "div", "details", "summary", "p",
         "table", "thead", "tbody", "tr", "th", "td", "img", "script"}


def check_page(page, scripts, given):
    """A page holds no element but ours, no handler or address, and each given text in its table."""
    reader = Reader(page)
    assert set(reader.tags) <= INERT and "\x00" not in page
    assert reader.tags.count("script") == scripts and reader.tags.count("img") == int(not scripts)
    for name, value in reader.attributes:
        assert not name.startswith("on") and name != "href"
        assert name == "alt" or "javascript:" not in value.lower()
        assert name != "src" or value.startswith("data:image/svg+xml;base64,")  # runs no script
    assert {shown(token) for token in given} <= set(reader.cells)
    (policy,) = (rule for name, rule in reader.attributes if name == "content" and "src" in rule)
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy
    assert policy.count("sha256-") == scripts
    return reader


def layer(tokens):
    return {tokens[0]: np.eye(len(tokens))[None]}


VIEWS = {
    "heat map": lambda t: attention.attention_heatmap(np.eye(len(t)), t, t, title=t[0]),
    "heads": lambda t: attention.attention_heatmap(dict.fromkeys(t[:2], np.eye(len(t))), t, t),
    "lines": lambda t: attention.attention_lines(np.eye(len(t)), t, t, title="$\\frac{$"),
    "overview": lambda t: attention.attention_overview(layer(t), t, t),
    "mask": lambda t: attention.mask_chart(np.eye(len(t), dtype=bool), t, t),
    "bars": lambda t: charts.bars_chart({token: {t[0]: 1.0, t[0] + "2": 2} for token in t}),
    "curves": lambda t: charts.lines_chart({t[0]: [1.0, 2.0], t[0] + "2": [2.0, 1.0]}, title=t[0]),
    "explorer": lambda t: explorer.attention_explorer(layer(t), t, t, title=t[0]),
    "stepper": lambda t: explorer.decode_stepper(
        t, [[(t[0], 1.0)]] * len(t), t, layer(t), title=t[0], beams=[[(x, 0.5)] for x in t]),
}
ODD = ["\x00", "a\x00b\x1b", "\n\r\t", "\ufffe", "\x85\x9f", "\ud800", "", " ", "\u202e"]


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
@pytest.mark.parametrize("view", VIEWS)
def test_hostile_tokens_stay_data_in_every_view(view):
    chart = VIEWS[view](HOSTILE + ODD)
    touched = view in ("explorer", "stepper")
    tokens = [shown(text) if text != "\ud800" else "\ufffd" for text in HOSTILE + ODD]
    in_table = [] if view == "curves" else tokens
    chart = chart if touched else getattr(chart, "figure", chart)
    reader = check_page(chart_page({"": chart}), 2 * touched, in_table)
    if touched:
        value = values_of(reader)
        assert value["keys"] == value["queries"] == [tokens] and value["layers"] == [HOSTILE[0]]
    rows = list(csv.reader(io.StringIO(theme.as_csv(*theme.table(chart)))))
    assert len({len(row) for row in rows}) == 1
    assert set(in_table) <= {cell for row in rows for cell in row}


def test_a_page_holds_every_chart_in_order_and_follows_the_theme_of_its_reader():
    two = {"one": VIEWS["bars"](["a", "b"]), "two": VIEWS["explorer"](["a", "b"])}
    page, parts = chart_page(two, "both"), ("<h1>both", "<h2>one", "<img", "<h2>two", 'id="chart1"')
    places = [page.index(part) for part in (*parts, 'view.signal("dark", dark.matches)')]
    assert places == sorted(places)
    assert "<title>{" not in chart_page({"": two["two"]}), "its title is made of parameters"
    page = chart_page({0: two["one"]}, "a\0b")
    assert "<h1>a␀b</h1><h2>0</h2>" in page and "\0" not in page


# ---- a real browser

@pytest.fixture
def visit(browser, tmp_path):
    """A function that opens a page of a chart; nothing may go wrong there or be fetched."""
    page = new_tab(browser)

    def open_page(chart):
        chart = getattr(chart, "figure", chart)
        (tmp_path / "chart.html").write_text(chart_page({"": chart}), encoding="utf-8")
        page.address = (tmp_path / "chart.html").as_uri()
        page.goto(page.address)
        page.wait_for_selector("#chart svg, main img")
        return page

    yield open_page
    page.close()
    assert page.outside == page.mistakes == []


@pytest.mark.parametrize("view", ["explorer", "stepper", "heat map"])
def test_browser_runs_no_hostile_text(visit, view):
    page = visit(VIEWS[view](HOSTILE))
    assert page.title() != "hurt" and page.evaluate("typeof window.hurt") == "undefined"
    page.locator("summary").click()
    assert any(text.startswith("</script>") for text in page.locator("td").all_inner_texts())
    assert page.locator("main script, main td img, main iframe, main a").count() == 0
    if view != "heat map":
        marks = page.locator("#chart svg [aria-label*='→']")
        marks.nth(len(HOSTILE) - 1).wait_for(state="attached")
        marks.first.hover()  # the tool tip writes tokens into the page, too
        tip = page.locator("#vg-tooltip-element")
        tip.filter(has_text=SCRIPT).wait_for()
        assert tip.locator("script, img").count() == 0
