"""Tokenizers: what goes in comes out, special ids never do, the same pairs give the same ids."""

from collections import Counter

import pytest
import spacy
import torch
from helpers import examples, run_python
from hypothesis import example, given
from hypothesis import strategies as st

from annotated.data import tokenizers
from annotated.data.base_tokenizer import BEGIN, END, PAD, UNKNOWN
from annotated.data.corpora import Corpus
from annotated.data.tokenizers import SubwordTokenizer, WordTokenizer, byte_letters, split_words

PAIRS = [
    ("The old dog sleeps under the table.", "Der alte Hund schläft unter dem Tisch."),
    ("The young dog sees the old cat.", "Der junge Hund sieht die alte Katze."),
    ("Doesn't the cat sleep?", "Schläft die Katze nicht?"),
    ("She hasn't seen the cat, the dog or the bird.",
     "Sie hat die Katze, den Hund oder den Vogel nicht gesehen."),
    ("Three birds sing in the old garden.", "Drei Vögel singen im alten Garten."),
    ("In winter the gardener sleeps.", "Im Winter schläft der Gärtner.")]
ODD = {"en": ["Doesn't the cat's owner know?", "He said: \"I'm here!\" (twice)",
              "It costs 3.50; we've 1,000.",
              "A well-known, old-fashioned hat?!", "They'll say he isn't \u2013 she's sure."],
       "de": ["„Komm“, sagt sie, „schnell!“", "Das kostet 3,50 Euro; (oder mehr).",
              "Wie spät ist es? Um 12:30 Uhr."]}
KINDS = ("bpe", "wordpiece", "words")
SUBWORDS = {model: SubwordTokenizer.fit(PAIRS, vocab_size=600, model=model)
            for model in ("bpe", "wordpiece")}


def fitted(kind):
    return SUBWORDS[kind] if kind in SUBWORDS else WordTokenizer.fit(PAIRS)


# --- round trips


@pytest.mark.parametrize("model", SUBWORDS)
@examples(150)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text="")
@example(text=" ")
@example(text="  two  spaces  ")
@example(text="<pad><s></s><unk>")
@example(text="tab\tline\nreturn\r\n\x00\x1b\u2028\u0085")
@example(text="👩‍👩‍👧 שלום مرحبا 日本語 ##⁀⁀a Ġ▁")
@example(text="e\u0301 \u00e9 \ufb01 \ufeff")
def test_subwords_give_back_every_text_in_its_form(model, text):
    tokenizer = SUBWORDS[model]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.normalizer(text)
    assert all(UNKNOWN < index < len(tokenizer) for index in ids)
    assert len(tokenizer.pieces(ids)) == len(ids)


@pytest.mark.parametrize("text, language", [
    ("The T-shirt (a red one) costs 3.50; isn't it nice?", "en"),
    ('He says: "I\'m Tom\'s friend", and goes...', "en"),
    ("Er sagt: „Das ist z. B. gut“, und geht.", "de"), ("C'est l'ami qu'il a vu là-bas.", "fr")])
def test_marks_find_their_words_again(text, language):
    assert tokenizers.join_words(split_words(text, language)) == text


@pytest.mark.parametrize("language", ODD)
def test_words_are_those_of_spacy_in_everyday_sentences(language):
    """Page 12 compares those of the whole toy corpus."""
    spacy_words = spacy.blank(language).tokenizer
    for text in ODD[language]:
        assert split_words(text, language) == [token.text for token in spacy_words(text)], text


def test_translating_needs_no_optional_package():
    code = ("import sys; sys.modules |= dict.fromkeys(['spacy', 'torchtext', 'sentencepiece', "
            "'datasets']); import annotated; print(annotated.translate('The old dog sleeps.'))")
    assert run_python(code).strip() == "Der alte Hund schläft."


@pytest.mark.parametrize("text, words", [
    ("l'ami qu'il a vu, aujourd'hui", "l' ami qu' il a vu , aujourd'hui"),
    ("हिन्दी में नमस्ते।", "हिन्दी में नमस्ते ।"), ("می\u200cخواهم بروم.", "می\u200cخواهم بروم ."),
    ("O'Neill's 3.50 … 12:30!", "O'Neill 's 3.50 … 12:30 !"), ("Don’t!", "Do n’t !"), ("", "")])
def test_words_of_other_languages_stay_whole(text, words):
    assert split_words(text) == words.split(" ") * bool(text)


# --- special ids


