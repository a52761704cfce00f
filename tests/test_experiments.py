"""The scripts in experiments/: what they count, their losses, the commands they give."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

import lengths
import long_inputs
import numpy as np
import padding
import pytest
import r_drop
import stops
import torch
from helpers import ROOT, random_model
from torch.nn import functional as F

from annotated import LabelSmoothingLoss, SubwordTokenizer, WordTokenizer, prepare, save_checkpoint
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


STUB = """set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
start() { .venv/bin/python "$@"; }
annotated() {
    printf '%q ' "$@" >> calls; echo >> calls
    if [ "$1" = train ]; then mkdir -p "$(sed 's/.*--out \\([^ ]*\\) .*/\\1/' <<< "$*")"; fi
    if [ "$1" = score ]; then
        mkdir -p "$5"; echo out > "$5/$4.txt"
        echo '{"entries": {"multi30k": {"score": 4'"${5: -1}"'.5}}}' > "$5/$4.json"
    fi
}
"""


def calls_of(folder, script):
    """The commands that a script gives, each a list of words, and what it prints; none is run."""
    for path in ("experiments", "results", ".venv/bin"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    for name in (script, "collect.py"):
        shutil.copyfile(ROOT / "experiments" / name, folder / "experiments" / name)
    (folder / "experiments/environment.sh").write_text(STUB)
    (folder / "experiments/prepare.py").write_text(
        "import pathlib, sys; pathlib.Path(sys.argv[2]).mkdir(parents=True)")
    (folder / ".venv/bin/python").unlink(missing_ok=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    (folder / "calls").write_text("")
    paths = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    done = subprocess.run(["bash", f"experiments/{script}"], cwd=folder, text=True, timeout=60,
                          env={"PATH": "/usr/bin:/bin", "PYTHONPATH": paths}, capture_output=True)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()], done.stdout


def test_the_recipe_for_multi30k_is_the_published_one(tmp_path):
    calls, output = calls_of(tmp_path, "multi30k_record.sh")
    assert [words[0] for words in calls] == ["train", "score"] * 3
    assert "BLEU 40.50, 41.50, 42.50: mean 41.50, deviation 1.00" in output
    trained = [train_options(words[1:]) for words in calls[::2]]
    assert len({options.out for options in trained}) == 3
    assert len({options.checkpoints for options in trained}) == 3
    for seed, options in enumerate(trained):
        sizes, training = options.sizes, options.training
        assert (sizes.N, sizes.d_model, sizes.d_ff, sizes.h, sizes.dropout) == (4, 128, 256, 4, 0.3)
        assert (training.seed, sizes.vocab_size, training.label_smoothing) == (seed, 10_000, 0.1)
        assert training.max_tokens == 8192 and training.accumulate == 2
        assert 7950 < training.steps < 8050 and training.steps % training.validate_every == 0
        assert training.validate_every == training.save_every == 58, "an epoch"
        assert training.patience == training.keep_last == options.average == 10 and options.resume
        rate = training.factor * 128**-0.5 * training.warmup**-0.5
        assert rate == pytest.approx(0.005, rel=1e-3)
    assert all(words[words.index("--beam") + 1] == "5" for words in calls[1::2])
    assert all(words[3] == "test" for words in calls[1::2])
    # what is there is neither trained nor scored again
    assert calls_of(tmp_path, "multi30k_record.sh") == ([], output)


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
    assert expected[0] != expected[1]


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


# Long inputs: layers that are computed again

IDS = torch.tensor([[5, 6, 7, 8, 9, 2], [4, 4, 10, 2, 0, 0]])


def gradients(again, prepared, dropout, norm_first):
    """(gradients of a seeded model by name, bytes that its backward pass needs beside weights)."""
    model = random_model(N=3, dropout=dropout, norm_first=norm_first).double().train()
    model = prepare(model) if prepared else model
    if again:
        assert long_inputs.checkpoint_layers(model) is model
    kept, weights = {}, {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model.hidden(IDS, IDS[:, :-1]).square().sum()
    loss.backward()
    return ({name: weight.grad for name, weight in model.named_parameters()},
            sum(kept[place] for place in kept.keys() - weights))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("prepared", [False, True])
def test_layers_computed_again_give_the_same_gradients_from_less_memory(
        prepared, dropout, norm_first):
    expected, whole = gradients(False, prepared, dropout, norm_first)
    ours, kept = gradients(True, prepared, dropout, norm_first)
    assert list(ours) == list(expected) and kept < whole / 3
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 and (ours[name] - gradient).abs().max() < 1e-12, name


def test_c17_training_pairs_are_short_and_the_longer_ones_are_held_out():
    corpus = load_corpus("toy")
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
