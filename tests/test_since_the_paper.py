"""Page 26: the long run goes on where it was ended, its results are whole, its changes short."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import since_the_paper as since  # noqa: E402


class Ended(Exception):
    """Stands for a kill."""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """(a function that starts a tiny run, the seeds that were trained); ends before run `stop`."""
    trained, stop, train_on = [], [None], since.train_on

    def counted(corpus, tokenizer, config, training, *how, **more):
        if len(trained) == stop[0]:
            raise Ended
        trained.append(training.seed)
        return train_on(corpus, tokenizer, config, training, *how, **more)

    def start(end=None, steps=1):
        trained.clear()
        stop[0] = end
        return since.main(
            tmp_path / "out.json", names=["as printed", "decoder only"], seeds=(0, 1), sentences=3,
            sizes=replace(since.SIZES, N=1, d_model=8, d_ff=8, h=4),
            training=replace(since.TRAINING, steps=steps, max_tokens=64, validate_every=steps))

    monkeypatch.setattr(since, "train_on", counted)
    return start, trained, tmp_path / "out.json"


def test_the_run_goes_on_where_it_was_ended_and_makes_nothing_twice(tiny):
    start, trained, out = tiny
    with pytest.raises(Ended):
        start(end=3)
    kept = json.loads(out.read_text())
    made = [(run["variant"], run["seed"]) for run in kept["runs"]]
    assert made == [("as printed", 0), ("decoder only", 0), ("as printed", 1)]
    runs = start()
    assert trained == [1] and len(runs) == 4 and runs[:3] == kept["runs"]
    assert start() == runs and trained == []
    assert len(start(steps=2)) == 4 and trained == [0, 0, 1, 1], "other numbers, other runs"
    parts = [run[part] for run in runs for part in ("short", "long")]
    assert all(part["loss"] > 0 and 0 <= part["bleu"] <= 100 for part in parts)


def test_results_hold_three_seeds_of_every_variant_as_the_page_builds_it():
    facts = json.loads((ROOT / "results" / "since_the_paper.json").read_text(encoding="utf-8"))
    space = {"__name__": "page"}
    exec(since.page_code(), space)
    made = Counter((run["variant"], run["seed"]) for run in facts["runs"])
    assert made == {(name, seed): 1 for name in space["VARIANTS"] for seed in range(3)}
    assert facts["training"]["steps"] == since.TRAINING.steps and facts["sentences"] == since.SENTENCES
    counts = [run["parameters"] for run in facts["runs"]]
    assert max(counts) / min(counts) < 1.006, "not at equal parameters"


def test_every_change_takes_at_most_twenty_lines():
    cells = json.loads(since.PAGE.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if "variant" in cell["metadata"].get("tags", [])]
    changes = [text for text in code if re.search("^(class|def) ", text, re.M)]
    assert len(changes) >= 7
    for text in changes:
        own = text.partition("VARIANTS = ")[0]
        assert sum(bool(line.strip()) for line in own.splitlines()) <= 20, own.splitlines()[0]
