"""The charts draw the data they are given, refuse what does not fit, and keep tokens data."""

import base64
import csv
import io
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

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
SCRIPT = "</script><script>parent.hurt = document.title = 'hurt'; alert(1)</script>"
HOSTILE = [SCRIPT, '"><img src=x onerror="document.title=\'hurt\'; alert(2)">', "javascript:alert(3)", '"]);alert(4);//',
           "<!--", "]]>", "$\\frac{$", "&lt;b&gt;", "\u2028über", "__proto__", "\u202eecila\u202c", "\u200f\u200eא",
           "{{constructor.constructor('alert(5)')()}}", "datum.weight"]


def shown(token):
    """A token as every chart shows it: what no file can hold is drawn as its picture."""
    pictures = {**{i: chr(0x2400 + i) for i in range(32)}, 127: "␡", 0xFFFE: "\ufffd", 0xFFFF: "\ufffd"}
    return token.translate(pictures)


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
    (HEADS[None, None], KEYS, QUERIES, r"got shape \(1, 1, 2, 3, 4\); choose one sentence"),
    (WEIGHTS[0], KEYS, QUERIES, r"got shape \(4,\)"),
    ([[1.0, 2.0], [3.0]], KEYS, QUERIES, "weights must be numbers in a rectangular"),
    ([["a", "b"]], KEYS, QUERIES, "weights must be numbers"),
    (np.zeros((0, 4)), KEYS, [], r"got shape \(0, 4\)"),
])
def test_heatmap_and_lines_name_what_does_not_fit(weights, keys, queries, message):
    for draw in (charts.attention_heatmap, charts.attention_lines):
        with pytest.raises(ValueError, match=message):
            draw(weights, keys, queries)


def test_a_batch_of_one_sentence_is_that_sentence_and_a_larger_one_is_refused():
    for draw in (charts.attention_heatmap, charts.attention_overview):
        one, same = ([row[-5:] for row in charts.table(draw(weights, KEYS, QUERIES))[1]] for weights in (HEADS[None], HEADS))
        assert one == same and len(one) == HEADS.size
    with pytest.raises(ValueError, match=r"got shape \(2, 2, 3, 4\); choose one sentence"):
        charts.attention_heatmap(np.stack([HEADS, HEADS]), KEYS, QUERIES)
    with pytest.raises(ValueError, match="weights of 'layer 1' hold a batch of 2 sentences: choose one"):
        charts.attention_overview([np.stack([HEADS, HEADS])], KEYS, QUERIES)


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
    with pytest.raises(ValueError, match=r"weights of 'a' must be \(heads, queries, keys\), got shape \(3, 4\)"):
        charts.attention_overview({"a": WEIGHTS})
    with pytest.raises(ValueError, match="weights have 2 layers, got 1 layer names"):
        charts.attention_overview([HEADS, HEADS], layer_names=["one"])


# ---- the explorer

def explorer_rows(spec):
    """What a reader of the chart sees: {(layer, head, place of query, query, place of key, key): weight}."""
    value = {param["name"]: param.get("value") for param in spec["params"]}
    return {(layer, h + 1, i, value["queries"][n][i], j, value["keys"][n][j]): weight
            for n, layer in enumerate(value["layers"]) for h, matrix in enumerate(value["weights"][n])
            for i, row in enumerate(matrix) for j, weight in enumerate(row)}


def test_explorer_holds_every_weight_under_its_tokens():
    weights = {"encoder": torch.tensor(HEADS[:, :, :3]), "cross": HEADS / 3}
    keys = {"encoder": QUERIES, "cross": KEYS}
    spec = charts.attention_explorer(weights, keys, QUERIES).to_dict()
    expected = {(name, h + 1, i, QUERIES[i], j, keys[name][j]): float(w)
                for name, array in weights.items() for (h, i, j), w in np.ndenumerate(np.asarray(array))}
    assert explorer_rows(spec) == pytest.approx(expected, abs=5e-5)
    assert all(len(str(weight)) <= 6 for weight in explorer_rows(spec).values())  # four digits


