"""Curves, bars and trees draw the data they are given and refuse what does not fit."""

import csv
import itertools

import numpy as np
import pytest
import torch
from drawing import HEADS, KEYS, QUERIES, WEIGHTS, close_figures, labels, stepper  # noqa: F401

from annotated import charts
from annotated.charts import attention, explorer, export


def test_lines_chart_draws_the_points_given():
    series = {"a": [3.0, 1.0, 2.0], "b": ([10, 20], torch.tensor([5.0, 6.0]))}
    ax = charts.lines_chart(series, x_label="layer", y_label="norm", log_x=True, log_y=True,
                            bands={"a": ([2, 0.5, 1], [4, 2, 3])})
    assert {line.get_label(): line.get_xydata().tolist() for line in ax.lines} == {
        "a": [[1, 3], [2, 1], [3, 2]], "b": [[10, 5], [20, 6]]}
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "log", "layer", "norm")
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines}) == 2
    assert len(ax.collections) == 1
    with pytest.raises(ValueError, match="same first dimension"):
        charts.lines_chart({"a": [1, 2, 3]}, x=[1, 2])
    with pytest.raises(ValueError, match="series holds no line"):
        charts.lines_chart({})


def test_schedule_starts_at_step_one_and_marks_the_peak_of_the_paper():
    steps = np.arange(1, 10_001)
    rates = 512**-0.5 * np.minimum(steps**-0.5, steps * 4000**-1.5)
    ax = charts.schedule_chart(rates)
    assert ax.lines[0].get_xdata()[0] == 1
    assert [text.get_text() for text in ax.texts] == ["0.0006988 at step 4,000"]
    assert ax.lines[1].get_xydata().tolist() == [[4000, rates.max()]]
    two = charts.schedule_chart({"base": rates, "half": rates / 2}, log=True)
    assert [text.get_text() for text in two.get_legend().get_texts()] == [
        "base: peak 0.0006988 at step 4,000", "half: peak 0.0003494 at step 4,000"]
    assert two.get_xscale() == "log"


def test_training_chart_draws_the_losses_and_skips_gaps():
    rows = [{"step": 1, "train_loss": 3.0, "lr": 0.1}, {"step": 2, "train_loss": 2.0, "valid_loss": 2.5}]
    ax = charts.training_chart(rows)
    assert {line.get_label(): line.get_xydata().tolist() for line in ax.lines} == {
        "train loss": [[1, 3], [2, 2]], "valid loss": [[2, 2.5]]}
    assert len(charts.training_chart(rows, fields=["lr"]).lines) == 1
    with pytest.raises(ValueError, match=r"log has the columns .* but none \['bleu'\]"):
        charts.training_chart(rows, fields=["bleu"])
    with pytest.raises(ValueError, match="none that ends in 'loss'"):
        charts.training_chart([{"step": 1, "bleu": 2.0}])


@pytest.mark.parametrize("horizontal", [False, True])
def test_bars_have_the_lengths_given(horizontal):
    values = {"g": {"a": 1.0, "b": 3.0}, "h": {"b": 2.0}}
    ax = charts.bars_chart(values, horizontal=horizontal)
    lengths = {bars.get_label(): [bar.get_width() if horizontal else bar.get_height() for bar in bars]
               for bars in ax.containers if hasattr(bars, "patches")}
    assert lengths == {"a": [1.0], "b": [3.0, 2.0]}
    assert labels(ax.yaxis if horizontal else ax.xaxis) == ["g", "h"]
    groups = [round(bar.get_y() + bar.get_height() / 2 if horizontal else bar.get_x() + bar.get_width() / 2)
              for bars in ax.containers if hasattr(bars, "patches") for bar in bars]
    assert groups == [0, 0, 1]
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
    edges = {tuple(sorted(map(tuple, line.get_xydata()[[0, -1]].tolist()))) for line in ax.lines}
    pairs = [("S", "NP"), ("S", "VP"), ("NP", "DT"), ("NP", "NN"), ("DT", "the"), ("NN", "cat"), ("VP", "sleeps")]
    assert edges == {tuple(sorted((tuple(map(float, place[a])), tuple(map(float, place[b]))))) for a, b in pairs}


@pytest.mark.parametrize("tree", [
    "(S (NP (NP the queen) and (NP the king)) (VP want (S (VP to (VP come (PRT back)))) (SBAR because (S (NP they) (VP are)))) .)",
    "(A (B (C (D a b) c) d) e (F f (G g (H h i))))",
])
def test_no_line_of_a_tree_crosses_another_or_a_label(tree):
    def turn(a, b, c):
        return round((b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]), 6)

    ax = charts.tree_chart(tree)
    pieces = [tuple(map(tuple, line.get_xydata()[i:i + 2].tolist())) for line in ax.lines for i in (0, 1)]
    pieces = [(a, b) for a, b in pieces if a != b]
    for (a, b), (c, d) in itertools.combinations(pieces, 2):
        assert not (turn(a, b, c) * turn(a, b, d) < 0 and turn(c, d, a) * turn(c, d, b) < 0), (a, b, c, d)
    for place in (text.get_position() for text in ax.texts):
        for a, b in pieces:  # a label on a line is at its end
            within = min(a[0], b[0]) <= place[0] <= max(a[0], b[0]) and min(a[1], b[1]) <= place[1] <= max(a[1], b[1])
            assert place in (a, b) or not within or turn(a, b, place), (a, b, place)


@pytest.mark.parametrize("tree, message", [
    ("(S (NP we) (VP sleep)", "1 brackets of .* are open"), ("(S we) sleep", "'sleep' stands outside"),
    ("(S we))", "stands outside"), ("(S (NP))", "'NP' has nothing in it"), ("", "0 brackets"),
    ("we sleep now", "'we' stands outside"), (")))", "stands outside"), ("(())", "'' has nothing in it"),
])
def test_a_tree_with_wrong_brackets_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        charts.tree_chart(tree)


# ---- all charts, had from one module

@pytest.mark.parametrize("draw", [
    lambda: attention.attention_lines(HEADS, KEYS, QUERIES), lambda: attention.attention_overview([HEADS], KEYS, QUERIES),
    lambda: attention.mask_chart(WEIGHTS > 0.2),
    lambda: charts.schedule_chart([1, 2, 1]), lambda: charts.training_chart([{"step": 1, "loss": 2.0}]),
    lambda: charts.bars_chart({"a": 1}), lambda: charts.tree_chart("(S we sleep)"), lambda: charts.model_diagram(),
    lambda: explorer.attention_explorer(HEADS, KEYS, QUERIES), lambda: stepper(),
])
def test_every_chart_has_a_table(draw, tmp_path):
    chart = draw()
    header, *rows = csv.reader(export.save_chart(chart, tmp_path / "t.csv").read_text(encoding="utf-8").splitlines())
    assert rows and all(len(row) == len(header) for row in rows)


def test_a_formula_like_token_is_drawn_as_it_is():
    tokens = ["$\\frac{$", "$x$", "a_b^c"]
    for ax in (attention.attention_heatmap(np.eye(3), tokens, tokens), attention.attention_lines(np.eye(3), tokens, tokens),
               attention.mask_chart(np.eye(3, dtype=bool), tokens, tokens), charts.tree_chart("(S $\\frac{$ $x$ a_b)"),
               charts.bars_chart(dict.fromkeys(tokens, 1))):
        ax.figure.canvas.draw()  # a formula that cannot be parsed would raise here
        texts = labels(ax.xaxis) + [text.get_text() for text in ax.texts]
        assert "$\\frac{$" in texts and "$x$" in texts
