"""The package is exactly what the notebooks export, and its imports only run forward."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import cells

sys.path.insert(0, "tools")
from notebooks import EXPORTED, PACKAGE, ROOT, export, module_file, module_of, page_tests, pages  # noqa: E402

PAGES = pages()
NOT_EXPORTED = {"__init__.py", "__main__.py"}  # written by hand: what a package is, and a call of the commands


def code_cells(path):
    return [cell for cell in cells(path) if cell.cell_type == "code"]


MODULES = {path: module for path in PAGES if (module := module_of(path))}


def test_no_two_pages_export_one_module():
    assert len(set(MODULES.values())) == len(MODULES), sorted(MODULES.values())


def test_package_is_what_the_notebooks_export(tmp_path):
    fresh = tmp_path / "annotated"
    for path in MODULES:
        export(path, fresh)
    exported = {str(file.relative_to(fresh)): file.read_bytes() for file in fresh.rglob("*.py")}
    header = re.compile(rb"(# %% |File to edit: ).*?([0-9][0-9]_\w+\.ipynb)")  # the path to the notebook is relative
    committed = {str(file.relative_to(PACKAGE)): file.read_bytes() for file in PACKAGE.rglob("*.py") if file.name not in NOT_EXPORTED}
    assert sorted(exported) == sorted(committed), "a module without its notebook, or a notebook that was not exported"
    for name, source in committed.items():
        assert header.sub(rb"\1\2", exported[name]) == header.sub(rb"\1\2", source), f"{name}: run `make sync` or `make export`"


def test_main_only_calls_the_terminal():
    tree = ast.parse((PACKAGE / "__main__.py").read_text())
    assert [ast.unparse(node) for node in tree.body[1:]] == ["import sys", "from annotated.cli import main", "sys.exit(main())"]


@pytest.mark.parametrize("folder", sorted({(PACKAGE / name.replace(".", "/")).parent for name in MODULES.values()} - {PACKAGE}), ids=str)
def test_packages_say_what_they_hold_and_load_nothing(folder):
    tree = ast.parse((folder / "__init__.py").read_text())
    loaded = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert ast.get_docstring(tree) and set(loaded) <= {"from annotated import lazy"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_exported_cells_are_plain_python(path):
    for cell in code_cells(path):
        if EXPORTED.search(cell.source):
            lines = cell.source.split("\n")
            assert not [line for line in lines if re.match(r"\s*[%!]", line)], f"a magic in {path.name}: {lines[1]!r}"
            ast.parse(cell.source)
            assert "import *" not in cell.source


def test_no_name_is_exported_twice():
    owner = {}
    for name in MODULES.values():
        tree = ast.parse(module_file(name).read_text())
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_") and node.name != "main":
                assert owner.setdefault(node.name, name) == name, f"{node.name} stands in {owner[node.name]} and {name}"


def test_every_exported_name_is_documented():
    for name in MODULES.values():
        for node in ast.parse(module_file(name).read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"


# Sizes: one idea a room

MODEL = [name for path, name in MODULES.items() if "01" <= path.name[:2] <= "08"]
SPEED = "is_autocast_enabled is_compiling get_num_threads device.type bfloat16 cache packed joined recorder __class__".split()


def code_lines(node, source):
    """Lines of code of a node, or of a whole module, without docstrings, comments and blank lines."""
    strings = (part.body[0] for part in ast.walk(node) if isinstance(part, (ast.Module, ast.ClassDef, ast.FunctionDef))
               and ast.get_docstring(part) is not None)
    documents = {line for string in strings for line in range(string.lineno, string.end_lineno + 1)}
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", len(source))
    lines = [(number, source[number - 1].strip()) for number in range(first, last + 1)]
    return sum(bool(line) and not line.startswith("#") and number not in documents for number, line in lines)


@pytest.fixture(scope="module")
def sources():
    return {name: module_file(name).read_text() for name in MODULES.values()}


def test_modules_are_small(sources):
    sizes = {name: code_lines(ast.parse(source), source.split("\n")) for name, source in sources.items()}
    assert sum(sizes[name] for name in MODEL) <= 330 and sizes[next(name for path, name in MODULES.items() if path.name[:2] == "17")] <= 260
    assert [name for name, size in sizes.items() if size > 420 and not name.endswith("toy_language")] == []
    source = sources[MODEL[1]]
    attention = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "MultiHeadAttention")
    assert code_lines(attention, source.split("\n")) <= 30


def test_the_model_knows_nothing_of_speed(sources):
    for name in MODEL:
        assert [word for word in SPEED if word in sources[name]] == [], name
    assert sum(isinstance(node, ast.Raise) for name in MODEL for node in ast.walk(ast.parse(sources[name]))) <= 14


def test_a_page_its_module_and_its_test_share_a_name():
    for path, name in MODULES.items():
        *folders, last = name.split(".")
        assert path.stem[3:] in (last, "_".join([*folders[-1:], last]), f"engine_{last}") and (ROOT / page_tests(path)).is_file()


def test_the_folder_above_a_clone_does_not_hide_the_package(tmp_path):
    """A clone is a folder `annotated` without a package: seen from above, the installed one comes first."""
    (tmp_path / "annotated" / "notebooks").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import annotated.files; print(annotated.files.CHECKOUT)"
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0 and Path(found.stdout.strip(), "pyproject.toml").is_file(), found.stderr
