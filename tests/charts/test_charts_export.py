"""Saved charts are whole and the same each time, and no token in them becomes an element, a script or a handler."""

import csv
import json
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from drawing import BEAMS, HEADS, HOSTILE, KEYS, QUERIES, SCRIPT, WEIGHTS, close_figures, shown, stepper  # noqa: F401
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt

from annotated import charts
from annotated.charts import attention, explorer, export, theme

# ---- files

class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.scripts, self.attributes, self.cells = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        for name, texts in (("script", self.scripts), ("td", self.cells)):
            if tag == name:
                texts.append("")

    def handle_data(self, data):
        if self.tags[-1:] == ["script"]:
            self.scripts[-1] += data
        if self.tags[-1:] == ["td"]:
            self.cells[-1] += data


def read(page):
    reader = Reader()
    reader.feed(page)
    return reader


def drawing(kind):
    draw = explorer.attention_explorer if kind == "altair" else attention.attention_heatmap
    return draw(WEIGHTS if kind == "axes" else HEADS, KEYS, QUERIES)


@pytest.mark.parametrize("kind", ["axes", "altair"])
def test_files_are_whole_and_the_same_each_time(kind, tmp_path):
    for suffix in ("png", "svg", "html", "csv"):
        first, second = (export.save_chart(drawing(kind), tmp_path / f"{i}.{suffix}").read_bytes() for i in range(2))
        assert first == second
        start, end = {"png": (b"\x89PNG", b"IEND\xaeB`\x82"), "svg": (b"<", b"</svg>"),
                      "html": (b"<!DOCTYPE", b"</html>"), "csv": (b"", b"")}[suffix]
        assert first.startswith(start) and first.rstrip(b"\n").endswith(end)
    assert len(list(tmp_path.iterdir())) == 8  # no partial file stays behind


def test_csv_gives_back_the_weights_and_their_tokens(tmp_path):
    for kind, panels in (("axes", WEIGHTS[None]), ("figure", HEADS), ("altair", HEADS)):
        path = export.save_chart(drawing(kind), tmp_path / f"{kind}.csv")
        rows = list(csv.DictReader(path.open(encoding="utf-8", newline="")))
        assert len(rows) == panels.size
        for row in rows:
            i, j = int(row["query index"]), int(row["key index"])
            panel = int(row.get("panel") or row.get("head") or 1) - 1
            assert float(row["weight"]) == pytest.approx(panels[panel, i, j], abs=5e-5)
            assert (row["query"], row["key"]) == (QUERIES[i], KEYS[j])


