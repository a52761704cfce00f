"""Execute, normalise and export notebooks: what `sync.py`, `book.py` and the tests share."""

import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbdev.export import nb_export

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
PACKAGE = ROOT / "annotated"
KERNEL_LOG = ROOT / "_build" / "kernels.log"
KEPT_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
TRAINS = ("17", "21", "22", "23")  # pages that train a model: long, and they use every core
EXPORTED = re.compile(r"^#\|\s*export\b", re.MULTILINE)
# One thread a page, so that the digits do not depend on the machine's number of cores; pages that train ask for two.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def pages(wanted=()):
    """Paths of the book's notebooks in order; `wanted` holds numbers such as "05" (all of them if empty)."""
    found = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    unknown = set(wanted) - {path.name[:2] for path in found}
    if unknown:
        raise SystemExit(f"no page {', '.join(sorted(unknown))}: there are {', '.join(p.name[:2] for p in found)}")
    return [path for path in found if not wanted or path.name[:2] in wanted]


def introduction_last(paths):
    """The order in which pages are executed: 00 after all others, because its ledger of claims reads what they print."""
    return sorted(paths, key=lambda path: path.name.startswith("00"))


def execute(notebook, timeout=600):
    """Run all cells in a fresh kernel, in the folder of the notebooks, and store the outputs in `notebook`."""
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )
    KERNEL_LOG.parent.mkdir(parents=True, exist_ok=True)
    with KERNEL_LOG.open("ab") as log:  # what the kernels themselves have to say; errors in cells are raised here
        client.execute(env={**os.environ, **ENVIRONMENT}, stderr=log)
    return notebook


def normalise(notebook):
    """Keep only what a run produces on every machine: counts from 1, tags, and no name, time or version."""
    notebook.metadata = nbformat.from_dict(KEPT_METADATA)
    count = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {})
        if cell.cell_type != "code":
            continue
        if cell.source.strip():
            count += 1
            cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def complaints(notebook):
    """What must not be stored: text on stderr, and paths of this machine. A list of sentences, empty if all is well."""
    found = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        for output in cell.outputs:
            first = cell.source.split("\n")[0]
            text = output.get("text", "") or str(output.get("data", {}).get("text/plain", ""))
            if output.get("name") == "stderr" and "nbval-ignore-output" not in cell.metadata.get("tags", []):
                found.append(f"cell {cell.execution_count} ({first!r}) writes to stderr: {text[:200]!r}")
            if str(ROOT) in text or str(Path.home()) + "/" in text:
                found.append(f"cell {cell.execution_count} ({first!r}) prints a path of this machine: {text[:200]!r}")
    return found


def export(path, package=PACKAGE):
    """Write the module that one notebook exports into the folder `package` (nothing if it exports none)."""
    nb_export(str(path), lib_path=package)