def test_explorer_puts_keys_along_x_on_top_and_queries_down_y():
    spec = charts.attention_explorer(HEADS, KEYS, QUERIES, key_label="source (key)").to_dict()
    x, y = spec["encoding"]["x"], spec["encoding"]["y"]
    assert (x["field"], x["axis"]["title"], x["axis"]["orient"]) == ("key", "source (key)", "top")
    assert (y["field"], y["axis"]["title"]) == ("row", "query")
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
    assert cells_of(spec) == {f"q{i} → k{j}": int(i != j) for i in range(3) for j in range(3)}
    svg = vl_convert.vegalite_to_svg(spec, vl_version="5.20")
    assert [token for token in re.findall(r">([qk]\d)<", svg)] == ["k0", "k1", "k2", "q0", "q1", "q2"]


def cells_of(spec, **values):
    """What a heat map of Altair draws: {"query → key": weight}, with these parameters set."""
    import vl_convert

    spec = json.loads(json.dumps(spec))
    for param in spec["params"]:
        param["value" if param["name"] in values else "name"] = values.get(param["name"], param["name"])
    svg = vl_convert.vegalite_to_svg(spec, vl_version="5.20")
    return {name: float(weight) for name, weight in re.findall(r'aria-label="([^"]* → [^"]*): ([\d.e-]+)"', svg)}


def test_explorer_draws_every_layer_and_head_with_its_own_tokens_and_leaves_nothing_over():
    weights = {"a": HEADS, "b": np.stack([WEIGHTS[:2, :2], 1 - WEIGHTS[:2, :2], np.eye(2)])}
    keys, queries = {"a": ["k0", "k1", "k2", "k3"], "b": ["y0", "y1"]}, {"a": ["q0", "q1", "q2"], "b": ["x0", "x1"]}
    spec = charts.attention_explorer(weights, keys, queries).to_dict()
    for layer, heads in weights.items():
        for head, matrix in enumerate(heads):
            expected = {f"{queries[layer][i]} → {keys[layer][j]}": w for (i, j), w in np.ndenumerate(matrix)}
            assert cells_of(spec, layer=layer, head=str(head + 1)) == pytest.approx(expected, abs=5e-5)
    assert cells_of(spec, layer="a", head="3") == {}  # a head that this layer does not have


@pytest.mark.parametrize("draw", [
    lambda: charts.attention_explorer(HEADS, KEYS, QUERIES), lambda: stepper(),
], ids=["explorer", "stepper"])
def test_altair_charts_turn_dark_with_a_signal(draw):
    import vl_convert

    spec, drawn = draw().to_dict(), {}
    for dark in (False, True):
        next(param for param in spec["params"] if param["name"] == "dark")["value"] = dark
        drawn[dark] = vl_convert.vegalite_to_svg(spec, vl_version="5.20")
    light, dark = ({colour.upper() for colour in re.findall("#[0-9a-fA-F]{6}", drawn[side])} for side in (False, True))
    for name in ("background", "text", "key_text"):
        assert charts.COLOURS[name] in light and charts.DARK[name] in dark
        assert charts.COLOURS[name] not in dark and charts.DARK[name] not in light


# ---- the stepper

STEPS = [{"die": 0.75, "Hund": 0.25}, {"der": 0.5, "Katze": 0.375}, [("Ende", 1.0)]]
BEAMS = [[("die", -0.25)], [("die Katze", -0.5), ("die Hund", -2.0)], [("die Katze", -0.125)]]


def stepper(**changes):
    given = {"output": QUERIES, "likeliest": STEPS, "source": KEYS, "cross": {"a": HEADS, "b": HEADS[:1] / 2}, "beams": BEAMS}
    return charts.decode_stepper(**{**given, **changes})


