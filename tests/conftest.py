"""Where shapes are enforced, fixtures that several files need, and how processes share the work.

The longest files come first, and one process takes all tests of a page of the site.
"""

import os
import sys
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import settings

# In the gate a property meets the same examples each time; `pytest --hypothesis-profile=long` draws
# new ones, ten times as many.
settings.register_profile("gate", derandomize=True, deadline=None, database=None)
settings.register_profile("long", max_examples=1000, deadline=None, database=None, print_blob=True)
settings.load_profile("gate")

PACKAGE = Path(__file__).resolve().parent.parent / "annotated"
with_shapes = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
               for path in PACKAGE.rglob("[!_]*.py") if "jaxtyping" in path.read_text("utf-8")]
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
# before the package is imported
jaxtyping.install_import_hook(with_shapes, "typechecking.typechecked")
sys.path[:0] = [str(PACKAGE.parent / name) for name in ("tools", "experiments")]

from browsing import address, browser, serve, site  # noqa: E402, F401
from publishing import publisher  # noqa: E402, F401

ENFORCED = "model", "training", "translation"  # elsewhere as in use: a call takes a quarter as long
LONGEST = ["test_live", "test_site_hostile", "test_processes", "test_table3", "test_charts_export",
           "test_search", "test_loop", "test_benchmarks"]


@pytest.fixture(autouse=True)
def on_processors(request, monkeypatch):
    """What is not told otherwise computes on processors, also where there is a GPU."""
    if request.path.stem != "test_cuda":
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=0: None)


@pytest.fixture
def unenforced(monkeypatch):
    """As in use: shapes are not enforced, and a check written out has to find what is wrong."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would begin with the files of most tests


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.hookimpl(tryfirst=True)  # before the fixtures
def pytest_runtest_setup(item):
    jaxtyping.config.update("jaxtyping_disable", item.path.parent.name not in ENFORCED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With --dist=loadgroup one process takes all tests of a page of the site; files stay whole.

    pytest-xdist 3.8 has marks for this, whose groups it writes where pytest 9.2 does not look any
    more: they would be without effect.
    """
    from xdist.scheduler import LoadScopeScheduling

    class PageByPage(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            return test.partition("[")[2] if file.endswith("test_site.py") else file

    return PageByPage(config, log) if config.getvalue("dist") == "loadgroup" else None
