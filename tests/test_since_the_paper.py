"""Page 26: the long run goes on where it was ended, its results are whole, its changes short."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import since_the_paper as since
from helpers import ROOT


def test_a_run_goes_on_where_it_was_ended_and_makes_nothing_twice(tmp_path, monkeypatch):
    trained, train_on, left = [], since.train_on, [3]

    def counted(*arguments, **more):
        trained.append(arguments[3].seed)
        return train_on(*arguments, **more) if len(trained) <= left[0] else 1 / 0  # it is ended

    def start(steps=1):
        trained.clear()
        training = replace(since.TRAINING, steps=steps, max_tokens=64, validate_every=steps)
        return since.main(
            tmp_path / "out.json", names=["as printed", "decoder only"], seeds=(0, 1), sentences=3,
            sizes=replace(since.SIZES, N=1, d_model=8, d_ff=8, h=4), training=training)

    monkeypatch.setattr(since, "train_on", counted)
    with pytest.raises(ZeroDivisionError):
        start()
    kept = json.loads((tmp_path / "out.json").read_text())["runs"]
    runs = start()
    assert trained == [1] and len(kept) == 3 and runs[:3] == kept and len(runs) == 4
    left[0] = 4
    assert len(start(steps=2)) == 4 and trained == [0, 0, 1, 1], "other numbers, other runs"


def test_results_hold_three_seeds_of_every_variant_as_the_page_builds_it():
    facts = json.loads((ROOT / "results" / "since_the_paper.json").read_text(encoding="utf-8"))
    space = {"__name__": "page"}
    exec(since.page_code(), space)
    counted = Counter((run["variant"], run["seed"]) for run in facts["runs"])
    assert counted == {(name, seed): 1 for name in space["VARIANTS"] for seed in range(3)}
    assert facts["training"]["steps"] == since.TRAINING.steps
    counts = [run["parameters"] for run in facts["runs"]]
    assert max(counts) / min(counts) < 1.006, "not at equal parameters"


def test_every_change_takes_at_most_twenty_lines():
    cells = json.loads(since.PAGE.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "variant" in cell["metadata"].get("tags", [])]
    code = ["".join(cell["source"]) for cell in tagged]
    changes = [text for text in code if re.search("^(class|def) ", text, re.M)]
    assert len(changes) >= 7
    for text in changes:
        own = text.partition("VARIANTS = ")[0]
        assert sum(bool(line.strip()) for line in own.splitlines()) <= 20, own.splitlines()[0]