def drawn_at(step, **values):
    """The texts and the labels of the marks that the stepper draws at a step."""
    import vl_convert

    spec = stepper().to_dict()
    for param in spec["params"]:
        if param["name"] in {"step": step, **values}:
            param["value"] = {"step": step, **values}[param["name"]]
    svg = vl_convert.vegalite_to_svg(spec, vl_version="5.20")
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg), re.findall(r'aria-label="([^"]*)"', svg)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_stepper_draws_the_candidates_the_attention_and_the_beam_of_the_chosen_step(step):
    texts, marks = drawn_at(step)
    assert " ".join([*QUERIES[:step - 1], "▸", QUERIES[step - 1]]) in texts
    candidates = [f"{token}: {p:g}" for token, p in dict(STEPS[step - 1]).items()]
    assert [mark for mark in marks if mark in candidates][:len(candidates)] == candidates  # in order, the best first
    assert not [mark for other in STEPS if other is not STEPS[step - 1] for token, p in dict(other).items()
                if (mark := f"{token}: {p:g}") in marks and mark not in candidates]
    assert {text for text, _ in BEAMS[step - 1]} <= set(texts)
    here, ever = ({text for beam in beams for text, _ in beam} for beams in (BEAMS[step - 1:step], BEAMS))
    assert ever & set(texts) - {token for token in dict(STEPS[step - 1])} == here - {token for token in dict(STEPS[step - 1])}
    cells = [mark for mark in marks if " → " in mark]
    assert cells == [f"{QUERIES[step - 1]} → {key}: {w:g}" for head in HEADS
                     for key, w in zip(KEYS, np.round(head[step - 1], 4), strict=True)]


def test_stepper_changes_the_layer_and_starts_where_it_is_told():
    _, marks = drawn_at(2, layer="b")
    assert [mark for mark in marks if " → " in mark] == [f"Katze → {k}: {w / 2:g}" for k, w in zip(KEYS, WEIGHTS[1], strict=True)]
    params = {param["name"]: param for param in stepper(start=3).to_dict()["params"]}
    assert params["step"]["value"] == 3 and params["step"]["bind"] == {"input": "range", "min": 1, "max": 3, "step": 1, "name": "step "}
    assert "beams" not in json.dumps(stepper(beams=None).to_dict()["vconcat"])


def test_stepper_has_a_table_of_all_that_it_shows():
    header, rows = charts.table(stepper())
    assert header == ["step", "what", "place", "text", "number"]
    assert {tuple(row[1:]) for row in rows if row[0] == 2 and row[1] != "attention"} == {
        ("next token", "rank 1", "der", 0.5), ("next token", "rank 2", "Katze", 0.375),
        ("hypothesis", "rank 1", "die Katze", -0.5), ("hypothesis", "rank 2", "die Hund", -2.0)}
    seen = [row[4] for row in rows if row[:3] == (3, "attention", "a, head 2")]
    np.testing.assert_allclose(seen, HEADS[1, 2], atol=5e-5)


@pytest.mark.parametrize("changes, message", [
    ({"likeliest": STEPS[:2]}, "likeliest has 2 steps but 3 output tokens were given"),
    ({"beams": BEAMS[:2]}, "beams has 2 steps but 3 output tokens were given"),
    ({"output": QUERIES + ["x"], "likeliest": STEPS + STEPS[:1], "beams": None},
     "weights of 'a' have 3 output tokens but 4 output tokens were given"),
    ({"source": KEYS[:3]}, "weights of 'a' have 4 source tokens but 3 source tokens were given"),
    ({"likeliest": [{"die": 1.5}] * 3}, "probabilities from 0 to 1, at step 1 it has"),
    ({"likeliest": [{}] * 3}, "probabilities from 0 to 1"), ({"likeliest": [["ab", "c"]] * 3}, "must hold pairs"),
    ({"output": "abc"}, "must be a list of tokens"), ({"start": 4}, "start must be a step from 1 to 3, got 4"),
    ({"start": 0}, "start must be a step from 1 to 3, got 0"), ({"cross": WEIGHTS}, r"must be \(heads, queries, keys\)"),
])
def test_stepper_names_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        stepper(**changes)


