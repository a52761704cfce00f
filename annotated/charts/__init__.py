"""Pictures: colours and style, attention, curves, files.

`theme`, `attention`, `curves`, `export`. All their public names can be had from here.
"""

from annotated import lazy

_HOMES = {
    "COLOURS": "theme", "CYCLE": "theme", "table": "theme", "use_style": "theme",
    "attention_heatmap": "attention", "attention_lines": "attention",
    "attention_overview": "attention", "attention_explorer": "attention",
    "decode_stepper": "attention", "mask_chart": "attention",
    "model_diagram": "curves", "lines_chart": "curves", "schedule_chart": "curves",
    "training_chart": "curves", "positional_encoding_chart": "curves", "bars_chart": "curves",
    "label_smoothing_chart": "curves", "padding_chart": "curves", "tree_chart": "curves",
    "save_chart": "export",
}
__all__ = list(_HOMES)

__getattr__, __dir__ = lazy(__name__, _HOMES)
