"""The charts draw the data they are given, refuse what does not fit, and keep tokens data."""

import base64
import csv
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib

matplotlib.use("agg")

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from annotated import charts

KEYS = ["the", "cat", "the", "end"]  # a token twice: places must not merge
QUERIES = ["die", "Katze", "Ende"]
WEIGHTS = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.15, 0.05], [0.25, 0.5, 0.125, 0.125]])
HEADS = np.stack([WEIGHTS, WEIGHTS[:, ::-1]])
HOSTILE = ["</script><script>alert(1)</script>", '"]);alert(2);//', "<!--", "$\\frac{$", "&lt;b&gt;", "\u2028über",
           "__proto__"]


@pytest.fixture(autouse=True)
def close_figures():
    charts.use_style()
    yield
    plt.close("all")


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


# ---- model_diagram

def coloured(part):
    ax = charts.model_diagram(lit=part)
    faded = {to_rgb("#AEB4BC"), to_rgb("#F6F7F8")}
    dark = {i for i, patch in enumerate(ax.patches) if patch.get_edgecolor()[:3] not in faded}
    return dark | {f"line {i}" for i, line in enumerate(ax.lines) if line.get_color() == charts.COLOURS["text"]}


def test_every_part_lights_something_of_its_own():
    lit = {part: frozenset(coloured(part)) for part in charts.PARTS}
    assert all(lit.values())
    assert len(set(lit.values())) == len(lit)
    everything = coloured(None)
    assert all(some < everything for some in lit.values())
    assert set().union(*lit.values()) == everything


@pytest.mark.parametrize("part, expected", [
    ("attention", ["attention"] * 3), ("multi_head", ["attention"] * 3 + ["masked multi-head"] + ["multi-head"] * 2),
    ("feed_forward", ["feed-forward"] * 2), ("embeddings", ["embedding"] * 2 + ["output projection"]),
    ("softmax", ["softmax"]), ("residual", ["add & normalise"] * 5), ("masking", ["attention", "masked multi-head"]),
    ("positional", []), ("data", ["source tokens", "target tokens,\nshifted right"]),
    ("training", ["loss against the\ntrue next token", "next token", "target tokens,\nshifted right"]),
])
def test_a_part_lights_its_boxes_and_no_others(part, expected):
    ax = charts.model_diagram(lit=part)
    inside = {box[-1] for box in charts._BOXES}
    shown = [text.get_text() for text in ax.texts if text.get_color() == charts.COLOURS["text"]]
    assert sorted(text for text in shown if text and text in inside) == expected


def test_several_parts_light_their_union():
    assert coloured(["attention", "softmax"]) == coloured("attention") | coloured("softmax")


@pytest.mark.parametrize("lit", ["attentions", ["encoder", "nothing"], [], ""])
def test_an_unknown_part_lists_the_known_ones(lit):
    with pytest.raises(ValueError, match="the parts are transformer, encoder, .*decoding"):
        charts.model_diagram(lit=lit)


def test_no_box_of_the_plan_overlaps_another():
    boxes = [(x, y, x + w, y + h) for _, x, y, w, h, colour, text in charts._BOXES if text and colour != "core"]
    for i, a in enumerate(boxes):
        for b in boxes[i + 1:]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


# ---- heat maps

@pytest.mark.parametrize("convert", [
    np.asarray, lambda w: torch.tensor(w, requires_grad=True), lambda w: w.tolist(),
    lambda w: [torch.tensor(row) for row in w],
], ids=["numpy", "tensor", "lists", "list of tensors"])
def test_heatmap_draws_the_matrix_untransposed(convert):
    ax = charts.attention_heatmap(convert(WEIGHTS), KEYS, QUERIES, title="A title")
    np.testing.assert_array_equal(ax.images[0].get_array(), WEIGHTS)
    assert labels(ax.xaxis) == KEYS and labels(ax.yaxis) == QUERIES
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    assert ax.xaxis.get_ticks_position() == "top" and ax.yaxis.get_inverted()  # the first query is the top row
    assert ax.get_title(loc="left") == "A title"