# ---- what all Altair charts share

def test_explorer_is_the_same_every_time_and_holds_no_token_in_an_expression():
    one, two = (json.dumps(charts.attention_explorer(np.eye(len(HOSTILE))[None], HOSTILE, HOSTILE).to_dict()) for _ in range(2))
    assert one == two
    spec = json.loads(one)
    assert next(param["value"] for param in spec["params"] if param["name"] == "keys") == [HOSTILE]
    rest = json.dumps({k: v for k, v in spec.items() if k != "params"})
    assert "alert" not in rest and "frac" not in rest


def test_explorer_names_what_does_not_fit():
    with pytest.raises(ValueError, match="weights of 'attention' have 4 keys but 3 key tokens"):
        charts.attention_explorer(HEADS, QUERIES, QUERIES)
    with pytest.raises(ValueError, match=r"weights of 'a' must be \(heads, queries, keys\), got shape \(3, 4\)"):
        charts.attention_explorer({"a": WEIGHTS}, KEYS, QUERIES)
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
    "heat map": lambda t: charts.attention_heatmap(np.eye(len(t)), t, t, title=t[0], titles=None),
    "heads": lambda t: charts.attention_heatmap(np.stack([np.eye(len(t))] * 2), t, t, titles=[t[0], t[-1]]),
    "lines": lambda t: charts.attention_lines(np.eye(len(t)), t, t, title=t[0]),
    "overview": lambda t: charts.attention_overview({t[0]: np.eye(len(t))[None]}, t, t),
    "mask": lambda t: charts.mask_chart(np.eye(len(t), dtype=bool), t, t),
    "smoothing": lambda t: charts.label_smoothing_chart({t[0]: np.eye(len(t))[0]}, t),
    "bars": lambda t: charts.bars_chart({token: {t[0]: 1.0, t[0] + "2": 2} for token in t}),
    "curves": lambda t: charts.lines_chart({t[0]: [1.0, 2.0], t[0] + "2": [2.0, 1.0]}, title=t[0]),
    "explorer": lambda t: charts.attention_explorer({t[0]: np.eye(len(t))[None]}, t, t, title=t[0]),
    "stepper": lambda t: charts.decode_stepper(t, [{t[0]: 1.0}] * len(t), t, {t[0]: np.eye(len(t))[None]}, title=t[0],
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
    page = charts.save_chart(chart, tmp_path / "chart.html").read_bytes()
    reader = check_page(page, 2 * altair, in_table)
    if altair:
        value = {param["name"]: param.get("value") for param in spec_of(reader)["params"]}
        assert value["keys"] == value["queries"] == [[shown(t) if t != "\ud800" else "\ufffd" for t in HOSTILE + ODD]]
        assert value["layers"] == [HOSTILE[0]]
    check_svg(charts.save_chart(chart, tmp_path / "chart.svg").read_bytes(), HOSTILE)
    assert charts.save_chart(chart, tmp_path / "chart.png").stat().st_size > 1000
    rows = list(csv.reader(charts.save_chart(chart, tmp_path / "chart.csv").open(encoding="utf-8", newline="")))
    assert len({len(row) for row in rows}) == 1
    assert {shown(text) for text in in_table} <= {cell for row in rows for cell in row}


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("view", VIEWS)
def test_a_title_with_a_null_byte_becomes_its_picture(view):
    chart = VIEWS[view](["a\x00b\x1f", "c", "d"])
    chart = chart.figure if hasattr(chart, "figure") else chart
    page, svg = (charts._render(chart, kind).decode() for kind in ("html", "svg"))
    assert "\x00" not in page + svg and "\x1f" not in page + svg
    if view in ("heat map", "lines", "curves"):
        assert "<title>a␀b␟</title>" in page and 'alt="a␀b␟"' in page


def check_strings(strings):
    """Generated strings in the views that carry text into HTML: both charts to touch, and a heat map's page."""
    tokens = list(dict.fromkeys(strings))
    for view in ("explorer", "stepper", "lines"):
        chart = VIEWS[view](tokens)
        reader = check_page(charts._render(chart.figure if view == "lines" else chart, "html"), 2 * (view != "lines"), tokens)
        if view != "lines":
            value = {param["name"]: param.get("value") for param in spec_of(reader)["params"]}
            assert value["keys"] == [[shown(text) for text in tokens]] and value["layers"] == [shown(tokens[0])]
    plt.close("all")


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
@settings(deadline=None, max_examples=4, derandomize=True)  # few charts of many tokens: a chart costs more than its tokens
@given(strings=st.lists(token, min_size=50, max_size=50, unique=True))
def test_two_hundred_generated_tokens_stay_data(strings):
    check_strings(strings)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
@settings(deadline=None, max_examples=500)
@given(strings=st.lists(token, min_size=20, max_size=20, unique=True))
def test_long_ten_thousand_generated_tokens_stay_data(strings):
    check_strings(strings)


# ---- a real browser

@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no browser tests: playwright is not installed")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("no browser tests: /usr/bin/chromium is not there")
    flags = ("--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
             "--disable-sync --disable-quic").split()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=flags)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, tmp_path):
    """A function that saves a chart as a page and opens it; in the end nothing may have gone wrong or been fetched."""
    seen, pages = [], []

    def open_page(chart, scheme="light", width=900):
        path = charts.save_chart(chart, tmp_path / f"chart{len(pages)}.html")
        page = chromium.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
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
    page = visit(charts.attention_explorer({"a": HEADS, "b": HEADS[:, :2, :2]}, {"a": KEYS, "b": KEYS[:2]},
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


def test_browser_slider_of_the_stepper_changes_the_drawing(visit):
    page = visit(stepper())
    page.locator("input[type=range]").focus()
    for step, written in ((1, "▸ die"), (2, "die ▸ Katze"), (3, "die Katze ▸ Ende")):
        becomes(lambda wanted={written, *(text for text, _ in BEAMS[step - 1])}:
                wanted - set(page.locator("#chart svg text").all_text_contents()), set())
        keys = [f"{QUERIES[step - 1]} → {key}" for _ in HEADS for key in KEYS]
        assert [label.split(":")[0] for label in labels_of(page)] == keys
        page.keyboard.press("ArrowRight")


def test_browser_follows_the_dark_setting_and_stays_narrow(visit):
    for scheme, ground in (("light", charts.COLOURS["background"]), ("dark", charts.DARK["background"])):
        page = visit(charts.attention_explorer(HEADS, KEYS, QUERIES), scheme=scheme, width=320)
        wanted = f"rgb({', '.join(str(round(255 * part)) for part in to_rgb(ground))})"
        becomes(lambda page=page: [page.evaluate(f"getComputedStyle(document.querySelector('{name}')).backgroundColor")
                                   for name in ("body", "#chart svg")], [wanted, wanted])
        assert page.evaluate("document.documentElement.scrollWidth") <= 320


# ---- a stranger's model

def test_torch_attention_is_drawn_with_one_call_each():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, num_heads=2, batch_first=True)
    query, key = torch.randn(1, 3, 8), torch.randn(1, 4, 8)
    _, weights = layer(query, key, key, average_attn_weights=False)
    expected = weights[0].detach().numpy()
    for draw in (charts.attention_heatmap, charts.attention_lines, charts.attention_overview, charts.attention_explorer):
        header, rows = charts.table(draw(weights, KEYS, QUERIES))
        places = [header.index(name) for name in ("query index", "key index", "weight")]
        found = np.array([[row[place] for place in places] for row in rows], dtype=float)
        assert len(found) == expected.size
        for (i, j, w), exact in zip(found, expected.reshape(-1), strict=True):
            assert exact == pytest.approx(w, abs=5e-5) and expected[:, int(i), int(j)].min() - 5e-5 <= w
        assert {(row[places[0] + 1], row[places[1] + 1]) for row in rows} == {(q, k) for q in QUERIES for k in set(KEYS)}


def test_a_hugging_face_encoder_decoder_is_drawn_with_one_call_each():
    transformers = pytest.importorskip("transformers", reason="no test of a stranger's model: transformers is not installed")
    torch.manual_seed(0)
    config = transformers.BartConfig(vocab_size=20, d_model=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                                     decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16,
                                     attn_implementation="eager", pad_token_id=1, bos_token_id=0, eos_token_id=2)
    model = transformers.BartModel(config).eval()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[5, 6, 7, 2]]), decoder_input_ids=torch.tensor([[2, 8, 9]]), output_attentions=True)
    assert output.cross_attentions[0].shape == (1, 2, 3, 4)
    for weights, keys, queries in ((output.cross_attentions, KEYS, QUERIES), (output.encoder_attentions, KEYS, KEYS),
                                   (output.decoder_attentions, QUERIES, QUERIES)):
        for draw in (charts.attention_overview, charts.attention_explorer):
            header, rows = charts.table(draw(weights, keys, queries))
            found = [row[header.index("weight")] for row in rows]
            np.testing.assert_allclose(found, torch.stack(weights).reshape(-1).numpy(), atol=5e-5)
    charts.attention_heatmap(output.cross_attentions[1], KEYS, QUERIES)
    charts.decode_stepper(QUERIES, STEPS, KEYS, output.cross_attentions, BEAMS)


