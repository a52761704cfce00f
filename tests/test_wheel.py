"""The wheel holds the package with the book's model and works without the clone; versions agree."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked(*paths):
    """The files of a clone below these paths, with those that are about to be committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *paths]
    found = subprocess.check_output(command, cwd=ROOT, encoding="utf-8").split("\0")
    return {name for name in found if name and (ROOT / name).exists()}


def pip(*words):
    command = [sys.executable, "-m", "pip", *words, "-q", "--no-deps", "--no-index"]
    subprocess.run([*map(str, command)], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that a clean clone builds."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("wheel")
    for name in tracked("annotated", "pyproject.toml", "README.md", "LICENSE"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    pip("wheel", "--no-build-isolation", "--wheel-dir", out, clone)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = email.message_from_bytes(archive.read(about))
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == tracked("annotated") and "annotated/book_model/model.safetensors" in inside
    assert (told["Name"], told["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert wheel.stat().st_size < 2_000_000


def test_installed_it_translates_from_an_empty_folder_without_a_network(wheel, tmp_path):
    place, empty = tmp_path / "site", tmp_path / "empty"
    pip("install", "--target", place, wheel)
    empty.mkdir()
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    here = {"PYTHONPATH": str(place), "HOME": str(empty), **nowhere}
    program = shutil.which("annotated", path=place / "bin") or place / "Scripts" / "annotated.exe"
    done = subprocess.run([program, "translate"], input="The old dog sleeps.\n", cwd=empty,
                          env=os.environ | here, capture_output=True, encoding="utf-8")
    assert done.stdout == "Der alte Hund schläft.\n", done.stderr
    asked = [sys.executable, "-c", "import annotated; print(annotated.__file__)"]
    used = subprocess.check_output(asked, cwd=empty, env=os.environ | here, text=True)
    assert used.strip() == str(place / "annotated" / "__init__.py")


def test_version_and_date_of_the_release_are_the_same_everywhere():
    cited = dict(re.findall(r'^(version|date-released): "?([\w.-]+)"?$',
                            (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.search(r"^## \[(\d[^]]*)\] - (\S+)$", changes, re.M).groups()
    assert cited == {"version": version, "date-released": date}
    assert PROJECT["version"] == version
