"""Planting faults: what is planted is seen, also by tests that see it only in processes they start, however they start them."""

import ast
import sys

import pytest

sys.path.insert(0, "tools")
from mutate import MUTATIONS, ROOT, caught_by, checkout, plant  # noqa: E402

from notebooks import file_of_tests  # noqa: E402

PROBE = '''
import os, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = "import sys; from annotated.tokens import UNKNOWN; sys.exit(UNKNOWN != 3)"

def test_nothing_is_wrong_in_a_process(tmp_path):
    (tmp_path / "script.py").write_text(CODE)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments, options = WAYS
    assert subprocess.run([sys.executable, *arguments], **options).returncode == 0
'''
WAYS = {
    "a line of code": '["-c", CODE], {}',
    "a script elsewhere": '[tmp_path / "script.py"], {}',
    "the folder of the checkout": '["-c", CODE], {"cwd": ROOT, "env": plain}',
    "the path of the checkout": '[tmp_path / "script.py"], {"cwd": tmp_path, "env": {**plain, "PYTHONPATH": str(ROOT)}}',
    "an environment without a path": '["-c", CODE], {"env": plain}',
}


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A checkout as it is, and one with a fault that the probes see only in the processes they start."""
    folders = [tmp_path_factory.mktemp(name) for name in ("sound", "faulty")]
    for folder in folders:
        checkout(folder)
        for number, way in enumerate(WAYS.values()):
            (folder / "tests" / f"test_probe{number}.py").write_text(PROBE.replace("WAYS", way), encoding="utf-8")
    plant(folders[1], "tokens", "PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 3", "PAD, BEGIN, END, UNKNOWN = 0, 1, 2, 4")
    return folders


@pytest.mark.long
def test_a_sound_checkout_passes(copies):
    assert caught_by(copies[0], " ".join(f"probe{number}" for number in range(len(WAYS)))) is None


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(WAYS)), ids=list(WAYS))
def test_a_fault_is_seen_in_processes_too(copies, number):
    assert caught_by(copies[1], f"probe{number}") == f"test_probe{number}.py::test_nothing_is_wrong_in_a_process"


def test_a_copy_shares_no_code_with_the_checkout(tmp_path):
    checkout(tmp_path)
    for name in ("annotated", "experiments", "tests", "tools"):
        assert not any(path.is_symlink() for path in (tmp_path / name, *(tmp_path / name).rglob("*")))
    assert (tmp_path / "pyproject.toml").read_bytes() == (ROOT / "pyproject.toml").read_bytes()


def test_every_fault_can_be_planted_and_has_a_name_of_its_own():
    names = [fault for fault, *_ in MUTATIONS]
    assert len(set(names)) == len(names)
    for fault, module, old, new, tests in MUTATIONS:
        source = (ROOT / "annotated" / f"{module}.py").read_text(encoding="utf-8")
        assert old != new and old in source, fault
        ast.parse(source.replace(old, new), fault)  # a fault is Python: a test has to notice it
        assert tests and all((ROOT / file_of_tests(name)).is_file() for name in tests.split()), fault