def test_heatmap_writes_each_number_into_its_cell():
    ax = charts.attention_heatmap(WEIGHTS, KEYS, QUERIES, values=True)
    written = {tuple(int(c) for c in text.get_position()): text.get_text() for text in ax.texts}
    assert written == {(j, i): f"{w:.2f}" for (i, j), w in np.ndenumerate(WEIGHTS)}


def test_heatmap_draws_every_head_in_order_under_one_scale():
    figure = charts.attention_heatmap(HEADS, KEYS, QUERIES, titles=["one", "two"], key_label="source (key)")
    panels = [ax for ax in figure.axes if ax.images and hasattr(ax, "chart_table")]
    for ax, head, title in zip(panels, HEADS, ["one", "two"], strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), head)
        assert ax.images[0].get_clim() == (0, 1)
        assert ax.get_title() == title and ax.get_xlabel() == "source (key)"
    assert labels(panels[0].yaxis) == QUERIES and labels(panels[1].xaxis) == KEYS


def test_heatmap_takes_half_precision_and_booleans():
    half = charts.attention_heatmap(torch.tensor(WEIGHTS, dtype=torch.bfloat16), KEYS, QUERIES)
    np.testing.assert_allclose(half.images[0].get_array(), WEIGHTS, atol=2e-3)
    gold = charts.attention_heatmap(WEIGHTS > 0.3, KEYS, QUERIES)
    np.testing.assert_array_equal(gold.images[0].get_array(), (WEIGHTS > 0.3).astype(float))
    assert not gold.texts


