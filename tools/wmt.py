"""`make wmt`: execute a copy of page 23 without a time limit, and show the output of each cell.

    WMT_RUN=full python tools/wmt.py     with WMT_SIZE=base|big and WMT_PAIR=en-de|en-fr

The copy with its outputs stays in _build/wmt/, even if the run fails; then the exit status is 1.
"""

import re
import sys

import nbformat
from nbclient.exceptions import CellExecutionError, DeadKernelError

from notebooks import ROOT, execute, pages


def show(cell, **_):
    """Print what a cell printed."""
    print("".join(output.text for output in cell.get("outputs", [])
                  if output.output_type == "stream"), end="", flush=True)


def main():
    (page,), copy = pages(["23"]), ROOT / "_build" / "wmt" / "23_wmt.ipynb"
    notebook, failure = nbformat.read(page, as_version=4), None
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # the stored ones belong to another run
    try:
        execute(notebook, timeout=None, after_cell=show)  # a training takes days
    except (CellExecutionError, DeadKernelError) as error:
        # the last line of the traceback
        failure = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().rpartition("\n")[2]
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, copy)
    print(f"[wmt] the page with its outputs: {copy.relative_to(ROOT)}", flush=True)
    sys.exit(f"[wmt] {failure}" if failure else 0)


if __name__ == "__main__":
    main()
