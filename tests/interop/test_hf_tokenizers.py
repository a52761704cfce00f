"""A tokenizer of ours and its form for Hugging Face give the same ids and the same text."""

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from small_exports import BPE, TOKENIZERS, small_model
from transformers import AutoTokenizer

from annotated.data.normalization import Normalizer
from annotated.data.tokenizers import END, UNKNOWN, SubwordTokenizer, WordTokenizer
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
@given(st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
                 st.text("</s>unkpad ⁀⟨⟩ĠÄéa\n", max_size=30),
                 st.sampled_from(["</s>", "<pad> a", "the <unk> dog</s>", "<s>"])), st.floats(0, 1))
def test_any_text_has_the_same_ids_and_comes_back(subwords, text, share):
    tokenizer, theirs = subwords
    ids = tokenizer.encode(text)
    assert theirs(text).input_ids == [*ids, END]
    back = theirs.decode([*ids, END], skip_special_tokens=True)
    assert back == tokenizer.decode(ids) == tokenizer.normalizer(text)
    some = ids[:int(share * len(ids))]  # the last of its letters may lack bytes
    assert theirs.decode(some, skip_special_tokens=True) == tokenizer.decode(some)


def test_a_piece_that_is_spelt_like_a_special_one(tmp_path):
    merges = [*BPE.merges, ("<", "/"), ("</", "s"), ("</s", ">")]
    tokenizer = SubwordTokenizer([*BPE.vocabulary, "</", "</s", "</s>"], merges)
    model = small_model(vocab_size=len(tokenizer))
    export_to_hugging_face(model, tokenizer, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token == "⟨</s>⟩" and theirs.eos_token_id == END
    assert theirs("x</s>y").input_ids == [*tokenizer.encode("x</s>y"), END]
    assert book_tokenizer(tmp_path / "out").as_dict() == tokenizer.as_dict()


def test_a_sigma_at_the_end_of_a_word_is_lower_cased_as_in_greek():
    texts = ["Ο ΛΟΓΟΣ ΤΟΥΣ.", "ΑΣ'Α ΑΣ’ Σ 1Σ", "Α.Σ ΑΣ.Α", "ΌΣΟΣ", "ΑΣ-ΑΣ"]
    pairs = [(text, text.lower()) for text in texts]
    tokenizer = SubwordTokenizer.fit(pairs, 330, normalizer=Normalizer(lowercase=True))
    for text in texts:
        assert library_form(tokenizer).encode(text).ids == [*tokenizer.encode(text), END]


@pytest.mark.parametrize("text, asked", [
    ("a dog", "a zebra"), ("They don't know.", None), ("a well-known dog", None),
    ("It's the dogs' (old) bowl, isn't it?", None), ("He'll see: they've won; I'm sure!", None)])
def test_words_contractions_and_marks_have_the_same_ids(text, asked):
    tokenizer, text = WordTokenizer.fit([(text, "x")]), asked or text
    form, ids = library_form(tokenizer), tokenizer.encode(text, "en")
    assert form.encode(text).ids == [*ids, END] and (UNKNOWN in ids) == bool(asked)
    assert asked or form.decode([*ids, END]) == tokenizer.decode(ids)
