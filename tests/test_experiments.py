"""What the scripts in experiments/ write: the padding of a corpus by hand, and both kinds of positions."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

from annotated.corpora import Corpus
from annotated.terminal import train_options
from annotated.tokens import SubwordTokenizer
from annotated.transformer import TransformerConfig

sys.path.insert(0, str(ROOT / "experiments"))
import lengths  # noqa: E402
import padding  # noqa: E402
import two_processes  # noqa: E402


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


def test_c17_lengths_are_written_for_both_kinds_of_positions(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(lengths, "measure_lengths", lambda *a, **k: asked.append((a, k)) or [])
    lengths.main(tmp_path / "l.json", longest=7, steps=3, seeds=2)
    assert asked == [((kind, seed, 7), {"steps": 3}) for seed in (0, 1) for kind in ("sinusoidal", "learned")]
    kept = json.loads((tmp_path / "l.json").read_text())
    assert kept["longest"] == 7 and len(kept["runs"]) == 4 and kept["training"]["steps"] == 3
    assert kept["model"]["d_model"] == 128 and TransformerConfig(**kept["model"])


def test_two_processes_and_one_get_the_same_options_and_are_scored_by_the_same_command(tmp_path, monkeypatch):
    asked, run = [], subprocess.run

    def done(command, **options):
        if "annotated" not in command:  # git, say, for the revision
            return run(command, **options)
        words = command[command.index("annotated") + 1:]
        asked.append((command[:command.index("annotated")], words))
        if words[0] == "score":
            Path(words[-1]).mkdir()
            (Path(words[-1]) / "test.json").write_bytes((ROOT / "results" / "multi30k" / "test.json").read_bytes())

    monkeypatch.setattr(two_processes.subprocess, "run", done)
    first = two_processes.main(tmp_path / "t.json", runs=[(1, 0), (2, 0)])
    (one, _), _, (two, _), _ = asked
    assert "--nproc-per-node=2" in two and "torch.distributed.run" in two and "torch.distributed.run" not in one
    same = [[word for word in words if not word.startswith("/")] for _, words in asked]
    assert same[0] == same[2] and same[1] == same[3]
    options = train_options(asked[0][1][1:])
    assert (options.sizes.d_model, options.corpus, options.training.steps) == (64, "toy", 500)
    assert first == two_processes.main(tmp_path / "t.json", runs=[(1, 0), (2, 0)]) and len(asked) == 4, "a kept run was made again"
    two_processes.main(tmp_path / "t.json", runs=[(1, 0)], steps=3)
    assert len(asked) == 6
    two_processes.main(tmp_path / "m.json", "multi30k", runs=[(2, 0)])
    assert train_options(asked[6][1][1:]).sizes.vocab_size == 4000


@pytest.mark.parametrize("script", sorted((ROOT / "experiments").glob("*.sh")), ids=lambda path: path.stem)
def test_scripts_are_shell_and_give_options_that_the_commands_know(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        words = line.partition("annotated train ")[2].partition("2>&1")[0].split()
        if words:
            options = train_options([word.strip('"') for word in words])
            assert str(options.out).startswith("$")
