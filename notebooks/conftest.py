"""How nbval executes pages, by `make book`, `make test` or `pytest --nbval notebooks/05*.ipynb`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from notebooks import ENVIRONMENT  # noqa: E402

# Begun first, so that no core waits for them at the end.
SLOW = ("22", "21", "24", "26", "17", "07", "09", "23")


def pytest_configure(config):
    os.environ.update(ENVIRONMENT)
    config.option.loadscopereorder = False  # pytest-xdist would begin with pages of many cells
    config.option.nbval_current_env = True  # the Python that runs pytest is the kernel
    config.option.nbval_sanitize_with = str(Path(__file__).with_name("sanitize.cfg"))
    config.option.nbval_cell_timeout = 3600.0
    config.option.nbval_kernel_startup_timeout = 600.0  # beside other work


def pytest_collection_modifyitems(items):
    def place(item):
        number = item.path.name[:2] if item.path.suffix == ".ipynb" else ""
        return SLOW.index(number) if number in SLOW else len(SLOW)

    items.sort(key=place)
