"""The plan of the model, curves, bars, batches and trees draw the data they are given and refuse what does not fit."""

import csv
import itertools

import numpy as np
import pytest
import torch
from drawing import HEADS, KEYS, QUERIES, WEIGHTS, close_figures, labels, stepper  # noqa: F401

from annotated import charts
from annotated.charts import attention, export, theme
from annotated.charts import curves as charts_curves

# ---- model_diagram

@pytest.mark.parametrize("part, expected", [
    ("attention", ["attention"] * 3), ("multi_head", ["attention"] * 3 + ["masked multi-head"] + ["multi-head"] * 2),
    ("feed_forward", ["feed-forward"] * 2), ("embeddings", ["embedding"] * 2 + ["output projection"]),
    ("softmax", ["softmax"]), ("residual", ["add & normalise"] * 5), ("masking", ["attention", "masked multi-head"]),
    ("positional", []), ("data", ["source tokens", "target tokens,\nshifted right"]),
    ("training", ["loss against the\ntrue next token", "next token", "target tokens,\nshifted right"]),
])
def test_a_part_lights_its_boxes_and_no_others(part, expected):
    ax = charts.model_diagram(lit=part)
    inside = {box[-1] for box in charts_curves._BOXES}
    shown = [text.get_text() for text in ax.texts if text.get_color() == theme.COLOURS["text"]]
    assert sorted(text for text in shown if text and text in inside) == expected


@pytest.mark.parametrize("lit", ["attentions", ["encoder", "nothing"], [], ""])
def test_an_unknown_part_lists_the_known_ones(lit):
    with pytest.raises(ValueError, match="the parts are transformer, encoder, .*decoding"):
        charts.model_diagram(lit=lit)


# ---- curves, bars, padding, trees

def test_encoding_has_positions_down_and_dimensions_across():
    encoding = np.sin(np.arange(12.0)).reshape(4, 3)
    ax = charts.positional_encoding_chart(encoding)
    np.testing.assert_array_equal(ax.images[0].get_array(), encoding)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("dimension", "position")
    assert ax.images[0].get_clim() == (-1, 1)
    curves = charts.positional_encoding_chart(encoding, dimensions=[2, 0])
    for line, d in zip(curves.lines, (2, 0), strict=True):
        np.testing.assert_array_equal(line.get_xydata(), np.stack([np.arange(4), encoding[:, d]], axis=1))
        assert line.get_label() == f"dimension {d}"
    for wrong in ([3], [-1], []):
        with pytest.raises(ValueError, match=r"dimensions must lie in 0 … 2"):
            charts.positional_encoding_chart(encoding, dimensions=wrong)
    with pytest.raises(ValueError, match=r"encoding must have 2 dimensions, got shape \(1, 4, 3\)"):
        charts.positional_encoding_chart(encoding[None])


def test_lines_chart_draws_the_points_given():
    series = {"a": [3.0, 1.0, 2.0], "b": ([10, 20], torch.tensor([5.0, 6.0]))}
    ax = charts.lines_chart(series, x_label="layer", y_label="norm", log_x=True, log_y=True,
                            bands={"a": ([2, 0.5, 1], [4, 2, 3])})
    assert {line.get_label(): line.get_xydata().tolist() for line in ax.lines} == {
        "a": [[1, 3], [2, 1], [3, 2]], "b": [[10, 5], [20, 6]]}
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "log", "layer", "norm")
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines}) == 2
    assert len(ax.collections) == 1
    with pytest.raises(ValueError, match="series 'a' has 3 values but 2 places"):
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


def test_training_chart_draws_rows_and_columns_alike_and_skips_gaps():
    rows = [{"step": 1, "train_loss": 3.0, "lr": 0.1}, {"step": 2, "train_loss": 2.0, "valid_loss": 2.5}]
    columns = {"step": [1, 2], "train_loss": [3.0, 2.0], "valid_loss": [None, 2.5]}
    for log in (rows, columns):
        ax = charts.training_chart(log)
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


