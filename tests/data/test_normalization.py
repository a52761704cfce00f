"""The form of the text: what cannot be told apart by eye is the same to a tokenizer."""

import unicodedata
from collections import Counter

import pytest
from helpers import PAIRS, TEXTS, examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.data.normalization import ALIKE, Normalizer, clean_text, frequent_marks, is_blank
from annotated.data.tokenizers import SubwordTokenizer, WordTokenizer, load_tokenizer


@examples(200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_what_is_left_can_be_seen_and_is_composed(text):
    clean = clean_text(text)
    assert unicodedata.is_normalized("NFC", clean) and clean_text(clean) == clean
    assert {letter for letter in clean if letter.isspace()} <= {" "}
    assert not any(unicodedata.category(letter) == "Cc" for letter in clean)
    assert is_blank(text) == is_blank(clean)
    visible = [c for c in unicodedata.normalize("NFC", text) if c.isprintable() and c != " "]
    if "\x1b" not in text and len(clean) == len(unicodedata.normalize("NFC", text)):
        assert [c for c in clean if c.isprintable() and c != " "] == visible, "a letter was lost"


@pytest.mark.parametrize("odd, plain", [
    ("Mu\u0308ller", "Müller"), ("\ufeffZwei", "Zwei"), ("so\u00adgar", "sogar"),
    ("\u200bTwo\u00a0dogs\u3000run\u2009.", "Two dogs run ."), ("\x1b[1;31mred\x1b[0m", "red"),
    ("Mu\u200b\u0308ller", "Müller"), ("\u202eabc\u202c", "abc"),
    ("a\tb\x0bc", "a b c"), ("bell\x07", "bell"),
    *zip(*[["می\u200cخواهم", "👩\u200d👩\u200d👧", "日本語", "ﬁ ½", "؀١"]] * 2, strict=True)])
def test_odd_writings_become_the_plain_one_and_what_has_a_meaning_stays(odd, plain):
    assert clean_text(odd) == plain


@pytest.mark.parametrize("text", ["", " ", "\u200b", "\u200f\t", "\ufeff\u00a0", "\x00", "\u2060"])
def test_a_text_without_a_visible_character_is_blank(text):
    assert is_blank(text) and not is_blank(text + ".")


@pytest.mark.parametrize("seen", ["'", "’", '"', "„“", "-", "–", ",", "，"])
def test_marks_that_training_never_saw_become_those_it_did(seen):
    row = next(row for row in ALIKE if seen[0] in row)
    form = Normalizer(marks=seen)
    assert form("".join(row)) == "".join(mark if mark in seen else seen[0] for mark in row)
    assert Normalizer()("".join(row)) == clean_text("".join(row)), "of unknown marks none changes"


def test_a_mark_counts_from_a_fiftieth_of_its_row_on():
    assert frequent_marks(Counter({"'": 490, "’": 10, "-": 1})) == "'’-"
    assert frequent_marks(Counter({"'": 491, "’": 9, "a": 1000})) == "'"
    assert Normalizer(marks="’'").table[ord("`")] == "’", "the most frequent one"


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_the_form_of_the_training_text_is_kept_with_the_tokenizer(kind, tmp_path):
    pairs = [(f"{a} It's 'so'-so.", f"{b} Das ist’s.") for a, b in TEXTS + PAIRS]
    normalizer = Normalizer(lowercase=True, languages=("en", "de"))
    tokenizer = (WordTokenizer.fit(pairs, normalizer=normalizer) if kind == "words" else
                 SubwordTokenizer.fit(pairs, 320, normalizer=normalizer))
    assert tokenizer.normalizer.marks[0] == "." and set(tokenizer.normalizer.marks) == set("'-.’")
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.normalizer == tokenizer.normalizer
    assert again.encode("THE DOG–so–sees `it`", "en") == tokenizer.encode("the dog-so-sees 'it'",
                                                                          "en")


def test_moses_tokens_are_joined_on_the_way_out():
    form = Normalizer(lowercase=True, punctuation=True, moses=True)
    assert form("Two dogs, „both red“ run.", "en") == 'two dogs , " both red " run .'
    assert form.undo("zwei hunde , einer rot , laufen .") == "zwei hunde, einer rot, laufen."
    assert form("it's the dog's", "en-GB") == form("it's the dog's", "en") == "it 's the dog 's"
    for languages, text in (({}, "it 's"), ({"languages": ("fr", "en")}, "it' s")):
        assert Normalizer(moses=True, **languages)("it's") == text, "not the source's by default"
