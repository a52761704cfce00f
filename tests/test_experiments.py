"""What the scripts in experiments/ write: the padding of a corpus by hand, and both kinds of positions."""

import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from helpers import ROOT, random_model
from torch.nn import functional as F

from annotated import terminal, variations
from annotated.batches import count_batches, pair_lengths
from annotated.checkpoints import average_checkpoints, load_checkpoint, save_checkpoint
from annotated.chunked_loss import ChunkedLoss
from annotated.corpora import Corpus, load_corpus
from annotated.fast import prepare, undo
from annotated.files import read_json, write_json_lines
from annotated.regularization import LabelSmoothingLoss
from annotated.terminal import train_options
from annotated.tokens import SubwordTokenizer, split_words
from annotated.training import TrainingConfig, encode_pairs, is_over, train
from annotated.transformer import Transformer, TransformerConfig

sys.path.insert(0, str(ROOT / "experiments"))
import curve  # noqa: E402
import gather  # noqa: E402
import intervals  # noqa: E402
import keep  # noqa: E402
import lengths  # noqa: E402
import long_inputs  # noqa: E402
import padding  # noqa: E402
import precision  # noqa: E402
import r_drop  # noqa: E402
import smoothed_stop  # noqa: E402
import stops  # noqa: E402
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


def test_translations_of_each_precision_are_compared_with_the_plain_ones(monkeypatch):
    pairs = [("a dog sleeps", "ein Hund schläft"), ("a cat runs fast", "eine Katze rennt schnell"), ("a dog runs", "ein Hund rennt")]
    tokenizer, german, asked = SubwordTokenizer.fit(pairs, vocab_size=300), [target for _, target in pairs], []
    model = random_model(len(tokenizer)).eval()
    found = precision.measure(model, tokenizer, pairs, beams=(1, 2))
    assert found["sentences"] == 3 and list(found["translations"]) == ["beam 1", "beam 2"] and "moses" in found["metric"]
    for rows in found["translations"].values():
        assert {name.split(", ")[0] for name in rows} == {"as trained", *precision.PRECISIONS}
        assert all(row["as the plain model"] == 3 for name, row in rows.items() if name == "as trained" or name.startswith("fp32"))

    def written(model, tokenizer, sources, beam, max_tokens):
        asked.append((getattr(model.decoder, "native", None) is not None, beam))
        return german if len(asked) == 1 else [*german[:2], "falsch"]

    monkeypatch.setattr(precision, "translate", written)
    rows = precision.measure(model, tokenizer, pairs, beams=(4,))["translations"]["beam 4"]
    assert rows["as trained"]["bleu"] == 100 and all(row["bleu"] < 100 for name, row in rows.items() if name != "as trained")
    assert [row["as the plain model"] for row in rows.values()] == [3] + [2] * (len(rows) - 1)
    assert asked == [("thread" in name, 4) for name in rows]


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


def test_two_processes_and_one_get_the_same_options_and_are_scored_by_the_same_command(tmp_path, monkeypatch):
    asked, run = [], subprocess.run

    def done(command, **options):
        if "annotated" not in command:  # git, say, for the revision
            return run(command, **options)
        words = command[command.index("annotated") + 1:]
        asked.append((command[:command.index("annotated")], words))
        if words[0] == "score":
            Path(words[-1]).mkdir()
            shutil.copyfile(ROOT / "results/multi30k/test.json", Path(words[-1]) / "test.json")

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