def test_heatmap_of_scores_is_centred_and_hatches_what_is_masked():
    scores = np.array([[1.0, -np.inf], [-3.0, 2.0]])
    ax = charts.attention_heatmap(scores, ["a", "b"], ["a", "b"], vmax=None)
    assert ax.images[0].get_clim() == (-3, 3)
    np.testing.assert_array_equal(ax.images[0].get_array().mask, [[False, True], [False, False]])
    assert [patch.get_xy() for patch in ax.patches] == [(0.5, -0.5)]
    assert "−∞" in [text.get_text() for text in ax.texts] and "−3.00" in [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("weights, keys, queries, message", [
    (WEIGHTS, KEYS[:3], QUERIES, "weights have 4 keys but 3 key tokens were given"),
    (WEIGHTS, KEYS, QUERIES * 2, "weights have 3 queries but 6 query tokens were given"),
    (WEIGHTS, QUERIES, KEYS, "weights have 4 keys but 3 key tokens"),
    (WEIGHTS, "abcd", QUERIES, "keys must be a list of tokens"),
    (HEADS[None], KEYS, QUERIES, r"got shape \(1, 2, 3, 4\); choose one sentence"),
    (WEIGHTS[0], KEYS, QUERIES, r"got shape \(4,\)"),
    ([[1.0, 2.0], [3.0]], KEYS, QUERIES, "weights must be numbers in a rectangular"),
    ([["a", "b"]], KEYS, QUERIES, "weights must be numbers"),
    (np.zeros((0, 4)), KEYS, [], r"got shape \(0, 4\)"),
])
def test_heatmap_and_lines_name_what_does_not_fit(weights, keys, queries, message):
    for draw in (charts.attention_heatmap, charts.attention_lines):
        with pytest.raises(ValueError, match=message):
            draw(weights, keys, queries)


def test_heatmap_refuses_several_heads_on_one_axes_and_a_wrong_number_of_titles():
    with pytest.raises(ValueError, match="ax holds one panel but weights have 2"):
        charts.attention_heatmap(HEADS, KEYS, QUERIES, ax=plt.gca())
    with pytest.raises(ValueError, match="titles must name each of the 2 panels, got 1"):
        charts.attention_heatmap(HEADS, KEYS, QUERIES, titles=["one"])


def test_a_formula_like_token_is_drawn_as_it_is():
    tokens = ["$\\frac{$", "$x$", "a_b^c"]
    for ax in (charts.attention_heatmap(np.eye(3), tokens, tokens), charts.attention_lines(np.eye(3), tokens, tokens),
               charts.mask_chart(np.eye(3, dtype=bool), tokens, tokens), charts.tree_chart("(S $\\frac{$ $x$ a_b)"),
               charts.label_smoothing_chart({"p": [0.5, 0.5, 0]}, tokens)):
        ax.figure.canvas.draw()  # a formula that cannot be parsed would raise here
        texts = labels(ax.xaxis) + [text.get_text() for text in ax.texts]
        assert "$\\frac{$" in texts and "$x$" in texts


# ---- lines and overview

def test_lines_join_each_query_to_each_key_with_the_width_of_the_weight():
    ax = charts.attention_lines(HEADS, KEYS, QUERIES, threshold=0.12)
    expected = {(h + 1, i, j): w for (h, i, j), w in np.ndenumerate(HEADS) if w >= 0.12}
    drawn = {tuple(int(n) for n in re.findall(r"\d+", patch.get_gid())): patch for patch in ax.patches}
    assert set(drawn) == set(expected)
    for (head, i, j), patch in drawn.items():
        start, end = patch.get_path().vertices[[0, -1]]
        assert start[0] == 0 and end[0] == 1  # queries left, keys right
        assert round(-start[1]) == i and round(-end[1]) == j
        assert patch.get_edgecolor()[:3] == pytest.approx(to_rgb(charts.CYCLE[head - 1]))
        assert patch.get_linewidth() == pytest.approx(0.4 + 4.2 * expected[head, i, j])
    places = {(text.get_text(), round(-text.get_position()[1]), text.get_position()[0] > 0.5) for text in ax.texts}
    assert {(token, i, False) for i, token in enumerate(QUERIES)} <= places
    assert {(token, j, True) for j, token in enumerate(KEYS)} <= places


def test_lines_of_one_query_and_of_some_heads():
    for query in ("Katze", 1, -2):
        ax = charts.attention_lines(HEADS, KEYS, QUERIES, query=query, heads=[1], threshold=0)
        assert {patch.get_gid() for patch in ax.patches} == {f"head 2 query 1 key {j}" for j in range(4)}
    with pytest.raises(ValueError, match="occurs 2 times"):
        charts.attention_lines(HEADS.transpose(0, 2, 1), QUERIES, KEYS, query="the")
    with pytest.raises(ValueError, match="occurs 0 times"):
        charts.attention_lines(HEADS, KEYS, QUERIES, query="Hund")
    with pytest.raises(ValueError, match="query must be an index below 3, got 3"):
        charts.attention_lines(HEADS, KEYS, QUERIES, query=3)
    with pytest.raises(ValueError, match="heads must be among 0 … 1"):
        charts.attention_lines(HEADS, KEYS, QUERIES, heads=[2])


def test_overview_has_layers_down_and_heads_across():
    layers = {"first": HEADS, "second": HEADS[:, ::-1], "third": HEADS[:1]}
    figure = charts.attention_overview(layers, KEYS, QUERIES)
    grid = np.array(figure.axes).reshape(3, 2)
    for row, (name, layer) in enumerate(layers.items()):
        assert grid[row, 0].get_ylabel() == name
        for column, head in enumerate(layer):
            np.testing.assert_array_equal(grid[row, column].images[0].get_array(), head)
            assert grid[row, column].images[0].get_clim() == (0, 1)
    assert not grid[2, 1].images
    with pytest.raises(ValueError, match="weights have 4 keys but 3 key tokens"):
        charts.attention_overview(layers, QUERIES, QUERIES)
    with pytest.raises(ValueError, match=r"must have 3 dimensions, got shape \(3, 4\)"):
        charts.attention_overview(HEADS)
    with pytest.raises(ValueError, match="2 layers of up to 2 heads, got 1 layer names"):
        charts.attention_overview([HEADS, HEADS], layer_names=["one"])


# ---- the explorer

def explorer_rows(spec):
    """What a reader of the chart sees: {(layer, head, place of query, query, place of key, key): weight}."""
    value = {param["name"]: param["value"] for param in spec["params"]}
    header, *rows = csv.reader(spec["data"]["values"].splitlines())
    assert header == ["layer", "head", "query", "key", "weight"]
    seen = {}
    for n, head, i, j, weight in rows:
        name = value["layers"][int(n)]
        place = (int(i), value["queries"][name][int(i)], int(j), value["keys"][name][int(j)])
        seen[name, int(head), *place] = float(weight)
    return seen


def test_explorer_holds_every_weight_under_its_tokens():
    weights = {"encoder": torch.tensor(HEADS[:, :, :3]), "cross": HEADS / 3}
    keys = {"encoder": QUERIES, "cross": KEYS}
    spec = charts.attention_explorer(weights, keys, QUERIES).to_dict()
    expected = {(name, h + 1, i, QUERIES[i], j, keys[name][j]): float(w)
                for name, array in weights.items() for (h, i, j), w in np.ndenumerate(np.asarray(array))}
    assert explorer_rows(spec) == pytest.approx(expected, abs=5e-5)
    assert all(len(line.split(",")[-1]) <= 6 for line in spec["data"]["values"].splitlines()[1:])  # four digits


def test_explorer_puts_keys_along_x_on_top_and_queries_down_y():
    spec = charts.attention_explorer(HEADS, KEYS, QUERIES, key_label="source (key)").to_dict()
    x, y = spec["encoding"]["x"], spec["encoding"]["y"]
    assert (x["field"], x["axis"]["title"], x["axis"]["orient"]) == ("key", "source (key)", "top")
    assert (y["field"], y["axis"]["title"]) == ("query", "query")
    assert x["axis"]["labelExpr"].startswith("keys[") and y["axis"]["labelExpr"].startswith("queries[")
    menus = {param["name"]: param["bind"]["options"] for param in spec["params"] if "bind" in param}
    assert menus == {"layer": ["attention"], "head": ["1", "2"]}


def test_explorer_shows_the_chosen_layer_and_head_in_the_rendered_picture():
    vl_convert = pytest.importorskip("vl_convert")
    weights = {"a": np.stack([np.eye(3), 1 - np.eye(3)]), "b": np.zeros((2, 3, 3))}
    chart = charts.attention_explorer(weights, ["k0", "k1", "k2"], ["q0", "q1", "q2"])
    spec = chart.to_dict()
    for param in spec["params"]:
        if param["name"] == "head":
            param["value"] = "2"
    svg = vl_convert.vegalite_to_svg(spec, vl_version="5.20")
    cells = dict(re.findall(r'aria-label="(q\d → k\d: [\d.]+)".*?fill="([^"]+)"', svg))
    assert set(cells) == {f"q{i} → k{j}: {int(i != j)}" for i in range(3) for j in range(3)}
    assert len(set(cells.values())) == 2
    assert [token for token in re.findall(r">([qk]\d)<", svg)] == ["k0", "k1", "k2", "q0", "q1", "q2"]


def test_explorer_is_the_same_every_time_and_holds_no_token_in_an_expression():
    one, two = (json.dumps(charts.attention_explorer(np.eye(7)[None], HOSTILE, HOSTILE).to_dict()) for _ in range(2))
    assert one == two
    spec = json.loads(one)
    assert next(param["value"] for param in spec["params"] if param["name"] == "keys") == {"attention": HOSTILE}
    rest = json.dumps({k: v for k, v in spec.items() if k != "params"})
    assert "alert" not in rest and "frac" not in rest


def test_explorer_names_what_does_not_fit():
    with pytest.raises(ValueError, match="weights of 'attention' have 4 keys but 3 key tokens"):
        charts.attention_explorer(HEADS, QUERIES, QUERIES)
    with pytest.raises(ValueError, match=r"weights of 'attention' must have 3 dimensions, got shape \(3, 4\)"):
        charts.attention_explorer(WEIGHTS, KEYS, QUERIES)
    with pytest.raises(ValueError, match=r"keys lack the layers \['b'\]"):
        charts.attention_explorer({"a": HEADS, "b": HEADS}, {"a": KEYS}, QUERIES)
    with pytest.raises(ValueError, match="weights hold no layer"):
        charts.attention_explorer({}, KEYS, QUERIES)


def test_renderer_gives_the_chart_and_a_picture_of_it_and_no_html():
    import altair

    charts.enable_altair()
    assert altair.renderers.active == "book"
    bundle = charts.attention_explorer(HEADS, KEYS, QUERIES)._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert set(bundle) == {"application/vnd.vegalite.v5+json", "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")


# ---- masks and encodings

def test_mask_is_light_where_it_may_attend_and_hatched_where_not():
    mask = torch.tensor([[True, False, False], [True, True, False]])
    ax = charts.mask_chart(mask, ["a", "b", "c"], ["x", "y"])
    np.testing.assert_array_equal(ax.images[0].get_array(), mask.numpy())
    colours = [ax.images[0].cmap(value)[:3] for value in (0.0, 1.0)]
    assert colours[0] == pytest.approx(to_rgb(charts.COLOURS["mask"])) and min(colours[1]) > 0.8
    hatched = {tuple(path.vertices.mean(axis=0).round().astype(int)) for path in ax.collections[0].get_paths()}
    assert hatched == {(1, 0), (2, 0), (2, 1)}
    assert labels(ax.xaxis) == ["a", "b", "c"] and labels(ax.yaxis) == ["x", "y"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["may attend", "hidden"]


def test_a_padding_mask_serves_every_query():
    ax = charts.mask_chart(torch.tensor([[[[True, True, False]]]]), ["a", "b", "<pad>"], ["x", "y"])
    np.testing.assert_array_equal(ax.images[0].get_array(), [[True, True, False]] * 2)


@pytest.mark.parametrize("mask, message", [
    (np.array([[0.0, -np.inf]]), "mask must be boolean"), (np.ones((2, 1, 1, 3), bool), r"got shape \(2, 1, 1, 3\)"),
    (np.ones((2, 3), bool), "mask has 3 keys but 2 key tokens"), (np.zeros((0, 3), bool), r"got shape \(0, 3\)"),
])
def test_mask_chart_names_what_does_not_fit(mask, message):
    with pytest.raises(ValueError, match=message):
        charts.mask_chart(mask, ["a", "b"], ["x", "y"])


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


# ---- curves, bars, padding, trees

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
    assert len(charts.training_chart(rows, fields=["lr"], y="rate").lines) == 1
    with pytest.raises(ValueError, match=r"log has the columns .* but none \['bleu'\]"):
        charts.training_chart(rows, fields=["bleu"])
    with pytest.raises(ValueError, match="none that ends in 'bleu'"):
        charts.training_chart(rows, y="bleu")


@pytest.mark.parametrize("horizontal", [False, True])
def test_bars_have_the_lengths_given(horizontal):
    values = {"g": {"a": 1.0, "b": 3.0}, "h": {"b": 2.0}}
    ax = charts.bars_chart(values, horizontal=horizontal, errors={"g": {"a": 0.1, "b": 0.2}, "h": {"b": 0.3}})
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
    edges = {tuple(sorted(map(tuple, line.get_xydata().tolist()))) for line in ax.lines}
    pairs = [("S", "NP"), ("S", "VP"), ("NP", "DT"), ("NP", "NN"), ("DT", "the"), ("NN", "cat"), ("VP", "sleeps")]
    assert edges == {tuple(sorted((tuple(map(float, place[a])), tuple(map(float, place[b]))))) for a, b in pairs}


@pytest.mark.parametrize("tree, message", [
    ("(S (NP we) (VP sleep)", "1 are open"), ("(S we) sleep", "'sleep' follows"), ("(S we))", "follows"),
    ("(S (NP))", "'NP' with nothing in it"), ("", "must be bracketed"),
    ("we sleep now", "must be bracketed"), (")))", "must be bracketed"),
    ("(())", "'' with nothing in it"),
])
def test_a_tree_with_wrong_brackets_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        charts.tree_chart(tree)


# ---- saving

class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.scripts, self.attributes = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags[-1:] == ["script"]:
            self.scripts[-1] += data


def read(page):
    reader = Reader()
    reader.feed(page)
    return reader


def spec_of(reader):
    start = reader.scripts[1].index("{")
    return json.JSONDecoder().raw_decode(reader.scripts[1][start:])[0]


token = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))


