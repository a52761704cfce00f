"""The share of mutants that the tests kill: mutmut over the model, loss, schedule, batches, decoding, evaluation and checkpoints.

    python tools/mutation_score.py                    a sample of every module's mutants; results/mutation_score.json
    python tools/mutation_score.py --share 1          all of them: hours; what has been run already is not run again
    python tools/mutation_score.py decoding batches   these modules only
    python tools/mutation_score.py --again            all tests, as they are now, once more on those that survived
    python tools/mutation_score.py --report           write the result from what has been run so far

A mutant is one small change inside a function, made by mutmut: another number, operator, argument or constant. It is killed if
a test of its module fails. Where it stands is kept in _build/mutmut/, a folder a module: an interrupted run goes on, and runs of
several modules may go on side by side. A module whose code has changed begins anew. Mutants that survive mutmut's own choice of
tests meet all tests of their module once more, in a fresh process, where those that only processes or fixtures reach are killed.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from annotated.files import changed_modules, code_digest, provenance
from notebooks import ROOT

WORK = ROOT / "_build" / "mutmut"
TESTS = {  # module: the tests that guard it
    "attention": "attention multi_head", "multi_head": "multi_head", "feed_forward": "feed_forward", "embeddings": "embeddings",
    "positional": "positional", "masking": "masking", "stacks": "stacks", "transformer": "transformer masking",
    "regularization": "regularization", "schedule": "schedule", "batches": "batches", "decoding": "decoding", "fast": "fast",
    "evaluation": "evaluation", "checkpoints": "checkpoints training",
}
# One test asks what importing loads: it would find mutmut.
CHOICE = ["-m", "not long", "--deselect=tests/test_transformer.py::test_import_needs_torch_and_the_names_of_shapes_only_and_opens_no_file"]
# Lines that only word a message, a help text or a representation are left alone; docstrings, annotations, decorators, decorated
# functions and code outside functions mutmut never changes.
NOT_MUTATED = [r"^\s*raise ", r"^\s*(mend|got|refused) = ", r"^\s*f?\"[^\"]*\"\)?,?$", "help=", "ArgumentParser", "return f\""]
STATUS = {0: "survived", 1: "killed", 3: "killed", 5: "no test", 33: "no test", None: "not run"}  # all others: "timeout"
CONFIG = """[tool.pytest.ini_options]
markers = ["long: runs in `make test-long` only"]

