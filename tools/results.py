"""Which files under results/ are older than the code that made them, and what has changed since.

    python tools/results.py                      a row for each file; the column "made at" of results/README.md is brought up to date, and
                                                 so are the rows on speed there and in README.md, from all runs in results/bench
    python tools/results.py stamp FILE MODULE …  names the present code in a file that a command of the package has just written

Every file of results names the revision it was made at and a digest of each module that had a part in it (`provenance` in
annotated.files). A module whose digest differs today has changed since; comments, docstrings and layout do not count.
"""

import json
import re
import subprocess
import sys

from annotated.files import changed_modules, provenance
from notebooks import ROOT

sys.path.append(str(ROOT))
from benchmarks import over  # noqa: E402

RESULTS = ROOT / "results"
TABLE, README = RESULTS / "README.md", ROOT / "README.md"
LINK = re.compile(r"\]\(\./([^)]+)\)")


def facts_of(path):
    """What a file of results says of its code: of a list, its first entry does."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    return facts[0] if isinstance(facts, list) else facts


def files(place=RESULTS):
    """The JSON files of results at a path: itself, or all in a folder. Logs, translations and kept models belong to them."""
    return sorted(set(place.rglob("*.json")) - set(place.glob("models/*/*"))) if place.is_dir() else [place]


def commits_since(facts):
    """How many commits have touched the modules of a result since it was made; None where git does not know its revision."""
    command = ["git", "rev-list", "--count", f"{facts['revision']}..HEAD", "--", *facts["modules"]]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return int(run.stdout) if run.returncode == 0 else None


def row(path):
    """One line on a file: its revision, and what has changed since."""
    facts = facts_of(path)
    changed, count = changed_modules(facts), commits_since(facts)
    since = f"{'?' if count is None else count} commits since, changed: {' '.join(changed)}" if changed else "by the present code"
    late = "; recorded afterwards" if facts.get("recorded_afterwards") else ""
    return f"{path.relative_to(ROOT)!s:45} {facts['revision'][:7]}  {since}{late}"


def made(cells):
    """The table's words on the files that a row links to: short revisions, and whether the code has changed since."""
    found = [facts_of(file) for place in dict.fromkeys(LINK.findall(cells)) for file in files(RESULTS / place)]
    revisions = ", ".join(dict.fromkeys(f"`{facts['revision'][:7]}`" for facts in found))
    older = sum(bool(changed_modules(facts)) for facts in found)
    return revisions + ("" if not older else ", older than the code" if older == len(found) else ", some older than the code")


def quoted(text):
    """The text of README.md with its row on speed as all stored runs have it."""
    return re.sub(r"^\| speed beside the quickest peer of .*$", lambda _: over.row_of_readme(over.stored(RESULTS / "bench")), text, flags=re.MULTILINE)


def marked(text):
    """The text of results/README.md with its row on speed, and then the last column of its table, as they should be."""
    speed = over.row_of_results(over.stored(RESULTS / "bench")) + " |"
    text = re.sub(r"^\| speed beside .*$", lambda _: speed, text, flags=re.MULTILINE)
    return re.sub(r"^(\|.*\]\(\./.*\|)[^|\n]*\|$", lambda line: f"{line[1]} {made(line[1])} |", text, flags=re.MULTILINE)


def stamp(path, *modules):
    """Write into a file of results which code made it: the present one."""
    facts = {**json.loads(path.read_text(encoding="utf-8")), **provenance(*modules)}
    facts.pop("recorded_afterwards", None)
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments):
    if arguments[:1] == ["stamp"] and len(arguments) > 2:
        return stamp(ROOT / arguments[1], *arguments[2:])
    if arguments:
        raise SystemExit(__doc__)
    print(*map(row, files()), sep="\n")
    for path, renewed in ((TABLE, marked), (README, quoted)):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
