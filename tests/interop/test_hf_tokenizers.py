"""A tokenizer of ours and its form for Hugging Face give the same ids and the same text."""

import json

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from small_exports import BPE, TOKENIZERS, copy_of, small_model
from transformers import AutoTokenizer

from annotated.data.tokenizers import END, PAD, SubwordTokenizer, WordTokenizer
from annotated.interop.hf_tokenizers import book_tokenizer, library_form
from annotated.interop.hugging_face import export_to_hugging_face


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
    back = theirs.decode([*ids, END], skip_special_tokens=True)
    assert back == tokenizer.decode(ids) == tokenizer.normalizer(text)


def test_incomplete_letters_are_decoded_alike(subwords):
    tokenizer, theirs = subwords
    ids = tokenizer.encode("schläft Käse")
    for end in range(len(ids)):
        text = theirs.decode(ids[:end], skip_special_tokens=True)
        assert text == tokenizer.decode(ids[:end])


def test_batches_are_padded_on_the_right(subwords):
    batch = subwords[1](["a dog", "the dog sees a cat"], return_tensors="pt", padding=True)
    assert set(batch) == {"input_ids", "attention_mask"} and batch.input_ids[0, -1] == PAD
    assert torch.equal(batch.attention_mask.bool(), batch.input_ids != PAD)


def test_a_piece_that_is_spelt_like_a_special_one(tmp_path):
    merges = [*BPE.merges, ("<", "/"), ("</", "s"), ("</s", ">")]
    tokenizer = SubwordTokenizer([*BPE.vocabulary, "</", "</s", "</s>"], merges)
    model = small_model(vocab_size=len(tokenizer))
    export_to_hugging_face(model, tokenizer, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == "⟨</s>⟩" and theirs.eos_token_id == END
    assert theirs("x</s>y").input_ids == [*tokenizer.encode("x</s>y"), END]
    assert book_tokenizer(tmp_path / "out").as_dict() == tokenizer.as_dict()


@pytest.mark.parametrize("text", [
    "They don't know.", "It's the dogs' (old) bowl, isn't it?",
    "He'll see: they've won; I'm sure!", "a well-known dog",
])
def test_contractions_and_marks(text):
    tokenizer = WordTokenizer.fit([(text, "x")])
    form, ids = library_form(tokenizer), tokenizer.encode(text, "en")
    assert form.encode(text).ids == [*ids, END]
    assert form.decode([*ids, END]) == tokenizer.decode(ids)


def test_unknown_words_are_unknown():
    words = TOKENIZERS["words"]
    ids = words.encode("a zebra sleeps", "en")
    assert library_form(words).encode("a zebra sleeps").ids == [*ids, END] and 3 in ids


def test_foreign_tokenizer_is_refused(tmp_path, exported):
    folder = copy_of(exported, tmp_path)
    form = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(form | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(ValueError, match="tokenizer.json is not one.*another normalizer"):
        book_tokenizer(folder)
