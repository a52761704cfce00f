"""Sphinx configuration of the HTML book; `tools/site_build.py` puts the pages beside it."""

import re

project = "Annotated"
author = "The Annotated authors"
copyright = "2026, The Annotated authors"
extensions = ["myst_nb", "sphinx-mathjax-offline", "sphinx.ext.autodoc"]
source_suffix = {".ipynb": "myst-nb", ".md": "myst-nb"}
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # what cells show as Markdown is read like the text around them
myst_enable_extensions = ["dollarmath", "amsmath", "attrs_block"]
myst_heading_anchors = 3
html_theme = "sphinx_book_theme"
html_title = "Annotated: Attention Is All You Need"
html_copy_source = False
html_context = {"default_mode": "auto"}
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"}), ("charts.js", {"defer": "defer"})]
html_sidebars = {"**": ["book-home.html", "book-search.html", "sbt-sidebar-nav.html"]}
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,  # each page links to its notebook below the title
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "primary_sidebar_end": [],
}
exclude_patterns = ["_build", "notebooks", "live"]
autodoc_typehints = "none"
autodoc_preserve_defaults = True


def plain_docstring(app, what, name, obj, options, lines):
    """The docstrings are plain text: only `code` is markup, and what is indented stays as it is."""
    text = re.sub(r"([\\*|]|_\b)", r"\\\1", "\n".join(lines))
    text = re.sub(r"`+([^`]+)`+", lambda match: f"``{match[1].replace(chr(92), '')}``", text)
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if re.search(r"^ +", paragraph, re.MULTILINE):
            escaped = paragraph.replace("\\", "")
            paragraph = "::\n\n" + re.sub(r"^", "   ", escaped, flags=re.MULTILINE)
        paragraphs.append(paragraph)
    lines[:] = "\n\n".join(paragraphs).split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", plain_docstring)
    # it only says where MathJax lies
    app.extensions["sphinx-mathjax-offline"].parallel_read_safe = True
