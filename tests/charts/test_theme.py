"""What all charts share: colours, the style, the renderer, the checks at the door, and the table behind every picture."""

import base64
import csv
import io

import numpy as np
import pytest
from drawing import HEADS, KEYS, QUERIES, WEIGHTS, close_figures  # noqa: F401
from matplotlib import pyplot as plt

from annotated import charts
from annotated.charts import attention, explorer, theme


def test_renderer_gives_the_chart_and_a_picture_of_it_and_no_html():
    import altair

    theme.enable_altair()
    assert altair.renderers.active == "book"
    bundle = explorer.attention_explorer(HEADS, KEYS, QUERIES)._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert set(bundle) == {"application/vnd.vegalite.v5+json", "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")


def test_figures_drawn_by_hand_have_a_table_of_what_they_draw():
    figure, (curves, bars, image) = plt.subplots(1, 3)
    curves.plot([1, 2], [3.0, 4.0], label="a")
    curves.plot([5], [6.0])
    curves.scatter([7], [8.0], label="dots")
    bars.bar(["x", "y"], [1.5, 2.5], label="b")
    image.imshow([[0.25, 0.5]])
    header, rows = theme.table(figure)
    assert header == ["panel", "series", "x", "y", "value"]
    assert rows == [[1, "a", 1, 3, ""], [1, "a", 2, 4, ""], [1, "series 2", 5, 6, ""], [1, "dots", 7, 8, ""],
                    [2, "b", "x", 1.5, ""], [2, "b", "y", 2.5, ""], [3, "image 1", 0, 0, 0.25], [3, "image 1", 1, 0, 0.5]]
    assert theme.table(curves)[1] == [tuple(row[1:]) for row in rows[:4]]


def test_lying_bars_have_their_names_and_lengths():
    figure, (stacked, numbered) = plt.subplots(1, 2)
    stacked.barh(["x", "y"], [1.5, 2.5], label="a")
    stacked.barh(["x", "y"], [1.0, 2.0], left=[1.5, 2.5], label="b")
    stacked.axvline(1.0, label="line")
    numbered.barh([0, 2], [3.0, 4.0], label="c")
    assert theme.table(figure)[1] == [
        [1, "line", 1, 0, ""], [1, "line", 1, 1, ""], [1, "a", "x", 1.5, ""], [1, "a", "y", 2.5, ""], [1, "b", "x", 1.0, ""],
        [1, "b", "y", 2.0, ""], [2, "c", 0, 3, ""], [2, "c", 2, 4, ""]]


def test_an_altair_chart_with_records_has_them_as_its_table_and_follows_the_page():
    import altair

    records = [{"size": 1, "cut": "a b"}, {"size": 2.5, "note": "n"}]
    chart = altair.Chart(altair.InlineData(values=records)).mark_point().encode(x="size:Q")
    beside = altair.hconcat(chart, chart.encode(y="cut:N"))
    for one in (chart, theme.dressed(beside, "t", {"most": 3})):
        assert theme.table(one) == (["size", "cut", "note"], [[1, "a b", ""], [2.5, "", "n"]])
    params = {param["name"]: param.get("value") for param in theme.dressed(beside, "t").to_dict()["params"]}
    assert params == {"dark": False}


def test_pictures_of_a_notebook_carry_their_table():
    image = pytest.importorskip("PIL.Image")
    data = base64.b64decode(theme._png(attention.attention_heatmap(WEIGHTS, KEYS, QUERIES).figure))
    notes = image.open(io.BytesIO(data)).text
    rows = list(csv.DictReader(io.StringIO(notes["Table"])))
    assert [float(row["weight"]) for row in rows] == WEIGHTS.reshape(-1).tolist() and rows[5]["query"] == "Katze"
    assert notes["Table-Rows"] == "12 of 12"
    data = base64.b64decode(theme._png(charts.lines_chart(np.arange(1000) * 1e-6).figure))
    notes = image.open(io.BytesIO(data)).text
    rows = list(csv.DictReader(io.StringIO(notes["Table"])))
    assert notes["Table-Rows"] == "334 of 1000" and len(rows) == 334
    assert [float(row["y"]) for row in rows[:3]] == [0, 3e-6, 6e-6]
    figure = plt.subplots()[0]
    assert "Table" not in image.open(io.BytesIO(base64.b64decode(theme._png(figure)))).text
