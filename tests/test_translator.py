"""Texts in, texts out: `Translator` and the command, against brute force and against each other."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import TEXTS, examples, one_thread, random_model
from hypothesis import given
from hypothesis import strategies as st
from test_cli import misread, refused

from annotated.cli import main
from annotated.data.tokenizers import BEGIN, END, WordTokenizer
from annotated.fast import prepare
from annotated.fast.engines import make_engine
from annotated.model.multi_head import record_attention
from annotated.training.checkpoints import save_checkpoint
from annotated.translation.search import beam_search, translate
from annotated.translator import Translator, decode_parts, load, split_text

pytestmark = pytest.mark.usefixtures(one_thread.__name__)
WORDS = WordTokenizer.fit(TEXTS)
DATA = "the dog sees a cat .\r\n\nthe\u2028cat sleeps .\n   \na zebra .".encode()
LINES = ["the dog sees a cat .", "", "a cat .", "the cat sleeps .", "   ", "a a a a a a a a", "cat"]


@pytest.fixture(scope="module")
def model():
    return random_model(len(WORDS), seed=2, dropout=0.4).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "saved"
    save_checkpoint(folder, model, WORDS, source_language="en")
    return str(folder)


def standard_input(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


# --- scores, tokens and attention

@pytest.mark.parametrize("alpha", [0.0, 0.8])
def test_the_n_best_have_texts_scores_tokens_and_attention(alpha, tmp_path, capsysbinary):
    """From the library and from the terminal, whose model is prepared."""
    tokenizer = WordTokenizer.fit([("a", "b")])
    model = random_model(len(tokenizer), seed=3, positions="learned", max_length=3).eval()
    translator, lines = Translator(model, tokenizer), ["a b", "", "zöbra"]
    translator.save(tmp_path / "model")
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    main(["translate", "--model", str(tmp_path / "model"), "--input", str(tmp_path / "in.txt"),
          "--beam", "50", "--n-best", "50", "--alpha", str(alpha), "--attention"])
    text = capsysbinary.readouterr().out.decode()
    written = [json.loads(line) for line in text.splitlines()]
    assert "zöbra" in text
    given = {"beam": 50, "n_best": 50, "alpha": alpha}
    for rows in (written, translator.translate(lines, attention=True, **given)):
        assert [row["source"] for row in rows] == lines
        assert [len(row["hypotheses"]) for row in rows] == [40, 0, 40], "all that there are"
        for row in (rows[0], rows[2]):
            assert list(row) == ["source", "source_tokens", "hypotheses"]
            source = [*tokenizer.encode(row["source"], "en"), END]
            assert row["source_tokens"] == tokenizer.pieces(source)
            (every,) = beam_search(model, torch.tensor([source]), 50, alpha, n_best=50)
            for found, (ids, score) in zip(row["hypotheses"], every, strict=True):
                with record_attention(model) as weights:
                    model(torch.tensor([source]), torch.tensor([[BEGIN, *ids]])[:, :3])
                # of the row that predicts a token, and the mean of the heads
                weights = weights["decoder.layers.0.cross_attention"][0].mean(dim=0)[:len(ids)]
                assert found == {"text": tokenizer.decode(ids), "tokens": tokenizer.pieces(ids),
                                 "score": pytest.approx(score, abs=1e-4), "attention": [
                                     pytest.approx(row, abs=1e-5) for row in weights.tolist()]}
    without = translator.translate(lines[0], **given)
    assert list(without) == ["source", "hypotheses"]
    assert list(without["hypotheses"][0]) == ["text", "score", "tokens"]
    rows = translator.translate(lines, beam=3, attention=True)
    assert [[found["text"] for found in row["hypotheses"]] for row in rows] == [
        [text] if text else [] for text in translator.translate(lines, beam=3)]


@pytest.mark.parametrize("options, message", [
    ("--n-best 3 --beam 2", "n_best=3 is invalid: give at least 1 and at most beam=2"),
    ("--n-best 3 --beam 4 --engine ctranslate2", "n_best and attention need engine torch"),
    ("--attention --engine auto", "n_best and attention need engine torch"),
    ("--attention --precision bf16", "n_best and attention need engine torch"),
    ("--n-best 0", "--n-best 0: give a number above 0"), ("--beam 0", "beam=0 is invalid"),
    ("--alpha -1", "alpha=-1.0 is invalid"), ("--device abacus", "device 'abacus' cannot be used"),
    ("--precision int8", "for int8 give another engine"),
    ("--input missing.txt", "missing.txt"), ("--input bad.txt", "bad.txt, line 3: not UTF-8")])
def test_what_cannot_be_given_is_refused_with_one_line(
        options, message, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_bytes(DATA)
    (tmp_path / "bad.txt").write_bytes(b"\n\n\xff\n")
    given = ["--model", folder, "--input", "good.txt", "--output", "out.txt", *options.split()]
    assert message in refused("translate", given, capsys)
    assert not (tmp_path / "out.txt").exists()
    assert "fp8" in misread("translate", ["--precision", "fp8"], capsys)


# --- sentences that are too long

LONG = "the dog sleeps . a cat sleeps . the cat sees a dog ."


@pytest.mark.parametrize("most, parts", [(15, 1), (14, 3), (7, 3), (6, 4), (3, 8)])
def test_a_long_line_is_split_at_sentence_ends_and_keeps_all(most, parts, capsys, monkeypatch):
    model = random_model(len(WORDS), seed=2, positions="learned", max_length=most).eval()
    translator, several = Translator(model, WORDS), LONG.replace(" . ", " .\n").split("\n")
    tokens = len(WORDS.encode(LONG, "en")) + 1
    assert translator.translate([LONG, "", "a cat"], engine=lambda sources, *_: [
        row[:-1] for row in sources]) == [WORDS.decode(WORDS.encode(LONG, "en")), "", "a cat"]
    told = capsys.readouterr().err
    assert told == "" if parts == 1 else (
        f"'{LONG[:40]}' … has {tokens} tokens, and max_length is {most}: it is translated in "
        f"{parts} parts, split at the ends of its sentences" in told)
    assert ("and inside long sentences" in told) == (parts > 3)
    if parts == 3:
        translations = translator.translate(several)
        assert translator.translate(LONG) == " ".join(translations)
        assert translate(several, translator.model, WORDS) == translations
        translator.info["target_language"] = "ja"  # which has no spaces
        assert translator.translate(LONG) == "".join(translations)
    if most == 14:  # which the words of a code fit in, too
        monkeypatch.setattr(WORDS, "prefix", lambda text: ">>deu<<")
        (found,) = decode_parts(translator, [f">>deu<<{LONG}"], lambda sources: sources, 4096)
        assert [text for text, *_ in found] == [f">>deu<<{sentence}" for sentence in several]


@examples(100)
@given(st.text("ab .!?…。\"'” \u2028", max_size=60), st.integers(1, 20))
def test_the_parts_of_any_text_fit_and_hold_all_of_it(text, most):
    parts = split_text(text, lambda part: len(part) <= most)
    assert all(len(part) <= most for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


@pytest.mark.parametrize("text, parts", [
    ('He said: "Go." He left! Why? … So.', ['He said: "Go."', "He left!", "Why?", "…", "So."]),
    ("3.5 of 4 e.g. here", ["3.5 of 4 e.g.", "here"]), ("犬。猫！", ["犬。", "猫！"])])
def test_where_sentences_end(text, parts):
    assert split_text(text, lambda part: part != text) == parts


# --- texts of any length

def test_one_line_for_each_line_from_a_file_and_standard_input(
        folder, tmp_path, monkeypatch, capfdbinary):
    (tmp_path / "in.txt").write_bytes(DATA)
    given = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt")]
    main(["translate", "--model", folder, *given])
    assert b"5/5" not in capfdbinary.readouterr().err, "a bar, where there is no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["translate", "--model", folder, *given])
    written, told = (tmp_path / "out.txt").read_bytes(), capfdbinary.readouterr()
    assert told.out == b"" and b"5/5" in told.err and b"zebra" in told.err
    assert [bool(line) for line in written.split(b"\n")] == [True, False] * 3, "not five lines"
    standard_input(monkeypatch, DATA)
    main(["translate", "--model", folder])
    assert capfdbinary.readouterr().out == written
    standard_input(monkeypatch, b"")
    main(["translate", "--model", folder])
    assert capfdbinary.readouterr().out == b""


def test_a_stream_holds_one_block_and_writes_the_same_with_any(folder):
    translator, read = load(folder), []
    lines = ["a cat sees the dog . " * (n % 3) for n in range(25)]
    stream = translator.stream((read.append(line) or line for line in lines), block=4, beam=1)
    first = next(stream)
    assert len(read) == 4
    assert [first, *stream] == translator.translate(lines, beam=1)
    for sentences, block in (("a cat", 4), (["a cat"], 0)):
        with pytest.raises(ValueError, match="a list of sentences, and a block of 1 or more"):
            next(translator.stream(sentences, block=block))


def test_output_file_appears_whole_or_not_at_all(folder, tmp_path, monkeypatch):
    given = [str(tmp_path / name) for name in ("in.txt", "out.txt")]
    for path in given:
        Path(path).write_text("older\n")
    monkeypatch.setattr("annotated.files.os.fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["translate", "--model", folder, "--input", given[0], "--output", given[1]])
    assert Path(given[1]).read_text() == "older\n" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("options", [
    {}, {"beam": 3}, {"beam": 3, "alpha": 2.0}, {"beam": 3, "engine": "torch", "precision": "bf16"},
    {"engine": "ctranslate2"}], ids=str)
def test_the_command_and_the_library_translate_as_they_are_told(
        options, folder, tmp_path, monkeypatch, capsysbinary):
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))  # where what CTranslate2 reads is kept
    translator = load(folder)
    if options.get("alpha"):
        assert len({tuple(translator.translate(LINES, beam=beam, alpha=alpha))
                    for beam, alpha in ((1, 0.6), (3, 0.6), (3, 2.0))}) > 1, "neither matters"
    prepare.prepare(translator.model)
    search = {"beam": 1, **{name: options[name] for name in ("beam", "alpha") if name in options}}
    name, precision = options.get("engine", "torch"), options.get("precision", "fp32")
    engine = make_engine(name, translator, precision)
    assert engine.name == name
    expected = translate(LINES, translator.model, WORDS, **search, engine=engine)
    standard_input(monkeypatch, "\n".join(LINES).encode())
    main(["translate", "--model", folder,
          *(word for name, value in options.items() for word in (f"--{name}", str(value)))])
    assert capsysbinary.readouterr().out.decode() == "".join(f"{line}\n" for line in expected)
    assert translator.translate(LINES, **options) == expected
    assert len(set(expected)) > 3