# ---- files and tables

def test_a_figure_becomes_a_page_with_one_picture_and_its_title(tmp_path):
    ax = charts.attention_heatmap(np.eye(3), QUERIES, QUERIES, title="a < b & \"c\"")
    reader = read(charts.save_chart(ax, tmp_path / "chart.html").read_text(encoding="utf-8"))
    assert [tag for tag in reader.tags if tag in ("img", "script", "main", "details")] == ["main", "img", "details"]
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
    lambda: charts.padding_chart([[[1, 0]]]), lambda: charts.tree_chart("(S we sleep)"), lambda: charts.model_diagram(),
    lambda: charts.attention_explorer(HEADS, KEYS, QUERIES), lambda: stepper(),
])
def test_every_chart_has_a_table(draw, tmp_path):
    chart = draw()
    header, *rows = csv.reader(charts.save_chart(chart, tmp_path / "t.csv").read_text(encoding="utf-8").splitlines())
    assert rows and all(len(row) == len(header) for row in rows)


def test_figures_drawn_by_hand_have_a_table_of_what_they_draw():
    figure, (curves, bars, image) = plt.subplots(1, 3)
    curves.plot([1, 2], [3.0, 4.0], label="a")
    curves.plot([5], [6.0])
    curves.scatter([7], [8.0], label="dots")
    bars.bar(["x", "y"], [1.5, 2.5], label="b")
    image.imshow([[0.25, 0.5]])
    header, rows = charts.table(figure)
    assert header == ["panel", "series", "x", "y", "value"]
    assert rows == [[1, "a", 1, 3, ""], [1, "a", 2, 4, ""], [1, "series 2", 5, 6, ""], [1, "dots", 7, 8, ""],
                    [2, "b", "x", 1.5, ""], [2, "b", "y", 2.5, ""], [3, "image 1", 0, 0, 0.25], [3, "image 1", 1, 0, 0.5]]
    assert charts.table(curves)[1] == [tuple(row[1:]) for row in rows[:4]]