@settings(deadline=None, max_examples=4)
@given(tokens=st.lists(token, min_size=2, max_size=2))
def test_hostile_tokens_stay_data_in_html(tmp_path_factory, tokens):
    path = tmp_path_factory.mktemp("page") / "chart.html"
    tokens = [*tokens, *HOSTILE]
    weights = {"</script><b>": np.eye(len(tokens))[None]}
    charts.save_chart(charts.attention_explorer(weights, tokens, tokens, title="<b>&</title><script>"), path)
    reader = read(path.read_bytes().decode())
    assert reader.tags == ["html", "head", "meta", "title", "style", "body", "div", "script", "script"]
    spec = spec_of(reader)
    value = {param["name"]: param["value"] for param in spec["params"]}
    assert value["keys"] == value["queries"] == {"</script><b>": tokens}
    assert not {name for name, _ in reader.attributes} & {"src", "href"}  # nothing is loaded


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(tokens=st.lists(token, min_size=1, max_size=5))
def test_long_any_token_survives_the_way_into_html_and_csv(tmp_path_factory, tokens):
    folder = tmp_path_factory.mktemp("fuzz")
    chart = charts.attention_explorer(np.eye(len(tokens))[None], tokens, tokens)
    reader = read(charts.save_chart(chart, folder / "chart.html").read_bytes().decode())
    assert reader.tags.count("script") == 2
    assert explorer_rows(spec_of(reader)) == explorer_rows(chart.to_dict())


