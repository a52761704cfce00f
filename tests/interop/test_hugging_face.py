"""Exports compute what the model computes, in two other libraries; they come back to the bit; what cannot leave is named."""

import json
import os

import pytest
import torch
import yaml
from helpers import examples, run_python
from hypothesis import given
from hypothesis import strategies as st

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers  # noqa: E402
from small_exports import BPE, SIZE, TOKENIZERS, WORDPIECE, WORDS, copy_of, model_that_writes, random_batch, small_model  # noqa: E402
from transformers import AutoTokenizer, MarianMTModel  # noqa: E402

from annotated.data.batches import pad  # noqa: E402
from annotated.data.corpora import load_corpus  # noqa: E402
from annotated.data.tokenizers import BEGIN, END, PAD, SubwordTokenizer, WordTokenizer  # noqa: E402
from annotated.interop import hugging_face as module  # noqa: E402
from annotated.interop.hugging_face import (  # noqa: E402
    book_config,
    book_tokenizer,
    export_to_hugging_face,
    from_marian,
    halves,
    import_from_hugging_face,
    library_form,
    marian_fields,
    marian_names,
    model_card,
    to_marian,
)
from annotated.model.transformer import TransformerConfig  # noqa: E402
from annotated.translation.search import greedy_decode  # noqa: E402

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

FILES = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]












def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- the same function


@pytest.mark.parametrize("changes", [
    {}, {"N": 1, "d_model": 24, "h": 3, "d_ff": 7}, {"d_model": 9, "h": 3}, {"h": 4, "d_k": 4, "d_v": 4}, {"vocab_size": 301},
])
def test_marian_computes_the_same_logits_with_padding(tmp_path, changes):
    model = small_model(dtype=torch.float64, **changes)
    export_to_hugging_face(model, BPE, tmp_path / "out")
    marian = MarianMTModel.from_pretrained(tmp_path / "out").eval()
    assert marian.dtype == torch.float64
    source, target = pad(random_batch(len(BPE), (9, 1, 30))), pad([[BEGIN, *row] for row in random_batch(len(BPE), (7, 12, 3), 1)])
    with torch.no_grad():
        theirs = marian(input_ids=source, attention_mask=source != PAD, decoder_input_ids=target).logits
        ours = model(source, target)
    real = target != PAD
    torch.testing.assert_close(theirs[real], ours[real], atol=1e-9, rtol=0)
    assert ours[real].std() > 0.5, "logits that are all alike would agree for nothing"


@examples(15)
@given(h=st.integers(1, 3), width=st.integers(1, 5), N=st.integers(1, 2), d_ff=st.integers(1, 9), seed=st.integers(0, 99))
def test_any_size_agrees(h, width, N, d_ff, seed):
    model = small_model(seed, 12, torch.float64, h=h, d_model=h * width, N=N, d_ff=d_ff)
    marian = MarianMTModel(transformers.MarianConfig(**marian_fields(model.config))).double().eval()
    wrong = marian.load_state_dict(to_marian(model.state_dict(), model.config), strict=False)
    assert not wrong.unexpected_keys
    marian.tie_weights()
    source, target = torch.randint(4, 12, (2, 6)), torch.randint(4, 12, (2, 5))
    with torch.no_grad():
        theirs = marian(input_ids=source, decoder_input_ids=target).logits
        torch.testing.assert_close(theirs, model(source, target), atol=1e-6, rtol=0)  # its sinusoids are rounded to float32


def test_order_is_that_of_marians_sinusoids():
    assert halves(6).tolist() == [0, 2, 4, 1, 3, 5] and halves(5).tolist() == [0, 2, 4, 1, 3]


def test_every_weight_has_one_place():
    for N in (1, 3):
        state = small_model(N=N).state_dict()
        assert sorted(ours for ours, _ in marian_names(N).values()) == sorted(state)