def test_panels_with_different_columns_share_one_table():
    _, (left, right) = plt.subplots(1, 2)
    charts.mask_chart([[True]], ["k"], ["q"], ax=left)
    charts.bars_chart({"a": 2.0}, ax=right)
    header, rows = charts.table(left.figure)
    assert [dict(zip(header, row, strict=True)) for row in rows] == [
        {"panel": 1, "query index": 0, "query": "q", "key index": 0, "key": "k", "may attend": 1, "group": "", "name": "", "value": ""},
        {"panel": 2, "query index": "", "query": "", "key index": "", "key": "", "may attend": "", "group": "a", "name": "",
         "value": 2.0}]


def test_pictures_of_a_notebook_carry_their_table():
    image = pytest.importorskip("PIL.Image")
    data = base64.b64decode(charts._png(charts.attention_heatmap(WEIGHTS, KEYS, QUERIES).figure))
    notes = image.open(io.BytesIO(data)).text
    rows = list(csv.DictReader(io.StringIO(notes["Table"])))
    assert [float(row["weight"]) for row in rows] == WEIGHTS.reshape(-1).tolist() and rows[5]["query"] == "Katze"
    assert notes["Table-Rows"] == "12 of 12"
    data = base64.b64decode(charts._png(charts.lines_chart(np.arange(1000) * 1e-6).figure))
    notes = image.open(io.BytesIO(data)).text
    rows = list(csv.DictReader(io.StringIO(notes["Table"])))
    assert notes["Table-Rows"] == "334 of 1000" and len(rows) == 334
    assert [float(row["y"]) for row in rows[:3]] == [0, 3e-6, 6e-6]
    figure = plt.subplots()[0]
    assert "Table" not in image.open(io.BytesIO(base64.b64decode(charts._png(figure)))).text


