"""The charts of attention draw the weights they are given, refuse what does not fit, and keep tokens data."""

import json
import re

import numpy as np
import pytest
import torch
from drawing import BEAMS, HEADS, HOSTILE, KEYS, QUERIES, STEPS, WEIGHTS, close_figures, labels, stepper  # noqa: F401
from matplotlib.colors import to_rgb

from annotated.charts import attention, theme

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
    assert ax.xaxis.get_ticks_position() == "top" and ax.yaxis.get_inverted()  # the first query is the top row
    assert ax.get_title(loc="left") == "A title"


def test_heatmap_draws_every_head_in_order_under_one_scale():
    figure = attention.attention_heatmap({"one": HEADS[0], "two": HEADS[1]}, KEYS, QUERIES, key_label="source (key)")
    panels = [ax for ax in figure.axes if ax.images and hasattr(ax, "chart_table")]
    for ax, head, title in zip(panels, HEADS, ["one", "two"], strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), head)
        assert ax.images[0].get_clim() == (0, 1)
        assert ax.get_title() == title and ax.get_xlabel() == "source (key)"
    assert labels(panels[0].yaxis) == QUERIES and labels(panels[1].xaxis) == KEYS


def test_heatmap_of_scores_is_centred_and_hatches_what_is_masked():
    scores = np.array([[1.0, -np.inf], [-3.0, 2.0]])
    ax = attention.attention_heatmap(scores, ["a", "b"], ["a", "b"], vmax=None)
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
    for draw in (attention.attention_heatmap, attention.attention_lines):
        with pytest.raises(ValueError, match=message):
            draw(weights, keys, queries)


def test_a_batch_of_one_sentence_is_that_sentence_and_a_larger_one_is_refused():
    for draw in (attention.attention_heatmap, attention.attention_overview):
        one, same = ([row[-5:] for row in theme.table(draw(weights, KEYS, QUERIES))[1]] for weights in (HEADS[None], HEADS))
        assert one == same and len(one) == HEADS.size
    with pytest.raises(ValueError, match=r"got shape \(2, 2, 3, 4\); choose one sentence"):
        attention.attention_heatmap(np.stack([HEADS, HEADS]), KEYS, QUERIES)
    with pytest.raises(ValueError, match="weights of 'layer 1' hold a batch of 2 sentences: choose one"):
        attention.attention_overview([np.stack([HEADS, HEADS])], KEYS, QUERIES)


# ---- lines and overview

def test_lines_join_each_query_to_each_key_with_the_width_of_the_weight():
    ax = attention.attention_lines(HEADS, KEYS, QUERIES, threshold=0.12)
    expected = {(h + 1, i, j): w for (h, i, j), w in np.ndenumerate(HEADS) if w >= 0.12}
    drawn = {tuple(int(n) for n in re.findall(r"\d+", patch.get_gid())): patch for patch in ax.patches}
    assert set(drawn) == set(expected)
    for (head, i, j), patch in drawn.items():
        start, end = patch.get_path().vertices[[0, -1]]
        assert start[0] == 0 and end[0] == 1  # queries left, keys right
        assert round(-start[1]) == i and round(-end[1]) == j
        assert patch.get_edgecolor()[:3] == pytest.approx(to_rgb(theme.CYCLE[head - 1]))
        assert patch.get_linewidth() == pytest.approx(0.4 + 4.2 * expected[head, i, j])
    places = {(text.get_text(), round(-text.get_position()[1]), text.get_position()[0] > 0.5) for text in ax.texts}
    assert {(token, i, False) for i, token in enumerate(QUERIES)} <= places
    assert {(token, j, True) for j, token in enumerate(KEYS)} <= places


def test_lines_of_one_query():
    for query in ("Katze", 1, -2):
        ax = attention.attention_lines(HEADS, KEYS, QUERIES, query=query, threshold=0)
        assert {patch.get_gid() for patch in ax.patches} == {f"head {h} query 1 key {j}" for h in (1, 2) for j in range(4)}
    with pytest.raises(ValueError, match="occurs 2 times"):
        attention.attention_lines(HEADS.transpose(0, 2, 1), QUERIES, KEYS, query="the")
    with pytest.raises(ValueError, match="occurs 0 times"):
        attention.attention_lines(HEADS, KEYS, QUERIES, query="Hund")
    with pytest.raises(ValueError, match="query must be an index below 3, got 3"):
        attention.attention_lines(HEADS, KEYS, QUERIES, query=3)