def test_greedy_output_is_the_same_and_padding_never_comes_out(tmp_path):
    model, source = model_that_writes(SIZE), pad(random_batch(SIZE, (8, 2, 14, 13, 1)))
    assert model(source, torch.full((5, 1), BEGIN))[0].argmax() == PAD
    export_to_hugging_face(model, BPE, tmp_path / "out")
    marian = MarianMTModel.from_pretrained(tmp_path / "out")
    assert marian.generation_config.suppress_tokens == [PAD, BEGIN]
    ours = greedy_decode(model, source, extra=3)
    limits = [(row != PAD).sum().item() + 3 for row in source]
    generated = marian.generate(source, attention_mask=source != PAD, num_beams=1, max_new_tokens=max(limits), max_length=None)
    theirs = [row[1 : 1 + limit] for row, limit in zip(generated.tolist(), limits, strict=True)]
    assert [row[: row.index(END)] if END in row else row for row in theirs] == ours
    assert max(len(set(row)) for row in ours) > 3, "a model that says one word would agree too easily"


def test_decoder_begins_with_begin(exported):
    marian = MarianMTModel.from_pretrained(exported)
    for settings_of in (marian.config, marian.generation_config):
        assert settings_of.decoder_start_token_id == BEGIN and settings_of.pad_token_id == PAD and settings_of.eos_token_id == END
        assert getattr(settings_of, "forced_eos_token_id", None) is None
    assert marian.generate(torch.tensor([[5, END]]), num_beams=1, max_new_tokens=2)[0, 0] == BEGIN


# -- CTranslate2










# -- there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_everything_comes_back_to_the_bit(tmp_path, dtype, kind):
    tokenizer = TOKENIZERS[kind]
    rates = {"dropout": 0.3, "attention_dropout": 0.1, "feed_forward_dropout": 0.2}
    model = small_model(3, len(tokenizer), dtype, d_model=15, h=3, max_length=70, **rates)
    export_to_hugging_face(model, tokenizer, tmp_path / "out", source_language="fr", target_language="de")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["max_position_embeddings"] == 70
    assert [fields[f"{name}dropout"] for name in ("", "attention_", "activation_")] == [0.3, 0.1, 0.2]
    returned = import_from_hugging_face(str(tmp_path / "out"))
    states = model.state_dict(), returned.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) and states[1][name].dtype == dtype for name in states[0])
    assert returned.model.config == model.config and not returned.model.training
    assert returned.info == {"source_language": "fr", "target_language": "de"}
    if kind == "words":
        assert returned.tokenizer.words == tokenizer.words and returned.tokenizer.languages == ("fr", "de")
    else:
        assert returned.tokenizer.as_dict() == tokenizer.as_dict()


def test_comes_back_from_what_transformers_saved(tmp_path, exported):
    MarianMTModel.from_pretrained(exported).save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "again")
    returned, model = import_from_hugging_face(tmp_path / "again"), small_model()
    assert all(torch.equal(returned.model.state_dict()[name], weight) for name, weight in model.state_dict().items())
    assert returned.model.config == model.config and returned.tokenizer.as_dict() == BPE.as_dict()


def test_importing_draws_no_random_numbers(exported):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    import_from_hugging_face(exported)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_on_its_way_stays_as_it_is(tmp_path):
    model = small_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    export_to_hugging_face(model, BPE, tmp_path / "out")
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


# -- refusals


