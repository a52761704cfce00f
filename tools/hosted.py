"""Copies of the pages for Colab: they are part of the site, and each page links to its copy.

A copy has one more cell, which clones the repository and installs the packages; outside Colab it
does nothing. Colab opens notebooks from GitHub only, so copies and links are made if
GITHUB_REPOSITORY names the repository, as in GitHub's workflows: .github/workflows/site.yml
publishes the site as the branch gh-pages.
"""

import os

import nbformat

CELL = """# On Colab this cell fetches the book and installs what its pages need.
import sys

if "google.colab" in sys.modules:
    !test -d /content/book || git clone -q --depth 1 https://github.com/{repository} /content/book
    !{{sys.executable}} -m pip install -q -e "/content/book[pages]"
    %cd -q /content/book/notebooks
    sys.path.insert(0, "/content/book")"""


def link(path):
    """Return Markdown that opens the copy of a page on Colab; empty without a repository."""
    if not (repository := os.environ.get("GITHUB_REPOSITORY")):
        return ""
    address = f"{repository}/blob/gh-pages/notebooks/{path.name}"
    return f" · [Open in Colab](https://colab.research.google.com/github/{address})"


def write(paths, folder):
    """Write copies of pages with the cell for Colab into `folder`, if there is a repository."""
    repository = os.environ.get("GITHUB_REPOSITORY")
    for path in paths if repository else ():
        notebook = nbformat.read(path, as_version=4)
        cell = nbformat.v4.new_code_cell(CELL.format(repository=repository), id="colab")
        notebook.cells.insert(1, cell)
        folder.mkdir(exist_ok=True)
        nbformat.write(notebook, folder / path.name)