[tool.mutmut]
source_paths = ["annotated"]
only_mutate = ["annotated/{module}.py"]
do_not_mutate_patterns = {patterns}
pytest_add_cli_args_test_selection = {selection}
pytest_add_cli_args = ["-p", "no:cacheprovider"]
process_isolation = "forkserver"
use_git_change_detection = false
timeout_constant = 10.0
"""
NAMES = """
import sys
from pathlib import Path
from mutmut.mutation.file_mutation import mutate_file_contents
made = mutate_file_contents(sys.argv[1], Path(sys.argv[1]).read_text(encoding="utf-8"))
print(*made.mutant_names, sep="\\n")
"""


def place(module):
    """The folder in which the mutants of a module are run, made ready: the checkout by links, and mutmut's settings."""
    folder, code = WORK / module, code_digest((ROOT / "annotated" / f"{module}.py").read_text(encoding="utf-8"))
    if folder.exists() and ((folder / "code").read_text() if (folder / "code").is_file() else "") != code:
        shutil.rmtree(folder)
    (folder / "mutants" / "data").mkdir(parents=True, exist_ok=True)
    (folder / "code").write_text(code)
    links = {folder / name: ROOT / name for name in ("annotated", "tests")}
    links |= {folder / "mutants" / entry.name: entry for entry in ROOT.iterdir()
              if entry.name not in (".git", ".venv", "_build", "data", "annotated", "tests", "pyproject.toml")}
    links[folder / "mutants" / "data" / "toy"] = ROOT / "data" / "toy"
    for link, target in links.items():
        if not link.is_symlink():
            link.symlink_to(target)
    files = [f"tests/test_{name}.py" for name in TESTS[module].split()]
    text = CONFIG.format(module=module, patterns=json.dumps(NOT_MUTATED), selection=json.dumps([*files, *CHOICE]))
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def environment(folder, mutant=None):
    """What processes of a module's folder need: the mutated package first, one thread, and perhaps the mutant that acts."""
    wanted = {"PYTHONPATH": str(folder / "mutants"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **wanted, **({"MUTANT_UNDER_TEST": mutant} if mutant else {})}


def chosen(folder, module, share, seed):
    """(names of all mutants, those of the sample): the first of a shuffled list, so that a larger share holds the smaller."""
    command = [sys.executable, "-c", NAMES, f"annotated/{module}.py"]
    said = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
    names = [f"annotated.{module}.{name}" for name in said.stdout.split()]
    shuffled = random.Random(f"{seed} {module}").sample(names, len(names))
    return names, shuffled[:math.ceil(share * len(names))]


def read(path):
    """What a JSON file holds; {} where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def outcomes(folder, module):
    """{mutant: "killed", "survived", "timeout", "no test" or "not run"}, second looks included."""
    codes = read(folder / "mutants" / "annotated" / f"{module}.py.meta").get("exit_code_by_key", {})
    return {name: STATUS.get(code, "timeout") for name, code in codes.items()} | read(folder / "again.json")


def run(module, share, seed, anew=False):
    """Run the sampled mutants of a module that have not been run; then all its tests on each that is left alive.

    anew: also on those that they have met before and not killed.
    """
    folder = place(module)
    _, sample = chosen(folder, module, share, seed)
    known = outcomes(folder, module)
    left = [name for name in sample if known.get(name, "not run") == "not run"]
    print(f"{module}: {len(left)} of {len(sample)} mutants are still to be run", flush=True)
    if left:
        with open(folder / "log", "ab") as log:
            command = [str(Path(sys.executable).parent / "mutmut"), "run", "--max-children", "1", *left]
            subprocess.run(command, cwd=folder, env=environment(folder), stdout=log, stderr=log, check=True)
    shutil.copytree(ROOT / "tests", folder / "mutants" / "tests", dirs_exist_ok=True)
    again = read(folder / "again.json")
    if anew:
        again = {name: outcome for name, outcome in again.items() if outcome == "killed"}
    for name, outcome in outcomes(folder, module).items():
        if name in sample and outcome != "killed" and name not in again:
            again[name] = second_look(folder, module, name)
            (folder / "again.json").write_text(json.dumps(again, indent=1), encoding="utf-8")


def second_look(folder, module, name):
    """All tests of a module on one of its mutants, in a process of their own."""
    files = [f"tests/test_{test}.py" for test in TESTS[module].split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *CHOICE, *files]
    try:
        code = subprocess.run(command, cwd=folder / "mutants", env=environment(folder, name), capture_output=True, timeout=1800).returncode
    except subprocess.TimeoutExpired:
        return "timeout"
    return STATUS.get(code, "killed")  # its tests could not be collected, or a signal ended it


def difference(folder, name):
    """(line as it is, line as the mutant has it), without the space around them."""
    command = [str(Path(sys.executable).parent / "mutmut"), "show", name]
    said = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True).stdout
    before, after = (re.findall(rf"^\{sign}(?!\{sign})(.*)$", said, re.MULTILINE) for sign in "-+")
    return " / ".join(map(str.strip, before)), " / ".join(map(str.strip, after))


def reason(module, was, now, reasons):
    """(kind, why) of a survivor by the first entry of tools/survivors.toml that fits; else it is unexamined."""
    for entry in reasons:
        if module in entry.get("modules", [module]) and entry["was"] in was and entry["now"] in now:
            return entry["kind"], entry["why"]
    return "unexamined", ""


def report(modules, share, seed):
    """Write results/mutation_score.json from what has been run, here or, for modules that were run elsewhere, before."""
    reasons = tomllib.loads((ROOT / "tools" / "survivors.toml").read_text(encoding="utf-8"))["survivor"]
    path = ROOT / "results" / "mutation_score.json"
    before, lines, survivors = read(path), {}, []
    for module in modules:
        name = f"annotated/{module}.py"
        if not (WORK / module).exists() and changed_modules({"modules": {name: before["modules"][name]}}) == []:
            lines[module] = before["by module"][module]
            kept = [survivor for survivor in before["survivors"] if survivor["module"] == module]
            said = [reason(module, survivor["was"], survivor["now"], reasons) for survivor in kept]
            survivors += [survivor | {"kind": kind, "why": why} for survivor, (kind, why) in zip(kept, said, strict=True)]
            continue
        folder = place(module)
        names, sample = chosen(folder, module, share, seed)
        found = outcomes(folder, module)
        ends = [found.get(name, "not run") for name in sample]
        lines[module] = {"mutants": len(names), "run": sum(end != "not run" for end in ends), "killed": ends.count("killed"),
                         "survived": ends.count("survived") + ends.count("no test"), "timeouts": ends.count("timeout")}
        for name, end in zip(sample, ends, strict=True):
            if end not in ("killed", "not run"):
                was, now = difference(folder, name)
                kind, why = reason(module, was, now, reasons)
                survivors.append({"module": module, "outcome": end, "was": was, "now": now, "kind": kind, "why": why})
    total = {key: sum(line[key] for line in lines.values()) for key in ("mutants", "run", "killed", "survived", "timeouts")}
    equivalent = sum(survivor["kind"] == "equivalent" for survivor in survivors)
    result = {"tool": f"mutmut {version('mutmut')}", "command": f"python tools/mutation_score.py --share {share} --seed {seed}",
              **provenance("tools/mutation_score.py", *(f"annotated/{module}.py" for module in modules)),
              "sample": {"share": share, "seed": seed}, "not mutated": NOT_MUTATED, "total": total, "equivalent": equivalent,
              "percent killed": round(100 * total["killed"] / max(1, total["run"]), 1),
              "percent killed of those that are not equivalent": round(100 * total["killed"] / max(1, total["run"] - equivalent), 1),
              "by module": lines, "survivors": sorted(survivors, key=lambda s: (s["module"], s["was"], s["now"]))}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{total['killed']} of {total['run']} killed ({result['percent killed']} %), {total['timeouts']} ran out of time, "
          f"{len(survivors)} left, {equivalent} of them equivalent")


def main():
    parser = argparse.ArgumentParser(description="The share of mutants that the tests kill.")
    parser.add_argument("modules", nargs="*", help="of annotated (all those of the score)")
    parser.add_argument("--share", type=float, default=0.1, help="of each module's mutants (0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--again", action="store_true", help="let all tests meet once more the mutants that survived them")
    parser.add_argument("--report", action="store_true", help="run nothing, only write the result")
    options = parser.parse_args()
    if unknown := set(options.modules) - set(TESTS):
        parser.error(f"no module {', '.join(sorted(unknown))}: there are {', '.join(TESTS)}")
    for module in () if options.report else options.modules or TESTS:
        run(module, options.share, options.seed, options.again)
    if options.report or not options.modules:
        report(list(TESTS), options.share, options.seed)


if __name__ == "__main__":
    main()
