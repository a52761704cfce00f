"""Put what `annotated score` wrote of a run into a file of results, a line a run.

    python experiments/collect.py RESULTS.jsonl ROW SEED FOLDER/SPLIT.json

The line holds row, seed of the training and split, the facts of SPLIT.json, and as "outputs" the translations of SPLIT.txt. It takes the
place of a line of the same run.
"""

import sys
from pathlib import Path

from annotated.files import read_json, read_json_lines, write_json_lines


def main(results, row, seed, scored):
    results, scored = Path(results), Path(scored)
    run = {"row": row, "training_seed": int(seed), "split": scored.stem}
    outputs = scored.with_suffix(".txt").read_text(encoding="utf-8").split("\n")[:-1]
    before = read_json_lines(results) if results.exists() else []
    others = [line for line in before if any(line[name] != run[name] for name in run)]
    write_json_lines(results, [*others, {**run, **read_json(scored), "outputs": outputs}])


if __name__ == "__main__":
    main(*sys.argv[1:])
