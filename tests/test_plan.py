"""The plan of the house: what each package may import, and how many names it promises."""

import ast

import pytest

from notebooks import PACKAGE, modules

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
    left = {module: set(others) & FILES.keys() for module, others in ARROWS.items()}
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"circles among {', '.join(sorted(left))}"


def test_what_is_imported_is_there():
    assert set().union(*ARROWS.values()) <= FILES.keys() | {package(module) for module in FILES}


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
