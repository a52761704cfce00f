"""The share of mutants that the tests kill, of every module of the package and of the C in them.

    python tools/mutation_score.py                    a sample of every module's mutants; results/mutation_score.json
    python tools/mutation_score.py --share 1          all of them: days; what has been run already is not run again
    python tools/mutation_score.py decoding native.c  these modules only, and the C of those that end in .c
    python tools/mutation_score.py --report           write the result from what has been run so far

A mutant is one small change inside a function, made by mutmut: another number, operator, argument or constant. It is killed if
a test of its module fails. mutmut does not look into strings, so C is changed here: an operator for its neighbour, n for n + 1.
Where it stands is kept in _build/mutmut/, a folder a module: an interrupted run goes on. A module whose code has changed begins
anew. Mutants that survive mutmut's own choice of tests meet all tests of their module once more, in a fresh process, where those
that only processes or fixtures reach are killed. A test that is written for a survivor does not raise the score: another seed may.
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path

from mutate import checkout

from annotated.files import provenance
from notebooks import PACKAGE, ROOT

WORK = ROOT / "_build" / "mutmut"
# Every module with a function is sampled, and guarded by tests/test_<module>.py; these by the tests of others too.
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if "def " in path.read_text(encoding="utf-8"))
C_MODULES = [f"{module}.c" for module in MODULES if "#pragma omp" in (PACKAGE / f"{module}.py").read_text(encoding="utf-8")]
ALSO = {"attention": "multi_head", "checkpoints": "run_state", "loader": "training", "masking": "transformer", "native": "fast",
        "style": "attention_charts charts", "transformer": "masking"}
FEWEST, FEWEST_IN_C = 6, 20  # mutants of a module that are run, if it has as many
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
timeout_multiplier = 6.0
"""
NAMES = """
import sys
from pathlib import Path
from mutmut.mutation.file_mutation import mutate_file_contents
made = mutate_file_contents(sys.argv[1], Path(sys.argv[1]).read_text(encoding="utf-8"))
print(*made.mutant_names, sep="\\n")
"""


def code_digest(text):
    """Changes when the code does, and with it what is known of its mutants."""
    return hashlib.sha256(text.encode()).hexdigest()


