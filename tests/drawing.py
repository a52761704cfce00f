"""What the tests of the charts share: weights with their tokens, hostile tokens, a replay."""

import matplotlib

matplotlib.use("agg")

import numpy as np
import pytest
from matplotlib import pyplot as plt

from annotated.charts import explorer, theme

KEYS = ["the", "cat", "the", "end"]  # a token twice: places must not merge
QUERIES = ["die", "Katze", "Ende"]
WEIGHTS = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.15, 0.05], [0.25, 0.5, 0.125, 0.125]])
HEADS = np.stack([WEIGHTS, WEIGHTS[:, ::-1]])
STEPS = [[("die", 0.75), ("Hund", 0.25)], [("Katze", 0.375), ("der", 0.5)], [("Ende", 1.0)]]
BEAMS = [[("die", -0.25)], [("die Katze", -0.5), ("die Hund", -2.0)], [("die Katze", -0.125)]]
SCRIPT = "</script><script>parent.hurt = document.title = 'hurt'; alert(1)</script>"
HOSTILE = [SCRIPT, '"><img src=x onerror="document.title=\'hurt\'; alert(2)">',
           "javascript:alert(3)", '"]);alert(4);//', "<!--", "]]>", "$\\frac{$", "&lt;b&gt;",
           "\u2028über", "__proto__", "\u202eecila\u202c", "\u200f\u200eא", "datum.weight",
           "{{constructor.constructor('alert(5)')()}}"]


def shown(token):
    """A token as every chart shows it: what no file can hold is drawn as its picture."""
    pictures = {127: "␡", 0xFFFE: "\ufffd", 0xFFFF: "\ufffd"}
    return token.translate({i: chr(0x2400 + i) for i in range(32)} | pictures)


@pytest.fixture(autouse=True)
def close_figures():
    theme.use_style()
    yield
    plt.close("all")


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def stepper(**changes):
    arguments = {"output": QUERIES, "top_tokens": STEPS, "source": KEYS, "beams": BEAMS,
                 "cross": {"a": HEADS, "b": HEADS[:1] / 2}}
    return explorer.decode_stepper(**{**arguments, **changes})
