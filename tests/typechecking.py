"""The type checker of the tests, under a name of its own.

While jaxtyping loads a module of shapes, it takes whatever that module imports from the compiled
files of this checker. Under the name "beartype.beartype" the pages leave theirs there, in which
every module is checked, and not those of shapes alone.
"""

from beartype import beartype as typechecked  # noqa: F401
