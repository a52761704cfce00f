"""Curves, bars and trees draw the data they are given and refuse what does not fit."""


import pytest
import torch
from drawing import labels

from annotated import charts
from annotated.charts import theme


def test_lines_chart_draws_the_points_given():
    series = {"a": [3.0, 1.0, 2.0], "b": ([10, 20], torch.tensor([5.0, 6.0]))}
    ax = charts.lines_chart(series, x_label="layer", y_label="norm", log_x=True, log_y=True,
                            bands={"a": ([2, 0.5, 1], [4, 2, 3])})
    assert {line.get_label(): line.get_xydata().tolist() for line in ax.lines} == {
        "a": [[1, 3], [2, 1], [3, 2]], "b": [[10, 5], [20, 6]]}
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "norm")
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines}
    assert len(looks) == 2 and len(ax.collections) == 1
    with pytest.raises(ValueError, match="same first dimension"):
        charts.lines_chart({"a": [1, 2, 3]}, x=[1, 2])
    with pytest.raises(ValueError, match="series is empty: give at least one line"):
        charts.lines_chart({})
    assert len(charts.lines_chart({1: [1, 2]}, bands={1: ([0, 1], [2, 3])}).collections) == 1
    for bands, message in (({"c": ([1], [2])}, "bands of c: series has a, b"),
                           ({"a": ([1], [2])}, "bands 'a' have 1 and 1 points: the line has 3")):
        with pytest.raises(ValueError, match=message):
            charts.lines_chart(series, bands=bands)


def test_training_chart_draws_the_losses_and_skips_gaps():
    rows = [{"step": 1, "train_loss": 3.0, "lr": 0.1},
            {"step": 2, "train_loss": 2.0, "valid_loss": 2.5}]
    ax = charts.training_chart(rows)
    assert {line.get_label(): line.get_xydata().tolist() for line in ax.lines} == {
        "train loss": [[1, 3], [2, 2]], "valid loss": [[2, 2.5]]}
    rates = charts.training_chart(rows, fields=["lr"])
    assert len(rates.lines) == 1 and (ax.get_ylabel(), rates.get_ylabel()) == ("loss", "lr")
    skipped = charts.training_chart([{"step": 1, "train_loss": None, "valid_loss": 2.5}])
    assert [line.get_label() for line in skipped.lines] == ["valid loss"]
    with pytest.raises(ValueError, match=r"log has the columns .* but no 'bleu'"):
        charts.training_chart(rows, fields=["bleu"])


@pytest.mark.parametrize("horizontal", [False, True])
def test_bars_have_the_lengths_given(horizontal):
    ax = charts.bars_chart({"g": {"a": 1.0, "b": 3.0}, "h": {"b": 2.0}}, horizontal=horizontal)
    bars = {group.get_label(): group for group in ax.containers if hasattr(group, "patches")}
    side, start, size = ("width", "y", "height") if horizontal else ("height", "x", "width")
    seen = {name: [(getattr(bar, f"get_{side}")(), round(getattr(bar, f"get_{start}")()
                                                         + getattr(bar, f"get_{size}")() / 2))
                   for bar in group] for name, group in bars.items()}
    assert seen == {"a": [(1.0, 0)], "b": [(3.0, 0), (2.0, 1)]}  # length, and the group's place
    assert labels(ax.yaxis if horizontal else ax.xaxis) == ["g", "h"]
    with pytest.raises(ValueError, match="values must be a dict"):
        charts.bars_chart({})


def test_tree_has_its_words_in_order_and_labels_above_what_they_span():
    ax = charts.tree_chart("(S (NP (DT the) (NN cat)) (VP sleeps))")
    place = {text.get_text(): text.get_position() for text in ax.texts}
    words = ["the", "cat", "sleeps"]
    assert [place[word][0] for word in words] == [0, 1, 2]
    assert len({place[word][1] for word in words}) == 1
    assert place["NP"][0] == 0.5 and place["S"][0] == 1.25
    assert place["S"][1] > place["NP"][1] == place["VP"][1] > place["DT"][1] > place["the"][1]
    edges = {frozenset(map(tuple, line.get_xydata()[[0, -1]].tolist())) for line in ax.lines}
    pairs = ("S NP", "S VP", "NP DT", "NP NN", "DT the", "NN cat", "VP sleeps")
    assert edges == {frozenset(place[label] for label in pair.split()) for pair in pairs}
    for line in ax.lines:  # aside and down by one, then straight down
        (_, a, b), (top, middle, bottom) = line.get_xdata(), line.get_ydata()
        assert a == b and top == middle + 1 and middle >= bottom


@pytest.mark.parametrize("tree, message", [
    ("(S (NP we) (VP sleep)", r"1 bracket\(s\) of .* left open"), ("", "0 bracket"),
    ("(S we) sleep", "piece 5, 'sleep', is out of place"), ("(S (NP))", r"piece 5, '\)', is out"),
    ("we sleep now", "piece 1, 'we', is out of place"), (")))", r"piece 1, '\)', is out")])
def test_a_tree_with_wrong_brackets_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        charts.tree_chart(tree)


# ---- all charts, had from one module

def test_charts_that_carry_no_tokens_have_a_table_too():
    for drawn in (charts.training_chart([{"step": 1, "loss": 2.0}]), charts.model_diagram(),
                  charts.tree_chart("(S we sleep)")):
        header, rows = theme.table(drawn)
        assert rows and all(len(row) == len(header) for row in rows)


def test_a_formula_like_word_of_a_tree_is_drawn_as_it_is():
    """All other charts draw one in test_charts_export.py."""
    ax = charts.tree_chart("(S $\\frac{$ $x$ a_b)")
    ax.figure.canvas.draw()  # a formula that cannot be parsed would raise here
    assert {"$\\frac{$", "$x$"} <= {text.get_text() for text in ax.texts}