def test_a_figure_becomes_a_page_with_one_picture_and_its_title(tmp_path):
    ax = charts.attention_heatmap(np.eye(7), HOSTILE, HOSTILE, title="a < b & \"c\"")
    reader = read(charts.save_chart(ax, tmp_path / "chart.html").read_text(encoding="utf-8"))
    assert reader.tags == ["html", "head", "meta", "title", "style", "body", "img"]
    assert dict(reader.attributes)["alt"] == "a < b & \"c\""
    kind, picture = dict(reader.attributes)["src"].split(",")
    assert kind == "data:image/svg+xml;base64" and b"</svg>" in base64.b64decode(picture)


def drawing(kind):
    draw = charts.attention_explorer if kind == "altair" else charts.attention_heatmap
    return draw(WEIGHTS if kind == "axes" else HEADS, KEYS, QUERIES)


@pytest.mark.parametrize("kind", ["axes", "altair"])
def test_files_are_whole_and_the_same_each_time(kind, tmp_path):
    for suffix in ("png", "svg", "html", "csv"):
        first, second = (charts.save_chart(drawing(kind), tmp_path / f"{i}.{suffix}").read_bytes() for i in range(2))
        assert first == second
        start, end = {"png": (b"\x89PNG", b"IEND\xaeB`\x82"), "svg": (b"<", b"</svg>"),
                      "html": (b"<!DOCTYPE", b"</html>"), "csv": (b"", b"")}[suffix]
        assert first.startswith(start) and first.rstrip(b"\n").endswith(end)
    assert len(list(tmp_path.iterdir())) == 8  # no partial file stays behind


