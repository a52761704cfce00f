"""`annotated score`, `vary` and `parse`: what they write is what the library measures."""

import math
from pathlib import Path

import pytest
import sacrebleu
import torch
from helpers import TEXTS, one_thread
from test_cli import SMALL, refused, run, write_corpus
from torch.nn import functional as F

from annotated.data.tokenizers import BEGIN, END
from annotated.data.toy_language import generate_corpus
from annotated.fast import engines
from annotated.paper.trees import bracket_f1, load_treebank, parse_tree
from annotated.results import read_json
from annotated.training import loop
from annotated.training.checkpoints import load_checkpoint, save_checkpoint
from annotated.translation.search import translate

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A model that has begun to learn, in the folder `model`, and its corpus in `own`."""
    monkeypatch.chdir(tmp_path)
    write_corpus("own")
    run("train", "own", "--out", "model", *SMALL, "--steps", 150, "--warmup", 60)
    return load_checkpoint("model")


def test_score_measures_what_translate_writes(trained, tmp_path, monkeypatch):
    sources, references = (list(side) for side in zip(*TEXTS, strict=True))
    outputs = translate(sources, trained.model, trained.tokenizer, "en", beam=2, alpha=0.5)
    run("score", "model", "own", "test", "results", "--beam", 2, "--alpha", 0.5)
    facts = read_json("results/test.json")
    assert Path("results/test.txt").read_text(encoding="utf-8").splitlines() == outputs
    score = facts["entries"]["sacrebleu"]["score"]
    assert score == pytest.approx(sacrebleu.corpus_bleu(outputs, [references]).score) and score > 10
    losses = []
    for source, target in loop.encode_pairs(TEXTS, trained.tokenizer):
        given = torch.tensor([[*source, END]]), torch.tensor([[BEGIN, *target]])
        losses += F.cross_entropy(trained.model(*given)[0], torch.tensor([*target, END]),
                                  reduction="none").tolist()
    perplexity = math.exp(sum(losses) / len(losses))  # 150 roundings
    assert facts["entries"]["perplexity"]["score"] == pytest.approx(perplexity, rel=1e-5)
    assert facts["decoding"] == "beam 2, alpha 0.5" and facts["log"][-1]["step"] == 150
    assert facts["data"].endswith(f"test, en to de, {len(TEXTS)} sentences")
    assert facts["command"].startswith("annotated score ") and facts["log"] == trained.info["log"]
    # as `export --back` makes it
    save_checkpoint("bare", trained.model, trained.tokenizer, source_language="en",
                    target_language="de")
    run("score", "bare", "own", "test", "again", "--beam", 2, "--alpha", 0.5)
    bare = read_json("again/test.json")
    assert bare["entries"] == facts["entries"] and bare["training"] is None and bare["log"] is None
    assert (bare["engine"], bare["precision"]) == ("torch", "fp32")
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))
    monkeypatch.setattr(engines, "apart", lambda *_: 9.9)  # no engine computes this model
    run("score", "bare", "own", "test", "third", "--engine", "ctranslate2", "--precision", "bf16")
    third = read_json("third/test.json")  # names what computed, not what was asked for
    assert (third["engine"], third["precision"]) == ("torch", "fp32")


def test_score_joins_moses_tokens_and_compares_with_the_plain_references(trained):
    plain = [(source, target.replace(" .", ".")) for source, target in TEXTS]
    references = [target for _, target in plain]
    write_corpus("plain", plain)
    run("score", "model", "own", "test", "results", "--moses", "--references", "plain")
    outputs = translate([text for text, _ in TEXTS], trained.model, trained.tokenizer, "en")
    outputs = [line.replace(" .", ".") for line in outputs]
    assert Path("results/test.txt").read_text(encoding="utf-8").splitlines() == outputs
    assert any(line.endswith(("Hund.", "schläft.")) for line in outputs)
    score = read_json("results/test.json")["entries"]["sacrebleu"]["score"]
    assert score == pytest.approx(sacrebleu.corpus_bleu(outputs, [references]).score) and score > 10


def test_parse_trains_scores_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees = [sentence.tree for sentence in generate_corpus()["train"][:43]]
    Path("own").mkdir()
    for split, some in (("train", trees[:40]), ("dev", trees[40:41]), ("test", trees[41:])):
        lines = "".join(f"{tree}\n" for tree in some)
        Path("own", f"{split}.trees").write_text(lines, encoding="utf-8")
    command = ("own --out model --results results.json --trees parsed.trees --N 1 --d-model 16 "
               "--d-ff 16 --h 2 --steps 4 --save-every 2 --copies 2 --precision fp32 --average 2 "
               "--extra 5 --beam 2 --leaves XX --word-dropout 0.5").split()

    def parse(*more):
        run("parse", *command, *more)
        return read_json("results.json")

    facts = parse()
    methods = ["right-branching", "nearest copy", "greedy", "beam 2", "constrained"]
    assert list(facts["scores"]) == methods and facts["scores"]["greedy"]["sentences"] == 2
    assert facts["treebank"] == "own" and facts["seed"] == 0 and facts["training"]["steps"] == 4
    preset = {"copies": 4, "min_frequency": 3, "leaves": "numbers", "parts": True,
              "word_dropout": 1.0}  # gum's
    assert facts["pairs"] == preset | {"copies": 2, "leaves": "XX", "word_dropout": 0.5}
    assert facts["averaged"] == ["step-00000002", "step-00000004"]
    assert facts["claim"] == "C30" and facts["command"].startswith("annotated parse own --out ")
    assert "vocabulary" not in facts and len(Path("parsed.trees").read_text().splitlines()) == 2
    before = Path("model/model.safetensors").read_bytes()
    rows = parse("--beam-sentences", 1)["scores"]
    few = {"greedy, first 1": 1, "beam 2, first 1": 1, "constrained, first 1": 1}
    assert {name: rows[name]["sentences"] for name in list(rows)[2:]} == {"greedy": 2, **few}
    assert len(Path("parsed.trees").read_text().splitlines()) == 1
    again = parse("--sentences", 1)  # the model is there: scored, not trained
    assert again["scores"]["greedy"]["sentences"] == 1
    assert Path("model/model.safetensors").read_bytes() == before
    valid = parse("--split", "valid")
    assert valid["scores"]["greedy"]["sentences"] == 1 and "scored on valid" in valid["data"]
    assert "scored on test" in facts["data"]
    error = refused("parse", ["toy", "--out", "model"], capsys)
    assert "holds no parser of this treebank toy" in error


def test_the_trees_that_parse_writes_have_the_score_that_it_says(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(*("parse toy --out model --N 1 --d-model 32 --d-ff 32 --h 2 --steps 2 --warmup 1 --copies 1"
          " --results scores.json --trees trees.txt --sentences 6 --beam 2 --device cpu").split())
    lines = Path("trees.txt").read_text(encoding="utf-8").splitlines()
    trees = [None if line == "(TOP)" else parse_tree(line) for line in lines]
    score = bracket_f1(trees, load_treebank("toy").test[:6])
    facts = read_json("scores.json")
    rates = {name: (row["f1"], row["well_formed"]) for name, row in facts["scores"].items()}
    assert rates["beam 2"] == (score.f1, score.well_formed) != rates["constrained"]
    assert facts["command"].startswith("annotated parse toy --out ")
    assert f"F1 {score.f1:6.2f}" in capsys.readouterr().out
