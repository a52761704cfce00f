"""The charts to touch show every layer, head and step with its own tokens."""

import json
import re

import numpy as np
import pytest
from drawing import BEAMS, HEADS, KEYS, QUERIES, STEPS, WEIGHTS, stepper

from annotated.charts import explorer, theme

# ---- the explorer

def drawn(spec, **values):
    """(texts, labels of the marks) that Altair draws, with these parameters set."""
    import vl_convert

    spec = json.loads(json.dumps(spec))
    for param in spec["params"]:
        if param["name"] in values:
            param["value"] = values[param["name"]]
    svg = vl_convert.vegalite_to_svg(spec, vl_version="5.20")
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg), re.findall(r'aria-label="([^"]*)"', svg)


def test_explorer_draws_every_layer_and_head_with_its_own_tokens_and_leaves_nothing_over():
    weights = {"a": HEADS, "b": np.stack([WEIGHTS[:2, :2], 1 - WEIGHTS[:2, :2], np.eye(2)])}
    keys = {"a": ["k0", "k1", "k2", "k3"], "b": ["y0", "y1"]}
    queries = {"a": ["q0", "q1", "q2"], "b": ["x0", "x1"]}
    spec = explorer.attention_explorer(weights, keys, queries).to_dict()
    menus = {param["name"]: param["bind"]["options"] for param in spec["params"] if "bind" in param}
    assert menus == {"layer": ["a", "b"], "head": ["1", "2", "3"]}
    for layer in weights:
        for head in range(3):
            cells = [mark for mark in drawn(spec, layer=layer, head=str(head + 1))[1]
                     if " → " in mark]
            matrix = weights[layer][head] if head < len(weights[layer]) else np.empty((0, 0))
            assert cells == [f"{queries[layer][i]} → {keys[layer][j]}: {round(w, 4):g}"
                             for (i, j), w in np.ndenumerate(matrix)]


@pytest.mark.parametrize("weights, keys, message", [
    (HEADS, QUERIES, "weights of 'attention' have 4 keys but 3 tokens"),
    ({"a": HEADS, "b": HEADS}, {"a": KEYS}, "keys lack the layers b"),
    ({}, KEYS, "weights hold no layer"),
])
def test_explorer_names_what_does_not_fit(weights, keys, message):
    with pytest.raises(ValueError, match=message):
        explorer.attention_explorer(weights, keys, QUERIES)


# ---- the stepper

@pytest.mark.parametrize("step", [1, 2, 3])
def test_stepper_draws_the_candidates_the_attention_and_the_beam_of_the_chosen_step(step):
    texts, marks = drawn(stepper().to_dict(), step=step)
    assert " ".join([*QUERIES[:step - 1], "▸", QUERIES[step - 1]]) in texts
    candidates = [[f"{token}: {p:g}" for token, p in sorted(pairs, key=lambda pair: -pair[1])]
                  for pairs in STEPS]
    ever = {mark for marks in candidates for mark in marks}
    assert [mark for mark in marks if mark in ever][:len(candidates[step - 1])] == (
        candidates[step - 1]), "in order, the best first"
    assert set(marks) & ever == set(candidates[step - 1])
    beams = [{text for text, _ in beam} for beam in BEAMS]
    others = set.union(*beams) - beams[step - 1] - {token for token, _ in STEPS[step - 1]}
    assert beams[step - 1] <= set(texts) and not others & set(texts)
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
    ({"top_tokens": STEPS[:2]}, "top_tokens has 2 steps but 3 output tokens were given"),
    ({"beams": BEAMS[:2]}, "beams has 2 steps but 3 output tokens were given"),
    ({"output": QUERIES + ["x"], "top_tokens": STEPS + STEPS[:1], "beams": None},
     "weights of 'a' have 3 output tokens but 4 tokens were given"),
    ({"source": KEYS[:3]}, "weights of 'a' have 4 source tokens but 3 tokens were given"),
    ({"output": "abc"}, "must be a list of tokens"), ({"start": 4}, "start=4 is no step of 3"),
    ({"cross": [np.stack([HEADS, HEADS])]}, "of 'layer 1' must be .* choose one of a batch"),
])
def test_stepper_names_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        stepper(**changes)
