"""The copies of the pages for Colab: the page and one cell, which elsewhere does nothing."""

import sys
import types

import hosted
import nbformat
import pytest
from helpers import cells
from IPython.core.inputtransformer2 import TransformerManager

from notebooks import pages


@pytest.fixture
def copy(monkeypatch, tmp_path):
    """The cells of a page's copy in the site of a repository."""
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/book")
    (page,) = pages(["05"])
    hosted.write([page], tmp_path / "notebooks")
    nbformat.validate(nbformat.read(tmp_path / "notebooks" / page.name, as_version=4))
    return cells(tmp_path / "notebooks" / page.name)


def test_a_copy_is_the_page_and_one_cell_below_its_title(copy):
    (page,) = pages(["05"])
    assert [cell for cell in copy if cell.id != "colab"] == cells(page)
    assert copy[1].id == "colab" and not copy[1].outputs


@pytest.mark.parametrize("colab", [True, False])
def test_the_cell_clones_and_installs_on_colab_alone(copy, colab, monkeypatch):
    asked = []
    shell = types.SimpleNamespace(system=asked.append,
                                  run_line_magic=lambda *words: asked.append(" ".join(words)))
    if colab:
        monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = TransformerManager().transform_cell(copy[1].source)
    exec(code, {"get_ipython": lambda: shell})
    found = [next((word for word in ("clone", "install", "cd") if word in line), line)
             for line in asked]
    assert found == (["clone", "install", "cd"] if colab else [])
    assert not colab or "https://github.com/someone/book /content/book" in asked[0]
    assert ("/content/book" in sys.path) == colab


def test_without_a_repository_the_site_has_neither_copies_nor_links(monkeypatch, tmp_path):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    hosted.write(pages(["05"]), tmp_path / "notebooks")
    assert not (tmp_path / "notebooks").exists() and hosted.link(*pages(["05"])) == ""
