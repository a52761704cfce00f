"""The explorer and the stepper show every layer, head and step with its own tokens, and refuse what does not fit."""

import json
import re

import numpy as np
import pytest
from drawing import BEAMS, HEADS, KEYS, QUERIES, STEPS, WEIGHTS, close_figures, stepper  # noqa: F401

from annotated.charts import explorer, theme

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
    spec = explorer.attention_explorer(weights, keys, queries).to_dict()
    for layer, heads in weights.items():
        for head, matrix in enumerate(heads):
            expected = {f"{queries[layer][i]} → {keys[layer][j]}": w for (i, j), w in np.ndenumerate(matrix)}
            assert cells_of(spec, layer=layer, head=str(head + 1)) == pytest.approx(expected, abs=5e-5)
    assert cells_of(spec, layer="a", head="3") == {}  # a head that this layer does not have


def test_explorer_names_what_does_not_fit():
    with pytest.raises(ValueError, match="weights of 'attention' have 4 keys but 3 key tokens"):
        explorer.attention_explorer(HEADS, QUERIES, QUERIES)
    with pytest.raises(ValueError, match=r"weights of 'a' must be \(heads, queries, keys\), got shape \(3, 4\)"):
        explorer.attention_explorer({"a": WEIGHTS}, KEYS, QUERIES)
    with pytest.raises(ValueError, match=r"keys lack the layers \['b'\]"):
        explorer.attention_explorer({"a": HEADS, "b": HEADS}, {"a": KEYS}, QUERIES)
    with pytest.raises(ValueError, match="weights hold no layer"):
        explorer.attention_explorer({}, KEYS, QUERIES)


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
    ({"output": "abc"}, "must be a list of tokens"), ({"cross": WEIGHTS}, r"must be \(heads, queries, keys\)"),
])
def test_stepper_names_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        stepper(**changes)
