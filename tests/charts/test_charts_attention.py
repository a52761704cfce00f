"""The charts of attention draw the weights they are given and refuse what does not fit."""

import re
import warnings

import numpy as np
import pytest
import torch
from drawing import BEAMS, HEADS, KEYS, QUERIES, STEPS, WEIGHTS, labels
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from annotated.charts import attention, explorer, theme

# ---- heat maps

@pytest.mark.parametrize("convert", [
    np.asarray, lambda w: torch.tensor(w, requires_grad=True), lambda w: w.tolist(),
    lambda w: [torch.tensor(row) for row in w],
], ids=["numpy", "tensor", "lists", "list of tensors"])
def test_heatmap_draws_the_matrix_untransposed(convert):
    ax = attention.attention_heatmap(convert(WEIGHTS), KEYS, QUERIES, title="A title")
    np.testing.assert_array_equal(ax.images[0].get_array(), WEIGHTS)
    assert labels(ax.xaxis) == KEYS and labels(ax.yaxis) == QUERIES
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    assert ax.xaxis.get_ticks_position() == "top" and ax.yaxis.get_inverted()  # queries downwards
    assert ax.get_title(loc="left") == "A title"


def test_heatmap_draws_every_head_in_order_under_one_scale():
    named = {"one": HEADS[0], "two": HEADS[1]}
    figure = attention.attention_heatmap(named, KEYS, QUERIES, key_label="source (key)")
    panels = [ax for ax in figure.axes if ax.images and hasattr(ax, "chart_table")]
    for ax, head, title in zip(panels, HEADS, named, strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), head)
        assert ax.images[0].get_clim() == (0, 1)
        assert ax.get_title() == title and ax.get_xlabel() == "source (key)"
    assert labels(panels[0].yaxis) == QUERIES and labels(panels[1].xaxis) == KEYS
    figure = attention.attention_heatmap([HEADS[0]] * 5, KEYS, QUERIES, columns=2)
    named = [(ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes if ax.images][:5]
    assert named == [("key", "query"), ("key", ""), ("", "query"), ("", ""), ("", "query")]
    assert attention.attention_heatmap({"one": WEIGHTS}, KEYS, QUERIES).get_title("left") == "one"


def test_heatmap_is_as_dark_as_its_largest_weight_only_on_request():
    for vmax, top in ((1.0, 1.0), (None, 0.7)):
        ax = attention.attention_heatmap(WEIGHTS, KEYS, QUERIES, vmax=vmax)
        assert ax.images[0].get_clim() == (0, top)
        inks = {text.get_text(): text.get_color() for text in ax.texts}
        assert inks["0.70"] == "white" and inks["0.05"] == theme.COLOURS["text"]


@pytest.mark.parametrize("weights, keys, queries, message", [
    (WEIGHTS, KEYS[:3], QUERIES, "weights have 4 keys but 3 tokens were given"),
    (WEIGHTS, KEYS, QUERIES * 2, "weights have 3 queries but 6 tokens were given"),
    (WEIGHTS, "abcd", QUERIES, "keys must be a list of tokens"),
    (np.stack([HEADS, HEADS]), KEYS, QUERIES, r"got shape \(2, 2, 3, 4\); choose one of a batch"),
    (WEIGHTS - 0.2, KEYS, QUERIES, "weights must be non-negative numbers"),
    (WEIGHTS * np.nan, KEYS, QUERIES, "weights must be non-negative numbers"),
    ([[1.0, 2.0], [3.0]], KEYS, QUERIES, "weights must be numbers in a rectangular"),
    (np.zeros((0, 4)), KEYS, [], r"got shape \(0, 4\)"),
])
@pytest.mark.parametrize("draw", [attention.attention_heatmap, attention.attention_lines])
def test_heatmap_and_lines_name_what_does_not_fit(draw, weights, keys, queries, message):
    with pytest.raises(ValueError, match=message):
        draw(weights, keys, queries)


@pytest.mark.parametrize("draw", [attention.attention_heatmap, attention.attention_lines,
                                  lambda *_, ax: attention.mask_chart(WEIGHTS > 0.2, ax=ax)])
def test_a_chart_is_drawn_into_the_axes_that_are_given(draw):
    ax = plt.figure(figsize=(9, 7)).add_subplot()
    assert draw(WEIGHTS, KEYS, QUERIES, ax=ax) is ax and len(plt.get_fignums()) == 1


# ---- lines and overview

def test_lines_join_each_query_to_each_key_with_the_width_of_the_weight():
    ax = attention.attention_lines(HEADS, KEYS, QUERIES, threshold=0.12)
    drawn = {tuple(map(int, re.findall(r"\d+", patch.get_gid()))): patch for patch in ax.patches}
    assert drawn.keys() == {(h + 1, i, j) for (h, i, j), w in np.ndenumerate(HEADS) if w >= 0.12}
    for (head, i, j), patch in drawn.items():
        start, end = patch.get_path().vertices[[0, -1]]
        assert start[0] == 0 and end[0] == 1  # queries left, keys right
        assert round(-start[1]) == i and round(-end[1]) == j
        assert patch.get_edgecolor()[:3] == pytest.approx(to_rgb(theme.CYCLE[head - 1]))
        assert patch.get_linewidth() == pytest.approx(0.4 + 4.2 * HEADS[head - 1, i, j])
    places = {(text.get_text(), round(-text.get_position()[1]), text.get_position()[0] > 0.5)
              for text in ax.texts}
    assert places >= {(token, i, side) for side, tokens in enumerate((QUERIES, KEYS))
                      for i, token in enumerate(tokens)}


def test_lines_of_one_query():
    for query in ("Katze", 1, -2):
        ax = attention.attention_lines(HEADS, KEYS, QUERIES, query=query, threshold=0)
        assert {patch.get_gid() for patch in ax.patches} == {
            f"head {h} query 1 key {j}" for h in (1, 2) for j in range(4)}
    for query, message in (("the", "occurs 2 times"), ("Hund", "occurs 0 times"),
                           (4, "query 4 is no index of 4 queries")):
        with pytest.raises(ValueError, match=message):
            attention.attention_lines(HEADS.transpose(0, 2, 1), QUERIES, KEYS, query=query)


def test_overview_has_layers_down_and_heads_across():
    layers = {"first": HEADS, "second": HEADS[:, ::-1], "third": HEADS[:1]}
    figure = attention.attention_overview(layers, KEYS, QUERIES)
    grid = np.array(figure.axes).reshape(3, 2)
    for row, (name, layer) in zip(grid, layers.items(), strict=True):
        assert row[0].get_ylabel() == name
        for ax, head in zip(row, layer, strict=False):
            np.testing.assert_array_equal(ax.images[0].get_array(), head)
            assert ax.images[0].get_clim() == (0, 1)
    assert not grid[2, 1].images
    with pytest.raises(ValueError, match="weights have 4 keys but 3 tokens"):
        attention.attention_overview(layers, QUERIES, QUERIES)


# ---- masks

def test_mask_is_dark_where_it_may_attend_as_heat_maps_are_and_hatched_where_not():
    mask = torch.tensor([[True, False, False], [True, True, False]])
    ax = attention.mask_chart(mask, ["a", "b", "c"], ["x", "y"])
    np.testing.assert_array_equal(ax.images[0].get_array(), mask.numpy())
    colours = [ax.images[0].cmap(value)[:3] for value in (0.0, 1.0)]
    assert min(colours[0]) > 0.9 and max(colours[1]) < 0.7
    hatched = {tuple(path.vertices.mean(axis=0).round().astype(int))
               for path in ax.collections[0].get_paths()}
    assert hatched == {(1, 0), (2, 0), (2, 1)}
    assert labels(ax.xaxis) == ["a", "b", "c"] and labels(ax.yaxis) == ["x", "y"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["may attend", "hidden"]


@pytest.mark.parametrize("mask, message", [
    (np.array([[0.0, -np.inf]]), "mask must be boolean"),
    (np.ones((2, 1, 1, 3), bool), r"got shape \(2, 1, 1, 3\)"),
    (np.ones((2, 3), bool), "mask has 3 keys but 2 tokens"),
    (np.zeros((0, 3), bool), r"got shape \(0, 3\)"),
])
def test_mask_chart_names_what_does_not_fit(mask, message):
    with pytest.raises(ValueError, match=message):
        attention.mask_chart(mask, ["a", "b"], ["x", "y"])


# ---- a stranger's model

def test_what_hugging_face_returns_is_drawn_with_one_call_each():
    """A tuple of layers, each (1, heads, queries, keys), as of `output_attentions=True`."""
    weights = tuple(torch.tensor(layer[None]) for layer in (HEADS, HEADS / 2))
    for draw in (attention.attention_overview, explorer.attention_explorer):
        header, rows = theme.table(draw(weights, KEYS, QUERIES))
        drawn = [row[header.index("weight")] for row in rows]
        np.testing.assert_allclose(drawn, torch.stack(weights).reshape(-1).numpy(), atol=5e-5)
    explorer.decode_stepper(QUERIES, STEPS, KEYS, weights, BEAMS)


@pytest.mark.parametrize("chart", [attention.attention_heatmap, attention.attention_lines])
def test_a_long_token_is_shortened_in_the_chart_and_whole_in_its_table(chart):
    keys = ["a" * 200, "Donau" + "dampfschiff" * 30, "c", "d"]
    ax = chart(WEIGHTS, keys, QUERIES)
    with warnings.catch_warnings(action="error"):  # no room for what is drawn, say
        ax.figure.canvas.draw()
    width = ax.get_window_extent().width / ax.figure.dpi
    assert width > 0.5, "inches: a speck is smaller"
    written = {text.get_text() for text in ax.findobj(theme.matplotlib.text.Text)}
    assert "a" * 23 + "…" in written and keys[0] not in written
    assert {keys[0], keys[1]} <= {cell for row in theme.table(ax)[1] for cell in row}
