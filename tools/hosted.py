"""Copies of the pages that run on Colab: they lie in the site, and each page links to its own.

The pages in notebooks/ stay as they are. A copy has one cell more, which fetches the repository and
installs what pages need; anywhere but on Colab it does nothing. Colab opens notebooks of GitHub
alone, so copies and links are made where GITHUB_REPOSITORY says which repository this is, as it
does in GitHub's workflows; .github/workflows/site.yml publishes the site as the branch gh-pages.
"""

import os

import nbformat

BRANCH = "gh-pages"
CELL = """# On Colab this cell fetches the book and installs what its pages need.
import sys

if "google.colab" in sys.modules:
    !test -d /content/book || git clone -q --depth 1 https://github.com/{repository} /content/book
    !{{sys.executable}} -m pip install -q -e "/content/book[pages]"
    %cd -q /content/book/notebooks
    sys.path.insert(0, "/content/book")"""


def repository():
    """The repository on GitHub, "owner/name", that this site is made for; None if none is named."""
    return os.environ.get("GITHUB_REPOSITORY") or None


def link(path):
    """Markdown that opens the copy of a page on Colab; empty without a repository."""
    if repository() is None:
        return ""
    place = f"{repository()}/blob/{BRANCH}/notebooks/{path.name}"
    return f" · [Open in Colab](https://colab.research.google.com/github/{place})"


def write(paths, folder):
    """Write copies of pages, each with the cell for Colab; nothing without a repository."""
    for path in paths if repository() else ():
        notebook = nbformat.read(path, as_version=4)
        cell = nbformat.v4.new_code_cell(CELL.format(repository=repository()), id="colab")
        notebook.cells.insert(1, cell)
        folder.mkdir(exist_ok=True)
        nbformat.write(notebook, folder / path.name)
