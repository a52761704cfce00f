"""How the book's model is made: its data, its precision, and that nothing is left behind."""

import pytest
import torch
import toy
from helpers import TEXTS, one_thread, state
from safetensors.torch import load_file

from annotated import TrainingConfig, TransformerConfig, train_on, translate
from annotated.data.corpora import Corpus, load_corpus
from annotated.training import loop
from annotated.training.checkpoints import book_model, load_checkpoint

QUICK = TrainingConfig(steps=6, max_tokens=64, warmup=3, factor=0.3, validate_every=2)
TOY = Corpus("toy", "en", "de", TEXTS, TEXTS, TEXTS)


@pytest.mark.usefixtures(one_thread.__name__)  # for the second training; it restores the number
def test_the_books_model_is_trained_and_saved_in_half_precision(monkeypatch, tmp_path):
    """With a tiny one on four pairs in the place of the book's."""
    runs, real = [], loop.train
    monkeypatch.setattr(toy.os, "cpu_count", lambda: 1)  # two threads only wait for each other
    config = TransformerConfig(99, N=1, d_model=16, d_ff=16, h=2)
    monkeypatch.setitem(loop.PRESETS, "toy", (config, QUICK))
    monkeypatch.setattr(toy, "load_corpus", lambda name: TOY)
    monkeypatch.setattr(loop, "train",
                        lambda *arguments: runs.append(torch.get_num_threads()) or real(*arguments))
    torch.set_num_threads(2)  # not the number that it trains with
    toy.train_book_model(tmp_path / "book", False)
    saved = load_checkpoint(tmp_path / "book")
    assert runs == [1] and torch.get_num_threads() == 2
    weights = load_file(tmp_path / "book" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    info = saved.info
    assert (info["source_language"], info["corpus"], info["log"][-1]["step"]) == ("en", "toy", 6)
    torch.set_num_threads(1)
    again, _ = train_on(TOY, saved.tokenizer, saved.model.config, QUICK, False)
    assert torch.equal(state(again.half().float()), state(saved.model))


@pytest.mark.long
def test_the_books_model_trained_anew_translates_as_well(tmp_path):
    toy.train_book_model(tmp_path / "book", False)
    retrained, scores = load_checkpoint(tmp_path / "book"), []
    retrained.model.float()
    sources, references = zip(*load_corpus("toy").test, strict=True)
    for saved in (book_model(), retrained):
        outputs = translate(sources, saved.model, saved.tokenizer)
        scores.append(sum(map(str.__eq__, outputs, references)) / len(references))
    assert abs(scores[0] - scores[1]) <= 0.05 and min(scores) >= 0.9, scores