def test_overview_has_layers_down_and_heads_across():
    layers = {"first": HEADS, "second": HEADS[:, ::-1], "third": HEADS[:1]}
    figure = attention.attention_overview(layers, KEYS, QUERIES)
    grid = np.array(figure.axes).reshape(3, 2)
    for row, (name, layer) in enumerate(layers.items()):
        assert grid[row, 0].get_ylabel() == name
        for column, head in enumerate(layer):
            np.testing.assert_array_equal(grid[row, column].images[0].get_array(), head)
            assert grid[row, column].images[0].get_clim() == (0, 1)
    assert not grid[2, 1].images
    with pytest.raises(ValueError, match="weights have 4 keys but 3 key tokens"):
        attention.attention_overview(layers, QUERIES, QUERIES)
    with pytest.raises(ValueError, match=r"weights of 'a' must be \(heads, queries, keys\), got shape \(3, 4\)"):
        attention.attention_overview({"a": WEIGHTS})


# ---- the explorer

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
    spec = attention.attention_explorer(weights, keys, queries).to_dict()
    for layer, heads in weights.items():
        for head, matrix in enumerate(heads):
            expected = {f"{queries[layer][i]} → {keys[layer][j]}": w for (i, j), w in np.ndenumerate(matrix)}
            assert cells_of(spec, layer=layer, head=str(head + 1)) == pytest.approx(expected, abs=5e-5)
    assert cells_of(spec, layer="a", head="3") == {}  # a head that this layer does not have


def test_explorer_names_what_does_not_fit():
    with pytest.raises(ValueError, match="weights of 'attention' have 4 keys but 3 key tokens"):
        attention.attention_explorer(HEADS, QUERIES, QUERIES)
    with pytest.raises(ValueError, match=r"weights of 'a' must be \(heads, queries, keys\), got shape \(3, 4\)"):
        attention.attention_explorer({"a": WEIGHTS}, KEYS, QUERIES)
    with pytest.raises(ValueError, match=r"keys lack the layers \['b'\]"):
        attention.attention_explorer({"a": HEADS, "b": HEADS}, {"a": KEYS}, QUERIES)
    with pytest.raises(ValueError, match="weights hold no layer"):
        attention.attention_explorer({}, KEYS, QUERIES)


# ---- the stepper

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


def test_stepper_has_a_table_of_all_that_it_shows():
    header, rows = theme.table(stepper())
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


# ---- masks

def test_mask_is_dark_where_it_may_attend_as_heat_maps_are_and_hatched_where_not():
    mask = torch.tensor([[True, False, False], [True, True, False]])
    ax = attention.mask_chart(mask, ["a", "b", "c"], ["x", "y"])
    np.testing.assert_array_equal(ax.images[0].get_array(), mask.numpy())
    colours = [ax.images[0].cmap(value)[:3] for value in (0.0, 1.0)]
    assert min(colours[0]) > 0.9 and max(colours[1]) < 0.7
    hatched = {tuple(path.vertices.mean(axis=0).round().astype(int)) for path in ax.collections[0].get_paths()}
    assert hatched == {(1, 0), (2, 0), (2, 1)}
    assert labels(ax.xaxis) == ["a", "b", "c"] and labels(ax.yaxis) == ["x", "y"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["may attend", "hidden"]


@pytest.mark.parametrize("mask, message", [
    (np.array([[0.0, -np.inf]]), "mask must be boolean"), (np.ones((2, 1, 1, 3), bool), r"got shape \(2, 1, 1, 3\)"),
    (np.ones((2, 3), bool), "mask has 3 keys but 2 key tokens"), (np.zeros((0, 3), bool), r"got shape \(0, 3\)"),
])
def test_mask_chart_names_what_does_not_fit(mask, message):
    with pytest.raises(ValueError, match=message):
        attention.mask_chart(mask, ["a", "b"], ["x", "y"])


# ---- a stranger's model

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
        for draw in (attention.attention_overview, attention.attention_explorer):
            header, rows = theme.table(draw(weights, keys, queries))
            found = [row[header.index("weight")] for row in rows]
            np.testing.assert_allclose(found, torch.stack(weights).reshape(-1).numpy(), atol=5e-5)
    attention.attention_heatmap(output.cross_attentions[1], KEYS, QUERIES)
    attention.decode_stepper(QUERIES, STEPS, KEYS, output.cross_attentions, BEAMS)
