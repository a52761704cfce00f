"""The stored notebooks are whole, tidy and in the form that CONTRIBUTING.md describes; the environment files agree."""

import ast
import base64
import re
import sys
import tomllib

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

sys.path.insert(0, "tools")

from notebooks import EXPORTED, KEPT_METADATA, ROOT, TRAINS, complaints, folded, module_of, pages  # noqa: E402

PAGES = pages()
HEADINGS = {  # in this order; a page that has one must not have it twice
    "complete": ["Where it stands", "Why", "The equation", "The plainest code", "The code of the library", "A picture",
                 "Checks", "Departures from the paper", "Summary", "Exercises", "Read on"],
}
COMPLETE = [path for path in PAGES if "01" <= path.name[:2] <= "09"]
parametrize = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def test_the_pages_of_the_book_are_there():
    numbers = [path.name[:2] for path in PAGES]
    assert numbers[:9] == [f"{n:02d}" for n in range(9)] and PAGES[-1].stem.endswith("_self_test")
    assert set(TRAINS) & set(numbers), "no page trains a model"


@parametrize
def test_stored_notebook_is_executed_and_normalised(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata == KEPT_METADATA
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert counts == list(range(1, len(counts) + 1)), "not executed top to bottom: run `make sync`"
    for cell in notebook.cells:
        hidden = {"jupyter": {"source_hidden": True}} if cell.cell_type == "code" and folded(cell, path.name[:2]) else {}
        assert {name: value for name, value in cell.metadata.items() if name != "tags"} == hidden
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert "text/html" not in output.get("data", {}) or "application/vnd.vegalite.v5+json" not in output["data"]
    assert complaints(notebook) == []


@parametrize
def test_title_says_what_the_page_is(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown" and re.match(r"# \S.*\n\n> \S", first.source), "no `# Title` and `> line`"


@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_complete_pages_answer_in_order(path):
    found = [line[3:].strip() for cell in read(path).cells if cell.cell_type == "markdown"
             for line in cell.source.split("\n") if line.startswith("## ")]
    assert [heading for heading in found if heading in HEADINGS["complete"]] == HEADINGS["complete"]


@parametrize
def test_exported_cells_have_prose_before_them(path):
    introduced = False  # one text may introduce several exported cells in a row
    for cell in read(path).cells:
        exported = cell.cell_type == "code" and EXPORTED.search(cell.source)
        introduced = cell.cell_type == "markdown" or (introduced and exported)
        if exported and re.search(r"^(def|class) ", cell.source, re.M):
            assert introduced, f"no prose before: {cell.source.splitlines()[1]!r}"


MODULES = {module: path.name[:2] for path in PAGES if (module := module_of(path))}


@pytest.mark.parametrize("path", [path for path in PAGES if "01" <= path.name[:2] < "76"], ids=lambda path: path.stem)
def test_what_a_page_shows_comes_from_earlier_pages_and_the_appendix(path):
    code = "\n".join(re.sub(r"^[%!].*", "", cell.source, flags=re.M) for cell in read(path).cells if cell.cell_type == "code")
    imported = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "annotated":
            within = node.module.split(".")[1:]
            imported |= {".".join(within)} | {".".join([*within, alias.name]) for alias in node.names}
    later = {name for name in imported if path.name[:2] < MODULES.get(name, "00") < "76"}
    assert not later, f"page {path.name[:2]} needs what comes later: {later}"


@parametrize
def test_pictures_have_alt_text(path):
    for cell in read(path).cells:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            assert re.search(r"^# alt: \S", cell.source, re.M), f"a picture without `# alt:`: {cell.source[:80]!r}"


@parametrize
def test_links_between_pages_lead_somewhere(path):
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([\w./-]+\.ipynb)[#)]", cell.source):
                assert (path.parent / target).is_file(), f"{path.name} links to {target}"


def exercises_and_solutions(path):
    """(numbers of the exercises, folded code cells of the solutions) of a page."""
    cells = read(path).cells
    heads = [re.findall("^## (.*)", cell.source, re.M) if cell.cell_type == "markdown" else [] for cell in cells]
    begin = next(k for k, head in enumerate(heads) if "Exercises" in head)
    end = next(k for k, head in enumerate(heads) if k > begin and head)
    text = "\n".join(cell.source for cell in cells[begin:end] if cell.cell_type == "markdown")
    asked = text[text.index("## Exercises"):text.index("### Solutions")]
    folded = [cell for cell in cells[begin:end] if cell.cell_type == "code" and "hide-cell" in cell.metadata.get("tags", [])]
    return [int(number) for number in re.findall(r"^(\d+)\. ", asked, re.M)], folded


@pytest.mark.parametrize("path", PAGES[:-1], ids=lambda path: path.stem)
def test_every_page_has_three_to_five_exercises_with_solutions_that_ran(path):
    numbers, solutions = exercises_and_solutions(path)
    assert numbers in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]) and len(solutions) >= len(numbers)
    for cell in solutions:
        assert cell.execution_count and (cell.outputs or "assert " in cell.source), f"shows and checks nothing: {cell.source[:60]!r}"


def test_picture_of_the_readme_is_the_one_in_the_introduction():
    stored = [output["data"]["image/png"] for cell in read(PAGES[0]).cells for output in cell.get("outputs", [])
              if "image/png" in output.get("data", {})]
    shown = (ROOT / "docs" / "attention.png").read_bytes()
    assert shown in [base64.b64decode(picture) for picture in stored], "copy it anew from page 00"


def lock():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}


def test_lock_satisfies_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = lock()
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "bench"}  # its peers live apart
    wanted = project["dependencies"] + [line for lines in extras.values() for line in lines]
    assert wanted
    for requirement in map(Requirement, wanted):
        pinned = pins.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
        assert pinned is not None, f"{requirement.name} is not in requirements.lock"
        assert requirement.specifier.contains(Version(pinned)), f"{requirement} against the pin {pinned}"
        assert "+" not in pinned, f"{requirement.name}: a local version such as +cpu cannot be installed elsewhere"


def test_conda_environment_installs_the_same_lock():
    text = (ROOT / "environment.yml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "- -r requirements.lock" in text and "--no-build-isolation" not in text, "pip takes no such option from a file"
    least = re.search(r"python=([\d.]+)", text).group(1)
    assert f">={least}" == project["requires-python"]
