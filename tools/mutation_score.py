"""The share of mutants that the tests kill, of a random sample from every module of the package,
for results/mutation_score.json.

A mutant is one small change inside a function, made by mutmut: another number, operator, argument
or constant. Each is put alone into a copy of the checkout, and killed if a test that guards its
module fails there, or a cell of its page, executed by nbval with the mutant in place of the code
that the page exports. The sample takes hours and goes on where it was interrupted: a module is
sampled anew if it, its page or its tests have changed since.
"""

import difflib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import nbformat
from mutmut.mutation.file_mutation import create_mutations

from annotated.files import write_json
from annotated.results import provenance
from notebooks import EXPORTED, ROOT, module_of, modules, page_tests, pages

RESULT = ROOT / "results" / "mutation_score.json"
KNOWN = tomllib.loads((ROOT / "tools" / "mutation_score.toml").read_text(encoding="utf-8"))
# `results` is first, while its tests find results/README.md true
MODULES = {module: modules()[module] for module in sorted(modules(), key="results".__ne__)
           if "def " in modules()[module].read_text(encoding="utf-8")}
PAGES = {module: path.relative_to(ROOT) for path in pages() if (module := module_of(path))}
# the sample: the share of a module's mutants, the least number of them, and the seed
SHARE, MINIMUM, SEED = 0.015, 6, 0


def guards(module):
    """Return the tests that guard a module: those of its page, and those that KNOWN lists."""
    others = (f"tests/{name}.py" for name in KNOWN["also_tested_by"].get(module, ()))
    return [page_tests(ROOT / PAGES[module]), *others]


def mutants(module):
    """Return the number of mutants, and an iterator over them in random order: (old line, new line,
    text of the module).
    """
    text = MODULES[module].read_text(encoding="utf-8")
    tree, candidates, *_ = create_mutations(str(MODULES[module]), text)
    changes = [change for change in candidates if change.contained_by_top_level_function]

    def shuffled():
        for change in random.Random(f"{SEED} {module}").sample(changes, len(changes)):
            mutated = tree.deep_replace(change.original_node, change.mutated_node).code
            lines = list(difflib.unified_diff(text.splitlines(), mutated.splitlines(), n=0,
                                              lineterm=""))[3:]
            was, now = (" / ".join(line[1:].strip() for line in lines if line[0] == sign)
                        for sign in "-+")
            if was != now:
                yield was, now, mutated

    return len(changes), shuffled()


def use_module(page, module):
    """Write a page.ipynb that imports the module which this page exports, and is else like it."""
    notebook = nbformat.read(page, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and EXPORTED.search(cell.source):
            cell.source = (f"import annotated.{module} as exported\nglobals().update({{name: value "
                           "for name, value in vars(exported).items() if name[:2] != '__'})")
    nbformat.write(notebook, page.with_name("page.ipynb"))


def run_tests(module, text):
    """Return whether the tests of a module fail with this text, or do not end."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        shutil.copytree(ROOT, copy, dirs_exist_ok=True, ignore=lambda place, _: (
            {".git", ".venv", "_build", "data"} if Path(place) == ROOT else ()))
        for name in ("data", ".git"):  # the revision is that of the checkout
            (copy / name).symlink_to(ROOT / name)
        (copy / MODULES[module].relative_to(ROOT)).write_text(text, encoding="utf-8")
        use_module(copy / PAGES[module], module)
        variables = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1",
                     "TOKENIZERS_PARALLELISM": "false", "PAGE_SECONDS": "8"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m",
                   "not long", "--nbval", *guards(module), "notebooks/page.ipynb"]
        try:
            return subprocess.run(command, cwd=copy, env=variables, capture_output=True,
                                  timeout=900).returncode != 0
        except subprocess.TimeoutExpired:
            return True


def score(module):
    """Return the counts of a module's sample, and its survivors."""
    if run_tests(module, MODULES[module].read_text(encoding="utf-8")):
        raise SystemExit(f"the tests of {module} fail without any change: repair them first")
    total, shuffled = mutants(module)
    sample = list(islice(shuffled, max(MINIMUM, math.ceil(SHARE * total))))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        killed = list(pool.map(lambda mutant: run_tests(module, mutant[2]), sample))
    survivors = [{"module": module, "was": was, "now": now}
                 for (was, now, _), noticed in zip(sample, killed, strict=True) if not noticed]
    return {"mutants": total, "run": len(killed), "killed": sum(killed)}, survivors


def explanation(survivor):
    """Return {"kind", "why"} from the first entry of tools/mutation_score.toml that matches."""
    module = survivor["module"]
    for entry in KNOWN["survivor"]:
        if module in entry.get("modules", [module]) and all(
                entry[side] in survivor[side] for side in ("was", "now")):
            return {"kind": entry["kind"], "why": entry["why"]}
    return {"kind": "unexamined", "why": ""}


def code(path, text):
    """What a file executes: for a page, the code of its cells without lines of comments."""
    if path.suffix != ".ipynb":
        return text
    return [[line for line in cell["source"] if not line.startswith("#")]
            for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def measured(module, row):
    """Whether the code of module, page and tests is what it was when the row was measured."""
    for path in (Path(ROOT, name) for name in (MODULES[module], PAGES[module], *guards(module))):
        name = path.relative_to(ROOT).as_posix()
        before = subprocess.run(["git", "show", f"{row['revision']}:{name}"], cwd=ROOT,
                                capture_output=True, encoding="utf-8")
        if before.returncode or code(path, before.stdout) != code(path, path.read_text("utf-8")):
            return False
    return True


def keep(rows, survivors):
    """Write the rows of all modules that have been measured, with their sums."""
    total = {key: sum(row[key] for row in rows.values()) for key in ("mutants", "run", "killed")}
    survivors = [survivor | explanation(survivor) for survivor in survivors]
    equivalent = Counter(row["module"] for row in survivors if row["kind"] == "equivalent")
    # a module counts as many times as it has mutants, of which small ones are sampled more densely
    shares = [round(100 / total["mutants"] * sum(
        row["mutants"] * row["killed"] / (row["run"] - without[module])
        for module, row in rows.items()), 1) for without in (Counter(), equivalent)]
    print(f"{len(rows)} of {len(MODULES)} modules: {total}, noticed: {shares} %", flush=True)
    write_json(RESULT, {
        "tool": f"mutmut {version('mutmut')}", **provenance(),
        "command": "python tools/mutation_score.py",
        "sample": {"share": SHARE, "at least": MINIMUM, "seed": SEED},
        "modules": len(MODULES), "total": total, "equivalent": equivalent.total(), "percent killed":
        shares[0], "percent killed of those that are not equivalent": shares[1],
        "by module": dict(sorted(rows.items())),
        "survivors": sorted(survivors, key=lambda survivor: survivor["module"])})


def main():
    stored = json.loads(RESULT.read_text(encoding="utf-8"))
    rows = {module: row for module, row in stored["by module"].items()
            if module in MODULES and measured(module, row)}
    survivors = [row for row in stored["survivors"] if row["module"] in rows]
    for module in MODULES:
        if module not in rows:
            counts, surviving = score(module)
            rows[module] = {**provenance(), **counts}
            keep(rows, survivors := survivors + surviving)
    keep(rows, survivors)


if __name__ == "__main__":
    main()