@pytest.mark.parametrize("kind", KINDS)
def test_decode_stops_at_the_end_and_passes_over_padding(kind):
    tokenizer = fitted(kind)
    ids = tokenizer.encode("The old dog sleeps.", "en")
    assert not {PAD, BEGIN, END} & set(ids)
    row = torch.tensor([BEGIN, *ids, END, PAD, ids[0], PAD])
    assert tokenizer.decode(row) == tokenizer.decode([PAD, *ids]) == "The old dog sleeps."
    assert tokenizer.decode([END, *ids]) == tokenizer.decode([]) == ""
    assert tokenizer.pieces(row)[-4:] == ["</s>", "<pad>", tokenizer.pieces(ids)[0], "<pad>"]
    assert tokenizer.pieces([BEGIN, UNKNOWN]) == ["<s>", "<unk>"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_are_named(kind):
    tokenizer = fitted(kind)
    for method in (tokenizer.decode, tokenizer.pieces):
        for index in (-1, len(tokenizer)):
            with pytest.raises(ValueError,
                               match=f"id {index} is outside the vocabulary of {len(tokenizer)} "):
                method([4, index])


@examples(100)
@given(st.lists(st.integers(0, len(SUBWORDS["bpe"]) - 1)))
def test_any_ids_decode_to_valid_text(ids):
    SUBWORDS["bpe"].decode(ids).encode("utf-8")  # half a letter becomes U+FFFD, never an error
    pieces = SUBWORDS["bpe"].pieces(ids)
    assert len(pieces) == len(ids) and all(piece.isprintable() and piece for piece in pieces)


# --- against something independent


def test_merges_worked_by_hand():
    """Of pairs that are as frequent the one of the lowest ids; what occurs once is not merged."""
    tokenizer = SubwordTokenizer.fit([("low low lower lower", "new")], vocab_size=4 + 256 + 60)
    expected = [("l", "o"), ("Ġ", "lo"), ("Ġlo", "w"), ("e", "r"), ("Ġlow", "er")]
    assert tokenizer.merges == expected
    assert tokenizer.vocabulary == sorted(byte_letters()) + list(map("".join, expected))


@pytest.mark.parametrize("min_frequency, max_size", [(1, None), (2, None), (1, 12), (3, 9)])
def test_the_word_vocabulary_is_a_plain_count(min_frequency, max_size):
    counts = Counter()
    for english, german in PAIRS:
        counts.update(split_words(english, "en") + split_words(german, "de"))
    expected = sorted((word for word in counts if counts[word] >= min_frequency),
                      key=lambda w: (-counts[w], w))
    expected = expected[: None if max_size is None else max_size - 4]
    tokenizer = WordTokenizer.fit(PAIRS, min_frequency=min_frequency, max_size=max_size)
    assert tokenizer.words == expected and len(tokenizer) == 4 + len(expected)
    assert tokenizer.pieces(range(4, len(tokenizer))) == expected
    assert tokenizer.encode("the cat", "en")[0] == 4 + expected.index("the")


def test_words_never_seen_are_unknown_and_a_language_never_seen_is_named():
    tokenizer, text = fitted("words"), "The zebra sleeps."
    assert tokenizer.encode(text, "en").count(UNKNOWN) == 1
    assert tokenizer.decode(tokenizer.encode(text, "en")) == "The <unk> sleeps."
    assert UNKNOWN not in SUBWORDS["bpe"].encode(text)
    for language in ("fr", None):
        with pytest.raises(ValueError, match=f"language is {language!r}, expected one of 'en', 'd"):
            tokenizer.encode("Bonjour", language)


# --- the same every time


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_is_learned_from_a_stream_in_any_order(kind):
    streamed = (WordTokenizer.fit(iter(PAIRS[::-1])) if kind == "words" else
                SubwordTokenizer.fit(iter(PAIRS[::-1]), 600, kind))
    assert streamed.as_dict() == fitted(kind).as_dict()


# --- on disk


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_the_same_one(kind, tmp_path):
    tokenizer, path = fitted(kind), tmp_path / "deep" / "tokenizer.json"
    tokenizer.save(path)
    again = tokenizers.load_tokenizer(path)
    assert type(again) is type(tokenizer) and again.as_dict() == tokenizer.as_dict()
    for text in ("The old dog's garden — 日本.", "Der Gärtner schläft nicht."):
        ids = tokenizer.encode(text, "de")
        assert again.encode(text, "de") == ids and again.decode(ids) == tokenizer.decode(ids)
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]
    with pytest.raises(FileNotFoundError, match="no tokenizer at .*nowhere"):
        tokenizers.load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "\x80", '{"kind": "words"}',
    '{"kind": "words", "words": [1], "languages": []}',
    '{"kind": "words", "words": ["a", "a"], "languages": ["en"]}',
    '{"kind": "words", "words": "abc", "languages": ["en"]}',
    '{"kind": "subwords", "model": "bpe", "vocabulary": ["a"], "merges": [["a", "b"]]}',
    '{"kind": "subwords", "model": "bpe", "vocabulary": ["日"], "merges": []}',
    '{"kind": "subwords", "model": "unigram", "vocabulary": ["a"], "merges": []}',
    '{"kind": "subwords", "model": "bpe", "vocabulary": ["a"], "merges": [["a"]]}'])
def test_a_damaged_file_is_named_with_the_mend(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text.encode("latin-1") if text == "\x80" else text.encode())
    with pytest.raises(ValueError,
                       match=r"tokenizer\.json is not a tokenizer that save wrote .*fit it anew"):
        tokenizers.load_tokenizer(path)


def test_a_kind_that_nobody_added_and_a_form_of_another_s_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"kind": "letters"}')
    with pytest.raises(ValueError, match="kind 'letters' is not one of .*import the module"):
        tokenizers.load_tokenizer(tmp_path / "tokenizer.json")
    corpus = Corpus("x", "en", "de", [], [], [])
    with pytest.raises(ValueError, match="own normalization: leave lowercase out"):
        tokenizers.fit_tokenizer("x.model", corpus, 9, lowercase=True)


# --- bad input


@pytest.mark.parametrize("model, least", [("bpe", 260), ("wordpiece", 516)])
def test_a_vocabulary_too_small_for_the_bytes(model, least):
    with pytest.raises(ValueError, match=f"vocab_size is {least - 1}, expected {least} or more"):
        SubwordTokenizer.fit(PAIRS, least - 1, model)
    tokenizer = SubwordTokenizer.fit(PAIRS, least, model)
    assert len(tokenizer) == least and tokenizer.decode(tokenizer.encode("Größe")) == "Größe"
