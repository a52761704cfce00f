"""The plan of the model lights the part that is asked for and no other."""

import pytest

from annotated import charts
from annotated.charts import diagram, theme


@pytest.mark.parametrize("part, expected", [
    ("attention", ["attention"] * 3),
    ("multi_head", ["attention"] * 3 + ["masked multi-head"] + ["multi-head"] * 2),
    ("positional", []), ("masking", ["attention", "masked multi-head"]),
    ("data", ["source tokens", "target tokens,\nshifted right"]),
])
def test_a_part_lights_its_boxes_and_no_others(part, expected):
    ax = charts.model_diagram(lit=part)
    inside = {box[-1] for box in diagram._BOXES}
    shown = [text.get_text() for text in ax.texts if text.get_color() == theme.COLOURS["text"]]
    assert sorted(text for text in shown if text and text in inside) == expected


@pytest.mark.parametrize("lit", ["attentions", ["encoder", "nothing"], [], ""])
def test_an_unknown_part_lists_the_known_ones(lit):
    with pytest.raises(ValueError, match="the parts are transformer, .*encoder, .*decoding"):
        charts.model_diagram(lit=lit)
