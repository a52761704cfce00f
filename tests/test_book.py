"""The stored notebooks are whole, tidy and in the form that CONTRIBUTING.md describes; the environment files agree."""

import base64
import re
import sys
import tomllib

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

sys.path.insert(0, "tools")
from notebooks import EXPORTED, KEPT_METADATA, ROOT, TRAINS, complaints, pages  # noqa: E402

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
    assert numbers[:9] == [f"{n:02d}" for n in range(9)] and numbers[-1] == "90"
    assert set(TRAINS) & set(numbers), "no page trains a model"


@parametrize
def test_stored_notebook_is_executed_and_normalised(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata == KEPT_METADATA
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert counts == list(range(1, len(counts) + 1)), "not executed top to bottom: run `make sync`"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
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


def test_picture_of_the_readme_is_the_one_in_the_introduction():
    stored = [output["data"]["image/png"] for cell in read(PAGES[0]).cells for output in cell.get("outputs", [])
              if "image/png" in output.get("data", {})]
    shown = (ROOT / "docs" / "attention.png").read_bytes()
    assert shown in [base64.b64decode(picture) for picture in stored], "copy it anew: tools/pictures.py 00 writes it"


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
    assert "- -r requirements.lock" in text
    least = re.search(r"python=([\d.]+)", text).group(1)
    assert f">={least}" == project["requires-python"]