def test_models_of_another_row_write_training_pairs_each_of_which_is_there_once(tmp_path):
    data = tmp_path / "_build/multi30k_record/data"
    data.mkdir(parents=True)
    texts = {"train": ("a dog\na cat\n", "ein Dackel\nein Katze\n"), "valid": ("a\n", "ein\n"), "test": ("the\n", "der\n")}
    for stem, (source, target) in texts.items():
        (data / f"{stem}.en").write_text(source)
        (data / f"{stem}.de").write_text(target)
    for name in ("first.seed0", "first.seed1", "first.seed1-checkpoints", "second.seed2"):
        (data.parent / name).mkdir()
    made, _ = calls_of(tmp_path, "multi30k_record.sh", "taught", "--patience", "0", teachers="first", seeds="1", split="valid")
    assert [words[0] for words in made] == ["translate", "translate", "train", "score"]
    for words, teacher in zip(made, ("first.seed0", "first.seed1"), strict=False):
        options = terminal._read(terminal.Translate, "translate", words[1:])
        assert options.model.name == teacher and (options.beam, options.alpha) == (5, 1.4)
    trained = train_options(made[2][1:])
    taught = load_corpus(str(tmp_path / trained.corpus), None, "en", "de")
    assert sorted(taught.train) == [("a cat", "ein Katze"), ("a dog", "ein Dackel"), ("a dog", "ein Hund 0"), ("a dog", "ein Hund 1")]
    assert taught.valid == [("a", "ein")] and not (tmp_path / f"{trained.corpus}.part").exists()
    assert trained.training.patience == 0 and made[3][2].endswith("/data"), "scored on the text that all rows are scored on"
    assert made[3][made[3].index("--command") + 1] == "split=valid teachers=first experiments/multi30k_record.sh taught --patience 0"
    again, _ = calls_of(tmp_path, "multi30k_record.sh", "taught", "--patience", "0", teachers="first", seeds="1 2", split="valid")
    assert [words[0] for words in again] == ["train", "score"], "the pairs are written once"
    with pytest.raises(AssertionError, match="no model of the row nobody in .*: train that row first"):
        calls_of(tmp_path, "multi30k_record.sh", "taught", teachers="nobody")
    assert not list(data.parent.glob("data.nobody*"))


def test_the_recipe_for_news_goes_on_and_draws_a_curve_from_checkpoints_that_stay(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/curve.py").write_text("import pathlib, shlex, sys; pathlib.Path(sys.argv[6]).touch()\n"
                                                   "open('calls', 'a').write(shlex.join(['curve', *sys.argv[1:]]) + '\\n')")
    made, _ = calls_of(tmp_path, "newstest.sh")
    assert [words[0] for words in made] == ["train", "curve", "score"]
    options, (_, run, corpus, *languages, every, _, command) = train_options(made[0][1:]), made[1]
    assert languages == [options.source, options.target] == ["en", "de"] and command == "experiments/newstest.sh"
    sizes, training = options.sizes, options.training
    assert options.resume and str(options.checkpoints) == run and options.corpus == corpus == made[2][2] and str(options.out) == made[2][1]
    assert training.steps // training.save_every <= training.keep_last, "all checkpoints stay"
    assert int(every) % training.save_every == 0 and training.steps % int(every) == 0, "the curve ends with the run"
    assert training.save_every * options.average < training.steps and training.validate_every == training.save_every
    weights = sizes.vocab_size * sizes.d_model + sizes.N * (12 * sizes.d_model**2 + 4 * sizes.d_model * sizes.d_ff)
    assert 2 * weights < keep.MOST, "small enough to be kept"
    again, _ = calls_of(tmp_path, "newstest.sh")
    assert [words[0] for words in again] == ["score"]


def test_the_recipe_for_news_also_translates_in_the_other_direction_from_the_same_text(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/curve.py").write_text("import shlex, sys\n"
                                                   "open('calls', 'a').write(shlex.join(['curve', *sys.argv[1:]]) + '\\n')")
    there, _ = calls_of(tmp_path, "newstest.sh")
    back, _ = calls_of(tmp_path, "newstest.sh", "de", "en")
    forth, reverse = (train_options(made[0][1:]) for made in (there, back))
    assert (reverse.source, reverse.target, reverse.corpus) == ("de", "en", forth.corpus)
    assert (reverse.sizes, reverse.training, reverse.average) == (forth.sizes, forth.training, forth.average), "the same recipe"
    assert not {forth.out, forth.checkpoints} & {reverse.out, reverse.checkpoints} and there[2][4] != back[2][4], "nothing is written over"
    assert back[1][3:5] == ["de", "en"] and back[1][-1] == back[2][back[2].index("--command") + 1] == "experiments/newstest.sh de en"
    with pytest.raises(AssertionError, match="give en de or de en, not de fr"):
        calls_of(tmp_path, "newstest.sh", "de", "fr")


