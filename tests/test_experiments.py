"""What the scripts in experiments/ write: the padding of a corpus by hand, and both kinds of positions."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT

from annotated.corpora import Corpus
from annotated.terminal import train_options
from annotated.tokens import SubwordTokenizer
from annotated.transformer import TransformerConfig

sys.path.insert(0, str(ROOT / "experiments"))
import gather  # noqa: E402
import lengths  # noqa: E402
import padding  # noqa: E402


def test_c22_padding_is_counted_from_the_lengths_of_the_tokenized_sides():
    pairs = [(f"word {'again ' * (k % 7)}", f"Wort {'noch einmal ' * (k % 7)}") for k in range(40)]
    result = padding.measure(Corpus("mine", "en", "de", pairs, [], [], []), vocab_size=300, budgets=(64,), seed=3)
    assert result["shares"]["64"]["bucketed"] < result["shares"]["64"]["random"] < result["fixed_length"] + 0.1
    tokenizer = SubwordTokenizer.fit(pairs, vocab_size=300)
    counts = np.array([[len(tokenizer.encode(text)) + 1 for text in pair] for pair in pairs])
    assert result["mean_lengths"] == [round(counts[:, side].mean(), 2) for side in (0, 1)]
    assert result["longest"] == counts.max(axis=0).tolist()
    assert result["fixed_length"] == round(1 - counts.sum() / (40 * counts.max(axis=0).sum()), 4)
    assert result["data"] == "mine, train, 40 pairs, en-de" and result["seed"] == 3


def test_batches_are_timed_only_where_both_ways_agree(tmp_path, monkeypatch):
    made = gather.measure(3000, tmp_path / "pairs", timed=2)
    rows = list(gather.lengths(3000))
    assert (made["pairs"], made["target_tokens"]) == (3000, sum(target + 1 for _, target in rows)) and made["batches"] > 2
    assert made["timed_batches"] == 2 and list(made["milliseconds"]) == ["collate", "gather"]
    assert all(list(times) == ["whole", "one of 8"] and min(times.values()) > 0 for times in made["milliseconds"].values())
    real = gather.collated
    monkeypatch.setattr(gather, "collated", lambda pairs, indices, *share: real(pairs, indices[::-1], *share))
    with pytest.raises(AssertionError, match="source differs"):
        gather.measure(3000, tmp_path / "other", timed=2)


def test_c17_lengths_are_written_for_both_kinds_of_positions(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(lengths, "measure_lengths", lambda *a, **k: asked.append((a, k)) or [])
    lengths.main(tmp_path / "l.json", longest=7, steps=3, seeds=2)
    assert asked == [((kind, seed, 7), {"steps": 3}) for seed in (0, 1) for kind in ("sinusoidal", "learned")]
    kept = json.loads((tmp_path / "l.json").read_text())
    assert kept["longest"] == 7 and len(kept["runs"]) == 4 and kept["training"]["steps"] == 3
    assert kept["model"]["d_model"] == 128 and TransformerConfig(**kept["model"])


@pytest.mark.parametrize("script", sorted((ROOT / "experiments").glob("*.sh")), ids=lambda path: path.stem)
def test_scripts_are_shell_and_give_options_that_the_commands_know(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        words = line.partition("annotated train ")[2].partition("2>&1")[0].split()
        if words:
            options = train_options([word.strip('"') for word in words])
            assert str(options.out).startswith("$")
