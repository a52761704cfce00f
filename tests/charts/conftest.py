"""Every test of the charts gets the look of the book, and leaves no figure behind."""

from drawing import close_figures  # noqa: F401
