"""The terminal: each command does what the library does, and mistakes are one line."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import PAIRS, ROOT, TEXTS, one_thread, random_model, run_python, state
from torch import nn

from annotated import TrainingConfig, TransformerConfig, cli, reproduce, train
from annotated.cli import main
from annotated.data import downloads
from annotated.data.prepared import load_prepared, prepare_corpus
from annotated.data.tokenizers import UNKNOWN, SubwordTokenizer
from annotated.fast import prepare
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.interop import ctranslate2, hugging_face
from annotated.options import train_options
from annotated.results import provenance, read_json
from annotated.training import distributed, loop
from annotated.training.checkpoints import load_checkpoint, run_checkpoints, save_checkpoint

pytestmark = pytest.mark.usefixtures(one_thread.__name__, "own")
SMALL = ("--tokenizer words --steps 4 --warmup 2 --N 1 --d-model 16 --d-ff 16 --h 2 "
         "--max-tokens 64").split()
NEW = ["--out", "model", *SMALL]


def run(*words):
    return main(list(map(str, words)))


def refused(command, arguments, capsys):
    """Run a command, which must refuse: exit status 2 and one line, which is returned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(command, *arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "Traceback" not in error
    last = error.splitlines()[-1]
    assert last.startswith(f"annotated {command}: error: ")
    return last


def misread(command, arguments, capsys):
    """What is said of options that cannot be read, on several lines, with exit status 2."""
    with pytest.raises(SystemExit) as stopped:
        run(command, *arguments)
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").replace("╭", " ").split())


def write_corpus(folder, pairs=TEXTS):
    folder = Path(folder)
    folder.mkdir()
    for split in ("train", "valid", "test"):
        for side, language in enumerate(("en", "de")):
            lines = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Files of the user's own, in the folder that the commands run in."""
    monkeypatch.chdir(tmp_path)
    return write_corpus("own")


def test_command_line_trains_on_the_users_own_files(capsys):
    given = ["--norm-first", "--seed", "3", "--label-smoothing", "0.2"]
    run("train", "own", "--out", "new/model", *SMALL, *given)
    assert "4 steps in" in capsys.readouterr().out
    saved = load_checkpoint("new/model")
    sizes = {"N": 1, "d_model": 16, "d_ff": 16, "h": 2, "dropout": loop.PRESETS["small"][0].dropout}
    assert saved.model.config == TransformerConfig(len(saved.tokenizer), **sizes, norm_first=True)
    told = {"source_language": "en", "target_language": "de", "corpus": "own"}
    assert told.items() <= saved.info.items() and len(saved.info["log"]) == 1
    told = {"seed": 3, "label_smoothing": 0.2, "steps": 4, "warmup": 2}
    assert told.items() <= saved.info["training"].items()


def test_command_line_learns_no_word_and_no_piece_from_what_is_held_out(own):
    for split, word in (("valid", "quax"), ("test", "zyxxyz")):
        for language in ("en", "de"):
            (own / f"{split}.{language}").write_text(f"{word}\n" * 50, encoding="utf-8")
    for kind in ("words", "bpe"):
        run("train", own, "--out", kind, *SMALL[2:], "--tokenizer", kind, "--vocab-size", 400)
        tokenizer = load_checkpoint(kind).tokenizer
        for word in ("quax", "zyxxyz"):  # unknown, or one id a letter and one for the space
            ids = tokenizer.encode(word, "en")
            assert ids == [UNKNOWN] if kind == "words" else len(ids) == 1 + len(word)
        assert UNKNOWN not in tokenizer.encode("the dog sleeps", "en")


def test_command_line_turns_the_direction_and_learns_pieces():
    run("train", "own", "--source", "de", "--target", "en", *NEW, "--tokenizer", "bpe",
        "--vocab-size", 300)
    saved = load_checkpoint("model")
    assert saved.info["source_language"] == "de"
    assert isinstance(saved.tokenizer, SubwordTokenizer)
    assert saved.tokenizer.decode(saved.tokenizer.encode("Hühnerhof")) == "Hühnerhof"
    run("train", "own", "--from", "model", "--out", "more", "--steps", 2)
    assert load_checkpoint("more").languages == ("de", "en"), "the direction is the model's"
    run("train", "own", "--from", "model", "--source", "en", "--target", "de", "--out", "back",
        "--steps", 2, "--checkpoints", "run")
    assert load_checkpoint("run/step-00000002").languages == ("en", "de"), "unless another is given"


def test_command_line_refuses_with_one_line(own, capsys):
    for arguments, message in (
        ([own, "--out", own], "own exists already"), (["nowhere"], "unknown corpus 'nowhere'"),
        (["./missing"], "there is no folder"), ([own, "--source", "xx"], "no language 'xx'"),
        ([own, "--device", "abacus"], "device 'abacus' cannot be used"),
        ([own, "--max-tokens", 5], "max_tokens=5"),
        ([own, "--tokenizer", "x.model", "--vocab-size", 9], "x.model has its own size: leave"),
        ([own, "--resume"], "give --checkpoints FOLDER"),
        ([own, "--checkpoints", "model/run"], "--checkpoints model/run lies in --out model"),
        ([own, "--tensorboard", "model"], "--tensorboard model lies in --out model")):
        assert message in refused("train", [*NEW, *arguments], capsys)
    for arguments, message in ((["--h", 3], "d_model=16 is not divisible by h=3"),
                               (["--steps", 0], "steps=0 is invalid"),
                               (["--steps", "many"], "invalid")):
        assert message in misread("train", [own, *NEW, *arguments], capsys)
    (own / "train.de").unlink()
    assert "train.de is missing" in refused("train", [own, *NEW], capsys)
    assert not Path("model").exists()


def test_commands_take_the_gpu_where_one_is_unless_told_otherwise(capsys, monkeypatch):
    asked = []

    def refuse(name, *_):
        asked.append(str(name))
        raise ValueError("so far")

    for function in ("process_group", "check_device"):
        monkeypatch.setattr(distributed, function, refuse)
    commands = {"train": ["own"], "translate": ["--input", "own/test.en"], "look": ["a cat"],
                "vary": ["toy"], "parse": ["gum"]}
    for gpu in (True, False):
        monkeypatch.setattr(torch.accelerator, "current_accelerator",
                            lambda check_available, gpu=gpu: torch.device("cuda") if gpu else None)
        for command, arguments in commands.items():
            out = ["--out", "x"] if command != "translate" else []
            refused(command, [*arguments, *out], capsys)
            refused(command, [*arguments, *out, "--device", "cpu"], capsys)
    assert asked == ["cuda", "cpu"] * 5 + ["cpu", "cpu"] * 5


def test_command_line_draws_the_first_queries_keys_and_values_as_torch_does(capsys):
    """Nearly no update: what is saved is how the model began."""
    for name, more in (("one", []), ("less", ["--attention-gain", 2**-0.5])):
        run("train", "own", "--out", name, *SMALL, "--factor", "1e-9", *more)
    one, less = load_checkpoint("one"), load_checkpoint("less")
    assert (one.info["attention_gain"], less.info["attention_gain"]) == (1.0, 2**-0.5)
    # the largest of 768 uniform draws
    theirs = nn.MultiheadAttention(16, 2, bias=False).in_proj_weight.abs().max().item()
    for (name, weight), other in zip(one.model.named_parameters(), less.model.parameters(),
                                     strict=True):
        asked = re.search(r"attention\.W_[QKV]\.weight$", name)
        # one rounding of numbers below 1
        assert torch.allclose(other, weight * (2**-0.5 if asked else 1), atol=1e-6), name
        assert not asked or other.abs().max().item() == pytest.approx(theirs, rel=0.05)
    for wrong in ("0", "-1", "nan", "inf"):
        error = refused("train", ["own", *NEW, "--attention-gain", wrong], capsys)
        assert "--attention-gain" in error and "give a number above 0" in error


def test_from_keeps_the_language_that_is_not_named(monkeypatch):
    start = SimpleNamespace(languages=("fr", "en"), tokenizer="its own")
    load = mock.Mock(return_value=SimpleNamespace(train=[]))
    monkeypatch.setattr(reproduce.corpora, "load_corpus", load)
    for more, target in ((["--source", "fr"], "en"), (["--target", "de"], "de"), ([], "en")):
        options = train_options(["mine", "--out", "x", "--from", "y", *more])
        assert reproduce._corpus_with_tokenizer(options, start)[1] == "its own"
        assert load.call_args.args == ("mine", None, "fr", target)


def test_command_line_goes_on_and_averages(capsys):
    saving = ["--save-every", 1, "--checkpoints", "run"]
    error = refused("train", ["own", *NEW, *saving, "--save-every", 3, "--average", 3], capsys)
    assert "4 steps with --save-every 3 make 2 checkpoints" in error
    error = refused("train", ["own", *NEW, *saving, "--average", 9], capsys)
    assert "--average 9: 4 steps with --save-every 1 make 4 checkpoints" in error
    assert not Path("run").exists()
    assert "need checkpoints" in refused("train", ["own", *NEW, "--average", 2], capsys)
    run("train", "own", "--out", "first", *SMALL, *saving)
    error = refused("train", ["own", *NEW, "--checkpoints", "run"], capsys)
    assert "holds checkpoints already: give --resume" in error
    error = refused("train", ["own", *NEW, *saving, "--resume", "--attention-gain", 2], capsys)
    assert "began with {'attention_gain': 1.0, 'from': None}, not {'attention_gain': 2.0" in error
    run("train", "own", *NEW, *saving, "--resume", "--steps", 9, "--average", 6)  # keeps 5 unasked
    saved, last = load_checkpoint("model"), run_checkpoints("run")
    assert saved.info["averaged"] == [f"step-0000000{step}" for step in range(4, 10)]
    mean = sum(state(load_checkpoint(folder).model).double() for folder in last) / 6
    # one rounding to float32 of numbers up to 2
    assert (state(saved.model).double() - mean).abs().max() < 1e-6
    assert saved.tokenizer.as_dict() == load_checkpoint(last[0]).tokenizer.as_dict()


def test_command_line_trains_on_a_prepared_corpus(capsys):
    corpus = prepare_corpus(str(write_corpus("three", TEXTS * 3)), "prepared", vocab_size=280)
    new = ["prepared", "--out", "model", *SMALL[2:]]  # without --tokenizer
    run("train", *new)
    saved = load_checkpoint("model")
    assert saved.tokenizer.as_dict() == corpus.tokenizer.as_dict()
    assert saved.info["corpus"] == corpus.name
    torch.manual_seed(0)
    model = prepare.prepared_transformer(saved.model.config)
    again = load_prepared("prepared")
    # the loss in chunks, as the command has it: the plain one adds in another order
    log = train(model, list(again.train), list(again.valid),
                TrainingConfig(**saved.info["training"]), show_progress=False, loss=ChunkedLoss)
    assert log == saved.info["log"] and torch.equal(state(model), state(saved.model))
    new[2] = "new"
    for other in (["--tokenizer", "words"], ["--source", "de", "--target", "en"]):
        error = refused("train", [*new, *other], capsys)
        assert "prepared from en to de with a vocabulary of 280: leave --vocab-size" in error
    Path("prepared/train/ids.bin").write_bytes(b"")
    assert "ids.bin has 0 bytes" in refused("train", new, capsys)


def test_corpus_too_large_for_memory_is_to_be_prepared_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(downloads, "fetch", lambda *_: pytest.fail("it is fetched first"))
    error = refused("train", ["wmt14-en-de", "--out", "model"], capsys)
    assert "annotated prepare wmt14-en-de FOLDER" in error and not Path("model").exists()
    error = refused("vary", ["wmt14-en-de", "--out", "rows.jsonl"], capsys)
    assert "too large to be held in memory: give a smaller corpus" in error


def test_tensorboard_reads_back_what_was_logged():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reproduce._reporter("skipped")({"step": 1, "train_loss": None})  # no update was made
    run("train", "own", *NEW, "--validate-every", 2, "--tensorboard", "curves")
    log, events = load_checkpoint("model").info["log"], EventAccumulator("curves")
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*log[0], "tokens_per_second"}
    for name in log[0]:
        scalars = [(event.step, event.value) for event in events.Scalars(name)]  # kept as float32
        assert scalars == [(row["step"], pytest.approx(row[name])) for row in log]


