"""Pictures: colours and style, attention, curves, files.

`theme`, `attention`, `curves`, `export`. All their public names can be had from here.
"""

from importlib import import_module

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


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'annotated.charts' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"annotated.charts.{_HOMES[name]}"), name)
    return value


def __dir__():
    return sorted({*globals(), *_HOMES})
