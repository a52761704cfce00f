"""Exports compute what the model computes, and come back to the bit; what cannot leave is named."""

import copy
import json

import pytest
import torch
import transformers
import yaml
from helpers import examples, run_python
from hypothesis import given
from hypothesis import strategies as st
from small_exports import BPE, TOKENIZERS, copy_of, model_that_writes, random_batch, small_model
from transformers import AutoTokenizer, MarianMTModel

from annotated.data.batches import pad
from annotated.data.tokenizers import BEGIN, END, PAD, SubwordTokenizer, WordTokenizer
from annotated.interop import hugging_face as hf
from annotated.interop.hugging_face import export_to_hugging_face, import_from_hugging_face
from annotated.model.transformer import TransformerConfig
from annotated.translation.search import greedy_decode

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- the same function


@pytest.mark.parametrize("changes", [
    {}, {"N": 1, "d_model": 9, "h": 3, "d_ff": 7}, {"h": 4, "d_k": 4, "d_v": 4, "vocab_size": 301},
])
def test_marian_computes_the_same_logits_with_padding(tmp_path, changes):
    model = small_model(dtype=torch.float64, **changes)
    export_to_hugging_face(model, BPE, tmp_path / "out")
    marian = MarianMTModel.from_pretrained(tmp_path / "out").eval()
    assert marian.dtype == torch.float64
    source = pad(random_batch(len(BPE), (9, 1, 30)))
    target = pad([[BEGIN, *row] for row in random_batch(len(BPE), (7, 12, 3), 1)])
    real, given = target != PAD, {"input_ids": source, "attention_mask": source != PAD}
    with torch.no_grad():
        theirs = marian(**given, decoder_input_ids=target).logits
        ours = model(source, target)
    torch.testing.assert_close(theirs[real], ours[real], atol=1e-9, rtol=0)
    assert ours[real].std() > 0.5, "logits that are all alike would agree for nothing"


def test_greedy_output_is_the_same_and_padding_never_comes_out(tmp_path):
    source = pad(random_batch(len(BPE), (8, 2, 14, 13, 1)))
    model = model_that_writes(len(BPE))
    assert model(source, torch.full((5, 1), BEGIN))[0].argmax() == PAD
    export_to_hugging_face(model, BPE, tmp_path / "out")
    marian = MarianMTModel.from_pretrained(tmp_path / "out")
    assert marian.generation_config.suppress_tokens == [PAD, BEGIN]
    ours = greedy_decode(model, source, extra=3)
    limits = [(row != PAD).sum().item() + 3 for row in source]
    generated = marian.generate(source, attention_mask=source != PAD, num_beams=1,
                                max_new_tokens=max(limits), max_length=None)
    theirs = [row[1 : 1 + limit] for row, limit in zip(generated.tolist(), limits, strict=True)]
    assert [row[: row.index(END)] if END in row else row for row in theirs] == ours
    assert max(len(set(row)) for row in ours) > 3, "one word would agree too easily"


# -- there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_everything_comes_back_to_the_bit(tmp_path, dtype, kind):
    tokenizer = TOKENIZERS[kind]
    rates = {"dropout": 0.3, "attention_dropout": 0.1, "feed_forward_dropout": 0.2}
    model = small_model(3, len(tokenizer), dtype, d_model=15, h=3, max_length=70, **rates)
    weights, languages = copy.deepcopy(model.state_dict()), ("fr", "de")
    export_to_hugging_face(model, tokenizer, tmp_path / "out", source_language="fr")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["max_position_embeddings"] == 70
    dropouts = [fields[f"{name}dropout"] for name in ("", "attention_", "activation_")]
    assert dropouts == [0.3, 0.1, 0.2]
    returned = import_from_hugging_face(str(tmp_path / "out"))
    state = returned.model.state_dict()
    assert state.keys() == weights.keys()
    for one in (state, model.state_dict()):  # which stays as it is
        assert all(torch.equal(one[name], weight) for name, weight in weights.items())
    assert {weight.dtype for weight in state.values()} == {dtype}
    assert returned.model.config == model.config and not returned.model.training
    assert returned.info == {"source_language": "fr", "target_language": "de"}
    if kind == "words":
        assert returned.tokenizer.words == tokenizer.words
        assert returned.tokenizer.languages == languages
    else:
        assert returned.tokenizer.as_dict() == tokenizer.as_dict()