def test_curves_without_tensorboard_are_refused(capsys, monkeypatch):
    # as if the package were not there
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    error = refused("train", ["own", *NEW, "--tensorboard", "curves"], capsys)
    assert "tensorboard" in error and "install it with pip" in error
    assert not Path("model").exists() and not Path("curves").exists()


def test_the_first_help_comes_without_torch_and_an_unknown_command_is_named(capsys):
    code = ("import sys; from annotated.cli import main; main(['--help']); print(sorted({'torch', "
            "'numpy', 'spacy'} & sys.modules.keys())); main(['translate', '--help'])")
    plain = os.environ | {"PYTHONIOENCODING": "ascii"}  # a terminal that knows no other letters
    said, more = run_python(code, cwd=ROOT, env=plain).split("\n[]\n")
    assert all(f"  {name} " in said for name in cli.COMMANDS) and "--n-best" in more
    assert main([]) == 0 and capsys.readouterr().out.startswith(said)
    assert "trian: give one of train, translate" in refused("trian", ["toy"], capsys)


def test_without_standard_error_only_translations_are_written(tmp_path):
    command = f"echo zebra | {sys.executable} -m annotated translate --device cpu 2>&-"
    out = subprocess.check_output(["sh", "-c", command], cwd=ROOT, text=True)
    assert out.count("\n") == 1 and "vocabulary" not in out


