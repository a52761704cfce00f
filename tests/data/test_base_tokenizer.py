"""The interface of tokenizers: special ids, texts, pairs, and what a subclass must write."""

import pytest

from annotated.data import base_tokenizer
from annotated.data.base_tokenizer import BEGIN, END, PAD, UNKNOWN


class Letters(base_tokenizer.Tokenizer):
    """One id for each of six letters."""

    table = ["<pad>", "<s>", "</s>", "<unk>", *"abcdef"]
    encode_batch = decode = as_dict = None


def test_special_ids_are_those_of_every_model():
    assert (PAD, BEGIN, END, UNKNOWN) == (0, 1, 2, 3)
    assert Letters().content_ids([BEGIN, 7, PAD, UNKNOWN, END, 8, END]) == [7, UNKNOWN]


@pytest.mark.parametrize("pairs, error, message", [
    ([], ValueError, "pairs is empty"), (["ab"], TypeError, "pairs holds 'ab'"),
    ([("a", "b"), ("a", "b", "c")], TypeError, "expected .source, target. strings"),
    ([("a", None)], TypeError, "expected .source, target. strings"), (7, TypeError, "not iterable"),
])
def test_pairs_that_are_no_pairs(pairs, error, message):
    with pytest.raises(error, match=message):
        list(base_tokenizer.check_pairs(pairs))


@pytest.mark.parametrize("texts, error, message", [
    ([7], TypeError, "a text must be a string, not int"),
    ("dog", TypeError, "texts is one string"),
    (["dog\ud83d"], ValueError, "half a surrogate pair at position 3")])
def test_texts_that_are_no_texts(texts, error, message):
    with pytest.raises(error, match=message):
        base_tokenizer.check_texts(texts)


def test_a_subclass_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="Letters has no from_dict: write one"):
        Letters.from_dict({})
    with pytest.raises(ValueError, match="Letters cannot be learned from a corpus: it has no fit"):
        Letters.fit_corpus(None, 9, None)
    assert Letters().for_training([1]) == [1] and Letters().unknown_words(["a"]) == []
