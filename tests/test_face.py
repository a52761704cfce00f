"""What can be had from `annotated` itself: few names, loaded when they are asked for."""

import ast

import pytest
from helpers import ROOT, run_python

import annotated

NAMES = annotated.__all__


def test_the_face_is_small_and_whole():
    assert len(NAMES) == len(set(NAMES)) <= 40 and set(NAMES) <= set(dir(annotated))
    with pytest.raises(AttributeError, match="annotated.*no attribute 'transformer_'"):
        annotated.transformer_  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_that_of_the_module_which_defines_it(name):
    public = getattr(annotated, name)
    assert public.__name__ == name and public.__module__ == f"annotated.{annotated._HOMES[name]}"
    assert getattr(annotated, name) is public


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "annotated" / "__init__.pyi").read_text(encoding="utf-8"))
    seen = [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom)
            for alias in node.names]  # `X as X` exports X
    assert seen == NAMES and (ROOT / "annotated" / "py.typed").exists()


def test_importing_loads_neither_torch_nor_any_module():
    code = ("import sys; import annotated; print(sorted(name for name in sys.modules if "
            "name.startswith('annotated') or name == 'torch'))")
    assert run_python(code, cwd=ROOT) == "['annotated']\n"