@pytest.mark.parametrize("changes, message", [
    ({"norm_first": True}, "norm_first=True cannot be exported: Marian's layers are post-norm"),
    ({"positions": "learned"}, "positions='learned' cannot be exported"),
    ({"d_k": 5}, "d_k=5 cannot be exported: .*only a model with d_k=8"),
    ({"d_v": 3}, "d_v=3 cannot be exported"),
    ({"h": 3, "d_k": 5, "d_v": 5}, "d_k=5 cannot be exported"),
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
        export_to_hugging_face(model, WORDPIECE, tmp_path / "out")


@pytest.mark.parametrize("name, value", [
    ("model_type", "bart"), ("activation_function", "swish"), ("scale_embedding", False), ("tie_word_embeddings", False),
    ("share_encoder_decoder_embeddings", False), ("pad_token_id", 58100), ("eos_token_id", 0), ("decoder_start_token_id", 0),
    ("decoder_layers", 1), ("decoder_ffn_dim", 8), ("decoder_attention_heads", 4), ("decoder_vocab_size", 7),
])
def test_what_a_transformer_cannot_express_is_named(tmp_path, exported, name, value):
    folder = copy_of(exported, tmp_path)
    change_json(folder / "config.json", **{name: value})
    with pytest.raises(ValueError, match=f"config.json: {name}={value!r} cannot be imported"):
        import_from_hugging_face(folder)


def test_missing_field_is_named():
    fields = marian_fields(TransformerConfig(20, N=1, d_model=8, d_ff=8, h=2))
    with pytest.raises(ValueError, match="config.json: max_position_embeddings is missing"):
        book_config({name: value for name, value in fields.items() if name != "max_position_embeddings"})


NORM = "model.decoder.layers.0.encoder_attn_layer_norm.weight"
BIAS = "model.encoder.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize("change, message", [
    (lambda w: w.pop(NORM), f"{NORM} is missing"),
    (lambda w: w[BIAS].fill_(0.1), f"{BIAS} is not zero"),
    (lambda w: w["final_logits_bias"].fill_(0.1), "final_logits_bias is not zero"),
    (lambda w: w.update({"lm_head.weight": torch.zeros(3, 3)}), "lm_head.weight is not model.shared.weight"),
    (lambda w: w.update({"model.encoder.layers.7.fc1.bias": torch.zeros(3)}), "layers.7.fc1.bias is no weight"),
    (lambda w: w.update({NORM: torch.zeros(8)}), rf"{NORM} has shape \(8,\), not d_model=16"),
])
def test_foreign_weights_are_named(change, message):
    model = small_model()
    weights = to_marian(model.state_dict(), model.config)
    from_marian(weights, model.config)
    change(weights)
    with pytest.raises(ValueError, match=message):
        from_marian(weights, model.config)


