"""Sphinx configuration of the HTML book; `tools/site.py` puts the pages beside it and builds."""

project = "Annotated"
author = "The Annotated authors"
copyright = "2026, The Annotated authors"
extensions = ["myst_nb", "sphinx-mathjax-offline"]
source_suffix = {".ipynb": "myst-nb", ".md": "myst-nb"}
nb_execution_mode = "off"
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]  # Vega-Lite, which stands beside a PNG that is shown
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_theme = "sphinx_book_theme"
html_title = "Annotated: Attention Is All You Need"
html_copy_source = False
html_theme_options = {"show_toc_level": 2, "use_download_button": True, "path_to_docs": "notebooks"}
exclude_patterns = ["_build"]