def guards(module):
    """The test files that a module's mutants meet."""
    return [f"tests/test_{name}.py" for name in [module, *ALSO.get(module, "").split()]]


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
    text = CONFIG.format(module=module, patterns=json.dumps(NOT_MUTATED), selection=json.dumps([*guards(module), *CHOICE]))
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def environment(folder, mutant=None):
    """What processes of a module's folder need: the mutated package first, one thread, and perhaps the mutant that acts."""
    wanted = {"PYTHONPATH": str(folder / "mutants"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **wanted, **({"MUTANT_UNDER_TEST": mutant} if mutant else {})}


def chosen(folder, module, share, seed):
    """(names of all mutants, those of the sample)."""
    command = [sys.executable, "-c", NAMES, f"annotated/{module}.py"]
    said = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
    names = [f"annotated.{module}.{name}" for name in said.stdout.split()]
    return names, sampled(names, module, share, seed)


def sampled(names, module, share, seed):
    """The first of a shuffled list, so that a larger share holds the smaller."""
    fewest = FEWEST_IN_C if module.endswith(".c") else FEWEST
    return random.Random(f"{seed} {module}").sample(names, len(names))[:max(fewest, math.ceil(share * len(names)))]


def read(path):
    """What a JSON file holds; {} where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def outcomes(folder, module):
    """{mutant: "killed", "survived", "timeout", "no test" or "not run"}, second looks included."""
    codes = read(folder / "mutants" / "annotated" / f"{module}.py.meta").get("exit_code_by_key", {})
    return {name: STATUS.get(code, "timeout") for name, code in codes.items()} | read(folder / "again.json")


def run(module, share, seed):
    """Run the sampled mutants of a module that have not been run, with mutmut's choice of tests."""
    folder = place(module)
    _, sample = chosen(folder, module, share, seed)
    known = outcomes(folder, module)
    left = [name for name in sample if known.get(name, "not run") == "not run"]
    print(f"{module}: {len(left)} of {len(sample)} mutants are still to be run", flush=True)
    if left:
        with open(folder / "log", "ab") as log:
            command = [str(Path(sys.executable).parent / "mutmut"), "run", "--max-children", "1", *left]
            if subprocess.run(command, cwd=folder, env=environment(folder), stdout=log, stderr=log).returncode:
                print(f"{module}: mutmut stopped, see {folder / 'log'}", flush=True)


def look_again(module, share, seed):
    """All tests of a module on each sampled mutant that is left alive."""
    folder = place(module)
    _, sample = chosen(folder, module, share, seed)
    shutil.copytree(ROOT / "tests", folder / "mutants" / "tests", dirs_exist_ok=True)
    again = read(folder / "again.json")
    for name, outcome in outcomes(folder, module).items():
        if name in sample and outcome not in ("killed", "not run") and name not in again:
            again[name] = tested(folder / "mutants", environment(folder, name), [*CHOICE, *guards(module)])
            (folder / "again.json").write_text(json.dumps(again, indent=1), encoding="utf-8")


def tested(folder, variables, choice):
    """What becomes of a mutant that meets these tests in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *choice]
    try:
        code = subprocess.run(command, cwd=folder, env=variables, capture_output=True, timeout=900).returncode
    except subprocess.TimeoutExpired:
        return "timeout"
    return STATUS.get(code, "killed")  # its tests could not be collected, or a signal ended it


SWAPS = dict(pair.split() for pair in
             "+ -,- +,* /,/ *,< <=,<= <,> >=,>= >,== !=,!= ==,&& ||,|| &&,<< >>,>> <<,& |,^ &,% *,+= -=,-= +=".split(","))
C_TOKEN = re.compile(r"(?<= )(?:[-+]=|[<>=!]=|&&|\|\||<<|>>|[-+*/<>%&^])(?= )|(?<![\w.])(?:0x[0-9a-f]+|\d+(?:\.\d+)?(?:e-?\d+)?)[fu]?\b")
C_TESTS = [*CHOICE, "tests/test_native.py", "tests/test_products.py", "tests/test_fast.py", "-k",
           "test_native or test_products or one_call or in_c or c_code or outside or only_some or chunks or writes"]
C_COMPILES = """
from annotated import native, products
assert all(map(native.library, (8, 16, 32))) and all(map(products.fused_library, (16, 32)))
"""


def c_mutants(module):
    """{name: (start, end, other)} in a module's text: one token of its C, in the branches that are compiled on this machine."""
    text, found, marked = (PACKAGE / f"{module}.py").read_text(encoding="utf-8"), {}, ""
    for block in re.finditer(r'= r"""\n(.*?)"""', text, re.DOTALL):
        end = block.start(1)
        for token in C_TOKEN.finditer(text, *block.span(1)):
            line = text[text.rindex("\n", 0, token.start()) + 1:token.start()]
            if "//" not in line and not re.match(r"\s*#(?!define)", line):
                found[f"at{token.start()}"] = (*token.span(), SWAPS.get(token[0], f"({token[0]} + 1)"))
                marked, end = f"{marked}{text[end:token.start()]} at{token.start()} ", token.end()
        marked += text[end:block.end(1)]
    left = ""
    for bits in (8, 16, 32):
        command = ["cc", "-E", "-P", "-march=native", f"-DBITS={bits}", "-x", "c", "-"]
        left += subprocess.run(command, input=marked, capture_output=True, text=True, check=True).stdout
    there = set(re.findall(r"\bat\d+\b", left))
    return {name: change for name, change in found.items() if name in there}


def run_c(module, share, seed):
    """Run the sampled mutants of a module's C; {name: outcome}, "no C" where the compiler refuses one."""
    source = PACKAGE / f"{module}.py"
    text, mutants, kept = source.read_text(encoding="utf-8"), c_mutants(module), WORK / f"{module}.c.json"
    known = read(kept)
    known = known if known.get("code") == code_digest(text) else {"code": code_digest(text)}
    with tempfile.TemporaryDirectory() as folder:
        checkout(copy := Path(folder).resolve())
        variables = environment(copy) | {"PYTHONPATH": str(copy), "XDG_CACHE_HOME": str(copy / "cache")}
        for name in sampled(list(mutants), f"{module}.c", share, seed):
            if known.get(name, "not run") != "not run":
                continue
            start, end, other = mutants[name]
            (copy / "annotated" / source.name).write_text(text[:start] + other + text[end:], encoding="utf-8")
            compiles = subprocess.run([sys.executable, "-c", C_COMPILES], cwd=copy, env=variables, capture_output=True).returncode == 0
            known[name] = tested(copy, variables, C_TESTS) if compiles else "no C"
            kept.write_text(json.dumps(known, indent=1), encoding="utf-8")
            print(f"{module}.c: {known[name]}: {text[text.rindex(chr(10), 0, start):end].strip()} -> {other}", flush=True)


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


def report(share, seed):
    """Write results/mutation_score.json from what has been run."""
    reasons = tomllib.loads((ROOT / "tools" / "survivors.toml").read_text(encoding="utf-8"))["survivor"]
    lines, survivors = {}, []
    for module in [*MODULES, *C_MODULES]:
        names, ends, differs = ends_in_c(module[:-2], share, seed) if module.endswith(".c") else ends_of(module, share, seed)
        counted = [end for end in ends.values() if end != "no C"]
        lines[module] = {"mutants": len(names), "sampled": len(counted), "run": sum(end != "not run" for end in counted),
                         "killed": counted.count("killed"), "survived": counted.count("survived") + counted.count("no test"),
                         "timeouts": counted.count("timeout")}
        for name, end in ends.items():
            if end not in ("killed", "not run", "no C"):
                was, now = differs(name)
                kind, why = reason(module, was, now, reasons)
                survivors.append({"module": module, "outcome": end, "was": was, "now": now, "kind": kind, "why": why})
    total = {key: sum(line[key] for line in lines.values()) for key in lines["native"]}
    equivalent = sum(survivor["kind"] == "equivalent" for survivor in survivors)
    result = {"tool": f"mutmut {version('mutmut')}", "command": f"python tools/mutation_score.py --share {share} --seed {seed}",
              **provenance(),
              "sample": {"share": share, "at least": FEWEST, "at least in C": FEWEST_IN_C, "seed": seed},
              "not mutated": NOT_MUTATED, "total": total, "equivalent": equivalent,
              "percent killed": round(100 * total["killed"] / max(1, total["run"]), 1),
              "percent killed of those that are not equivalent": round(100 * total["killed"] / max(1, total["run"] - equivalent), 1),
              "by module": lines, "survivors": sorted(survivors, key=lambda s: (s["module"], s["was"], s["now"]))}
    path = ROOT / "results" / "mutation_score.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{words(result)}; {total['sampled'] - total['run']} not run, {total['timeouts']} ran out of time, "
          f"{len(survivors)} left, {equivalent} of them equivalent")


