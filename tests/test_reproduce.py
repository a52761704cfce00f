"""`annotated score`, `vary` and `parse`: what they write is what the library measures."""

import math
from pathlib import Path
from unittest import mock

import pytest
import sacrebleu
import torch
from helpers import ROOT, TEXTS, one_thread
from test_cli import SMALL, refused, run, write_corpus
from torch.nn import functional as F

from annotated import load_checkpoint, save_checkpoint, translate
from annotated.data.tokenizers import BEGIN, END
from annotated.data.toy_language import read_sentences
from annotated.fast import engines
from annotated.paper.trees import bracket_f1, parse_tree
from annotated.results import read_json
from annotated.training import loop

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A model that has begun to learn, in the folder `model`, and its corpus in `own`."""
    monkeypatch.chdir(tmp_path)
    write_corpus("own")
    run("train", "own", "--out", "model", *SMALL, "--steps", 150, "--warmup", 60)
    return load_checkpoint("model")


def check_score(folder, outputs, references):
    """What `score` wrote into a folder is these outputs and their BLEU; the facts."""
    facts = read_json(f"{folder}/test.json")
    assert Path(folder, "test.txt").read_text(encoding="utf-8").splitlines() == outputs
    score = sacrebleu.corpus_bleu(outputs, [references]).score
    assert facts["entries"]["sacrebleu"]["score"] == pytest.approx(score) and score > 10
    return facts


def test_score_measures_what_translate_writes(trained, tmp_path, monkeypatch):
    sources, references = (list(side) for side in zip(*TEXTS, strict=True))
    outputs = translate(sources, trained.model, trained.tokenizer, "en", beam=2, alpha=0.5)
    given = "own", "test"
    with mock.patch.object(loop, "encode_pairs", wraps=loop.encode_pairs) as encode:
        run("score", "model", *given, "results", "--beam", 2, "--alpha", 0.5)
    assert encode.call_args.args[2:] == ("en", "de")
    facts, losses = check_score("results", outputs, references), []
    for source, target in loop.encode_pairs(TEXTS, trained.tokenizer):
        rows = torch.tensor([[*source, END]]), torch.tensor([[BEGIN, *target]])
        losses += F.cross_entropy(trained.model(*rows)[0], torch.tensor([*target, END]),
                                  reduction="none").tolist()
    perplexity = math.exp(sum(losses) / len(losses))  # 150 roundings
    assert facts["entries"]["perplexity"]["score"] == pytest.approx(perplexity, rel=1e-5)
    assert facts["decoding"] == "beam 2, alpha 0.5" and facts["log"] == trained.info["log"]
    assert facts["data"].endswith(f"test, en to de, {len(TEXTS)} sentences")
    assert facts["command"].startswith("annotated score ")
    # as `export --back` makes it
    save_checkpoint("bare", trained.model, trained.tokenizer, source_language="en",
                    target_language="de")
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))
    monkeypatch.setattr(engines, "apart", lambda *_: 9.9)  # no engine computes this model
    run("score", "bare", *given, "again", "--beam", 2, "--alpha", 0.5, "--engine", "ctranslate2",
        "--precision", "bf16")
    bare = read_json("again/test.json")
    assert bare["entries"] == facts["entries"] and bare["training"] is None and bare["log"] is None
    # names what computed, not what was asked for
    assert (bare["engine"], bare["precision"]) == ("torch", "fp32")


def test_score_joins_moses_tokens_and_compares_with_the_plain_references(trained):
    plain = [(source, target.replace(" .", ".")) for source, target in TEXTS]
    write_corpus("plain", plain)
    run("score", "model", "own", "test", "results", "--moses", "--references", "plain")
    outputs = translate([text for text, _ in TEXTS], trained.model, trained.tokenizer, "en")
    outputs = [line.replace(" .", ".") for line in outputs]
    assert any(line.endswith(("Hund.", "schläft.")) for line in outputs)
    check_score("results", outputs, [target for _, target in plain])
    run("score", "model", "own", "test", "joined", "--moses")  # references in Moses tokens, too
    check_score("joined", outputs, [target for _, target in plain])


def test_parse_trains_scores_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trees = [sentence.tree for sentence in read_sentences(ROOT / "data/toy/valid.tsv")[:47]]
    Path("own").mkdir()
    for split, some in (("train", trees[:40]), ("dev", trees[40:41]), ("test", trees[41:])):
        lines = "".join(f"{tree}\n" for tree in some)
        Path("own", f"{split}.trees").write_text(lines, encoding="utf-8")
    command = ("own --out model --results results.json --trees parsed.trees --N 1 --d-model 16 "
               "--d-ff 16 --h 2 --steps 4 --save-every 2 --copies 2 --precision fp32 --average 2 "
               "--extra 5 --beam 2 --leaves XX --word-dropout 0.5").split()

    def parse(*more):
        run("parse", *command, *more)
        facts = read_json("results.json")
        return facts, {name: row["sentences"] for name, row in facts["scores"].items()}

    facts, counts = parse()
    lines = Path("parsed.trees").read_text(encoding="utf-8").splitlines()
    parsed = [None if line == "(TOP)" else parse_tree(line) for line in lines]
    score = bracket_f1(parsed, list(map(parse_tree, trees[41:])))
    rates = {name: (row["f1"], row["well_formed"]) for name, row in facts["scores"].items()}
    assert rates["beam 2"] == (score.f1, score.well_formed) != rates["constrained"]
    assert len(lines) == 6 and f"F1 {score.f1:6.2f}" in capsys.readouterr().out
    methods = ["right-branching", "nearest copy", "greedy", "beam 2", "constrained"]
    assert list(counts) == methods and counts["greedy"] == 6
    assert facts["treebank"] == "own" and facts["seed"] == 0 and facts["training"]["steps"] == 4
    preset = {"copies": 4, "min_frequency": 3, "leaves": "numbers", "parts": True,
              "word_dropout": 1.0}  # gum's
    assert facts["pairs"] == preset | {"copies": 2, "leaves": "XX", "word_dropout": 0.5}
    assert facts["averaged"] == ["step-00000002", "step-00000004"]
    assert facts["claim"] == "C30" and facts["command"].startswith("annotated parse own --out ")
    assert "vocabulary" not in facts
    before = Path("model/model.safetensors").read_bytes()
    _, counts = parse("--beam-sentences", 1)
    few = {"greedy, first 1": 1, "beam 2, first 1": 1, "constrained, first 1": 1}
    assert {name: counts[name] for name in list(counts)[2:]} == {"greedy": 6, **few}
    assert len(Path("parsed.trees").read_text().splitlines()) == 1
    assert parse("--sentences", 1)[1]["greedy"] == 1  # the model is there: scored, not trained
    assert "with average 2, not 1: " in refused("parse", [*command, "--average", 1], capsys)
    assert "leave it out" in refused("parse", [*command, "--vocab-size", 9], capsys)
    assert Path("model/model.safetensors").read_bytes() == before
    valid, counts = parse("--split", "valid")
    assert counts["greedy"] == 1 and "scored on valid" in valid["data"]
    assert "scored on test" in facts["data"]
