"""Attention Is All You Need as a library; each module is exported from the page of its name.

Packages: `model`, `data`, `training`, `translation`, `paper`, `interop`, `fast`, `charts`; the
docstring of each says what it holds. The names in `__all__` are loaded when they are first used; a
stub beside this file lists them, for type checkers and for what follows here.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path


def lazy(package, homes):
    """(`__getattr__`, `__dir__`) of a package whose names are loaded when they are asked for.

    homes: {name: module of the package that defines it}.
    """
    space = sys.modules[package].__dict__

    def load(name):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        space[name] = getattr(import_module(f"{package}.{homes[name]}"), name)
        return space[name]

    return load, lambda: sorted({*space, *homes})


_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {alias.name: node.module.removeprefix("annotated.") for node in _STUB.body
          if isinstance(node, ast.ImportFrom) for alias in node.names}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy(__name__, _HOMES)
