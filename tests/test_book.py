"""The stored notebooks are whole and in the form of CONTRIBUTING.md; environment files agree."""

import base64
import re
import tomllib

import nbformat
import pytest
from helpers import ROOT, cells
from packaging.requirements import Requirement
from packaging.version import Version
from test_plan import imported
from test_prose import sections

from notebooks import EXPORTED, KEPT_METADATA, complaints, folded, module_of, pages

PAGES = pages()
HEADINGS = ["Where it stands", "Why", "The equation", "The plainest code",
            "The code of the library", "A picture", "Checks", "Departures from the paper",
            "Summary", "Exercises", "Read on"]
by_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


def some(*bounds):
    """A mark as above for the pages whose number lies between two others."""
    chosen = [path for path in PAGES if bounds[0] <= path.name[:2] <= bounds[1]]
    return pytest.mark.parametrize("path", chosen, ids=lambda path: path.stem)


def texts(path):
    return [cell.source for cell in cells(path) if cell.cell_type == "markdown"]


@by_page
def test_stored_notebook_is_executed_and_normalised(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == KEPT_METADATA
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code if cell.source.strip()]
    assert counts == list(range(1, len(counts) + 1)), "not executed top to bottom: run `make sync`"
    for cell in notebook.cells:
        hidden = cell.cell_type == "code" and folded(cell)
        kept = {name: value for name, value in cell.metadata.items() if name != "tags"}
        assert kept == ({"jupyter": {"source_hidden": True}} if hidden else {})
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            data = output.get("data", {})
            assert not {"text/html", "application/vnd.vegalite.v5+json"} <= data.keys()
            pictures = "image/png" in data
            assert not pictures or re.search(r"^# alt: \S", cell.source, re.M), cell.source[:80]
    assert complaints(notebook) == []
    assert re.match(r"# \S.*\n\n> \S", texts(path)[0]), "no title, or no line on what the page is"


@some("01", "09")
def test_complete_pages_answer_in_order(path):
    found = re.findall(r"^## (.*?) *$", "\n".join(texts(path)), re.M)
    assert [heading for heading in found if heading in HEADINGS] == HEADINGS


@by_page
def test_exported_cells_have_prose_before_them(path):
    introduced = False  # one text may introduce several exported cells in a row
    for cell in cells(path):
        exported = cell.cell_type == "code" and EXPORTED.search(cell.source)
        introduced = cell.cell_type == "markdown" or (introduced and exported)
        if exported and re.search(r"^(def|class) ", cell.source, re.M):
            assert introduced, f"no prose before: {cell.source.splitlines()[1]!r}"


MODULES = {module: path.name[:2] for path in PAGES if (module := module_of(path))}


@some("01", "72")
def test_what_a_page_shows_comes_from_earlier_pages_and_the_appendix(path):
    code = "\n".join(re.sub(r"^[%!].*", "", cell.source, flags=re.M)
                     for cell in cells(path) if cell.cell_type == "code")
    later = {name for name in imported(code) if path.name[:2] < MODULES.get(name, "00") < "64"}
    assert not later, f"page {path.name[:2]} needs what comes later: {later}"


@some("00", "97")
def test_pages_have_three_to_five_exercises_with_solutions_that_ran(path):
    own = sum((group for group in sections(cells(path))
               if any(re.search("^## Exercises", cell.source, re.M) for cell in group)), [])
    text = "\n".join(cell.source for cell in own if cell.cell_type == "markdown")
    asked = text.partition("## Exercises")[2].partition("### Solutions")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", asked, re.M)]
    solutions = [cell for cell in own
                 if cell.cell_type == "code" and "hide-cell" in cell.metadata.get("tags", [])]
    least = 3 if path.name[:2] < "64" else 0  # the appendix has those that are worth it
    assert numbers == [1, 2, 3, 4, 5][: len(numbers)] and least <= len(numbers) <= len(solutions)
    for cell in solutions:
        shows = cell.outputs or "assert " in cell.source
        assert cell.execution_count and shows, f"shows and checks nothing: {cell.source[:60]!r}"


def test_picture_of_the_readme_is_the_one_in_the_introduction():
    outputs = [output for cell in cells(PAGES[0]) for output in cell.get("outputs", [])]
    stored = [base64.b64decode(output.get("data", {}).get("image/png", "")) for output in outputs]
    assert (ROOT / "docs" / "attention.png").read_bytes() in stored, "copy it anew from page 00"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_lock_satisfies_pyproject():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.partition(";")[0].split("==")
                for line in lines if line and not line.startswith("#"))
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    wanted = list(PROJECT["dependencies"])
    for name, lines in PROJECT["optional-dependencies"].items():
        wanted += lines if name != "bench" else []  # its peers live apart
    for requirement in map(Requirement, wanted):
        pinned = pins.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
        assert pinned is not None, f"{requirement.name} is not in requirements.lock"
        assert requirement.specifier.contains(Version(pinned)), f"{requirement}, pinned: {pinned}"
        assert "+" not in pinned, f"{requirement.name}: +cpu cannot be installed elsewhere"


def test_conda_environment_installs_the_same_lock():
    text = (ROOT / "environment.yml").read_text()
    assert "- -r requirements.lock" in text
    assert "--no-build-isolation" not in text, "pip takes no such option from a file"
    assert f">={re.search(r'python=([0-9.]+)', text)[1]}" == PROJECT["requires-python"]
