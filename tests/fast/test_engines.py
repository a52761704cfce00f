"""Each engine against the plain model: what it writes, refuses, and where it falls back."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import PAIRS, random_model
from torch import nn

from annotated.data.sentencepiece import SentencePieceTokenizer
from annotated.data.tokenizers import END, WordTokenizer
from annotated.fast import engines
from annotated.fast.engines import TOLERANCE, make_engine
from annotated.model.feed_forward import PositionwiseFeedForward
from annotated.training.builders import build_model
from annotated.training.checkpoints import Checkpoint
from annotated.translation.search import search

WORDS = WordTokenizer.fit(PAIRS)
SOURCES = [[*WORDS.encode(source, "en"), END] for source, _ in PAIRS]
SOURCES += [[5, END], [9, 4, 8, 8, 6, 7, END]]


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))  # where what CTranslate2 reads is kept
    model = random_model(len(WORDS), seed=2, N=2).eval()
    return Checkpoint(model, WORDS, {"source_language": "en"})


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", engines.ENGINES)
def test_an_engine_writes_and_scores_as_the_plain_model(saved, name, precision, capfd):
    if (name, precision) == ("torch", "int8"):
        with pytest.raises(ValueError, match="for int8 give another engine"):
            make_engine(name, saved, precision)
        return
    engine, plain = make_engine(name, saved, precision), search(saved.model, SOURCES)
    fell_back = "PyTorch translates" in capfd.readouterr().err
    if (name, precision) == ("ctranslate2", "int8") and fell_back:
        return  # without VNNI its 8-bit sums saturate, which the proof has found
    assert engine.name == name and not fell_back
    for source, output in zip(SOURCES, plain, strict=True):
        with torch.no_grad():
            (logits,) = saved.model(torch.tensor([source]), torch.tensor([[1, *output]]))
        written = [*output, END]
        expected = logits.log_softmax(dim=1).gather(1, torch.tensor(written)[:, None])[:, 0]
        off = torch.tensor(engine.score(source, written)) - expected
        assert off.abs().max() < TOLERANCE[precision]
    if precision == "fp32":
        assert engine(SOURCES) == plain
        if name != "ctranslate2":  # its length penalty is another one
            assert engine(SOURCES, beam=3) == search(saved.model, SOURCES, beam=3)


def test_an_engine_is_taken_though_a_translation_is_cut_off(saved):
    saved.model.config = replace(saved.model.config, max_length=12)
    assert max(map(len, search(saved.model, SOURCES[: len(PAIRS)]))) >= 12
    assert make_engine("ctranslate2", saved, sentences=[text for text, _ in PAIRS]).name != "torch"


def test_a_model_that_an_engine_does_not_know_is_left_to_pytorch(saved, capfd, monkeypatch):
    monkeypatch.setattr(PositionwiseFeedForward, "forward", with_silu)
    engine = make_engine("ctranslate2", saved, sentences=[source for source, _ in PAIRS])
    assert engine.name == "torch" and engine(SOURCES) == search(saved.model, SOURCES)
    assert "The engine ctranslate2 in fp32 is not this model" in capfd.readouterr().err


def test_an_engine_that_computes_nan_is_not_taken(saved, monkeypatch):
    engine = engines.Engine("x", "bf16", None, lambda source, target: [math.nan] * len(target))
    monkeypatch.setitem(engines.ENGINES, "ctranslate2", lambda *_: engine)
    assert make_engine("ctranslate2", saved, "bf16").name == "torch"


def test_of_two_that_convert_a_model_the_slower_takes_what_is_there(saved, monkeypatch):
    export = engines.export_to_ctranslate2
    monkeypatch.setattr(engines, "export_to_ctranslate2",
                        lambda *given: (export(*given), export(*given)))
    assert make_engine("ctranslate2", saved)(SOURCES) == search(saved.model, SOURCES)


def test_a_long_source_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))
    model = random_model(len(WORDS), max_length=2048).eval()
    score = make_engine("ctranslate2", Checkpoint(model, WORDS, {})).score
    source = [4, 5, 6, 7] * 300
    ours = score([*source, END], [4, 5, END])
    assert ours != score([*source[:-2], 8, 9, END], [4, 5, END])


def test_what_ctranslate2_reads_is_made_once_and_anew_for_other_weights_or_bits(saved, monkeypatch):
    made, export = [], engines.export_to_ctranslate2
    monkeypatch.setattr(engines, "export_to_ctranslate2",
                        lambda *given: made.append(1) or export(*given))
    for change, precision, times in ((0, "fp32", 1), (0, "fp32", 1), (0.1, "fp32", 2),
                                     (0, "int8", 3)):
        saved.model.encoder.layers[0].feed_forward.W_1.bias.data += change
        make_engine("ctranslate2", saved, precision)
        assert len(made) == times


def test_a_sentence_beyond_the_table_of_positions_is_not_cut(saved):
    long = [[*range(4, 10)] * 100 + [END]]
    assert len(long[0]) > saved.model.config.max_length
    assert make_engine("ctranslate2", saved)(long) == search(saved.model, long)


def test_an_empty_translation_stays_empty(saved):
    model = build_model(saved.model.config, "marian-relu").eval()
    model.embedding.weight.data[END, -1] = 100.0  # its bias
    engine = make_engine("ctranslate2", Checkpoint(model, WORDS, saved.info))
    assert engine.name == "ctranslate2" and engine(SOURCES) == [[]] * len(SOURCES)


def without_ctranslate2(saved, precision):
    raise ImportError("no ctranslate2 here")


def without_cuda(saved, precision):
    raise RuntimeError("no libcublas here")


def with_silu(layer, x):
    return layer.W_2(nn.functional.silu(layer.W_1(x)))


def test_an_engine_whose_library_fails_says_so(saved, monkeypatch):
    monkeypatch.setitem(engines.ENGINES, "ctranslate2", without_cuda)
    with pytest.raises(ValueError, match="ctranslate2 fails .no libcublas here.: take the engine"):
        make_engine("ctranslate2", saved)


@pytest.fixture
def timed(monkeypatch):
    """The names of the engines whose time was taken, in which CTranslate2 is the quicker."""
    names, seconds = [], {"torch": 0.002, "ctranslate2": 0.001}
    monkeypatch.setattr(engines, "_seconds", lambda engine, sources: names.append(engine.name)
                        or seconds[engine.name])
    return names


def test_auto_takes_the_quickest_and_measures_once_for_a_machine_and_a_model(
        saved, timed, monkeypatch, capsys):
    times = "(torch: 2 ms per sentence; ctranslate2: 1 ms per sentence)"
    for _ in range(2):  # what was measured is kept
        assert make_engine("auto", saved).name == "ctranslate2"
        assert timed == ["torch", "ctranslate2"]
        assert f"The engine is ctranslate2, the quickest here {times}." in capsys.readouterr().err
    monkeypatch.setattr(engines, "describe_machine", lambda device: "another machine")
    for precision, change, times in (("fp32", 0.0, 4), ("bf16", 0.0, 6), ("fp32", 0.1, 8)):
        saved.model.encoder.layers[0].feed_forward.W_1.bias.data += change
        make_engine("auto", saved, precision)
        assert len(timed) == times, "each machine, precision and model has its own choice"


def test_auto_leaves_out_what_cannot_compute_the_model_and_says_why(
        saved, timed, monkeypatch, capsys):
    with monkeypatch.context() as silu:
        silu.setattr(PositionwiseFeedForward, "forward", with_silu)
        assert make_engine("auto", saved).name == "torch"
    assert "ctranslate2: it computes another model" in capsys.readouterr().err
    with monkeypatch.context() as broken:
        broken.setitem(engines.ENGINES, "ctranslate2", without_cuda)
        broken.setattr(engines.files, "write_json", without_cuda)
        assert make_engine("auto", saved).name == "torch"
    assert "ctranslate2: no libcublas here" in capsys.readouterr().err
    with monkeypatch.context() as without:
        without.setitem(engines.ENGINES, "ctranslate2", without_ctranslate2)
        assert make_engine("auto", saved).name == "torch"
        reasons = "in int8 .*for int8 give another.*no ctranslate2 here"
        with pytest.raises(ValueError, match=f"no engine computes this model {reasons}"):
            make_engine("auto", saved, "int8")
    assert make_engine("auto", saved).name == "ctranslate2", "tried again: it is there by now"
    timed.clear()
    monkeypatch.setitem(TOLERANCE, "int8", 9.0)  # where 8-bit sums saturate, too
    for _ in range(2):  # that PyTorch has no int8 will not change
        assert make_engine("auto", saved, "int8").name == "ctranslate2"
    assert timed == ["ctranslate2"]


@pytest.mark.parametrize("name, precision, message", [
    ("onnx", "fp32", "engine 'onnx' is unknown: give one of torch, ctranslate2, auto"),
    ("torch", "fp8", "precision 'fp8' is unknown")])
def test_unknown_names_are_refused(saved, name, precision, message):
    with pytest.raises(ValueError, match=message):
        make_engine(name, saved, precision)


def test_ctranslate2_takes_a_model_with_any_tokenizer(saved):
    pieces = SentencePieceTokenizer.fit(PAIRS, vocab_size=400)
    model = random_model(len(pieces), seed=2, N=2).eval()
    engine = make_engine("ctranslate2", Checkpoint(model, pieces, {"source_language": "en"}))
    sources = [[*pieces.encode(source), END] for source, _ in PAIRS]
    assert engine.name == "ctranslate2" and engine(sources) == search(model, sources)