def test_a_stored_figure_is_given_its_table_by_use_style():
    code = """
import io, base64, matplotlib
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
matplotlib.use("module://matplotlib_inline.backend_inline")
from annotated import charts
charts.use_style()
figure = charts.bars_chart({"a": 1.5}).figure
data, _ = shell.display_formatter.format(figure, include=["image/png"])
from PIL import Image
png = data["image/png"]
print(Image.open(io.BytesIO(base64.b64decode(png) if isinstance(png, str) else png)).text["Table"])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["group,name,value", "a,,1.5"], run.stderr


def test_save_chart_refuses_what_it_cannot_write(tmp_path, monkeypatch):
    ax = charts.bars_chart({"a": 1})
    with pytest.raises(ValueError, match=r"path must end in one of \.html, \.svg, \.png, \.csv, got 'chart\.pdf'"):
        charts.save_chart(ax, tmp_path / "chart.pdf")
    with pytest.raises(TypeError, match="chart must be axes, a figure or an Altair chart, got list"):
        charts.save_chart([1], tmp_path / "chart.png")
    with pytest.raises(ValueError, match="chart holds no table"):
        charts.save_chart(plt.figure(), tmp_path / "chart.csv")
    with pytest.raises(ValueError, match="of Altair charts only attention_explorer's and decode_stepper's do"):
        charts.table({"mark": "point"})
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
    assert set(names.split()) <= set(charts.COLOURS) and set(charts.DARK) <= set(charts.COLOURS)
    assert all(re.fullmatch("#[0-9A-F]{6}", colour) for colour in [*charts.COLOURS.values(), *charts.CYCLE])
    assert len(set(charts.CYCLE)) == 8


def test_a_chart_draws_on_the_axes_given():
    for draw in (lambda ax: charts.attention_heatmap(WEIGHTS, KEYS, QUERIES, ax=ax),
                 lambda ax: charts.attention_lines(WEIGHTS, KEYS, QUERIES, ax=ax),
                 lambda ax: charts.model_diagram(ax=ax), lambda ax: charts.mask_chart(WEIGHTS > 0.2, ax=ax),
                 lambda ax: charts.lines_chart([1, 2], ax=ax), lambda ax: charts.tree_chart("(S we)", ax=ax)):
        ax = plt.subplots()[1]
        assert draw(ax) is ax
