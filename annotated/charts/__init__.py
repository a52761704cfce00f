"""Charts: colours and style, attention, curves, saving.

`theme`, `attention`, `explorer`, `curves`, `diagram`, `export`. All their public names can be had
from here.
"""

from annotated import lazy

_HOMES = {
    "COLOURS": "theme", "CYCLE": "theme", "table": "theme", "use_style": "theme",
    "attention_heatmap": "attention", "attention_lines": "attention",
    "attention_overview": "attention", "mask_chart": "attention",
    "attention_explorer": "explorer", "decode_stepper": "explorer", "model_diagram": "diagram",
    "lines_chart": "curves", "training_chart": "curves", "bars_chart": "curves",
    "tree_chart": "curves", "chart_page": "export",
}
__all__ = list(_HOMES)

__getattr__, __dir__ = lazy(__name__, _HOMES)
