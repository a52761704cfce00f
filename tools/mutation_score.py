"""The share of mutants that the tests kill, of a seeded sample from every module of the package.

    python tools/mutation_score.py [MODULE …] [--share 0.015] [--seed 0]

Without a MODULE it writes results/mutation_score.json.

A mutant is one small change inside a function, made by mutmut: another number, operator, argument
or constant. It is planted alone in a copy of the checkout, and killed if a test of its module fails
there.
"""

import argparse
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from mutmut.mutation.file_mutation import create_mutations

from annotated.results import provenance
from notebooks import ROOT, module_of, modules, page_tests, pages

RESULT, SURVIVORS = ROOT / "results" / "mutation_score.json", ROOT / "tools" / "survivors.toml"
# The tests of its page guard a module; these are guarded by the tests of others too.
MODULES = {module: path for module, path in sorted(modules().items())
           if "def " in path.read_text(encoding="utf-8")}
TESTS = {module: page_tests(path) for path in pages() if (module := module_of(path))}
ALSO = {"model.attention": "model.multi_head", "model.masking": "model.transformer",
        "model.transformer": "model.masking", "training.checkpoints": "training.run_state",
        "training.loader": "training.loop",
        "charts.theme": "charts.attention charts.curves charts.explorer"}
FEWEST = 6  # mutants of a module that are run, if it has as many


def mutants(module):
    """(number of mutants, iterator over (old line, new line, text of the module)), shuffled."""
    text = MODULES[module].read_text(encoding="utf-8")
    tree, candidates, *_ = create_mutations(str(MODULES[module]), text)
    changes = [change for change in candidates if change.contained_by_top_level_function]

    def planted():
        for change in random.Random(f"{OPTIONS.seed} {module}").sample(changes, len(changes)):
            mutated = tree.deep_replace(change.original_node, change.mutated_node).code
            lines = list(difflib.unified_diff(text.splitlines(), mutated.splitlines(), n=0,
                                              lineterm=""))[3:]
            was, now = (" / ".join(line[1:].strip() for line in lines if line[0] == sign)
                        for sign in "-+")
            if was != now:
                yield was, now, mutated

    return len(changes), planted()


def outcome(module, text):
    """What becomes of a module's text that meets its tests: "killed", "survived" or "timeout"."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        # package, experiments, tests and tools are copies, all else links
        for entry in ROOT.iterdir():
            if entry.name in ("annotated", "experiments", "tests", "tools"):
                shutil.copytree(entry, copy / entry.name,
                                ignore=shutil.ignore_patterns("__pycache__"))
            elif entry.name not in (".git", ".venv", "_build"):
                (copy / entry.name).symlink_to(entry)
        (copy / MODULES[module].relative_to(ROOT)).write_text(text, encoding="utf-8")
        tests = [TESTS[name] for name in [module, *ALSO.get(module, "").split()]]
        variables = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1",
                     "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m",
                   "not long", *tests]
        try:
            done = subprocess.run(command, cwd=copy, env=variables, capture_output=True,
                                  timeout=900)
        except subprocess.TimeoutExpired:
            return "timeout"
        return "survived" if done.returncode == 0 else "killed"


def run(module):
    """The result on a module's sample: its line of figures, and its survivors."""
    if outcome(module, MODULES[module].read_text(encoding="utf-8")) != "survived":
        raise SystemExit(f"the tests of {module} fail without any change: repair them first")
    count, supply = mutants(module)
    sample = list(islice(supply, max(FEWEST, -int(-OPTIONS.share * count // 1))))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ends = list(pool.map(lambda mutant: outcome(module, mutant[2]), sample))
    left = [{"module": module, "outcome": end, "was": was, "now": now, **reason(module, was, now)}
            for (was, now, _), end in zip(sample, ends, strict=True) if end != "killed"]
    for survivor in left:
        print(f"{module}: {survivor['outcome']}: {survivor['was']} -> {survivor['now']} "
              f"({survivor['kind']})", flush=True)
    counts = {end: ends.count(end) for end in ("killed", "survived", "timeout")}
    return {"mutants": count, "run": len(ends), **counts}, left


def reason(module, was, now):
    """{"kind", "why"} of a survivor by the first entry of tools/survivors.toml that fits."""
    for entry in tomllib.loads(SURVIVORS.read_text(encoding="utf-8"))["survivor"]:
        if module in entry.get("modules", [module]) and entry["was"] in was and entry["now"] in now:
            return {"kind": entry["kind"], "why": entry["why"]}
    return {"kind": "unexamined", "why": ""}


def main():
    lines, survivors = {}, []
    for module in OPTIONS.modules or MODULES:
        lines[module], left = run(module)
        survivors += left
        print(f"{module}: {lines[module]['killed']} of {lines[module]['run']} killed", flush=True)
    total = {key: sum(line[key] for line in lines.values()) for key in next(iter(lines.values()))}
    equivalent = sum(survivor["kind"] == "equivalent" for survivor in survivors)
    shares = [round(100 * total["killed"] / (total["run"] - left_out), 1)
              for left_out in (0, equivalent)]
    print(f"{total['killed']} of {total['run']} noticed by a test ({shares[0]} %), {shares[1]} % "
          "of those that are not equivalent")
    if not OPTIONS.modules:
        result = {
            "tool": f"mutmut {version('mutmut')}", **provenance(),
            "command": " ".join(["python", "tools/mutation_score.py", *sys.argv[1:]]),
            "sample": {"share": OPTIONS.share, "at least": FEWEST, "seed": OPTIONS.seed},
            "total": total, "equivalent": equivalent, "percent killed": shares[0],
            "percent killed of those that are not equivalent": shares[1],
            "by module": lines, "survivors": survivors}
        RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The share of mutants that the tests kill.")
    parser.add_argument("modules", nargs="*", choices=[*MODULES, []], metavar="MODULE",
                        help="of annotated (all)")
    parser.add_argument("--share", type=float, default=0.015,
                        help="of each module's mutants (0.015)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    OPTIONS = parser.parse_args()
    main()