def test_comes_back_from_what_transformers_saved(tmp_path, exported):
    MarianMTModel.from_pretrained(exported).save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "again")
    before = torch.get_rng_state()
    returned = import_from_hugging_face(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before), "importing draws random numbers"
    state, model = returned.model.state_dict(), small_model()
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    assert returned.model.config == model.config and returned.tokenizer.as_dict() == BPE.as_dict()


# -- refusals


@pytest.mark.parametrize("changes, message", [
    ({"norm_first": True}, "norm_first=True cannot be exported: Marian's layers are post-norm"),
    ({"pad_id": 3}, "pad_id=3 cannot be exported"),
])
def test_what_marian_cannot_express_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        export_to_hugging_face(small_model(**changes), BPE, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_other_parts_are_refused(tmp_path):
    model = small_model()
    with pytest.raises(TypeError, match="model is a Linear: give the Transformer itself"):
        export_to_hugging_face(torch.nn.Linear(2, 2), BPE, tmp_path / "out")
    with pytest.raises(TypeError, match="tokenizer is a NoneType"):
        export_to_hugging_face(model, None, tmp_path / "out")
    with pytest.raises(ValueError, match="WordPiece|pieces, the model vocab_size=.*trained with"):
        export_to_hugging_face(model, TOKENIZERS["wordpiece"], tmp_path / "out")


@pytest.mark.parametrize("name, value", [
    ("model_type", "bart"), ("activation_function", "swish"), ("scale_embedding", False),
    ("pad_token_id", 58100), ("decoder_start_token_id", 0), ("decoder_layers", 1),
])
def test_what_a_transformer_cannot_express_is_named(tmp_path, exported, name, value):
    folder = copy_of(exported, tmp_path)
    change_json(folder / "config.json", **{name: value})
    with pytest.raises(ValueError, match=f"config.json: {name}={value!r} cannot be imported"):
        import_from_hugging_face(folder)


def test_missing_field_is_named():
    fields = hf.marian_fields(TransformerConfig(20, N=1, d_model=8, d_ff=8, h=2))
    del fields["max_position_embeddings"]
    with pytest.raises(ValueError, match="config.json: max_position_embeddings is missing"):
        hf.book_config(fields)


NORM = "model.decoder.layers.0.encoder_attn_layer_norm.weight"
FURTHER = "model.encoder.layers.7.fc1.bias"


@pytest.mark.parametrize("change, message", [
    (lambda w: w.pop(NORM), f"{NORM} is missing"),
    (lambda w: w["final_logits_bias"].fill_(0.1), "final_logits_bias is not zero"),
    (lambda w: w.update({"lm_head.weight": torch.zeros(3, 3)}), "lm_head.weight is not model.sh"),
    (lambda w: w.update({FURTHER: torch.zeros(3)}), f"{FURTHER} is no weight"),
    (lambda w: w.update({NORM: torch.zeros(8)}), rf"{NORM} has shape \(8,\), not d_model=16"),
])
def test_foreign_weights_are_named(change, message):
    model = small_model()
    weights = hf.to_marian(model.state_dict(), model.config)
    hf.from_marian(weights, model.config)
    change(weights)
    with pytest.raises(ValueError, match=message):
        hf.from_marian(weights, model.config)


def test_weights_of_another_size_are_named(tmp_path, exported):
    folder = copy_of(exported, tmp_path)
    change_json(folder / "config.json", encoder_ffn_dim=21, decoder_ffn_dim=21)
    message = r"W_1.weight would have shape \(20, 16\), config.json says \(21, 16\)"
    with pytest.raises(ValueError, match=message):
        import_from_hugging_face(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_and_damaged_files_are_named(tmp_path, exported, name):
    folder = copy_of(exported, tmp_path)
    (folder / name).write_bytes(b"{ half of")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        import_from_hugging_face(folder)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {name}"):
        import_from_hugging_face(folder)


def test_foreign_tokenizer_is_refused(tmp_path, exported):
    folder = copy_of(exported, tmp_path)
    change_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    with pytest.raises(ValueError, match="tokenizer.json has another normalizer"):
        import_from_hugging_face(folder)


# -- whole or not at all


def test_a_folder_that_fails_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_to_hugging_face(small_model(), BPE, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# -- tokenizers


@pytest.fixture(scope="module", params=["bpe", "wordpiece"])
def subwords(request, tmp_path_factory):
    """A tokenizer of ours and what AutoTokenizer makes of its export."""
    tokenizer = TOKENIZERS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    export_to_hugging_face(small_model(vocab_size=len(tokenizer)), tokenizer, folder)
    return tokenizer, AutoTokenizer.from_pretrained(folder)


@examples(150)
@given(text=st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
                      st.text("</s>unkpad ⁀⟨⟩ĠÄéa\n", max_size=30),
                      st.sampled_from(["</s>", "<pad> a", "the <unk> dog</s>", "<s>"])))
def test_any_text_has_the_same_ids_and_comes_back(subwords, text):
    tokenizer, theirs = subwords
    ids = tokenizer.encode(text)
    assert theirs(text).input_ids == [*ids, END]
    assert theirs.decode([*ids, END], skip_special_tokens=True) == tokenizer.decode(ids) == tokenizer.normalizer(text)


def test_incomplete_letters_are_decoded_alike(subwords):
    tokenizer, theirs = subwords
    ids = tokenizer.encode("schläft Käse")
    for end in range(len(ids)):
        assert theirs.decode(ids[:end], skip_special_tokens=True) == tokenizer.decode(ids[:end])


def test_batches_are_padded_on_the_right(subwords):
    batch = subwords[1](["a dog", "the dog sees a cat"], return_tensors="pt", padding=True)
    assert set(batch) == {"input_ids", "attention_mask"} and batch.input_ids[0, -1] == PAD
    assert torch.equal(batch.attention_mask.bool(), batch.input_ids != PAD)


def test_a_piece_that_is_spelt_like_a_special_one(tmp_path):
    merges = [*BPE.merges, ("<", "/"), ("</", "s"), ("</s", ">")]
    tokenizer = SubwordTokenizer([*BPE.vocabulary, "</", "</s", "</s>"], merges)
    export_to_hugging_face(small_model(vocab_size=len(tokenizer)), tokenizer, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == "⟨</s>⟩" and theirs.eos_token_id == END
    assert theirs("x</s>y").input_ids == [*tokenizer.encode("x</s>y"), END]
    assert hf.book_tokenizer(tmp_path / "out").as_dict() == tokenizer.as_dict()


@pytest.mark.parametrize("text", [
    "They don't know.", "It's the dogs' (old) bowl, isn't it?",
    "He'll see: they've won; I'm sure!", "a well-known dog",
])
def test_contractions_and_marks(text):
    tokenizer = WordTokenizer.fit([(text, "x")])
    form = hf.library_form(tokenizer)
    ids = tokenizer.encode(text, "en")
    assert form.encode(text).ids == [*ids, END]
    assert form.decode([*ids, END]) == tokenizer.decode(ids)


def test_unknown_words_are_unknown():
    words = TOKENIZERS["words"]
    ids = words.encode("a zebra sleeps", "en")
    assert hf.library_form(words).encode("a zebra sleeps").ids == [*ids, END] and 3 in ids


# -- the card


def test_card_invents_nothing():
    card = hf.model_card(small_model().config, TOKENIZERS["words"], "no", "de")
    assert card.count("not stated") == 3 and "BLEU" not in card and "spaCy" in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["language"] == ["no", "de"] and "license" not in front, "no truth value"
    assert "spaCy" not in hf.model_card(small_model().config, BPE)


def test_card_wants_score_and_signature_together():
    for given_one, lacking in (("metric", "signature"), ("signature", "metric")):
        with pytest.raises(ValueError, match=f"{given_one} is given without {lacking}"):
            hf.model_card(small_model().config, BPE, **{given_one: "x"})


def test_card_keeps_its_lines():
    hostile = {"data": "one\n- Score: BLEU 99\n---", "metric": "a\nb", "signature": "c\n d"}
    card = hf.model_card(small_model().config, BPE, **hostile)
    assert "- Trained on: one - Score: BLEU 99 ---" in card.split("\n")
    assert "- Score: a b" in card and "`c d`" in card


def test_the_code_on_the_card_runs(tmp_path, exported):
    folder = copy_of(exported, tmp_path)
    change_json(folder / "generation_config.json", max_length=10)  # random models seldom end
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    seen, texts = [], ["a dog sleeps", "the dog sees"]
    exec(code, {"folder": folder, "sentences": texts, "print": seen.append})
    ours = [greedy_decode(small_model(), torch.tensor([[*BPE.encode(text), END]]))[0][:9]
            for text in texts]
    assert seen == [[BPE.decode(row) for row in ours]] and len(ours[0]) > 1


def test_importing_the_module_needs_neither_library():
    code = ("import sys, annotated.interop.hugging_face; "
            "print([n for n in ('transformers', 'ctranslate2', 'spacy') if n in sys.modules])")
    assert run_python(code) == "[]\n"
