"""What the scripts in experiments/ write: the padding of a corpus by hand, and both kinds of positions."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from helpers import ROOT, random_model
from torch.nn import functional as F

from annotated import terminal
from annotated.checkpoints import average_checkpoints, load_checkpoint, save_checkpoint
from annotated.corpora import Corpus
from annotated.fast import prepare
from annotated.files import read_json, write_json_lines
from annotated.regularization import LabelSmoothingLoss
from annotated.terminal import train_options
from annotated.tokens import SubwordTokenizer
from annotated.training import TrainingConfig, encode_pairs, is_over
from annotated.transformer import Transformer

sys.path.insert(0, str(ROOT / "experiments"))
import intervals  # noqa: E402
import long_inputs  # noqa: E402
import padding  # noqa: E402
import r_drop  # noqa: E402
import stops  # noqa: E402


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


@pytest.mark.parametrize("name, near", [("two_processes", 0.05), ("two_processes_multi30k", 0.03)])
def test_two_processes_have_reached_the_score_of_one_as_far_as_seeds_agree(name, near):
    """Two seeds each: the means differ by less than two runs of one kind do, and every row of the log saw the same tokens.

    `near`: runs that differ in rounding drift apart. Of the stored ones by at most 3.7 and
    2.0 per cent of a loss, the two seeds by 15 and 4.8.
    """
    runs = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))["runs"]
    scores = {processes: [run["entries"]["sacrebleu"]["score"] for run in runs if run["processes"] == processes] for processes in (1, 2)}
    assert [len(some) for some in scores.values()] == [2, 2]
    apart = abs(np.mean(scores[1]) - np.mean(scores[2]))
    assert apart <= max(max(some) - min(some) for some in scores.values())
    by_seed = {seed: [run for run in runs if run["seed"] == seed] for seed in (0, 1)}
    for one, two in by_seed.values():
        assert one["tokens"] == two["tokens"], "other batches"
        assert np.allclose(one["losses"], two["losses"], rtol=near), "another run altogether"
    first, second = (runs[0]["losses"] for runs in by_seed.values())
    assert not np.allclose(first, second, rtol=near), "seeds that make no difference say nothing"


@pytest.mark.parametrize("script", sorted((ROOT / "experiments").glob("*.sh")), ids=lambda path: path.stem)
def test_scripts_are_shell_and_give_options_that_the_commands_know(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        line = re.sub(r'"\$(seed|epoch)"|\$\(\(.*?\)\)', "1", line).replace('"${@:2}"', "")  # numbers; more options
        words = line.partition("annotated train ")[2].partition("2>&1")[0].split()
        if words:
            options = train_options([word.strip('"') for word in words])
            assert str(options.out).startswith("$")


STUB = """set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
start() { echo "${processes:-1}" >> processes; .venv/bin/python "$@"; }
annotated() {
    echo "${processes:-1}" >> processes
    printf '%q ' "$@" >> calls; echo >> calls
    if [ "$1" = train ]; then mkdir -p "$(sed 's/.*--out \\([^ ]*\\) .*/\\1/' <<< "$*")"; fi
    if [ "$1" = score ]; then mkdir -p "$5"; echo '{"entries": {"multi30k": {"score": 4'"${5: -1}"'.5}}}' > "$5/$4.json"; fi
    if [ "$1" = score ]; then echo out > "$5/$4.txt"; fi
    if [ "$1" = translate ]; then sed "s/^a/ein/; s/dog$/Hund ${3: -1}/; s/cat$/Katze/" "$5" > "$7"; fi
}
"""


def calls_of(folder, script, *arguments, **environment):
    """The commands that a script gives, each a list of words, and what it prints; they do nothing but note that they were called."""
    (folder / "experiments").mkdir(exist_ok=True)
    for name in (script, "collect.py"):
        shutil.copyfile(ROOT / "experiments" / name, folder / "experiments" / name)
    (folder / "results").mkdir(exist_ok=True)
    (folder / "experiments/environment.sh").write_text(STUB)
    (folder / "experiments/prepare.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[2]).mkdir(parents=True)")
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv/bin/python").unlink(missing_ok=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    (folder / "calls").write_text("")
    environment |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])}
    done = subprocess.run(["bash", f"experiments/{script}", *arguments], cwd=folder, env=environment, text=True, capture_output=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()], done.stdout


def test_the_recipe_for_multi30k_is_the_published_one(tmp_path):
    made, said = calls_of(tmp_path, "multi30k_record.sh")
    assert [words[0] for words in made] == ["train", "score"] * 3 and "BLEU 40.50, 41.50, 42.50: mean 41.50, deviation 1.00" in said
    trained = [train_options(words[1:]) for words in made[::2]]
    assert [options.training.seed for options in trained] == [0, 1, 2]
    assert len({options.out for options in trained}) == len({options.checkpoints for options in trained}) == 3
    for options in trained:
        sizes, training = options.sizes, options.training
        assert (sizes.N, sizes.d_model, sizes.d_ff, sizes.h, sizes.dropout, sizes.vocab_size) == (4, 128, 256, 4, 0.3, 10_000)
        assert training.max_tokens == 8192 and training.accumulate == 2 and training.label_smoothing == 0.1
        assert 7950 < training.steps < 8050 and training.steps % training.validate_every == 0
        assert training.validate_every == training.save_every == 58, "an epoch"
        assert training.patience == training.keep_last == options.average == 10 and options.resume
        assert training.factor * 128**-0.5 * training.warmup**-0.5 == pytest.approx(0.005, rel=1e-3)
    assert all(words[words.index("--beam") + 1] == "5" and words[3] == "test" for words in made[1::2])
    assert calls_of(tmp_path, "multi30k_record.sh") == ([], said), "what is there is neither trained nor scored again"
    own, _ = calls_of(tmp_path, "multi30k_record.sh", "own", "--attention-dropout", "0.1", split="valid")
    assert train_options(own[0][1:]).sizes.attention_dropout == 0.1 and own[1][3] == "valid"
    assert train_options(own[0][1:]).training == trained[0].training
    said = [words[words.index("--command") + 1] for words in (made[1], own[1])]
    assert said == ["experiments/multi30k_record.sh", "split=valid experiments/multi30k_record.sh own --attention-dropout 0.1"]
    anew, told = calls_of(tmp_path, "multi30k_record.sh", "anew", copies="10", seeds="0")
    assert told.splitlines()[-1] == "BLEU 40.50: mean 40.50", "one seed has no deviation"
    prepared = terminal._read(terminal.Prepare, "prepare", anew[0][1:])
    assert anew[0][0] == "prepare" and (prepared.copies, prepared.vocab_size, prepared.model) == (10, 10_000, "bpe")
    assert train_options(anew[1][1:]).corpus == str(prepared.folder) and train_options(anew[1][1:]).training == trained[0].training
    assert anew[2][anew[2].index("--command") + 1] == "copies=10 experiments/multi30k_record.sh anew"
    (tmp_path / "experiments/r_drop.py").write_text("import shlex, sys; open('calls', 'a').write(shlex.join(sys.argv) + '\\n')")
    (own, scored), _ = calls_of(tmp_path, "multi30k_record.sh", "apart", "--attention-gain", "0.7", seeds="2", r_drop="5")
    assert own[:2] == ["experiments/r_drop.py", "5"] and train_options(own[2:]).attention_gain == 0.7
    assert train_options(own[2:]).training == trained[2].training and str(train_options(own[2:]).out) == scored[1]
    assert scored[scored.index("--command") + 1] == "r_drop=5 experiments/multi30k_record.sh apart --attention-gain 0.7"
    stub = (tmp_path / "experiments/r_drop.py").read_text()
    (tmp_path / "experiments/smoothed_stop.py").write_text(stub)
    (own, scored), _ = calls_of(tmp_path, "multi30k_record.sh", "plain", "--precision", "fp32", seeds="2", smoothed_stop="1")
    assert own[0] == "experiments/smoothed_stop.py" and train_options(own[1:]).training == replace(trained[2].training, precision="fp32")
    assert scored[scored.index("--command") + 1] == "smoothed_stop=1 experiments/multi30k_record.sh plain --precision fp32"
    assert anew[2][:3] == ["score", str(train_options(anew[1][1:]).out), prepared.name], "scored as text, cut with all merges"
    assert set((tmp_path / "processes").read_text().split()) == {"1"}
    (tmp_path / "processes").unlink()
    (_, scored), _ = calls_of(tmp_path, "multi30k_record.sh", "both", "--accumulate", "1", seeds="2", r_drop="5", processes="2")
    assert (tmp_path / "processes").read_text().split() == ["2", "1", "1"], "both train, one scores and collects"
    assert scored[scored.index("--command") + 1] == "r_drop=5 processes=2 experiments/multi30k_record.sh both --accumulate 1"


def test_a_run_would_have_stopped_where_training_stops():
    draw, ended = np.random.default_rng(0), 0
    for _ in range(50):
        values = (np.exp(-np.arange(12) / 4) + draw.normal(0, 0.1, 12)).tolist()
        runs = (SimpleNamespace(config=TrainingConfig(patience=3), progress={"step": 1, "log": [{"valid_loss": v} for v in values[:end]]})
                for end in range(1, 13))
        expected = next((end for end, run in enumerate(runs, 1) if is_over(run)), 12)
        assert stops.stop(values, 3) == expected
        ended += expected < 12
    assert 10 < ended < 50, "some end sooner, some at the end"
    assert stops.stop([3.0, 2.0, 1.0], 2) == 3


def test_sentences_drawn_anew_are_scored_as_sacrebleu_scores_them(tmp_path, monkeypatch):
    """Interval, mean and difference of two small rows: each draw written out as texts, and scored by sacreBLEU."""
    draw, words = random.Random(0), "a red dog reads the old book in a green park".split()
    references = [" ".join(draw.choices(words, k=draw.randrange(6, 14))) for _ in range(12)]
    texts, runs = {}, []
    for row, seed, rate in (("taught", 0, 0.1), ("taught", 1, 0.1), ("to-the-end", 0, 0.2), ("to-the-end", 1, 0.3), ("alone", 0, 0.2)):
        lines = [" ".join(w if draw.random() > rate else draw.choice(words) for w in line.split()) for line in references]
        texts.setdefault(row, []).append(lines)
        score = sacrebleu.corpus_bleu(lines, [references], tokenize="none", smooth_method="none", force=True).score
        runs.append({"row": row, "training_seed": seed, "split": "test", "outputs": lines, "entries": {"multi30k": {"score": score}}})
    write_json_lines(tmp_path / "multi30k_record.jsonl", runs)
    monkeypatch.setattr(intervals, "RESULTS", tmp_path)
    monkeypatch.setattr(intervals, "DRAWS", 200)
    monkeypatch.setattr(intervals, "load_corpus", lambda name: SimpleNamespace(test=[("", line) for line in references]))
    intervals.main()
    found = read_json(tmp_path / "multi30k_intervals.json")
    times = np.random.default_rng(intervals.SEED).multinomial(12, np.full(12, 1 / 12), size=200)
    assert len({tuple(row) for row in times.tolist()}) > 150 and (times.sum(axis=1) == 12).all()

    def mean(row, places):
        picked = [references[i] for i in places]
        return np.mean([sacrebleu.corpus_bleu([lines[i] for i in places], [picked], tokenize="none", smooth_method="none", force=True).score
                        for lines in texts[row]])

    drawn = {row: [mean(row, np.repeat(np.arange(12), counts)) for counts in times] for row in texts}
    for row in texts:
        expected = [mean(row, range(12)), *np.quantile(drawn[row], (0.025, 0.975))]
        assert [found["rows"][row][key] for key in ("mean", "low", "high")] == pytest.approx(expected)
    assert list(found["differences"]) == ["taught minus to-the-end"]
    by = found["differences"]["taught minus to-the-end"]
    apart = np.subtract(drawn["taught"], drawn["to-the-end"])
    assert [by["low"], by["high"]] == pytest.approx(np.quantile(apart, (0.025, 0.975)))
    assert by["mean"] == pytest.approx(mean("taught", range(12)) - mean("to-the-end", range(12)))


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
    expected = [F.cross_entropy(torch.cat(logits), torch.tensor(targets), label_smoothing=smoothing).item() for smoothing in (0.0, 0.1)]
    assert row["step"] == 58 and [row["plain"], row["smoothed"]] == pytest.approx(expected, rel=1e-5)  # float32: some 150 roundings
    assert expected[0] != expected[1]


def test_r_drop_is_half_of_the_published_loss_of_both_readings():
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 5, 16, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    target = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0], [1, 2, 0, 0, 0]]).repeat(100, 1)  # 1,000 words: in four parts
    keep_row = target.flatten() != 0
    logits = [(hidden[..., part].flatten(0, 1) @ weight.T)[keep_row] for part in (slice(8), slice(8, None))]
    nll = sum(F.cross_entropy(x, target.flatten()[keep_row], label_smoothing=0.1, reduction="sum") for x in logits)
    one, other = (x.log_softmax(-1) for x in logits)
    kl = F.kl_div(one, other, reduction="sum", log_target=True) + F.kl_div(other, one, reduction="sum", log_target=True)
    loss = r_drop.RDropLoss(0.1, reduction="sum", alpha=5.0)
    assert torch.allclose(loss.of_hidden(hidden, weight, target), (nll + 5.0 * kl / 2) / 2) and kl > 1
    once = hidden[..., :8]
    twice = loss.of_hidden(torch.cat([once, once], dim=-1), weight, target)  # no dropout, no distance
    assert torch.allclose(twice, LabelSmoothingLoss(0.1, reduction="sum").of_hidden(once, weight, target))
    assert torch.equal(loss.of_hidden(once, weight, target), LabelSmoothingLoss(0.1, reduction="sum").of_hidden(once, weight, target))


def test_r_drop_reads_twice_in_training_only_and_what_it_saves_translates(tmp_path, monkeypatch):
    for split in ("train", "valid", "test"):
        for language, text in (("en", "The dog sleeps .\nThe bear reads .\n"), ("de", "Der Hund schläft .\nDer Bär liest .\n")):
            (tmp_path / f"{split}.{language}").write_text(20 * text)
    arguments = shlex.split(f"{tmp_path} --source en --target de --out {tmp_path / 'model'} --checkpoints {tmp_path / 'run'} --resume "
                            "--N 1 --d-model 16 --d-ff 32 --h 2 --dropout 0.3 --vocab-size 290 --steps 6 --max-tokens 64 --accumulate 2 "
                            "--validate-every 3 --save-every 3 --average 2 --attention-gain 0.5")
    r_drop.main(5.0, arguments)
    saved = load_checkpoint(tmp_path / "model")
    mean = average_checkpoints([tmp_path / "run" / f"step-0000000{step}" for step in (3, 6)])
    assert all(torch.equal(weight, mean[name]) for name, weight in saved.model.state_dict().items())
    assert type(saved.model) is Transformer and saved.info["attention_gain"] == 0.5 and len(saved.info["log"]) == 2
    monkeypatch.setenv("COLUMNS", "80")
    terminal.main(["score", str(tmp_path / "model"), str(tmp_path), "test", str(tmp_path / "scores")])
    assert read_json(tmp_path / "scores/test.json")["log"] == saved.info["log"]
    model = r_drop.build(saved.model.config)
    source, target = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8]])
    first, second = model.train().hidden(source, target).chunk(2, dim=-1)
    assert model.eval().hidden(source, target).shape == (1, 2, 16) and not torch.allclose(first, second), "other dropout"
    pairs = torch.tensor([[5, 6, 7], [8, 9, 3]]), torch.tensor([[1, 8], [1, 4]])
    sure = r_drop.build(replace(saved.model.config, dropout=0.0))
    each = sure.eval().hidden(*pairs).repeat(1, 1, 2)
    assert torch.allclose(sure.train().hidden(*pairs), each, atol=1e-5), "each beside itself, but for roundings"


# Long inputs: layers that are computed again

IDS = torch.tensor([[5, 6, 7, 8, 9, 2], [4, 4, 10, 2, 0, 0]])


def gradients(again, purpose, dropout, norm_first=False):
    """(gradients of a model by name, bytes kept for the backward pass besides the weights); seeded alike."""
    model = random_model(N=3, dropout=dropout, norm_first=norm_first).double().train()
    if purpose:
        prepare(model, purpose)
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
    return {name: weight.grad for name, weight in model.named_parameters()}, sum(kept[place] for place in kept.keys() - weights)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("purpose", [None, "train"])
def test_layers_computed_again_give_the_same_gradients_from_less_memory(purpose, dropout, norm_first):
    expected, whole = gradients(False, purpose, dropout, norm_first)
    found, kept = gradients(True, purpose, dropout, norm_first)
    assert list(found) == list(expected) and kept < whole / 3
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 and (found[name] - gradient).abs().max() < 1e-12, name