def test_label_smoothing_draws_distributions_only():
    ax = charts.label_smoothing_chart({"hard": [0, 1, 0], "soft": [0.05, 0.9, 0.05]}, ["a", "b", "c"])
    assert [[bar.get_height() for bar in bars] for bars in ax.containers] == [[0, 1, 0], [0.05, 0.9, 0.05]]
    assert labels(ax.xaxis) == ["a", "b", "c"]
    for wrong in ([0.5, 0.6], [1.5, -0.5], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="distribution 'p' must be probabilities"):
            charts.label_smoothing_chart({"p": wrong})
    with pytest.raises(ValueError, match="distribution 'p' has 2 tokens but 3 tokens were given"):
        charts.label_smoothing_chart({"p": [0.5, 0.5]}, ["a", "b", "c"])


def test_padding_chart_counts_the_padding():
    batches = [torch.tensor([[4, 5, 0, 0], [4, 0, 0, 0]]), torch.tensor([[7, 8]])]
    figure = charts.padding_chart(batches)
    for ax, batch in zip(figure.axes, batches, strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), batch.numpy() != 0)
        assert len(ax.collections[0].get_paths()) == int((batch == 0).sum())
    assert [ax.get_title() for ax in figure.axes] == ["batch 1: 62% padding", "batch 2: 0% padding"]
    with pytest.raises(ValueError, match=r"batch 1 must have 2 dimensions, got shape \(3,\)"):
        charts.padding_chart([[1, 2, 3]])
    with pytest.raises(ValueError, match="titles must name each batch"):
        charts.padding_chart(batches, titles=["one"])


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
    ("(S (NP we) (VP sleep)", "1 are open"), ("(S we) sleep", "'sleep' follows"), ("(S we))", "follows"),
    ("(S (NP))", "'NP' with nothing in it"), ("", "must be bracketed"),
    ("we sleep now", "must be bracketed"), (")))", "must be bracketed"),
    ("(())", "'' with nothing in it"),
])
def test_a_tree_with_wrong_brackets_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        charts.tree_chart(tree)


# ---- all charts, had from one module

@pytest.mark.parametrize("draw", [
    lambda: attention.attention_lines(HEADS, KEYS, QUERIES), lambda: attention.attention_overview([HEADS], KEYS, QUERIES),
    lambda: charts.positional_encoding_chart(WEIGHTS), lambda: attention.mask_chart(WEIGHTS > 0.2),
    lambda: charts.schedule_chart([1, 2, 1]), lambda: charts.training_chart({"step": [1], "loss": [2.0]}),
    lambda: charts.bars_chart({"a": 1}), lambda: charts.label_smoothing_chart({"a": [1.0]}),
    lambda: charts.padding_chart([[[1, 0]]]), lambda: charts.tree_chart("(S we sleep)"), lambda: charts.model_diagram(),
    lambda: attention.attention_explorer(HEADS, KEYS, QUERIES), lambda: stepper(),
])
def test_every_chart_has_a_table(draw, tmp_path):
    chart = draw()
    header, *rows = csv.reader(export.save_chart(chart, tmp_path / "t.csv").read_text(encoding="utf-8").splitlines())
    assert rows and all(len(row) == len(header) for row in rows)


def test_a_formula_like_token_is_drawn_as_it_is():
    tokens = ["$\\frac{$", "$x$", "a_b^c"]
    for ax in (attention.attention_heatmap(np.eye(3), tokens, tokens), attention.attention_lines(np.eye(3), tokens, tokens),
               attention.mask_chart(np.eye(3, dtype=bool), tokens, tokens), charts.tree_chart("(S $\\frac{$ $x$ a_b)"),
               charts.label_smoothing_chart({"p": [0.5, 0.5, 0]}, tokens)):
        ax.figure.canvas.draw()  # a formula that cannot be parsed would raise here
        texts = labels(ax.xaxis) + [text.get_text() for text in ax.texts]
        assert "$\\frac{$" in texts and "$x$" in texts