def test_csv_gives_back_the_weights_and_their_tokens(tmp_path):
    for kind, panels in (("axes", WEIGHTS[None]), ("figure", HEADS), ("altair", HEADS)):
        path = charts.save_chart(drawing(kind), tmp_path / f"{kind}.csv")
        rows = list(csv.DictReader(path.open(encoding="utf-8", newline="")))
        assert len(rows) == panels.size
        for row in rows:
            i, j = int(row["query index"]), int(row["key index"])
            panel = int(row.get("panel") or row.get("head") or 1) - 1
            assert float(row["weight"]) == pytest.approx(panels[panel, i, j], abs=5e-5)
            assert (row["query"], row["key"]) == (QUERIES[i], KEYS[j])


@pytest.mark.parametrize("draw", [
    lambda: charts.attention_lines(HEADS, KEYS, QUERIES), lambda: charts.attention_overview([HEADS], KEYS, QUERIES),
    lambda: charts.positional_encoding_chart(WEIGHTS), lambda: charts.mask_chart(WEIGHTS > 0.2),
    lambda: charts.schedule_chart([1, 2, 1]), lambda: charts.training_chart({"step": [1], "loss": [2.0]}),
    lambda: charts.bars_chart({"a": 1}), lambda: charts.label_smoothing_chart({"a": [1.0]}),
    lambda: charts.padding_chart([[[1, 0]]]), lambda: charts.tree_chart("(S we sleep)"),
])
def test_every_chart_has_a_table(draw, tmp_path):
    chart = draw()
    header, *rows = csv.reader(charts.save_chart(chart, tmp_path / "t.csv").read_text(encoding="utf-8").splitlines())
    assert rows and all(len(row) == len(header) for row in rows)


