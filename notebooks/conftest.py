"""How nbval executes pages, by `make book`, `make test` or `pytest --nbval notebooks/05*.ipynb`.

nbval compares all outputs but pictures; here those of matplotlib are compared, too.
"""

import base64
import io
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from notebooks import ENVIRONMENT  # noqa: E402

# Begun first, so that no core waits for them at the end.
SLOW = ("22", "21", "24", "26", "17", "07", "09", "23")
# Of 255 levels of a colour: twice the largest difference of a pixel, on any page but those whose
# pictures show losses (`nbval-ignore-output`), between an AMD EPYC and an Intel Xeon.
MAX_DIFFERENCE = 8
VEGA_LITE = "application/vnd.vegalite.v5+json"


def pictures(outputs):
    """Return the pixels of the pictures that a cell drew with matplotlib.

    Altair's are left out: their specification is text, and their fonts are the machine's.
    """
    shown = [output.get("data", {}) for output in outputs]
    found = [data["image/png"] for data in shown if "image/png" in data and VEGA_LITE not in data]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA"), dtype=int)
            for png in found]


def compare_with_pictures(cell, compare_outputs, test, ref, skip_compare=None):
    """Compare as nbval does, and then the pictures."""
    if not compare_outputs(test, ref, skip_compare):
        return False
    now, stored = pictures(test), pictures(ref)
    same = [one.shape for one in now] == [one.shape for one in stored] and all(
        abs(one - other).max() <= MAX_DIFFERENCE for one, other in zip(now, stored, strict=True))
    if not same:
        cell.comparison_traceback.append("the pictures differ from the stored ones")
    return same


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

    for item in items:
        if item.path.suffix == ".ipynb":
            item.compare_outputs = partial(compare_with_pictures, item, item.compare_outputs)
    items.sort(key=place)