def test_weights_of_another_size_are_named(tmp_path, exported):
    folder = copy_of(exported, tmp_path)
    change_json(folder / "config.json", encoder_ffn_dim=21, decoder_ffn_dim=21)
    with pytest.raises(ValueError, match=r"feed_forward.W_1.weight would have shape \(20, 16\), config.json says \(21, 16\)"):
        import_from_hugging_face(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
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


@pytest.mark.parametrize("place", ["to_marian", "save", "_tokenizer_fields"])
def test_a_folder_that_fails_is_not_there(tmp_path, monkeypatch, place):
    def fails(*arguments, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(module, place, fails)
    with pytest.raises(OSError, match="no space left"):
        export_to_hugging_face(small_model(), BPE, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_refused_and_kept(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists already"):
        export_to_hugging_face(small_model(), BPE, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


# -- tokenizers


@pytest.fixture(scope="module", params=["bpe", "wordpiece"])
def subwords(request, tmp_path_factory):
    """A tokenizer of ours and what AutoTokenizer makes of its export."""
    tokenizer = TOKENIZERS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    export_to_hugging_face(small_model(vocab_size=len(tokenizer)), tokenizer, folder)
    return tokenizer, AutoTokenizer.from_pretrained(folder)


@examples(150)
@given(text=st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.text("</s>unkpad ⁀⟨⟩ĠÄéa\n", max_size=30)))
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


@pytest.mark.parametrize("text", ["</s>", "<pad> a", "the <unk> dog</s>", "<s>"])
def test_names_of_special_ids_are_ordinary_text(subwords, text):
    tokenizer, theirs = subwords
    assert theirs(text).input_ids == [*tokenizer.encode(text), END]
    assert not {PAD, BEGIN, END, 3} & set(theirs(text).input_ids[:-1])


def test_batches_are_padded_on_the_right(subwords):
    batch = subwords[1](["a dog", "the dog sees a cat"], return_tensors="pt", padding=True)
    assert set(batch) == {"input_ids", "attention_mask"} and batch.input_ids[0, -1] == PAD
    assert torch.equal(batch.attention_mask.bool(), batch.input_ids != PAD)


def test_a_piece_that_is_spelt_like_a_special_one(tmp_path):
    tokenizer = SubwordTokenizer([*BPE.vocabulary, "</", "</s", "</s>"], [*BPE.merges, ("<", "/"), ("</", "s"), ("</s", ">")])
    export_to_hugging_face(small_model(vocab_size=len(tokenizer)), tokenizer, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == "⟨</s>⟩" and theirs.eos_token_id == END and theirs.pad_token == "<pad>"
    assert theirs("x</s>y").input_ids == [*tokenizer.encode("x</s>y"), END]
    assert book_tokenizer(tmp_path / "out").as_dict() == tokenizer.as_dict()


def test_words_are_split_as_spacy_splits_the_books_corpus():
    corpus = load_corpus("toy")
    tokenizer = WordTokenizer.fit(corpus.train)
    form = library_form(tokenizer)
    for english, german in corpus.test + corpus.novel:
        for text, language in ((english, "en"), (german, "de")):
            ids = tokenizer.encode(text, language)
            assert form.encode(text).ids == [*ids, END]
            assert form.decode([*ids, END]) == tokenizer.decode(ids) == tokenizer.normalizer(text)


@pytest.mark.parametrize("text", [
    "They don't know.", "It's the dogs' (old) bowl, isn't it?", "He'll see: they've won; I'm sure!", "a well-known dog",
])
def test_contractions_and_marks(text):
    tokenizer = WordTokenizer.fit([(text, "x")])
    form = library_form(tokenizer)
    ids = tokenizer.encode(text, "en")
    assert form.encode(text).ids == [*ids, END]
    assert form.decode([*ids, END]) == tokenizer.decode(ids)


def test_unknown_words_are_unknown():
    assert library_form(WORDS).encode("a zebra sleeps").ids == [*WORDS.encode("a zebra sleeps", "en"), END]
    assert WORDS.encode("zebra", "en") == [3]


# -- the card


def test_card_says_what_was_given(exported):
    card = (exported / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["language"] == ["en", "de"] and front["library_name"] == "transformers" and front["pipeline_tag"] == "translation"
    assert "license" not in front, "nobody gave one"
    for line in ("- Size: N=2, d_model=16, d_ff=20, h=2", f"- Vocabulary: {len(BPE)} ids, byte-pair encoding, one for both languages",
                 "- Trained on: two sentences", "- Score: BLEU 12.3 on two sentences", "- Signature of the score: `a|b:c`"):
        assert line in text.split("\n")


def test_card_invents_nothing():
    card = model_card(small_model().config, WORDS, "no", "de")
    assert card.count("not stated") == 3 and "BLEU" not in card and "spaCy" in card
    assert yaml.safe_load(card.split("---\n")[1])["language"] == ["no", "de"], "the language, not a truth value"
    assert "spaCy" not in model_card(small_model().config, BPE)


def test_card_wants_score_and_signature_together():
    for given_one, lacking in (("metric", "signature"), ("signature", "metric")):
        with pytest.raises(ValueError, match=f"{given_one} is given without {lacking}"):
            model_card(small_model().config, BPE, **{given_one: "x"})


def test_card_keeps_its_lines():
    card = model_card(small_model().config, BPE, data="one\n- Score: BLEU 99\n---", metric="a\nb", signature="c\n d")
    assert "- Trained on: one - Score: BLEU 99 ---" in card.split("\n") and "- Score: a b" in card and "`c d`" in card


def test_the_code_on_the_card_runs(tmp_path, exported):
    folder = copy_of(exported, tmp_path)
    change_json(folder / "generation_config.json", max_length=10)  # random models seldom end
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    seen, texts = [], ["a dog sleeps", "the dog sees"]
    exec(code, {"folder": folder, "sentences": texts, "print": seen.append})
    ours = [greedy_decode(small_model(), torch.tensor([[*BPE.encode(text), END]]))[0][:9] for text in texts]
    assert seen == [[BPE.decode(row) for row in ours]] and len(ours[0]) > 1


# -- the check, and the command line








def test_importing_the_module_needs_neither_library():
    code = "import sys, annotated.interop.hugging_face; print([n for n in ('transformers', 'ctranslate2', 'spacy') if n in sys.modules])"
    assert run_python(code) == "[]\n"
