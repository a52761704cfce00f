"""The interface of tokenizers: special ids, texts, pairs, and what a subclass must write."""

from collections import Counter

import pytest

from annotated.data.base_tokenizer import (
    BEGIN,
    END,
    PAD,
    UNKNOWN,
    Tokenizer,
    check_pairs,
    check_texts,
    training_texts,
)
from annotated.data.normalization import Normalizer


class Letters(Tokenizer):
    """One id for each of six letters."""

    table = ["<pad>", "<s>", "</s>", "<unk>", *"abcdef"]
    encode_batch = decode = as_dict = None


def test_special_ids_are_those_of_every_model():
    assert (PAD, BEGIN, END, UNKNOWN) == (0, 1, 2, 3)
    assert Letters().content_ids([BEGIN, 7, PAD, UNKNOWN, END, 8, END]) == [7, UNKNOWN]


@pytest.mark.parametrize("pairs, error, message", [
    ([], ValueError, "pairs is empty"),
    (["ab"], TypeError, "pairs holds 'ab'"),
    ([("a", "b"), ("a", "b", "c")], TypeError, "expected .source, target. strings"),
    ([("a", None)], TypeError, "expected .source, target. strings"),
    (7, TypeError, "not iterable"),
])
def test_pairs_that_are_no_pairs(pairs, error, message):
    with pytest.raises(error, match=message):
        list(check_pairs(pairs))


@pytest.mark.parametrize("texts, error, message", [
    ([7], TypeError, "a text is a int, expected a string"),
    ("dog", TypeError, "texts is one string"),
    (["dog\ud83d"], ValueError, "half a surrogate pair at position 3"),
])
def test_texts_that_are_no_texts(texts, error, message):
    with pytest.raises(error, match=message):
        check_texts(texts)


def test_training_texts_are_a_stream_with_their_marks_counted():
    marks, drawn = Counter(), []
    pairs = ((drawn.append(n) or f"It's {n}.", f"Das\u00a0ist {n}.") for n in range(9))
    texts = training_texts(pairs, Normalizer(languages=("en", "de")), marks)
    assert next(texts) == ("It's 0.", "en") and drawn == [0] and next(texts) == ("Das ist 0.", "de")
    assert len(list(texts)) == 16 and marks == {"'": 9, ".": 18}


def test_a_subclass_says_what_it_lacks():
    for method, arguments in (("from_dict", [{}]), ("fit_corpus", [None, 9, None])):
        with pytest.raises(NotImplementedError, match=f"Letters has no {method}: write one"):
            getattr(Letters, method)(*arguments)
    assert Letters().for_training([1]) == [1] and Letters().unknown_words(["a"]) == []
