"""Add the output of `annotated score` for a run to a file of results, one line per run.

    python experiments/collect.py RESULTS.jsonl ROW SEED FOLDER/SPLIT.json

The line holds row, training seed and split, the content of SPLIT.json, and the translations of
SPLIT.txt as "outputs". It replaces an earlier line of the same run.
"""

import sys
from pathlib import Path

from annotated.results import add_json_line, read_json


def main(results, row, seed, scored):
    scored = Path(scored)
    run = {"row": row, "training_seed": int(seed), "split": scored.stem}
    outputs = scored.with_suffix(".txt").read_text(encoding="utf-8").split("\n")[:-1]
    add_json_line(results, {**run, **read_json(scored), "outputs": outputs}, key=run)


if __name__ == "__main__":
    main(*sys.argv[1:])
