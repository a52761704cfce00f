"""Execute, normalise and export notebooks: what `sync.py`, `book.py` and the tests share."""

import ast
import json
import os
import re
import textwrap
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbdev.export import nb_export
from nbdev.maker import ModuleMaker

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
PACKAGE = ROOT / "annotated"
KERNEL_LOG = ROOT / "_build" / "kernels.log"
PYTHON = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT_METADATA = {"kernelspec": PYTHON, "language_info": {"name": "python"}}
NAMES = re.compile(r"^__all__ = \[[^\]]*\]", re.MULTILINE)
EXPORTED = re.compile(r"^#\|\s*exporti?\b", re.MULTILINE)
# One thread a page, so that the digits do not depend on the machine's number of cores. Where there
# are two, one that waits for the other must sleep: beside other work a waiting thread that spins
# keeps the one it waits for off the processor, and a minute becomes twenty.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000",
               "TOKENIZERS_PARALLELISM": "false"}


def pages(numbers=()):
    """Return the paths of the book's notebooks in order, or of those with numbers such as "05"."""
    paths = {path.name[:2]: path for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))}
    if unknown := set(numbers) - paths.keys():
        raise SystemExit(f"no page {', '.join(sorted(unknown))}: there are {', '.join(paths)}")
    return [path for number, path in paths.items() if not numbers or number in numbers]


def execute(notebook, timeout=3600, after_cell=None):
    """Run all cells in a fresh kernel, in the folder of the notebooks, and store the outputs in
    `notebook`.

    timeout: seconds that a cell may take, or None; after_cell: called as nbclient's
    `on_cell_executed`. Raises nbclient's CellExecutionError for a cell that raises, and
    CellTimeoutError.
    """
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", record_timing=False,
                            coalesce_streams=True, on_cell_executed=after_cell,
                            resources={"metadata": {"path": str(NOTEBOOKS)}})
    KERNEL_LOG.parent.mkdir(parents=True, exist_ok=True)
    # messages of the kernels themselves; errors in cells are raised here
    with KERNEL_LOG.open("ab") as log:
        client.execute(env={**os.environ, **ENVIRONMENT}, stderr=log)
    return notebook


def role(cell):
    """Return the role of a code cell: "imports", "library", "drawing", "check", or "" for one that
    is part of the text.
    """
    code = "\n".join("" if line.startswith("%") else line for line in cell.source.split("\n"))
    try:
        tree = ast.parse(code).body
    except (SyntaxError, ValueError):  # a page from elsewhere may hold anything; none of ours does
        tree = None
    imports = (ast.Import, ast.ImportFrom)
    expressions = [ast.unparse(node) for node in tree or () if isinstance(node, ast.Expr)]
    plain = tree is not None and all(isinstance(node, (*imports, ast.Assign, ast.Expr)) for node
                                     in tree) and not any("print" in line for line in expressions)
    if plain and (code != cell.source or any(isinstance(node, imports) for node in tree)):
        return "imports"
    if EXPORTED.search(code):
        return "library"
    if re.search(r"^# alt: ", code, re.MULTILINE):
        return "drawing"
    return "check" if re.match(r"# C\d+", code) else ""


def folded(cell):
    """Whether the source of a code cell is collapsed, on the site and in JupyterLab."""
    return role(cell) in ("imports", "drawing", "library")


def normalise(notebook):
    """Keep only what a run produces on every machine: no name, time or version.

    Execution counts start at 1, only tags stay, and JupyterLab hides the source of `folded` cells.
    """
    notebook.metadata = nbformat.from_dict(KEPT_METADATA)
    count = 0
    for cell in notebook.cells:
        kept = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        if cell.cell_type == "code" and folded(cell):
            kept["jupyter"] = {"source_hidden": True}
        cell.metadata = nbformat.from_dict(kept)
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
    """Return messages on what must not be stored: text on stderr, and paths of this machine."""
    messages = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        where = f"cell {cell.execution_count} ({cell.source.partition(chr(10))[0]!r})"
        ignored = "nbval-ignore-output" in cell.metadata.get("tags", [])
        for output in cell.outputs:
            text = output.get("text", "") or str(output.get("data", {}).get("text/plain", ""))
            if output.get("name") == "stderr" and not ignored:
                messages.append(f"{where} writes to stderr: {text[:200]!r}")
            if str(ROOT) in text or f"{Path.home()}/" in text:
                messages.append(f"{where} prints a path of this machine: {text[:200]!r}")
    return messages


def module_of(path):
    """Return the module that a notebook exports, such as "model.attention"; None if it has none."""
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    code = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    names = re.findall(r"^#\|\s*default_exp\s+(\S+)", "\n".join(code), re.MULTILINE)
    if len(names) > 1:
        raise ValueError(f"{path} names {len(names)} modules: one notebook exports one module")
    return names[0] if names else None


def module_file(module, package=PACKAGE):
    """Return the file of a module: annotated/model/attention.py for "model.attention"."""
    return Path(package, *module.split(".")).with_suffix(".py")


def modules(package=PACKAGE):
    """Return {name: file} of all exported modules of the package."""
    files = sorted(Path(package).rglob("[!_]*.py"))
    return {".".join(file.relative_to(package).with_suffix("").parts): file for file in files}


def page_tests(path):
    """Return the tests of a page's module, such as tests/model/test_stacks.py; None without a
    module. The file has the name of the page, the folder that of the package.
    """
    module = module_of(path)
    return module and Path("tests", *module.split(".")[:-1], f"test_{path.stem[3:]}.py")


class AbsoluteImports(ModuleMaker):
    """Exports imports as they are on the page, while nbdev would make some of them relative."""

    def make(self, cells, all_cells=None, lib_path=None):
        return super().make(cells, all_cells, lib_path=Path(self.dest) / "elsewhere")


def export(path, package=PACKAGE):
    """Write the module that a notebook exports, if any, into the folder `package`."""
    nb_export(str(path), lib_path=package, mod_maker=AbsoluteImports)
    if module := module_of(path):  # nbdev's list of names is 120 characters wide
        file = module_file(module, package)
        narrow = textwrap.TextWrapper(100, subsequent_indent=" " * 11, break_long_words=False)
        text = NAMES.sub(lambda names: narrow.fill(" ".join(names[0].split())),
                         file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")
