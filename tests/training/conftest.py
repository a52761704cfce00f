"""A run that nothing happened to, with which the tests here compare others."""

from types import SimpleNamespace

import pytest
from helpers import one_thread, state  # noqa: F401
from small_runs import digests, run


@pytest.fixture(scope="module")
def undisturbed(one_thread, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    log, model = run(folder)
    return SimpleNamespace(folder=folder, log=log, weights=state(model), digests=digests(folder))
