"""`make results`: update the parts of results/README.md and README.md that come from stored files.

The column "made at" of results/README.md names the git revisions of the files that a row links to.
The rows on speed, there and in README.md, summarise all runs in results/bench.
"""

import re

from annotated.results import read_json, read_json_lines
from benchmarks import summary
from notebooks import ROOT

RESULTS = ROOT / "results"
TABLE, README = RESULTS / "README.md", ROOT / "README.md"
LINK = re.compile(r"\]\(\./([^)]+)\)")


def load_records(path):
    """Return the records of a file of results, a dictionary for each run."""
    records = (read_json_lines if path.suffix == ".jsonl" else read_json)(path)
    return records if isinstance(records, list) else [records]


def files(place=RESULTS):
    """Return the files of results at a path: the file itself, or all in the folder, without logs of
    subfolders, translations and the files of kept models.
    """
    if not place.is_dir():
        return [place]
    return sorted({*place.rglob("*.json"), *place.glob("*.jsonl")} - set(place.glob("models/*/*")))


def revisions(cells):
    """Return the short revisions of the files that a row links to."""
    records = [part for place in dict.fromkeys(LINK.findall(cells))
               for file in files(RESULTS / place) for record in load_records(file)
               for part in (record, *record.get("points", ()))]
    return ", ".join(dict.fromkeys(f"`{record['revision'][:7]}`" for record in records))


def update_readme(text):
    """Return README.md with its row on speed brought up to date."""
    row = summary.readme_row(summary.load_runs(RESULTS / "bench"))
    return re.sub(r"^\| speed as .*$", lambda _: row, text, flags=re.MULTILINE)


def update_table(text):
    """Return results/README.md with its row on speed and its column of revisions brought up to
    date.
    """
    speed = summary.results_row(summary.load_runs(RESULTS / "bench")) + " |"
    text = re.sub(r"^\| speed beside .*$", lambda _: speed, text, flags=re.MULTILINE)
    return re.sub(r"^(\|.*\]\(\./.*\|)[^|\n]*\|$", lambda line: f"{line[1]} {revisions(line[1])} |",
                  text, flags=re.MULTILINE)


if __name__ == "__main__":
    for path, update in ((TABLE, update_table), (README, update_readme)):
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
