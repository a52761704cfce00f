"""Page 26: the results of the long run are whole, its changes short."""

import json
import re
from collections import Counter

import since_the_paper as since
from helpers import ROOT


def test_results_hold_three_seeds_of_every_variant_as_the_page_builds_it():
    facts = json.loads((ROOT / "results" / "since_the_paper.json").read_text(encoding="utf-8"))
    space = {"__name__": "page"}
    exec(since.page_code(), space)
    counted = Counter((run["variant"], run["seed"]) for run in facts["runs"])
    assert counted == {(name, seed): 1 for name in space["VARIANTS"] for seed in range(3)}


def test_every_change_takes_at_most_twenty_lines():
    cells = json.loads(since.PAGE.read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "variant" in cell["metadata"].get("tags", [])]
    code = ["".join(cell["source"]) for cell in tagged]
    changes = [text for text in code if re.search("^(class|def) ", text, re.M)]
    assert len(changes) >= 7
    for text in changes:
        own = text.partition("VARIANTS = ")[0]
        assert sum(bool(line.strip()) for line in own.splitlines()) <= 20, own.splitlines()[0]
