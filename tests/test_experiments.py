"""The scripts in experiments/: what they count, their losses, the commands they give."""

import re
import subprocess
from dataclasses import replace

import lengths
import numpy as np
import padding
import pytest
import r_drop
import stops
import torch
from helpers import ROOT, random_model
from torch.nn import functional as F

from annotated import LabelSmoothingLoss, SubwordTokenizer, WordTokenizer, save_checkpoint
from annotated.data.corpora import Corpus, load_corpus
from annotated.options import train_options
from annotated.training.loop import encode_pairs


def test_c22_padding_is_counted_from_the_lengths_of_the_tokenized_sides():
    pairs = [(f"word {'again ' * (k % 7)}", f"Wort {'noch einmal ' * (k % 7)}") for k in range(40)]
    corpus = Corpus("mine", "en", "de", pairs, [], [], [])
    result = padding.measure(corpus, vocab_size=300, budgets=(64,), seed=3)
    shares = result["shares"]["64"]
    assert shares["bucketed"] < shares["random"] < result["fixed_length"] + 0.1
    tokenizer = SubwordTokenizer.fit(pairs, vocab_size=300)
    counts = np.array([[len(tokenizer.encode(text)) + 1 for text in pair] for pair in pairs])
    assert result["mean_lengths"] == [round(counts[:, side].mean(), 2) for side in (0, 1)]
    assert result["longest"] == counts.max(axis=0).tolist()
    assert result["fixed_length"] == round(1 - counts.sum() / (40 * counts.max(axis=0).sum()), 4)
    assert result["data"] == "mine, train, 40 pairs, en-de" and result["seed"] == 3


@pytest.mark.parametrize("script", sorted((ROOT / "experiments").glob("*.sh")),
                         ids=lambda path: path.stem)
def test_scripts_are_shell_and_give_options_that_the_commands_know(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        # numbers; more options
        line = re.sub(r'"\$(seed|epoch)"|\$\(\(.*?\)\)', "1", line).replace('"${@:2}"', "")
        words = line.partition("annotated train ")[2].partition("2>&1")[0].split()
        if words:
            options = train_options([word.strip('"') for word in words])
            assert str(options.out).startswith("$")


def test_both_losses_of_a_checkpoint_are_those_of_pytorch(tmp_path):
    pairs = [("The dog sleeps .", "Der Hund schläft ."), ("A bear reads .", "Ein Bär liest .")]
    tokenizer = SubwordTokenizer.fit(pairs, 280)
    model = random_model(vocab_size=len(tokenizer)).eval()
    save_checkpoint(tmp_path / "step-00000058", model, tokenizer)
    logits, targets = [], []
    for source, target in encode_pairs(pairs, tokenizer, "en", "de"):
        logits.append(model(torch.tensor([[*source, 2]]), torch.tensor([[1, *target]]))[0])
        targets += [*target, 2]
    row, = stops.losses([tmp_path / "step-00000058"], pairs)
    expected = [F.cross_entropy(torch.cat(logits), torch.tensor(targets),
                                label_smoothing=smoothing).item() for smoothing in (0.0, 0.1)]
    # float32: some 150 roundings
    assert row["step"] == 58
    assert [row["plain"], row["smoothed"]] == pytest.approx(expected, rel=1e-5)


def test_r_drop_is_half_of_the_published_loss_of_both_readings():
    torch.manual_seed(0)
    hidden = torch.randn(300, 5, 16, dtype=torch.float64)
    weight = torch.randn(11, 8, dtype=torch.float64)
    # 1,000 words: in four parts
    target = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0], [1, 2, 0, 0, 0]]).repeat(100, 1)
    real, first, second = target != 0, hidden[..., :8], hidden[..., 8:]
    logits = [(reading[real] @ weight.T) for reading in (first, second)]
    nll = sum(F.cross_entropy(x, target[real], label_smoothing=0.1, reduction="sum")
              for x in logits)
    p, q = (x.log_softmax(-1) for x in logits)
    kl = ((p.exp() - q.exp()) * (p - q)).sum()  # in both directions
    loss = r_drop.RDropLoss(0.1, reduction="sum", alpha=5.0)
    plain = LabelSmoothingLoss(0.1, reduction="sum")
    assert torch.allclose(loss.of_hidden(hidden, weight, target), (nll + 5.0 * kl / 2) / 2)
    expected = plain.of_hidden(first, weight, target)  # without dropout there is no distance
    assert kl > 1 and torch.equal(loss.of_hidden(first, weight, target), expected)
    twice = torch.cat([first, first], dim=-1)
    assert torch.allclose(loss.of_hidden(twice, weight, target), expected)


def test_c17_training_pairs_are_short_and_the_longer_ones_are_held_out():
    corpus = replace(load_corpus("toy"), train=load_corpus("toy").train[:1500])
    short, buckets = lengths.length_buckets(corpus, 9, per_bucket=50)
    sizes = lengths.side_lengths(corpus)
    assert max(sizes[pair] for pair in short.train) == 9 == max(sizes[pair] for pair in short.valid)
    assert set(short.train) == {pair for pair in corpus.train if sizes[pair] <= 9}
    trained, words = set(short.train), WordTokenizer.fit(short.train)
    assert max(buckets) > 9 >= min(buckets)
    for length, pairs in buckets.items():
        assert pairs and len(pairs) <= 50 and not trained & set(pairs)
        assert all(sizes[pair] == length for pair in pairs)
        # no word that training never showed
        assert all(3 not in side for pair in encode_pairs(pairs, words) for side in pair)
