"""The terminal: each command does what the library does, its help says what fields mean, and mistakes are one line."""

import gzip
import io
import itertools
import json
import math
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
from helpers import PAIRS, ROOT, TEXTS, one_thread, random_model, run_python, state
from torch import nn
from torch.nn import functional as F

from annotated import cli
from annotated.cli import main
from annotated.data import prepared
from annotated.data.corpora import Corpus
from annotated.data.prepared import load_prepared, prepare_corpus
from annotated.data.tokenizers import BEGIN, END, UNKNOWN, SubwordTokenizer, WordTokenizer
from annotated.data.toy_language import generate_corpus
from annotated.fast import engines, prepare
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.fast.engines import make_engine
from annotated.interop import ctranslate2, hugging_face
from annotated.model.transformer import TransformerConfig
from annotated.results import provenance, read_json
from annotated.training import checkpoints, distributed, loop
from annotated.training.checkpoints import load_checkpoint, run_checkpoints, save_checkpoint
from annotated.training.loop import TrainingConfig, train
from annotated.translation import search
from annotated.translation.search import beam_search, translate

WORDS = WordTokenizer.fit(TEXTS)


pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def refused(command, arguments, capsys):
    """Run a command, which must refuse: exit status 2 and one line, which is returned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([command, *map(str, arguments)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "Traceback" not in error
    last = error.splitlines()[-1]
    assert last.startswith(f"annotated {command}: error: ")
    return last


def misread(command, arguments, capsys):
    """What is said of options that cannot be read, on several lines, with exit status 2."""
    with pytest.raises(SystemExit) as stopped:
        main([command, *map(str, arguments)])
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").replace("╭", " ").split())


SMALL = "--tokenizer words --steps 4 --warmup 2 --N 1 --d-model 16 --d-ff 16 --h 2 --max-tokens 64".split()


def write_corpus(folder, pairs=TEXTS):
    folder.mkdir()
    for split in ("train", "valid", "test"):
        for side, language in enumerate(("en", "de")):
            (folder / f"{split}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return folder


def test_command_line_trains_on_the_users_own_files(tmp_path, capsys):
    own = write_corpus(tmp_path / "own")
    given = ["--norm-first", "--seed", "3", "--label-smoothing", "0.2"]
    main(["train", str(own), "--out", str(tmp_path / "new" / "model"), *SMALL, *given])
    assert "4 steps in" in capsys.readouterr().out
    saved = load_checkpoint(tmp_path / "new" / "model")
    sizes = {"N": 1, "d_model": 16, "d_ff": 16, "h": 2, "dropout": loop.PRESETS["small"][0].dropout}
    assert saved.model.config == TransformerConfig(len(saved.tokenizer), **sizes, norm_first=True)
    told = saved.info["training"]
    assert (told["seed"], told["label_smoothing"], told["steps"], told["warmup"]) == (3, 0.2, 4, 2)
    assert (saved.info["source_language"], saved.info["target_language"], saved.info["corpus"]) == ("en", "de", "own")
    assert saved.tokenizer.encode("the cat", "en") and len(saved.info["log"]) == 1


def test_command_line_learns_no_word_and_no_piece_from_what_is_held_out(tmp_path):
    own = write_corpus(tmp_path / "own")
    for split, word in (("valid", "quax"), ("test", "zyxxyz")):
        for language in ("en", "de"):
            (own / f"{split}.{language}").write_text(f"{word}\n" * 50, encoding="utf-8")
    for kind, known in (("words", [UNKNOWN]), ("bpe", None)):
        options = [*SMALL[2:], "--tokenizer", kind, "--vocab-size", "400"]
        main(["train", str(own), "--out", str(tmp_path / kind), *options])
        tokenizer = load_checkpoint(tmp_path / kind).tokenizer
        for word in ("quax", "zyxxyz"):
            ids = tokenizer.encode(word, "en")
            assert ids == known if known else len(ids) == 1 + len(word), "one id a letter, and one for the space"
        assert len(tokenizer.encode("the dog sleeps", "en")) == 3 or kind == "bpe"


def test_command_line_turns_the_direction_and_learns_pieces(tmp_path):
    own = write_corpus(tmp_path / "own")
    small = [*SMALL[2:], "--tokenizer", "bpe", "--vocab-size", "300"]
    main(["train", str(own), "--out", str(tmp_path / "model"), "--source", "de", "--target", "en", *small])
    saved = load_checkpoint(tmp_path / "model")
    assert saved.info["source_language"] == "de" and type(saved.tokenizer).__name__ == "SubwordTokenizer"
    assert saved.tokenizer.decode(saved.tokenizer.encode("Hühnerhof")) == "Hühnerhof"


def test_command_line_refuses_with_one_line(tmp_path, capsys):
    own = write_corpus(tmp_path / "own")
    new = ["--out", tmp_path / "model", *SMALL]
    assert f"{own} exists already" in refused("train", [own, "--out", own], capsys)
    assert "unknown corpus 'nowhere'" in refused("train", ["nowhere", *new], capsys)
    assert "there is no folder" in refused("train", [tmp_path / "missing", *new], capsys)
    assert "no language 'xx'" in refused("train", [own, *new, "--source", "xx"], capsys)
    assert "device 'abacus' cannot be used" in refused("train", [own, *new, "--device", "abacus"], capsys)
    assert "max_tokens=5" in refused("train", [own, *new, "--max-tokens", "5"], capsys)
    assert "d_model=16 is not divisible by h=3" in misread("train", [own, *new, "--h", "3"], capsys)
    assert "steps=0 is invalid" in misread("train", [own, *new, "--steps", "0"], capsys)
    assert "invalid" in misread("train", [own, *new, "--steps", "many"], capsys)
    (own / "train.de").write_text("nur eine Zeile\n", encoding="utf-8")
    assert "train.en has 4 lines but" in refused("train", [own, *new], capsys)
    (own / "train.de").write_bytes(b"gut\n\xff\n\n\n")
    assert "train.de, line 2: not UTF-8" in refused("train", [own, *new], capsys)
    (own / "train.de").unlink()
    assert "train.de is missing" in refused("train", [own, *new], capsys)
    assert "train has 1 pair(s)" in refused("train", [write_corpus(tmp_path / "one", TEXTS[:1]), *new], capsys)
    assert not (tmp_path / "model").exists()


def test_commands_take_the_gpu_where_one_is_unless_told_otherwise(tmp_path, capsys, monkeypatch):
    own, asked = write_corpus(tmp_path / "own"), []

    def refuse(name, *_):
        asked.append(str(name))
        raise ValueError("so far")

    for function in ("process_group", "check_device"):
        monkeypatch.setattr(distributed, function, refuse)
    commands = {"train": [own, "--out", tmp_path / "x"], "translate": [], "vary": ["toy", "--out", tmp_path / "x"],
                "parse": ["gum", "--out", tmp_path / "x"]}
    for gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        for command, arguments in commands.items():
            refused(command, arguments, capsys)
            refused(command, [*arguments, "--device", "cpu"], capsys)
    assert asked == ["cuda", "cpu"] * 4 + ["cpu", "cpu"] * 4


def test_command_line_draws_the_first_queries_keys_and_values_as_torch_does(tmp_path, capsys):
    """Nearly no update: what is saved is how the model began."""
    own, still = write_corpus(tmp_path / "own"), ["--factor", "1e-9"]
    for name, more in (("one", []), ("less", ["--attention-gain", str(2**-0.5)])):
        main(["train", str(own), "--out", str(tmp_path / name), *SMALL, *still, *more])
    one, less = (load_checkpoint(tmp_path / name) for name in ("one", "less"))
    assert (one.info["attention_gain"], less.info["attention_gain"]) == (1.0, 2**-0.5)
    others = dict(less.model.named_parameters())
    smaller = {name for name, weight in one.model.named_parameters() if not torch.allclose(weight, others[name])}
    attentions = ["encoder.layers.0.self_attention", "decoder.layers.0.self_attention", "decoder.layers.0.cross_attention"]
    assert smaller == {f"{attention}.W_{which}.weight" for attention in attentions for which in "QKV"}
    theirs = nn.MultiheadAttention(16, 2, bias=False).in_proj_weight.abs().max()  # of 768 uniform draws
    for name, weight in one.model.named_parameters():
        if name in smaller:
            assert torch.allclose(others[name], weight * 2**-0.5, atol=1e-6)  # one rounding of numbers below 1
            assert others[name].abs().max().item() == pytest.approx(theirs.item(), rel=0.05)
    for wrong in ("0", "-1", "nan", "inf"):
        error = refused("train", [own, "--out", tmp_path / "model", *SMALL, "--attention-gain", wrong], capsys)
        assert "--attention-gain" in error and "give a number above 0" in error


def test_command_line_goes_on_and_averages(tmp_path, capsys):
    own, new, steps = write_corpus(tmp_path / "own"), ["--out", tmp_path / "model", *SMALL], ["--save-every", "1"]
    assert "give --checkpoints FOLDER" in refused("train", [own, *new, "--resume"], capsys)
    main(["train", str(own), "--out", str(tmp_path / "first"), *SMALL, *steps, "--checkpoints", str(tmp_path / "run")])
    assert "holds checkpoints already: give --resume" in refused("train", [own, *new, "--checkpoints", tmp_path / "run"], capsys)
    goes_on = [own, *new, *steps, "--checkpoints", tmp_path / "run", "--resume", "--steps", "6", "--average", "3"]
    main(["train", *map(str, goes_on)])
    saved, last = load_checkpoint(tmp_path / "model"), run_checkpoints(tmp_path / "run")[-3:]
    assert saved.info["averaged"] == ["step-00000004", "step-00000005", "step-00000006"]
    mean = sum(state(load_checkpoint(folder).model).double() for folder in last) / 3
    assert (state(saved.model).double() - mean).abs().max() < 1e-6  # one rounding to float32 of numbers up to 2
    assert saved.tokenizer.as_dict() == load_checkpoint(last[0]).tokenizer.as_dict()


def test_command_line_trains_on_a_prepared_corpus(tmp_path, capsys):
    own = write_corpus(tmp_path / "own", TEXTS * 3)
    corpus = prepare_corpus(str(own), tmp_path / "prepared", vocab_size=280)
    rest = SMALL[2:]  # without --tokenizer
    main(["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "model"), *rest])
    saved = load_checkpoint(tmp_path / "model")
    assert saved.tokenizer.as_dict() == corpus.tokenizer.as_dict() and saved.info["corpus"] == corpus.name
    torch.manual_seed(0)
    model = prepare.prepared_transformer(saved.model.config)
    again = load_prepared(tmp_path / "prepared")
    config = TrainingConfig(**saved.info["training"])
    # the loss in chunks, as the command has it: the plain one adds in another order, and on some processors the last digit tells
    assert train(model, list(again.train), list(again.valid), config, show_progress=False, loss=ChunkedLoss) == saved.info["log"]
    assert torch.equal(state(model), state(saved.model))
    capsys.readouterr()
    new = [tmp_path / "prepared", "--out", tmp_path / "new", *rest]
    assert "prepared from en to de with a tokenizer of its own" in refused("train", [*new, "--tokenizer", "words"], capsys)
    turned = [*new, "--source", "de", "--target", "en"]
    assert "leave --tokenizer, --normalize, --source and" in refused("train", turned, capsys)
    (tmp_path / "prepared" / "train" / "ids.bin").write_bytes(b"")
    assert "ids.bin has 0 bytes" in refused("train", new, capsys)


def test_corpus_too_large_for_memory_is_to_be_prepared_first(tmp_path, capsys, monkeypatch):
    for stem in ("train", "newstest2013", "newstest2014"):
        for language in ("en", "de"):
            path = tmp_path / "wmt14-en-de" / f"{stem}.{language}"
            path.parent.mkdir(exist_ok=True)
            path.write_text("A dog.\n" * 3, encoding="utf-8")
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))
    error = refused("train", ["wmt14-en-de", "--out", tmp_path / "model"], capsys)
    assert "annotated prepare wmt14-en-de FOLDER" in error and not (tmp_path / "model").exists()


def test_tensorboard_reads_back_what_was_logged(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    own, curves = write_corpus(tmp_path / "own"), tmp_path / "curves"
    main(["train", str(own), "--out", str(tmp_path / "model"), *SMALL, "--validate-every", "2", "--tensorboard", str(curves)])
    log, events = load_checkpoint(tmp_path / "model").info["log"], EventAccumulator(str(curves))
    events.Reload()
    assert [row["step"] for row in log] == [2, 4]
    assert set(events.Tags()["scalars"]) == {*log[0], "tokens_per_second"}
    for name in log[0]:
        told = events.Scalars(name)
        assert [event.step for event in told] == [2, 4]
        assert [event.value for event in told] == pytest.approx([row[name] for row in log], rel=1e-6)  # kept as float32


def test_curves_without_tensorboard_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if the package were not there
    given = [write_corpus(tmp_path / "own"), "--out", tmp_path / "model", *SMALL, "--tensorboard", tmp_path / "curves"]
    error = refused("train", given, capsys)
    assert "tensorboard" in error and "install it with pip" in error
    assert not (tmp_path / "model").exists() and not (tmp_path / "curves").exists()


def test_the_first_help_comes_without_torch():
    code = ("import sys; from annotated.cli import main; main(['--help']); "
            "print(sorted({'torch', 'numpy', 'spacy'} & sys.modules.keys()))")
    said = run_python(code)
    assert said.splitlines()[-1] == "[]" and all(f"  {name} " in said for name in cli.COMMANDS)


def test_an_unknown_command_is_named_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["trian", "toy"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and "trian" in error and "train, translate" in error


def test_the_module_is_a_program_and_a_console_script(capsys):
    said = subprocess.run([sys.executable, "-m", "annotated", "--help"], capture_output=True, text=True, check=True)
    assert main([]) == 0 and said.stdout == capsys.readouterr().out
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"annotated": "annotated.cli:main"}


@pytest.fixture(scope="module")
def model():
    return random_model(len(WORDS), seed=2, dropout=0.4).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "saved"
    save_checkpoint(folder, model, WORDS, source_language="en")
    return str(folder)


DATA = "the dog sees a cat .\r\n\nthe\u2028cat sleeps .\n   \na zebra .".encode()


def test_translate_gives_one_line_for_each_line(folder, tmp_path, monkeypatch, capsysbinary):
    (tmp_path / "in.txt").write_bytes(DATA)
    main(["translate", "--model", folder, "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt")])
    written = (tmp_path / "out.txt").read_bytes()
    assert capsysbinary.readouterr().out == b""
    lines = written.split(b"\n")
    assert [bool(line) for line in lines] == [True, False, True, False, True, False], "five lines and a final newline"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DATA)))
    main(["translate", "--model", folder])
    assert capsysbinary.readouterr().out == written
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    main(["translate", "--model", folder])
    assert capsysbinary.readouterr().out == b""


def test_translate_passes_beam_and_alpha_on(folder, model, monkeypatch, capsysbinary):
    seen = []
    monkeypatch.setattr(search, "beam_search", lambda *given, **steps: seen.append(given[2:]) or beam_search(*given, **steps))
    for options in ([], ["--beam", "3"], ["--beam", "3", "--alpha", "2"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat .\n")))
        main(["translate", "--model", folder, *options])
        expected = translate(["a cat ."], model, WORDS, beam=3 if options else 1, alpha=2.0 if "2" in options else 0.6)
        assert capsysbinary.readouterr().out.decode() == f"{expected[0]}\n"
    assert seen == [(3, 0.6), (3, 0.6), (3, 2.0), (3, 2.0)], "twice each: by main and by this test; greedy needs none"


def test_output_file_appears_whole_or_not_at_all(folder, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_bytes(DATA)
    (tmp_path / "out.txt").write_text("older\n")
    monkeypatch.setattr("annotated.files.os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(SystemExit):
        main(["translate", "--model", folder, "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt")])
    assert (tmp_path / "out.txt").read_text() == "older\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]


def test_translate_refuses_with_one_line(folder, tmp_path, model, capsys):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_bytes(DATA)
    bad.write_bytes(b"\n\n\xff\n")
    assert "bad.txt, line 3: not UTF-8" in refused("translate", ["--model", folder, "--input", bad], capsys)
    assert "missing.txt" in refused("translate", ["--model", folder, "--input", tmp_path / "missing.txt"], capsys)
    assert str(tmp_path / "none") in refused("translate", ["--model", tmp_path / "none", "--input", good], capsys)
    no_device = ["--model", folder, "--input", good, "--device", "abacus"]
    assert "device 'abacus' cannot be used" in refused("translate", no_device, capsys)
    assert "beam=0 is invalid" in refused("translate", ["--model", folder, "--input", good, "--beam", "0"], capsys)
    assert "alpha=-1.0 is invalid" in refused("translate", ["--model", folder, "--input", good, "--alpha", "-1"], capsys)
    save_checkpoint(tmp_path / "bare", model)
    assert "bare holds no tokenizer" in refused("translate", ["--model", tmp_path / "bare", "--input", good], capsys)


def test_without_a_model_the_book_s_own_translates(model, tmp_path, monkeypatch, capsysbinary):
    saved = SimpleNamespace(model=model, tokenizer=WORDS, info={"source_language": "en"})
    monkeypatch.setattr(checkpoints, "book_model", lambda: saved)
    (tmp_path / "in.txt").write_bytes(DATA)
    main(["translate", "--input", str(tmp_path / "in.txt")])
    assert capsysbinary.readouterr().out.count(b"\n") == 5


LINES = ["the dog sees a cat .", "", "a cat .", "the cat sleeps .", "   ", "a a a a a a a a a", "cat"]


@pytest.mark.parametrize("engine, precision, beam", [(None, None, 1), ("torch", "bf16", 3),
                                                     ("ctranslate2", "fp32", 1)])
def test_the_command_line_translates_with_the_engine_that_is_named(folder, engine, precision, beam, tmp_path, monkeypatch, capsysbinary):
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))  # where what CTranslate2 reads is kept
    saved = load_checkpoint(folder)
    prepare.prepare(saved.model)
    wanted = make_engine(engine or "torch", saved, precision or "fp32")
    assert wanted.name == (engine or "torch")
    expected = translate(LINES, saved.model, WORDS, beam=beam, engine=wanted)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(LINES).encode())))
    options = [word for name, value in (("--engine", engine), ("--precision", precision)) if value for word in (name, value)]
    main(["translate", "--model", folder, "--beam", str(beam), *options])
    assert capsysbinary.readouterr().out.decode() == "".join(f"{line}\n" for line in expected) and len(set(expected)) > 3


@pytest.mark.parametrize("module", ["translation/search", "training/loop", "paper/table3", "paper/parsing"])
def test_the_commands_are_quick_and_their_modules_plain(module):
    """The commands hand the prepared parts on; the modules that train and translate know nothing of them."""
    code = (ROOT / "annotated" / f"{module}.py").read_text(encoding="utf-8")
    assert "annotated.fast.prepare" not in code and ".fast " not in code and "from . import fast" not in code


def test_training_from_the_terminal_is_that_of_a_prepared_model(tmp_path, monkeypatch):
    seen, real = [], loop.train
    monkeypatch.setattr(loop, "train", lambda model, *given: seen.append((model, given[-2])) or real(model, *given))
    main(["train", str(write_corpus(tmp_path / "own")), "--out", str(tmp_path / "model"), *SMALL])
    (model, loss), = seen
    assert loss is ChunkedLoss and any(isinstance(part, prepare.PreparedPart) for part in model.modules())


def test_what_no_engine_computes_is_refused(folder, tmp_path, capsys):
    (tmp_path / "in.txt").write_bytes(DATA)
    assert "fp8" in misread("translate", ["--model", folder, "--precision", "fp8"], capsys)
    given = ["--model", folder, "--input", tmp_path / "in.txt", "--precision", "int8"]
    assert "for int8 give another engine" in refused("translate", given, capsys)


def test_the_command_counts_faults_in_two_files(tmp_path, capsys):
    (tmp_path / "a.en.gz").write_bytes(gzip.compress(b"A dog\n\ncaf\xe9\n"))
    (tmp_path / "a.de").write_bytes(b"Ein Hund\nleer\nCafe\n")
    main(["clean", str(tmp_path / "a.en.gz"), str(tmp_path / "a.de")])
    result = json.loads(capsys.readouterr().out)
    assert result["counts"] == {"broken": 1, "empty": 1, "kept": 1} and result["pairs"] == 3
    main(["clean", str(tmp_path / "a.en.gz"), str(tmp_path / "a.de"), "--out", str(tmp_path / "r.json")])
    assert json.loads((tmp_path / "r.json").read_text())["counts"] == result["counts"]
    assert "none" in refused("clean", [tmp_path / "a.en.gz", tmp_path / "none"], capsys)


@pytest.mark.parametrize("command, arguments", [
    ("vary", "toy --out out --steps 0"), ("vary", "toy --out out --seeds 0"), ("vary", "toy --out out --sentences -1"),
    ("parse", "toy --out out --sentences -1"), ("parse", "toy --out out --beam-sentences 0"),
    ("export", "--out out --limit 0"), ("train", "--out out --average 0 --checkpoints c"),
])
def test_numbers_that_mean_nothing_are_refused_at_once(command, arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flag, number = next((flag, number) for flag, number in itertools.pairwise(arguments.split()) if number in ("0", "-1"))
    assert f"{flag} {number}: give a number above 0" in refused(command, arguments.split(), capsys) and not list(tmp_path.iterdir())


def test_score_measures_what_translate_writes_and_tells_auto_what_valid_says(tmp_path, capsys, monkeypatch):
    own, results = write_corpus(tmp_path / "own"), tmp_path / "results"
    main(["train", str(own), "--out", str(tmp_path / "model"), *SMALL, "--steps", "150", "--warmup", "60"])
    main(["score", str(tmp_path / "model"), str(own), "test", str(results), "--beam", "2", "--alpha", "0.5"])
    saved, (sources, references) = load_checkpoint(tmp_path / "model"), (list(side) for side in zip(*TEXTS, strict=True))
    outputs = translate(sources, saved.model, saved.tokenizer, "en", beam=2, alpha=0.5)
    facts = read_json(results / "test.json")
    assert (results / "test.txt").read_text(encoding="utf-8").splitlines() == outputs
    score = facts["entries"]["sacrebleu"]["score"]
    assert score == pytest.approx(sacrebleu.corpus_bleu(outputs, [references]).score) and score > 10
    losses = []
    for source, target in loop.encode_pairs(TEXTS, saved.tokenizer):
        logits = saved.model(torch.tensor([[*source, END]]), torch.tensor([[BEGIN, *target]]))[0]
        losses += F.cross_entropy(logits, torch.tensor([*target, END]), reduction="none").tolist()
    assert facts["entries"]["perplexity"]["score"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)  # 150 roundings
    assert facts["decoding"] == "beam 2, alpha 0.5" and facts["data"].endswith(f"test, en to de, {len(TEXTS)} sentences")
    assert facts["command"].startswith("annotated score ") and facts["log"] == saved.info["log"] and facts["log"][-1]["step"] == 150
    save_checkpoint(tmp_path / "bare", saved.model, saved.tokenizer, source_language="en", target_language="de")  # as --back makes it
    main(["score", str(tmp_path / "bare"), str(own), "test", str(tmp_path / "again"), "--beam", "2", "--alpha", "0.5"])
    bare = read_json(tmp_path / "again/test.json")
    assert bare["entries"] == facts["entries"] and bare["training"] is None and bare["log"] is None
    assert (bare["engine"], bare["precision"]) == ("torch", "fp32")
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))
    monkeypatch.setattr(engines, "apart", lambda *_: 9.9)  # no engine computes this model
    given = ["--engine", "ctranslate2", "--precision", "bf16"]
    main(["score", str(tmp_path / "bare"), str(own), "test", str(tmp_path / "third"), *given])
    third = read_json(tmp_path / "third/test.json")
    assert (third["engine"], third["precision"]) == ("torch", "fp32"), "the report names what computed, not what was asked for"


def test_score_joins_moses_tokens_and_compares_with_the_plain_references(tmp_path, capsys):
    plain = write_corpus(tmp_path / "plain", [(source, target.replace(" .", ".")) for source, target in TEXTS])
    tokens, results = write_corpus(tmp_path / "tokens"), tmp_path / "results"
    main(["train", str(tokens), "--out", str(tmp_path / "model"), *SMALL, "--steps", "150", "--warmup", "60"])
    main(["score", str(tmp_path / "model"), str(tokens), "test", str(results), "--moses", "--references", str(plain)])
    saved = load_checkpoint(tmp_path / "model")
    outputs = [line.replace(" .", ".") for line in translate([text for text, _ in TEXTS], saved.model, saved.tokenizer, "en")]
    written = (results / "test.txt").read_text(encoding="utf-8").splitlines()
    assert written == outputs and any(line.endswith("Hund.") or line.endswith("schläft.") for line in written)
    score = json.loads((results / "test.json").read_text(encoding="utf-8"))["entries"]["sacrebleu"]["score"]
    references = [target.replace(" .", ".") for _, target in TEXTS]
    assert score == pytest.approx(sacrebleu.corpus_bleu(outputs, [references]).score) and score > 10


def test_the_command_prepares(tmp_path, capsys, monkeypatch):
    pairs = [(f"word {n % 23} and {n}", f"Wort {n % 19} und {n}") for n in range(200)]
    own = Corpus("mine", "en", "de", pairs, pairs[:20], pairs[:20])
    monkeypatch.setattr(prepared, "load_corpus", lambda *given: own)
    main(["prepare", "mine", str(tmp_path / "p"), "--vocab-size", "700", "--model", "wordpiece", "--max-length", "99"])
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert "2 of 2, encoding: 100%" in said.err and "B of about " in said.err, "how long, and how much disk"
    assert facts["model"] == "wordpiece" and facts["cleaning"]["kept"] == 200 and facts["max_length"] == 99
    assert load_prepared(tmp_path / "p").tokenizer.model == "wordpiece"
    error = refused("prepare", ["mine", tmp_path / "p", "--vocab-size", "300"], capsys)
    assert "was prepared with vocab_size 700, not 300" in error
    assert "unigram" in misread("prepare", ["mine", tmp_path / "q", "--vocab-size", "300", "--model", "unigram"], capsys)
    main(["prepare", "mine", str(tmp_path / "r"), "--vocab-size", "300", "--seed", "7", "--share", "0.5"])
    assert (facts := json.loads(capsys.readouterr().out))["seed"] == 7 and facts["share"] == 0.5


def test_command_trains_scores_and_writes(tmp_path, capsys):
    trees = [sentence.tree for sentence in generate_corpus()["train"][:43]]
    (tmp_path / "own").mkdir()
    for split, some in (("train", trees[:40]), ("dev", trees[40:41]), ("test", trees[41:])):
        (tmp_path / "own" / f"{split}.trees").write_text("".join(f"{tree}\n" for tree in some), encoding="utf-8")
    model, results, trees = tmp_path / "model", tmp_path / "results.json", tmp_path / "parsed.trees"
    small = ("--N 1 --d-model 16 --d-ff 16 --h 2 --steps 4 --save-every 2 --copies 2 --precision fp32 --average 2 --extra 5 --beam 2 "
             "--leaves XX --word-dropout 0.5").split()
    command = [str(tmp_path / "own"), "--out", str(model), "--results", str(results), "--trees", str(trees), *small]
    main(["parse", *command])
    found = json.loads(results.read_text())
    assert list(found["scores"]) == ["right-branching", "nearest copy", "greedy", "beam 2", "constrained"]
    assert found["scores"]["greedy"]["sentences"] == 2
    assert found["treebank"] == "own" and found["seed"] == 0 and found["training"]["steps"] == 4
    preset = {"copies": 4, "min_frequency": 3, "leaves": "numbers", "parts": True, "word_dropout": 1.0}  # gum's
    assert found["pairs"] == preset | {"copies": 2, "leaves": "XX", "word_dropout": 0.5}
    assert found["averaged"] == ["step-00000002", "step-00000004"] and found["command"].startswith("annotated parse ")
    assert found["claim"] == "C30" and len(trees.read_text().splitlines()) == 2 and "vocabulary" not in found
    before = (model / "model.safetensors").read_bytes()
    main(["parse", *command, "--beam-sentences", "1"])
    rows = json.loads(results.read_text())["scores"]
    few = {"greedy, first 1": 1, "beam 2, first 1": 1, "constrained, first 1": 1}
    assert {name: rows[name]["sentences"] for name in list(rows)[2:]} == {"greedy": 2, **few}
    assert len(trees.read_text().splitlines()) == 1
    main(["parse", *command, "--sentences", "1"])  # the model is there: scored, not trained
    again = json.loads(results.read_text())
    assert again["scores"]["greedy"]["sentences"] == 1 and (model / "model.safetensors").read_bytes() == before
    main(["parse", *command, "--split", "valid"])
    valid = json.loads(results.read_text())
    assert valid["scores"]["greedy"]["sentences"] == 1 and "scored on valid" in valid["data"] and "scored on test" in found["data"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["parse", "toy", "--out", str(model)])
    assert stop.value.code == 2 and "holds no parser of this treebank toy" in capsys.readouterr().err


PIECES = SubwordTokenizer.fit(PAIRS, vocab_size=270)


def exported_model():
    return random_model(len(PIECES), N=2)


@pytest.fixture
def checkpoint(tmp_path):
    save_checkpoint(tmp_path / "checkpoint", exported_model(), PIECES, source_language="en", target_language="fr", corpus="pairs")
    (tmp_path / "lines.txt").write_text("a dog\n\nthe dog sees a cat\nein Hund\n")
    (tmp_path / "scores.json").write_text(json.dumps(
        {"data": "pairs test", "decoding": "greedy", "entries": {"sacrebleu": {"score": 12.345, "signature": "s|t"}}}))
    return tmp_path


def test_export_exports_checks_and_brings_back(checkpoint, capsys):
    main(["export", str(checkpoint / "checkpoint"), "--out", str(checkpoint / "hf"), "--scores", str(checkpoint / "scores.json"),
                 "--check", str(checkpoint / "lines.txt"), "--limit", "2", "--report", str(checkpoint / "report.json")])
    report = json.loads((checkpoint / "report.json").read_text())
    assert {name: report.pop(name) for name in ("revision", "date")} == provenance()
    assert report == json.loads(capsys.readouterr().out)
    assert report["passed"] and report["sentences"] == report["same greedy output"] == 2 and report["trained on"] == "pairs"
    assert report["versions"]["torch"] == torch.__version__.split("+")[0] and "--limit 2" in report["command"]
    card = (checkpoint / "hf" / "README.md").read_text()
    assert "- Trained on: pairs\n- Score: BLEU 12.35 on pairs test, greedy\n- Signature of the score: `s|t`\n" in card
    main(["export", "--back", str(checkpoint / "hf"), "--out", str(checkpoint / "again")])
    again = load_checkpoint(checkpoint / "again")
    assert again.info == {"source_language": "en", "target_language": "fr"}
    assert all(torch.equal(again.model.state_dict()[name], weight) for name, weight in exported_model().state_dict().items())


def test_export_fails_where_the_export_differs(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(hugging_face, "halves", torch.arange)  # the order forgotten both ways: only a comparison can tell
    told = ["--out", str(checkpoint / "hf"), "--check", str(checkpoint / "lines.txt")]
    assert main(["export", str(checkpoint / "checkpoint"), *told]) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert not report["passed"] and report["weights come back to the bit"] and report["largest difference of a logit"] > 1e-2
    assert "does not agree" in printed.err


@pytest.mark.parametrize("name, value", [
    (None, None), ("largest difference of a logit", 2e-4), ("weights come back to the bit", False), ("same greedy output", 2),
    ("same greedy output of CTranslate2", 2), ("same ids of the source", 2),
])
def test_export_passes_only_if_everything_agrees(checkpoint, capsys, monkeypatch, name, value):
    found = {"largest difference of a logit": 2e-5, "weights come back to the bit": True, "same greedy output": 3,
             "same ids of the source": 3, "same greedy output of CTranslate2": 3}
    monkeypatch.setattr(ctranslate2, "check_export", lambda *arguments: {**found, **({name: value} if name else {})})
    monkeypatch.setattr(ctranslate2, "export_to_ctranslate2", lambda *arguments: None)
    arguments = [str(checkpoint / "checkpoint"), "--out", str(checkpoint / "hf"), "--ctranslate2", str(checkpoint / "ct2"),
                 "--check", str(checkpoint / "lines.txt")]
    assert main(["export", *arguments]) == (0 if name is None else 1)
    assert json.loads(capsys.readouterr().out)["passed"] == (name is None)


def test_export_says_what_is_wrong_in_one_line(checkpoint, capsys):
    save_checkpoint(checkpoint / "bare", exported_model())
    (checkpoint / "empty.txt").write_text("\n")
    for arguments, message in (
        ([str(checkpoint / "nowhere")], "there is no folder"),
        ([str(checkpoint / "bare")], "holds no tokenizer"),
        ([str(checkpoint / "checkpoint"), "--scores", str(checkpoint / "lines.txt")], "is no report of scores"),
        (["--back", str(checkpoint / "checkpoint")], "config.json: model_type=None cannot be imported"),
        ([str(checkpoint / "checkpoint"), "--check", str(checkpoint / "empty.txt")], "holds no sentences"),
        ([str(checkpoint / "checkpoint"), "--check", str(checkpoint / "gone.txt")], "gone.txt"),
        ([str(checkpoint / "checkpoint"), "--report", str(checkpoint / "report.json")], "--check None holds no sentences"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["export", *arguments, "--out", str(checkpoint / "out")])
        error = capsys.readouterr().err
        assert end.value.code == 2 and message in error and error.count("\n") == 1 and not (checkpoint / "out").exists()