def test_save_chart_refuses_what_it_cannot_write(tmp_path, monkeypatch):
    ax = charts.bars_chart({"a": 1})
    with pytest.raises(ValueError, match=r"path must end in one of \.html, \.svg, \.png, \.csv, got 'chart\.pdf'"):
        export.save_chart(ax, tmp_path / "chart.pdf")
    with pytest.raises(TypeError, match="chart must be axes, a figure or an Altair chart, got list"):
        export.save_chart([1], tmp_path / "chart.png")
    with pytest.raises(ValueError, match="chart holds no table"):
        export.save_chart(plt.figure(), tmp_path / "chart.csv")
    with pytest.raises(ValueError, match="of Altair charts only those with records as data"):
        theme.table({"mark": "point"})
    (tmp_path / "kept.png").write_bytes(b"old")
    monkeypatch.setattr(export, "_render", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export.save_chart(ax, tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes() == b"old"  # a failure leaves the old file


# ---- hostile tokens

def spec_of(reader):
    start = reader.scripts[1].index("{")
    return json.JSONDecoder().raw_decode(reader.scripts[1][start:])[0]


INERT = {"html", "head", "meta", "title", "style", "body", "main", "div", "details", "summary", "p", "table", "thead", "tbody",
         "tr", "th", "td"}


def check_page(data, scripts, given):
    """A page holds our elements and no other, no handler, no address, and each of the given texts in its table."""
    reader = read(data.decode())
    assert set(reader.tags) <= INERT | {"img", "script"} and "\x00" not in data.decode()
    assert reader.tags.count("script") == scripts and reader.tags.count("img") == int(not scripts)
    assert not [name for name, value in reader.attributes if name.startswith("on") or name == "href" or "javascript:" in value.lower()
                and name != "alt"]
    assert all(value.startswith("data:image/svg+xml;base64,") for name, value in reader.attributes if name == "src")
    assert {shown(token) for token in given} <= set(reader.cells)
    policy = next(value for name, value in reader.attributes if name == "content" and "src" in value)
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy and policy.count("sha256-") == scripts
    return reader


def check_svg(data, given):
    """An SVG is well-formed XML without scripts, links or handlers."""
    root = ElementTree.fromstring(data)
    for element in root.iter():
        assert element.tag.split("}")[-1] not in ("script", "foreignObject", "a", "iframe", "image") or element.get("href", "") == ""
        assert not [name for name in element.attrib if name.split("}")[-1].startswith("on")]


VIEWS = {
    "heat map": lambda t: attention.attention_heatmap(np.eye(len(t)), t, t, title=t[0]),
    "heads": lambda t: attention.attention_heatmap({t[0]: np.eye(len(t)), t[-1]: np.eye(len(t))}, t, t),
    "lines": lambda t: attention.attention_lines(np.eye(len(t)), t, t, title=t[0]),
    "overview": lambda t: attention.attention_overview({t[0]: np.eye(len(t))[None]}, t, t),
    "mask": lambda t: attention.mask_chart(np.eye(len(t), dtype=bool), t, t),
    "bars": lambda t: charts.bars_chart({token: {t[0]: 1.0, t[0] + "2": 2} for token in t}),
    "curves": lambda t: charts.lines_chart({t[0]: [1.0, 2.0], t[0] + "2": [2.0, 1.0]}, title=t[0]),
    "explorer": lambda t: explorer.attention_explorer({t[0]: np.eye(len(t))[None]}, t, t, title=t[0]),
    "stepper": lambda t: explorer.decode_stepper(t, [{t[0]: 1.0}] * len(t), t, {t[0]: np.eye(len(t))[None]}, title=t[0],
                                               beams=[[(token, 0.5)] for token in t]),
}
token = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
ODD = ["\x00", "a\x00b\x1b", "\n\r\t", "\ufffe", "\x85\x9f", "\ud800", "", " ", "\u202e"]


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
@pytest.mark.parametrize("view", VIEWS)
def test_hostile_tokens_stay_data_in_every_view_and_file(view, tmp_path):
    chart = VIEWS[view](HOSTILE + ODD)
    altair = view in ("explorer", "stepper")
    in_table = [] if view == "curves" else [text for text in HOSTILE + ODD if text != "\ud800"]
    page = export.save_chart(chart, tmp_path / "chart.html").read_bytes()
    reader = check_page(page, 2 * altair, in_table)
    if altair:
        value = {param["name"]: param.get("value") for param in spec_of(reader)["params"]}
        assert value["keys"] == value["queries"] == [[shown(t) if t != "\ud800" else "\ufffd" for t in HOSTILE + ODD]]
        assert value["layers"] == [HOSTILE[0]]
    check_svg(export.save_chart(chart, tmp_path / "chart.svg").read_bytes(), HOSTILE)
    assert export.save_chart(chart, tmp_path / "chart.png").stat().st_size > 1000
    rows = list(csv.reader(export.save_chart(chart, tmp_path / "chart.csv").open(encoding="utf-8", newline="")))
    assert len({len(row) for row in rows}) == 1
    assert {shown(text) for text in in_table} <= {cell for row in rows for cell in row}


def check_strings(strings):
    """Generated strings in the views that carry text into HTML: both charts to touch, and a heat map's page."""
    tokens = list(dict.fromkeys(strings))
    for view in ("explorer", "stepper", "lines"):
        chart = VIEWS[view](tokens)
        reader = check_page(export._render(chart.figure if view == "lines" else chart, "html"), 2 * (view != "lines"), tokens)
        if view != "lines":
            value = {param["name"]: param.get("value") for param in spec_of(reader)["params"]}
            assert value["keys"] == [[shown(text) for text in tokens]] and value["layers"] == [shown(tokens[0])]
    plt.close("all")


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
@examples(4)  # few charts of many tokens: a chart costs more than its tokens
@given(strings=st.lists(token, min_size=50, max_size=50, unique=True))
def test_two_hundred_generated_tokens_stay_data(strings):
    check_strings(strings)


# ---- a real browser

@pytest.fixture
def visit(browser, tmp_path):
    """A function that saves a chart as a page and opens it; in the end nothing may have gone wrong or been fetched."""
    seen, pages = [], []

    def open_page(chart, scheme="light", width=900):
        path = export.save_chart(chart, tmp_path / f"chart{len(pages)}.html")
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
        pages.append(page)
        page.on("dialog", lambda dialog: (seen.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("pageerror", lambda error: seen.append(f"error {error}"))
        page.on("console", lambda message: seen.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: seen.append(request.url) if not request.url.startswith(("data:", path.as_uri())) else None)
        page.goto(path.as_uri())
        page.wait_for_selector("#chart svg, main img")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert seen == []


def becomes(look, expected, patience=10):
    """Wait until look() returns what is expected; a drawing follows its menus a moment later."""
    end = time.monotonic() + patience
    while look() != expected and time.monotonic() < end:
        time.sleep(0.02)
    assert look() == expected


def labels_of(page):
    return page.locator("#chart svg [aria-label*='→']").evaluate_all("marks => marks.map(m => m.getAttribute('aria-label'))")


@pytest.mark.parametrize("view", ["explorer", "stepper", "heat map"])
def test_browser_runs_no_hostile_text(visit, view):
    page = visit(VIEWS[view](HOSTILE))
    title = page.title()
    assert title != "hurt" and page.evaluate("typeof window.hurt") == "undefined"
    page.locator("summary").click()
    cells = page.locator("td").all_inner_texts()
    assert any(text.startswith("</script><script>") for text in cells)
    assert page.locator("main script, main td img, main iframe, main a").count() == 0
    if view != "heat map":
        marks = page.locator("#chart svg [aria-label*='→']")
        assert marks.count() >= len(HOSTILE)
        marks.first.hover()  # the tool tip writes tokens into the page, too
        becomes(lambda: SCRIPT in page.locator("#vg-tooltip-element").inner_text(), True)
        assert page.locator("#vg-tooltip-element script, #vg-tooltip-element img").count() == 0


def test_browser_menus_of_the_explorer_change_the_drawing(visit):
    page = visit(explorer.attention_explorer({"a": HEADS, "b": HEADS[:, :2, :2]}, {"a": KEYS, "b": KEYS[:2]},
                                           {"a": QUERIES, "b": QUERIES[:2]}))

    def expected(head, rows, columns):
        return [f"{QUERIES[i]} → {KEYS[j]}: {HEADS[head, i, j]:g}" for i in range(rows) for j in range(columns)]

    becomes(lambda: labels_of(page), expected(0, 3, 4))
    layer, head = page.locator("select").all()
    head.focus()
    page.keyboard.press("ArrowDown")  # by keyboard, as everything must work
    becomes(lambda: labels_of(page), expected(1, 3, 4))
    layer.select_option("b")
    becomes(lambda: labels_of(page), expected(1, 2, 2))
