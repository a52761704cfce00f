"""CTranslate2 writes what the model writes; its folder is whole or not there."""

import json
import sys

import pytest
import torch
from helpers import disturbed
from small_exports import BPE, TOKENIZERS, copy_of, model_that_writes, random_batch, small_model

from annotated.data.tokenizers import BEGIN, PAD
from annotated.fast.engines import make_engine
from annotated.interop.ctranslate2 import check_export, export_to_ctranslate2, translate_ids
from annotated.interop.hf_tokenizers import library_form
from annotated.interop.hugging_face import export_to_hugging_face
from annotated.model.transformer import TransformerConfig
from annotated.training.builders import build_model
from annotated.training.checkpoints import Checkpoint
from annotated.translation.search import greedy_decode

ctranslate2 = pytest.importorskip("ctranslate2")


@pytest.mark.parametrize("kind, spare", [
    ("bpe", 0), ("bpe", 3), ("words", 0), ("wordpiece", 1)])
def test_ctranslate2_writes_the_same(tmp_path, kind, spare):
    tokenizer = TOKENIZERS[kind]
    model = model_that_writes(len(tokenizer), spare)
    export_to_hugging_face(model, tokenizer, tmp_path / "hf")
    export_to_ctranslate2(tmp_path / "hf", tmp_path / "ct2")
    translator = ctranslate2.Translator(str(tmp_path / "ct2"))
    rows = random_batch(len(tokenizer), (8, 2, 14, 13, 1))
    limit = 25
    form = library_form(tokenizer)
    names = {form.id_to_token(index): index for index in range(len(tokenizer))}
    fast = translate_ids(translator, names, rows, limit)
    ours = [greedy_decode(model, torch.tensor([row]), extra=limit - len(row))[0] for row in rows]
    assert [row[:limit] for row in fast] == ours
    assert max(len(set(row)) for row in ours) > 3, "one word would agree too easily"
    first = model(torch.tensor([rows[0]]), torch.tensor([[BEGIN]])).argmax()
    assert first == PAD, "nothing was forbidden"
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (tmp_path / "ct2" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_ctranslate2_has_the_biases_and_the_activation_of_a_marian_model(tmp_path, monkeypatch):
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))  # where what CTranslate2 reads is kept
    torch.manual_seed(0)
    config = TransformerConfig(len(BPE), N=2, d_model=16, d_ff=20, h=2, max_length=64)
    model = disturbed(build_model(config, "marian-swish"), 0.5, 0.2)
    model.embedding.weight.data[:, -1].normal_(std=3)
    engine = make_engine("ctranslate2", Checkpoint(model, BPE, {}))
    source, target = random_batch(len(BPE), (9, 6))
    logits = model(torch.tensor([source]), torch.tensor([[BEGIN, *target[:-1]]]))[0]
    ours = logits.log_softmax(dim=1)[range(len(target)), target].tolist()
    assert engine.name == "ctranslate2"
    assert engine.score(source, target) == pytest.approx(ours, abs=1e-4)


def test_a_folder_that_another_program_wrote_is_refused(tmp_path, exported):
    folder = copy_of(exported, tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"decoder_start_token_id": PAD}))
    with pytest.raises(ValueError, match="was not written by export_to_hugging_face"):
        export_to_ctranslate2(folder, tmp_path / "ct2")


def test_a_folder_that_fails_is_not_there(tmp_path, exported):
    broken = copy_of(exported, tmp_path)
    (broken / "notes").mkdir()  # a folder is not copied
    with pytest.raises(IsADirectoryError):  # after the conversion itself
        export_to_ctranslate2(broken, tmp_path / "ct2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_missing_package_is_named(tmp_path, exported, monkeypatch):
    for name in ["ctranslate2", *(name for name in sys.modules if name.startswith("ctranslate2."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install transformers ctranslate2"):
        export_to_ctranslate2(exported, tmp_path / "ct2")
    assert not (tmp_path / "ct2").exists()


def test_check_names_a_sentence_that_is_too_long(exported):
    with pytest.raises(ValueError, match="a dog a .* 512 positions there is room for 461"):
        check_export(small_model(), BPE, exported, ["a dog", "a dog " * 300])