def test_processes_share_a_run_of_the_scripts_a_thread_each(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copyfile(ROOT / "experiments/environment.sh", tmp_path / "experiments/environment.sh")
    for name in ("python", "torchrun"):
        (tmp_path / ".venv/bin" / name).write_text(f'#!/bin/sh\necho {name} "${{OMP_NUM_THREADS:-all}}" "$@"\n')
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    commands = "source experiments/environment.sh; annotated train a; processes=2 annotated train b; annotated score c"
    said = subprocess.run(["bash", "-c", commands], cwd=tmp_path, env={"PATH": "/usr/bin:/bin:/sbin:/usr/sbin"}, text=True,
                          capture_output=True, timeout=60)
    assert said.stdout.splitlines() == ["python all -m annotated train a", "torchrun 1 --nproc-per-node 2 -m annotated train b",
                                        "python all -m annotated score c"], said.stderr


def test_the_curve_of_a_run_scores_each_checkpoint_that_is_asked_for(tmp_path, monkeypatch):
    pairs = [("The dog sleeps .", "Der Hund schläft ."), ("The bear sleeps .", "Der Bär schläft .")] * 2
    tokenizer = SubwordTokenizer.fit(pairs, 280)
    model = random_model(vocab_size=len(tokenizer))
    monkeypatch.setattr(curve, "translate", lambda model, tokenizer, sentences, language: [f"{language}: {pairs[0][1]}"] * len(sentences))
    for step in (2, 4, 5, 8):
        save_checkpoint(tmp_path / f"step-{step:08}", model, tokenizer, scheduled=step != 8)
    rows, signature = curve.along(tmp_path, pairs, "en", 2)
    by_hand = sacrebleu.corpus_bleu([f"en: {pairs[0][1]}"] * 4, [[german for _, german in pairs]])
    assert [row["step"] for row in rows] == [2, 4], "5 is no multiple, 8 was written for a signal"
    assert all(row["bleu"] == by_hand.score for row in rows) and 0 < by_hand.score < 100 and "tok:13a" in signature
    with pytest.raises(ValueError, match="holds no checkpoint of an update that 7 divides"):
        curve.along(tmp_path, pairs, "en", 7)


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


def test_the_last_checkpoints_before_each_stop_are_scored_once(tmp_path, monkeypatch):
    rows = [{"step": 58 * n, "plain": plain, "smoothed": 9.0 - n} for n, plain in enumerate([5.0, 3.0, 4.0, 4.0, 4.0, 2.0], 1)]
    folders, asked = [tmp_path / f"run/step-{row['step']:08}" for row in rows], []
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.setattr(stops, "EPOCHS", 2)
    monkeypatch.setattr(stops.stop, "__defaults__", (2,))
    monkeypatch.setattr(stops, "load_corpus", lambda name, *_: SimpleNamespace(valid=[(name, name)]))
    monkeypatch.setattr(stops, "losses", lambda found, pairs: rows)
    monkeypatch.setattr(stops, "mean_scores", lambda some, pairs, plain: asked.append((some, pairs, plain)) or SimpleNamespace(
        score=float(len(asked)), signature="BLEU"))
    stops.main("words", "texts", tmp_path / "out.json", tmp_path / "run")
    assert asked == [(folders[2:4], [("words", "words")], [("texts", "texts")]), (folders[4:], [("words", "words")], [("texts", "texts")])]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["runs"] == [{"rows": rows, "stops": {"plain": {"step": 232, "bleu": 1.0}, "smoothed": {"step": 348, "bleu": 2.0},
                                                      "end": {"step": 348, "bleu": 2.0}}}] and found["signature"] == "BLEU"


def test_the_mean_of_checkpoints_translates_and_is_scored_as_plain_text(tmp_path, monkeypatch):
    words, texts = [("the dog sleeps .", "der hund schläft .")], [("The dog sleeps.", "Der Hund schläft.")]
    tokenizer, seen = SubwordTokenizer.fit(words, 280), []
    for seed in (1, 2):
        save_checkpoint(tmp_path / f"step-0000000{seed}", random_model(len(tokenizer), seed), tokenizer)
    folders = sorted(tmp_path.glob("step-*"))

    def translated(model, tokenizer, sentences, language, beam, alpha):
        seen.append((undo(model).state_dict(), sentences, language, beam, alpha))
        return ["der hund schläft ."]

    monkeypatch.setattr(stops, "translate", translated)
    assert stops.mean_scores(folders, words, texts).score == pytest.approx(100.0)
    (weights, *asked), = seen
    assert asked == [["the dog sleeps ."], "en", 5, 1.4]
    assert all(torch.equal(weights[name], weight) for name, weight in average_checkpoints(folders).items())


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


def test_a_smoothed_loss_ends_the_run_and_stands_in_its_log(tmp_path, monkeypatch):
    pairs = [("The dog sleeps .", "Der Hund schläft ."), ("The bear reads .", "Der Bär liest .")]
    for split in ("train", "valid", "test"):
        for n, language in enumerate(("en", "de")):
            (tmp_path / f"{split}.{language}").write_text(20 * "".join(f"{pair[n]}\n" for pair in pairs))
    monkeypatch.setattr(sys, "argv", ["smoothed_stop.py", *shlex.split(
        f"{tmp_path} --source en --target de --out {tmp_path / 'model'} --N 1 --d-model 16 --d-ff 32 --h 2 --vocab-size 290 --steps 6 "
        "--max-tokens 64 --validate-every 3 --label-smoothing 0.2")])
    runpy.run_path(smoothed_stop.__file__, run_name="__main__")
    saved, losses = load_checkpoint(tmp_path / "model"), []
    logits, targets = [], []
    for source, target in encode_pairs(pairs, saved.tokenizer, "en", "de"):
        logits.append(saved.model(torch.tensor([[*source, 2]]), torch.tensor([[1, *target]]))[0])
        targets += [*target, 2]
    losses = [F.cross_entropy(torch.cat(logits), torch.tensor(targets), label_smoothing=share).item() for share in (0.0, 0.1, 0.2)]
    assert saved.info["log"][-1]["valid_loss"] == pytest.approx(losses[1], rel=1e-5)  # float32: some 150 roundings
    assert losses[0] < losses[1] < losses[2]
    assert smoothed_stop.smoothed(0.2).smoothing == 0.2, "training keeps its own"


@pytest.mark.long
def test_an_epoch_of_the_recipe_for_multi30k_has_58_batches():
    folder = Path(os.environ.get("ANNOTATED_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "multi30k").is_dir():
        pytest.skip("there is no Multi30k here")
    pairs = load_corpus("multi30k", folder, "en", "de").train
    pairs = [tuple(" ".join(split_words(text, language)).lower() for text, language in zip(pair, ("en", "de"), strict=True))
             for pair in pairs]  # nearly the form that is scored
    tokenizer = SubwordTokenizer.fit(pairs, 10_000)
    assert abs(count_batches(pair_lengths(encode_pairs(pairs, tokenizer)), 8192) - 58) <= 1


def test_table_3_on_toy_begins_with_base_and_goes_on_by_whole_seeds(tmp_path):
    made, _ = calls_of(tmp_path, "variations.sh", "toy")
    assert made[::2] == made[1::2], "two processes share each sweep"
    made = made[::2]
    scales = ["toy-long", "toy-few"]
    assert [words[words.index("--scale") + 1] for words in made] == scales * 4
    assert all(words[-2:] == ["--rows", "base"] for words in made[:2])
    assert [words[-1] for words in made[2:]] == ["1", "1", "2", "2", "3", "3"] and all(words[-2] == "--seeds" for words in made[2:])
    assert {words[words.index("--out") + 1] for words in made} == {"results/table3_toy-long.jsonl", "results/table3_toy-few.jsonl"}
    assert calls_of(tmp_path, "variations.sh")[0][0][:6] == \
        ["vary", "multi30k", "--scale", "multi30k", "--out", "results/table3_multi30k.jsonl"]


def test_table_3_on_multi30k_takes_nine_rows_of_two_seeds(tmp_path):
    (made, _), _ = calls_of(tmp_path, "variations.sh", "multi30k-long", "--device", "cpu")
    names = made[made.index("--rows") + 1:made.index("--seeds")]
    assert made[:4] == ["vary", "multi30k", "--scale", "multi30k-long"] and made[-4:] == ["--seeds", "2", "--device", "cpu"]
    known = {row.name for row in variations.rows("multi30k-long")}
    assert len(set(names)) == 9 and set(names) <= known and "base" in names


# Long inputs: layers that are computed again

IDS = torch.tensor([[5, 6, 7, 8, 9, 2], [4, 4, 10, 2, 0, 0]])


def gradients(again, purpose, dropout, norm_first=False):
    """(gradients of a model by name, bytes kept for the backward pass besides the weights); seeded alike."""
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


def test_train_takes_a_model_whose_layers_are_computed_again():
    pairs = [([a, b], [b, a]) for a in range(4, 9) for b in range(4, 9)]
    logs, models = [], [random_model(N=2, dropout=0.2).double() for _ in range(2)]
    calls = []
    for model, again in zip(models, (False, True), strict=True):
        prepare(model)
        if again:
            long_inputs.compute_again(model)
            model.encoder.layers[1].feed_forward.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        logs.append(train(model, pairs, pairs[:5], TrainingConfig(steps=3, max_tokens=40, warmup=2), show_progress=False, loss=ChunkedLoss))
    assert logs[0] == logs[1] and sum(calls) == 2 * (3 + 1), "each of three steps, and the rehearsal, goes through a layer twice"
    plain, again = (undo(model).eval()(IDS, IDS).detach() for model in models)
    assert torch.equal(plain, again) and list(models[0].state_dict()) == list(models[1].state_dict())


def test_long_inputs_are_measured_in_processes_of_their_own(tmp_path, monkeypatch):
    sizes, run = TransformerConfig(40, N=1, d_model=16, d_ff=32, h=2), subprocess.run
    for purpose, ways in long_inputs.WAYS.items():
        for way in ways:
            found = long_inputs.measure(purpose, way, 40, sizes)
            assert found["bytes"] >= 0 and found["seconds"] > 0

    def done(command, **options):
        if "long_inputs.py" not in str(command):
            return run(command, **options)
        return subprocess.CompletedProcess(command, 0, json.dumps({"bytes": int(command[-1]), "seconds": 0.0}))

    monkeypatch.setattr(long_inputs.subprocess, "run", done)
    long_inputs.main(tmp_path / "l.json")
    kept, stored = (json.loads(path.read_text()) for path in (tmp_path / "l.json", ROOT / "results" / "long_inputs.json"))
    assert [(row["purpose"], row["way"], row["tokens"]) for row in kept["rows"]] \
        == [(row["purpose"], row["way"], row["tokens"]) for row in stored["rows"]]
    assert len(kept["rows"]) == 25 and all(row["bytes"] == row["tokens"] for row in kept["rows"])
    assert TransformerConfig(**kept["model"]) == long_inputs.SIZES