def test_what_is_broken_off_ends_without_a_traceback(monkeypatch, capsys):
    """By the user, or by a reader that wants no more, such as `head`."""
    monkeypatch.setitem(cli.COMMANDS, "clean", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as stopped:
        main(["clean"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "annotated clean: interrupted\n"
    code = "from annotated import cli; cli.COMMANDS['x'] = print; cli.main(['x', 'y' * 10**6])"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=-1, stderr=-1)
    process.stdout.read(1)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 1)


def test_training_from_the_terminal_is_that_of_a_prepared_model(monkeypatch):
    calls, real = [], loop.train
    monkeypatch.setattr(loop, "train", lambda *given: calls.append(given) or real(*given))
    run("train", "own", *NEW)
    (model, *_, loss, _), = calls
    assert loss is ChunkedLoss
    assert any(isinstance(part, prepare.PreparedPart) for part in model.modules())


def test_the_command_counts_faults_in_two_files(capsys):
    Path("a.en.gz").write_bytes(gzip.compress(b"A dog\n\ncaf\xe9\n"))
    Path("a.de").write_bytes(b"Ein Hund\nleer\nCafe\n")
    run("clean", "a.en.gz", "a.de")
    result = json.loads(capsys.readouterr().out)
    assert result["counts"] == {"broken": 1, "empty": 1, "kept": 1} and result["pairs"] == 3
    run("clean", "a.en.gz", "a.de", "--out", "r.json")
    assert read_json("r.json")["counts"] == result["counts"]
    assert "none" in refused("clean", ["a.en.gz", "none"], capsys)


@pytest.mark.parametrize("line", [
    "vary toy --out out --steps 0", "vary toy --out out --seeds -1",
    "vary toy --out out --sentences -1", "parse toy --out out --sentences -1",
    "parse toy --out out --beam-sentences 0", "export --out out --limit 0",
    "train --out out --checkpoints c --average 0", "translate --n-best 0",
    "train toy --out out --timeout nan", "prepare toy out --vocab-size 300 --max-length 0",
    "clean a b --max-ratio nan"])
def test_numbers_that_mean_nothing_are_refused_at_once(line, capsys, tmp_path):
    command, *arguments = line.split()
    said = refused(command, arguments, capsys)
    assert f"{' '.join(arguments[-2:])}: give a number above 0" in said
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_the_command_prepares(capsys):
    write_corpus("mine", [(f"word {n % 23} and {n}", f"Wort {n % 19} und {n}") for n in range(200)])
    run("prepare", "mine", "p", "--vocab-size", 700, "--model", "wordpiece", "--max-length", 99)
    said = capsys.readouterr()
    # how long, and how much disk
    assert "2 of 2, encoding: 100%" in said.err and "B of about " in said.err
    facts = {"model": "wordpiece", "max_length": 99}
    assert facts.items() <= json.loads(said.out).items()
    assert load_prepared("p").tokenizer.model == "wordpiece"
    error = refused("prepare", ["mine", "p", "--vocab-size", 300], capsys)
    assert "was prepared with vocab_size 700, not 300" in error
    given = ["mine", "q", "--vocab-size", 300]
    assert "unigram" in misread("prepare", [*given, "--model", "unigram"], capsys)
    run("prepare", *given, "--seed", 7, "--share", 0.5)
    facts = {"seed": 7, "share": 0.5}
    assert facts.items() <= json.loads(capsys.readouterr().out).items()


# Export

PIECES = SubwordTokenizer.fit(PAIRS, vocab_size=270)


@pytest.fixture
def checkpoint():
    save_checkpoint("checkpoint", random_model(len(PIECES), N=2), PIECES, source_language="en",
                    target_language="fr", corpus="pairs")
    Path("lines.txt").write_text("a dog\n\nthe dog sees a cat\nein Hund\n")
    Path("scores.json").write_text(json.dumps(
        {"data": "pairs test", "decoding": "greedy",
         "entries": {"sacrebleu": {"score": 12.345, "signature": "s|t"}}}))


def test_export_exports_checks_and_brings_back(checkpoint, capsys):
    run("export", "checkpoint", "--out", "hf", "--scores", "scores.json", "--check", "lines.txt",
        "--limit", 2, "--report", "report.json")
    report = read_json("report.json")
    assert report.items() >= provenance().items()
    assert report == json.loads(capsys.readouterr().out) | provenance()
    assert report["passed"] and report["sentences"] == report["same greedy output"] == 2
    assert report["trained on"] == "pairs" and "--limit 2" in report["command"]
    assert report["command"].startswith("annotated export checkpoint --out hf ")
    assert report["versions"]["torch"] == torch.__version__.split("+")[0]
    card = Path("hf/README.md").read_text()
    assert ("- Trained on: pairs\n- Score: BLEU 12.35 on pairs test, greedy\n"
            "- Signature of the score: `s|t`\n") in card and "# Transformer, en to fr\n" in card
    assert run("export", "--back", "hf", "--out", "again") == 0
    again = load_checkpoint("again")
    assert again.info == {"source_language": "en", "target_language": "fr"}
    assert torch.equal(state(again.model), state(load_checkpoint("checkpoint").model))


def test_export_fails_where_the_export_differs(checkpoint, capsys, monkeypatch):
    # another activation: a folder like any other, only a comparison can tell
    monkeypatch.setattr(hugging_face, "_activation", lambda *_: "swish")
    assert run("export", "checkpoint", "--out", "hf", "--check", "lines.txt") == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert not report["passed"] and report["largest difference of a logit"] > 1e-2
    assert "does not agree" in printed.err


@pytest.mark.parametrize("name, value", [
    (None, None), ("largest difference of a logit", 2e-4), ("weights come back to the bit", False),
    ("same greedy output", 2), ("same greedy output of CTranslate2", 2),
    ("same ids of the source", 2)])
def test_export_passes_only_if_everything_agrees(checkpoint, capsys, monkeypatch, name, value):
    facts = {"largest difference of a logit": 2e-5, "weights come back to the bit": True,
             "same greedy output": 3, "same ids of the source": 3,
             "same greedy output of CTranslate2": 3, **({name: value} if name else {})}
    monkeypatch.setattr(ctranslate2, "check_export", lambda *_: facts)
    monkeypatch.setattr(ctranslate2, "export_to_ctranslate2", lambda *_: None)
    given = ["checkpoint", "--out", "hf", "--ctranslate2", "ct2", "--check", "lines.txt"]
    assert run("export", *given) == (0 if name is None else 1)
    assert json.loads(capsys.readouterr().out)["passed"] == (name is None)


@pytest.mark.parametrize("line, message", [
    ("nowhere", "there is no folder"), ("bare", "has no tokenizer"),
    ("checkpoint --scores lines.txt", "is no report of scores"),
    ("--back checkpoint", "config.json: model_type=None cannot be imported"),
    ("checkpoint --back hf --data x", "--back needs --out alone: leave out model, data"),
    ("checkpoint --ctranslate2 bare", "bare exists already"),
    ("checkpoint --ctranslate2 out/in", "--ctranslate2 out/in lies in --out"),
    ("checkpoint --ctranslate2 ./out", "--ctranslate2 out lies in --out"),
    ("checkpoint --check lines.txt --report out/r.json", "--report out/r.json lies in --out"),
    ("checkpoint --scores other.json", "other.json holds the scores of another model"),
    ("--scores other.json", "other.json holds the scores of another model"),
    ("checkpoint --check empty.txt", "holds no sentences"),
    ("checkpoint --check gone.txt", "gone.txt"),
    ("checkpoint --limit 5", "--limit needs --check: give both"),
    ("checkpoint --report report.json", "--report needs --check: give both"),
    ("checkpoint --quantization int8", "--quantization needs --ctranslate2: give both")])
def test_export_says_what_is_wrong_in_one_line(checkpoint, line, message, capsys):
    save_checkpoint("bare", random_model())
    Path("empty.txt").write_text("\n")
    report = json.loads(Path("scores.json").read_text()) | {"weights": "0" * 64}
    Path("other.json").write_text(json.dumps(report))
    assert message in refused("export", [*line.split(), "--out", "out"], capsys)
    assert not Path("out").exists()
