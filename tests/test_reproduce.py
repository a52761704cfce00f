"""`annotated parse` and `annotated vary`: what they write is what the library measures."""

import json

from annotated.cli import main
from annotated.paper.trees import bracket_f1, load_treebank, parse_tree


def test_the_trees_that_parse_writes_have_the_score_that_it_says(tmp_path, capsys):
    sizes = "--N 1 --d-model 32 --d-ff 32 --h 2 --steps 2 --warmup 1 --copies 1".split()
    words = ["--results", tmp_path / "scores.json", "--trees", tmp_path / "trees.txt"]
    words += ["--sentences", 6, "--beam", 2, "--device", "cpu"]
    main(["parse", "toy", "--out", str(tmp_path / "model"), *sizes, *map(str, words)])
    lines = (tmp_path / "trees.txt").read_text(encoding="utf-8").splitlines()
    gold = load_treebank("toy").test[:6]
    trees = [None if line == "(TOP)" else parse_tree(line) for line in lines]
    score = bracket_f1(trees, gold)
    facts = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    scores = {name: (row["f1"], row["well_formed"]) for name, row in facts["scores"].items()}
    assert scores["beam 2"] == (score.f1, score.well_formed) != scores["constrained"]
    assert facts["command"].startswith("annotated parse toy --out ")
    assert f"F1 {score.f1:6.2f}" in capsys.readouterr().out
