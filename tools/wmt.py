"""`make wmt`: execute a copy of page 23, for as long as it takes, and show what its cells print as
they end.

    WMT_RUN=full python tools/wmt.py     with WMT_SIZE=base|big and WMT_PAIR=en-de|en-fr

The copy with its outputs stays in _build/wmt/, also of a run that failed; then the exit status is
1.
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
    (page,), kept = pages(["23"]), ROOT / "_build" / "wmt" / "23_wmt.ipynb"
    notebook, wrong = nbformat.read(page, as_version=4), None
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # what is stored belongs to another run
    try:
        execute(notebook, timeout=None, after_cell=show)  # a training takes days
    except (CellExecutionError, DeadKernelError) as error:
        # of a traceback what was raised
        wrong = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().rpartition("\n")[2]
    kept.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, kept)
    print(f"[wmt] the page with its outputs: {kept.relative_to(ROOT)}", flush=True)
    sys.exit(f"[wmt] {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
