"""What all charts share: the renderer, and the table behind every picture."""

import base64
import csv
import io

import numpy as np
import pytest
from drawing import KEYS, QUERIES, WEIGHTS
from matplotlib import pyplot as plt

from annotated import charts
from annotated.charts import attention, explorer, theme


def test_figures_drawn_by_hand_have_a_table_of_what_they_draw():
    figure, (curves, bars, image, lying) = plt.subplots(1, 4)
    curves.plot([1, 2], [3.0, 4.0], label="a")
    curves.plot([5], [6.0])
    curves.scatter([7], [8.0], label="dots")
    bars.bar(["x", "y"], [1.5, 2.5], label="b")
    image.imshow([[0.25, 0.5]])
    lying.barh(["x", "y"], [1.5, 2.5], label="a")
    lying.barh(["x", "y"], [1.0, 2.0], left=[1.5, 2.5], label="b")
    header, rows = theme.table(figure)
    assert header == ["panel", "series", "x", "y", "value"]
    assert rows == [
        [1, "a", 1, 3, ""], [1, "a", 2, 4, ""], [1, "series 2", 5, 6, ""], [1, "dots", 7, 8, ""],
        [2, "b", "x", 1.5, ""], [2, "b", "y", 2.5, ""], [3, "image 1", 0, 0, 0.25],
        [3, "image 1", 1, 0, 0.5], [4, "a", "x", 1.5, ""], [4, "a", "y", 2.5, ""],
        [4, "b", "x", 1.0, ""], [4, "b", "y", 2.0, ""]]
    assert theme.table(curves)[1] == [tuple(row[1:]) for row in rows[:4]]
    numbered = plt.subplots()[1]
    numbered.barh([0, 2], [3.0, 4.0], label="c")
    assert theme.table(numbered)[1] == [("c", 0, 3, ""), ("c", 2, 4, "")]


def test_an_altair_chart_with_records_has_them_as_its_table_and_follows_the_page():
    import altair

    records = [{"size": 1, "cut": "a b"}, {"size": 2.5, "note": "n"}]
    chart = altair.Chart(altair.InlineData(values=records)).mark_point().encode(x="size:Q")
    beside = altair.hconcat(chart, chart.encode(y="cut:N"))
    for drawn in (chart, theme.dressed(beside, "t", {"most": 3})):
        assert theme.table(drawn) == (["size", "cut", "note"], [[1, "a b", ""], [2.5, "", "n"]])
    header, rows = theme.table(explorer.attention_explorer({"a": WEIGHTS[None]}, KEYS, QUERIES))
    assert dict(zip(header, rows[5], strict=True)) == {
        "layer": "a", "head": 1, "query index": 1, "query": "Katze", "key index": 1, "key": "cat",
        "weight": WEIGHTS[1, 1]}
    (param,) = theme.dressed(beside, "t").to_dict()["params"]
    assert (param["name"], param["value"]) == ("dark", False)


def notes_of(figure):
    """What the picture of a figure in a notebook carries beside it, and its table's rows."""
    image = pytest.importorskip("PIL.Image")
    notes = image.open(io.BytesIO(base64.b64decode(theme._png(figure)))).text
    return notes, list(csv.DictReader(io.StringIO(notes.get("Table", ""))))


def test_pictures_of_a_notebook_carry_their_table():
    notes, rows = notes_of(attention.attention_heatmap(WEIGHTS, KEYS, QUERIES).figure)
    assert [float(row["weight"]) for row in rows] == WEIGHTS.reshape(-1).tolist()
    assert rows[5]["query"] == "Katze" and notes["Table-Rows"] == "12 of 12"
    notes, rows = notes_of(charts.lines_chart(np.arange(1000) * 1e-6).figure)
    assert notes["Table-Rows"] == "334 of 1000" and len(rows) == 334
    assert [float(row["y"]) for row in rows[:3]] == [0, 3e-6, 6e-6]
    assert "Table" not in notes_of(plt.subplots()[0])[0]


def test_letters_of_asia_get_a_font_that_is_installed_or_a_warning(monkeypatch):
    monkeypatch.setattr(theme, "ASIAN_FONTS", ("No Such Font", "STIXGeneral"))
    theme.use_style()
    assert plt.rcParams["font.family"] == ["DejaVu Sans", "STIXGeneral"]
    monkeypatch.setattr(theme, "ASIAN_FONTS", ())
    theme.use_style()
    ax = attention.attention_heatmap(WEIGHTS, ["\U0002a6d6", "a", "b", "c"], QUERIES)
    with pytest.warns(UserWarning, match="Glyph 173782 .*missing from font"):
        ax.figure.canvas.draw()