def test_save_chart_refuses_what_it_cannot_write(tmp_path, monkeypatch):
    ax = charts.bars_chart({"a": 1})
    with pytest.raises(ValueError, match=r"path must end in one of \.html, \.svg, \.png, \.csv, got 'chart\.pdf'"):
        charts.save_chart(ax, tmp_path / "chart.pdf")
    with pytest.raises(TypeError, match="chart must be axes, a figure or an Altair chart, got list"):
        charts.save_chart([1], tmp_path / "chart.png")
    with pytest.raises(ValueError, match="chart holds no table"):
        charts.save_chart(plt.figure(), tmp_path / "chart.csv")
    (tmp_path / "kept.png").write_bytes(b"old")
    monkeypatch.setattr(charts, "_render", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        charts.save_chart(ax, tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes() == b"old"  # a failure leaves the old file


# ---- the module

def test_import_needs_neither_torch_nor_altair():
    code = "import sys, annotated.charts; assert not {'torch', 'altair', 'vl_convert'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_colours_that_pages_rely_on_are_there():
    names = ("query key value mask encoder decoder attention feed_forward embedding position norm output accent muted "
             "text")
    assert set(names.split()) <= set(charts.COLOURS)
    assert all(re.fullmatch("#[0-9A-F]{6}", colour) for colour in [*charts.COLOURS.values(), *charts.CYCLE])
    assert len(set(charts.CYCLE)) == 8


def test_a_chart_draws_on_the_axes_given():
    for draw in (lambda ax: charts.attention_heatmap(WEIGHTS, KEYS, QUERIES, ax=ax),
                 lambda ax: charts.attention_lines(WEIGHTS, KEYS, QUERIES, ax=ax),
                 lambda ax: charts.model_diagram(ax=ax), lambda ax: charts.mask_chart(WEIGHTS > 0.2, ax=ax),
                 lambda ax: charts.lines_chart([1, 2], ax=ax), lambda ax: charts.tree_chart("(S we)", ax=ax)):
        ax = plt.subplots()[1]
        assert draw(ax) is ax
