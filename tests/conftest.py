"""Fixtures of the tests that need a browser, and the order in which several processes take the files: those that take longest first."""

from browsing import browser, serve, site  # noqa: F401

LONGEST = ["test_live", "test_site_hostile", "test_processes", "test_variations", "test_charts", "test_decoding", "test_training",
           "test_benchmarks"]  # fmt: skip


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests, and end alone with the longest


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
