"""The plan of the house: the package is exactly what the notebooks export; what each part of it may
import, how many names it promises, how small its modules are.
"""

import ast
import graphlib
import os
import re
from pathlib import Path

import pytest
from helpers import run_python

from notebooks import PACKAGE, ROOT, export, module_of, modules, page_tests, pages

# From above to below; each may import those before it. The charts know none of the others, and
# only the views of a sentence import the charts.
ORDER = ("files results model data training translation paper interop fast charts translator views "
         "options reproduce checks_model checks workbook cli").split()
FILES = modules()


def package(module):
    return module.partition(".")[0]


def imported(source):
    """Modules of `annotated` that code imports."""
    others = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"`{ast.unparse(node)}`: imports are absolute"
            if package(node.module) == "annotated":
                within = node.module.removeprefix("annotated").removeprefix(".")
                names = {f"{within}.{name.name}".lstrip(".") for name in node.names}
                others |= {within} & FILES.keys() or names
        elif isinstance(node, ast.Import):
            names = {name.name for name in node.names if name.name.startswith("annotated.")}
            others |= {name.removeprefix("annotated.") for name in names}
    return others


BY_HAND = "__init__.py", "__main__.py"
PAGES = {path: module for path in pages() if (module := module_of(path))}
SOURCES = {module: path.read_text(encoding="utf-8") for module, path in FILES.items()}
ARROWS = {module: imported(source) for module, source in SOURCES.items()}


@pytest.mark.parametrize("module", FILES)
def test_a_package_imports_only_from_those_above_it(module):
    above = set(ORDER[:ORDER.index(package(module)) + 1])
    above -= {"charts"} if package(module) != "views" else set()
    above = {"files", "charts"} if package(module) == "charts" else above
    wrong = {other for other in ARROWS[module] if package(other) not in above}
    assert not wrong, f"{module} imports {', '.join(sorted(wrong))}"


def test_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter(ARROWS).prepare()  # raises CycleError, which names the circle


def test_the_package_promises_few_names():
    listed = [ast.literal_eval(node.value)
              for source in SOURCES.values() for node in ast.parse(source).body
              if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    assert sum(map(len, listed)) <= 120


def test_each_package_says_what_its_modules_are_and_loads_nothing():
    for folder in {path.parent for path in FILES.values()} - {PACKAGE}:
        tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
        document = ast.get_docstring(tree)
        assert all(f"`{path.stem}`" in document for path in folder.glob("[!_]*.py")), folder.name
        loads = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert {ast.unparse(node) for node in loads} <= {"from annotated import lazy"}


# What the notebooks export


def test_package_is_what_the_notebooks_export(tmp_path):
    fresh = tmp_path / "annotated"
    for path in PAGES:
        export(path, fresh)
    exported = {str(file.relative_to(fresh)): file.read_bytes() for file in fresh.rglob("*.py")}
    header = re.compile(rb"(# %% |File to edit: ).*?([0-9][0-9]_\w+\.ipynb)")  # a relative path
    committed = {str(file.relative_to(PACKAGE)): file.read_bytes()
                 for file in PACKAGE.rglob("*.py") if file.name not in BY_HAND}
    assert sorted(exported) == sorted(committed), "modules and notebooks differ"
    for name, source in committed.items():
        fresh_source = header.sub(rb"\1\2", exported[name])
        assert fresh_source == header.sub(rb"\1\2", source), f"{name}: run `make export`"


def public():
    """(module, node) of each public function and class."""
    for name in PAGES.values():
        for node in ast.parse(SOURCES[name]).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield name, node


def test_every_exported_name_is_documented_and_exported_once():
    owner = {}
    for name, node in public():
        assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"
        first = owner.setdefault(node.name, name)
        assert first == name or node.name == "main", f"{node.name} stands in {first} and {name}"


# Sizes: one idea a room

MODEL = [name for path, name in PAGES.items() if "01" <= path.name[:2] <= "08"]
SPEED = ("is_autocast_enabled", "is_compiling", "get_num_threads", "device.type", "bfloat16",
         "cache", "packed", "joined", "recorder", "__class__")


def code_lines(source):
    """Lines of a class or a module, without blank ones and comments."""
    return len(re.findall(r"^\s*[^\s#]", source, re.MULTILINE))


def test_modules_are_small():
    sizes = {name: code_lines(source) for name, source in SOURCES.items()}
    assert sum(sizes[name] for name in MODEL) <= 460 and sizes["training.loop"] <= 290
    large = {"data.toy_language", "checks", "checks_model"}  # a grammar, and hints for readers
    assert {name for name, size in sizes.items() if size > 330} <= large
    attention = next(node for _, node in public() if node.name == "MultiHeadAttention")
    assert code_lines(ast.get_source_segment(SOURCES["model.multi_head"], attention)) <= 45


def test_the_model_knows_nothing_of_speed():
    for name in MODEL:
        assert [word for word in SPEED if word in SOURCES[name]] == [], name
    nodes = [node for name in MODEL for node in ast.walk(ast.parse(SOURCES[name]))]
    assert sum(isinstance(node, ast.Raise) for node in nodes) <= 14


def test_a_page_its_module_and_its_test_share_a_name():
    for path, name in PAGES.items():
        *folders, last = name.split(".")
        assert path.stem[3:] in (last, "_".join([*folders[-1:], last]))
        assert (ROOT / page_tests(path)).is_file()


def test_the_folder_above_a_clone_does_not_hide_the_package(tmp_path):
    """A clone is a folder `annotated` without a package: the installed one comes first."""
    (tmp_path / "annotated" / "notebooks").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import annotated.files; print(annotated.files.CHECKOUT)"
    checkout = run_python(program, cwd=tmp_path, env=environment)
    assert Path(checkout.strip(), "pyproject.toml").is_file()
