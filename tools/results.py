"""Bring what results/README.md and README.md say of stored files up to date: `make results`.

The column "made at" of results/README.md names the git revision of the files that a row links to;
the rows on speed, there and in README.md, come from all runs in results/bench.
"""

import json
import re
import sys

from notebooks import ROOT

sys.path.append(str(ROOT))
from benchmarks import summary  # noqa: E402

RESULTS = ROOT / "results"
TABLE, README = RESULTS / "README.md", ROOT / "README.md"
LINK = re.compile(r"\]\(\./([^)]+)\)")


def facts_of(path):
    """What a file of results says of its runs, a dictionary each."""
    text = path.read_text(encoding="utf-8")
    facts = [json.loads(line)
             for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    return facts if isinstance(facts, list) else [facts]


def files(place=RESULTS):
    """The files of results at a path: itself, or all in a folder.

    Logs, translations and kept models belong to them.
    """
    if not place.is_dir():
        return [place]
    return sorted({*place.rglob("*.json"), *place.glob("*.jsonl")} - set(place.glob("models/*/*")))


def revisions(cells):
    """The short revisions of the files that a row links to."""
    runs = [facts for place in dict.fromkeys(LINK.findall(cells)) for file in files(RESULTS / place)
            for facts in facts_of(file)]
    return ", ".join(dict.fromkeys(f"`{facts['revision'][:7]}`" for facts in runs))


def quoted(text):
    """The text of README.md with its row on speed as all stored runs have it."""
    row = summary.readme_row(summary.load_runs(RESULTS / "bench"))
    return re.sub(r"^\| speed beside the quickest peer of .*$", lambda _: row, text,
                  flags=re.MULTILINE)


def marked(text):
    """The text of results/README.md with its row on speed, and then the last column of its table,
    as they should be.
    """
    speed = summary.results_row(summary.load_runs(RESULTS / "bench")) + " |"
    text = re.sub(r"^\| speed beside .*$", lambda _: speed, text, flags=re.MULTILINE)
    return re.sub(r"^(\|.*\]\(\./.*\|)[^|\n]*\|$", lambda line: f"{line[1]} {revisions(line[1])} |",
                  text, flags=re.MULTILINE)


if __name__ == "__main__":
    for path, renewed in ((TABLE, marked), (README, quoted)):
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