def words(score):
    """What both READMEs say of a result."""
    total = score["total"]
    return (f"{total['killed']} of {total['run']} noticed by a test ({score['percent killed']} %), "
            f"{score['percent killed of those that are not equivalent']} % of those that are not equivalent")


def ends_of(module, share, seed):
    """(all mutants, {sampled mutant: outcome}, what tells the difference that one makes)."""
    folder = place(module)
    names, sample = chosen(folder, module, share, seed)
    found = outcomes(folder, module)
    return names, {name: found.get(name, "not run") for name in sample}, lambda name: difference(folder, name)


def ends_in_c(module, share, seed):
    """The same of a module's C."""
    text, mutants, known = (PACKAGE / f"{module}.py").read_text(encoding="utf-8"), c_mutants(module), read(WORK / f"{module}.c.json")
    known = known if known.get("code") == code_digest(text) else {}

    def differs(name):
        start, end, other = mutants[name]
        first, last = text.rindex("\n", 0, start) + 1, text.index("\n", end)
        return text[first:last].strip(), (text[first:start] + other + text[end:last]).strip()

    return mutants, {name: known.get(name, "not run") for name in sampled(list(mutants), f"{module}.c", share, seed)}, differs


def main():
    parser = argparse.ArgumentParser(description="The share of mutants that the tests kill.")
    parser.add_argument("modules", nargs="*", help="of annotated (all), and with .c their C")
    parser.add_argument("--share", type=float, default=0.015, help="of each module's mutants (0.015)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--report", action="store_true", help="run nothing, only write the result")
    options = parser.parse_args()
    every = [*MODULES, *C_MODULES]
    if unknown := set(options.modules) - set(every):
        parser.error(f"no module {', '.join(sorted(unknown))}: there are {', '.join(every)}")
    for act in () if options.report else (run, look_again):
        for module in options.modules or every:
            if not module.endswith(".c"):
                act(module, options.share, options.seed)
            elif act is run:
                run_c(module[:-2], options.share, options.seed)
    if options.report or not options.modules:
        report(options.share, options.seed)


if __name__ == "__main__":
    main()
