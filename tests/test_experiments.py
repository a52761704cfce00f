"""What the scripts in experiments/ write: the padding of a corpus by hand, and both kinds of
positions.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
import torch
from helpers import ROOT, random_model
from torch.nn import functional as F

from annotated.data.corpora import Corpus, load_corpus
from annotated.data.tokenizers import SubwordTokenizer, WordTokenizer
from annotated.fast.prepare import prepare
from annotated.options import train_options
from annotated.training.checkpoints import save_checkpoint
from annotated.training.label_smoothing import LabelSmoothingLoss
from annotated.training.loop import encode_pairs

sys.path.insert(0, str(ROOT / "experiments"))
import lengths  # noqa: E402
import long_inputs  # noqa: E402
import padding  # noqa: E402
import r_drop  # noqa: E402
import stops  # noqa: E402


def test_c22_padding_is_counted_from_the_lengths_of_the_tokenized_sides():
    pairs = [(f"word {'again ' * (k % 7)}", f"Wort {'noch einmal ' * (k % 7)}") for k in range(40)]
    result = padding.measure(Corpus("mine", "en", "de", pairs, [], [], []), vocab_size=300,
                             budgets=(64,), seed=3)
    assert (result["shares"]["64"]["bucketed"] < result["shares"]["64"]["random"]
            < result["fixed_length"] + 0.1)
    tokenizer = SubwordTokenizer.fit(pairs, vocab_size=300)
    counts = np.array([[len(tokenizer.encode(text)) + 1 for text in pair] for pair in pairs])
    assert result["mean_lengths"] == [round(counts[:, side].mean(), 2) for side in (0, 1)]
    assert result["longest"] == counts.max(axis=0).tolist()
    assert result["fixed_length"] == round(1 - counts.sum() / (40 * counts.max(axis=0).sum()), 4)
    assert result["data"] == "mine, train, 40 pairs, en-de" and result["seed"] == 3


@pytest.mark.parametrize("name, near", [("two_processes", 0.05), ("two_processes_multi30k", 0.03)])
def test_two_processes_have_reached_the_score_of_one_as_far_as_seeds_agree(name, near):
    """Two seeds each: the means differ by less than two runs of one kind do, and every row of the
    log saw the same tokens.

    `near`: runs that differ in rounding drift apart. Of the stored ones by at most 3.7 and
    2.0 per cent of a loss, the two seeds by 15 and 4.8.
    """
    runs = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))["runs"]
    scores = {processes: [run["entries"]["sacrebleu"]["score"]
                          for run in runs if run["processes"] == processes] for processes in (1, 2)}
    assert [len(some) for some in scores.values()] == [2, 2]
    apart = abs(np.mean(scores[1]) - np.mean(scores[2]))
    assert apart <= max(max(some) - min(some) for some in scores.values())
    by_seed = {seed: [run for run in runs if run["seed"] == seed] for seed in (0, 1)}
    for one, two in by_seed.values():
        assert one["tokens"] == two["tokens"], "other batches"
        assert np.allclose(one["losses"], two["losses"], rtol=near), "another run altogether"
    first, second = (runs[0]["losses"] for runs in by_seed.values())
    assert not np.allclose(first, second, rtol=near), "seeds that make no difference say nothing"


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


def calls_of(folder, script, *arguments, **environment):
    """The commands that a script gives, each a list of words, and what it prints.

    They do nothing but note that they were called.
    """
    (folder / "experiments").mkdir(exist_ok=True)
    for name in (script, "collect.py"):
        shutil.copyfile(ROOT / "experiments" / name, folder / "experiments" / name)
    (folder / "results").mkdir(exist_ok=True)
    (folder / "experiments/environment.sh").write_text(STUB)
    (folder / "experiments/prepare.py").write_text("import pathlib, sys; "
                                                   "pathlib.Path(sys.argv[2]).mkdir(parents=True)")
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv/bin/python").unlink(missing_ok=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    (folder / "calls").write_text("")
    environment |= {"PATH": "/usr/bin:/bin",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])}
    done = subprocess.run(["bash", f"experiments/{script}", *arguments], cwd=folder,
                          env=environment, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()], done.stdout


def test_the_recipe_for_multi30k_is_the_published_one(tmp_path):
    made, said = calls_of(tmp_path, "multi30k_record.sh")
    assert [words[0] for words in made] == ["train", "score"] * 3
    assert "BLEU 40.50, 41.50, 42.50: mean 41.50, deviation 1.00" in said
    trained = [train_options(words[1:]) for words in made[::2]]
    assert [options.training.seed for options in trained] == [0, 1, 2]
    assert len({options.out
                for options in trained}) == len({options.checkpoints for options in trained}) == 3
    for options in trained:
        sizes, training = options.sizes, options.training
        assert (sizes.N, sizes.d_model, sizes.d_ff, sizes.h, sizes.dropout,
                sizes.vocab_size) == (4, 128, 256, 4, 0.3, 10_000)
        assert training.max_tokens == 8192 and training.accumulate == 2
        assert training.label_smoothing == 0.1
        assert 7950 < training.steps < 8050 and training.steps % training.validate_every == 0
        assert training.validate_every == training.save_every == 58, "an epoch"
        assert training.patience == training.keep_last == options.average == 10 and options.resume
        assert training.factor * 128**-0.5 * training.warmup**-0.5 == pytest.approx(0.005, rel=1e-3)
    assert all(words[words.index("--beam") + 1] == "5" and words[3] == "test"
               for words in made[1::2])
    # what is there is neither trained nor scored again
    assert calls_of(tmp_path, "multi30k_record.sh") == ([], said)


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
    keep_row = target.flatten() != 0
    logits = [(hidden[..., part].flatten(0, 1) @ weight.T)[keep_row]
              for part in (slice(8), slice(8, None))]
    nll = sum(F.cross_entropy(x, target.flatten()[keep_row], label_smoothing=0.1, reduction="sum")
              for x in logits)
    one, other = (x.log_softmax(-1) for x in logits)
    kl = F.kl_div(one, other, reduction="sum",
                  log_target=True) + F.kl_div(other, one, reduction="sum", log_target=True)
    loss = r_drop.RDropLoss(0.1, reduction="sum", alpha=5.0)
    assert torch.allclose(loss.of_hidden(hidden, weight, target), (nll + 5.0 * kl / 2) / 2)
    assert kl > 1
    once = hidden[..., :8]
    # no dropout, no distance
    twice = loss.of_hidden(torch.cat([once, once], dim=-1), weight, target)
    assert torch.allclose(twice,
                          LabelSmoothingLoss(0.1, reduction="sum").of_hidden(once, weight, target))
    assert torch.equal(loss.of_hidden(once, weight, target),
                       LabelSmoothingLoss(0.1, reduction="sum").of_hidden(once, weight, target))


# Long inputs: layers that are computed again

IDS = torch.tensor([[5, 6, 7, 8, 9, 2], [4, 4, 10, 2, 0, 0]])


def gradients(again, purpose, dropout, norm_first=False):
    """(gradients of a model by name, bytes kept for the backward pass besides the weights).

    Seeded alike.
    """
    model = random_model(N=3, dropout=dropout, norm_first=norm_first).double().train()
    if purpose:
        prepare(model)
    if again:
        assert long_inputs.compute_again(model) is model
    kept, weights = {}, {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model.hidden(IDS, IDS[:, :-1]).square().sum()
    loss.backward()
    return {name: weight.grad for name, weight
            in model.named_parameters()}, sum(kept[place] for place in kept.keys() - weights)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("purpose", [None, "train"])
def test_layers_computed_again_give_the_same_gradients_from_less_memory(purpose, dropout,
                                                                        norm_first):
    expected, whole = gradients(False, purpose, dropout, norm_first)
    found, kept = gradients(True, purpose, dropout, norm_first)
    assert list(found) == list(expected) and kept < whole / 3
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 and (found[name] - gradient).abs().max() < 1e-12, name


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
