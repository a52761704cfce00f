"""Cleaning: each fault is named, good pairs of any script pass, and a great loss is told."""

import pytest

from annotated.data.cleaning import clean_pairs, count_words, loss_warning, pair_fault


@pytest.mark.parametrize("fault, source, target", [
    (None, "A dog runs.", "Ein Hund läuft."),
    (None, "Übergrößenträger, »naïve« 日本語 🙂", "Crème brûlée\u00a0!"),
    ("empty", "", "Ein Hund."), ("empty", "A dog.", " \u2003\t "), ("empty", "", ""),
    ("empty", "\u200b", "Ein Hund."),
    ("broken", "A dog\ufffd.", "Ein Hund."), ("broken", "A dog.", "Ein\x85Hund."),
    ("broken", "A\0 dog", "Ein Hund"), ("broken", "Ein schÃ¶ner Hund", "A beautiful dog"),
    ("broken", "A dog", "Il dit Â« non Â»"), ("broken", "donâ€™t", "Ne pas"),
    ("broken", "Die StraÃŸe", "The street"), ("broken", "A key", "Ã–ffner"),
    ("overlong", "a " * 251, "b " * 240), ("overlong", "a " * 240, "b " * 251),
    (None, "a " * 250, "b " * 250),
    ("ratio", "a b c d", "e"), ("ratio", "a", "b c d e"), (None, "a b c", "e"),
    ("copied", "New York", "New York"),
    (None, "We shall meet at the school gate tomorrow.", "我们明天在学校门口见面。"),
    (None, "The old dog sleeps under the table.", "年老いた犬がテーブルの下で寝ている。"),
    (None, "The old dog sleeps under the table.", "สุนัขแก่นอนอยู่ใต้โต๊ะ"),
    (None, "I like to eat fried rice.", "ខ្ញុំចូលចិត្តញ៉ាំបាយឆា"),
    ("ratio", "Yes.", "我们明天在学校门口见面。" * 3),
    *((None, text, "something else") for text in (  # letters that look like broken ones
        "Âşık Veysel", "AMANHÃ", "CÂȘTIG", "SÃO PAULO", "Ângela", "NÃO!", "Âge tendre", "İÇİN Â"))])
def test_every_fault_is_named(fault, source, target):
    assert pair_fault(source, target) == fault


@pytest.mark.parametrize("word", ["Müller", "déjà vu", "naïve", "Öl", "Straße", "привет", "日本"])
def test_what_a_wrong_encoding_makes_of_a_word_is_broken(word):
    spoilt = word.encode("utf-8").decode("cp1252", "replace")
    assert pair_fault(f"They wrote {spoilt} there.", "Sie schrieben es.") == "broken"


@pytest.mark.parametrize("text, words", [  # counted by hand
    ("我们明天在学校门口见面。", 7), ("老狗睡在桌子底下。", 5), ("他昨天给我打了电话。", 7),
    ("年老いた犬がテーブルの下で寝ている。", 9), ("東京は日本の首都です。", 7),
    ("สุนัขแก่นอนอยู่ใต้โต๊ะ", 6), ("ฉันชอบกินข้าวผัด", 4), ("저는 학교에 갑니다.", 3), ("U2 和 R.E.M.", 3),
    ("Ein Hund läuft.", 3), ("Я люблю тебя .", 4), ("", 0), ("…", 1)])
def test_words_are_counted_in_any_script(text, words):
    assert 0.6 * words <= count_words(text) <= 1.7 * words


def test_cleaning_counts_what_it_drops_and_keeps_the_order():
    good = [(f"word {n}", f"Wort {n}") for n in range(100)]
    noise = [("", "leer")] * 3 + [("a b c d", "e")] * 5 + [("same", "same")] * 7
    noise += [("bad\ufffd", "gut")] * 11 + [("a " * 251, "b " * 240)]
    mixed = [pair for n in range(100) for pair in [good[n], *noise[n : n + 1]]]
    counts = {}
    assert list(clean_pairs(mixed, counts)) == good
    assert counts == {"kept": 100, "empty": 3, "ratio": 5, "copied": 7, "broken": 11, "overlong": 1}
    assert list(clean_pairs(good, {}, max_length=1)) == []
    assert len(list(clean_pairs(noise, {}, max_ratio=4))) == 5


def test_a_great_loss_is_told_with_its_rules():
    assert loss_warning({"kept": 90, "ratio": 10}) is None and loss_warning({}) is None
    assert loss_warning({"kept": 899, "ratio": 100, "empty": 1}).startswith("101 of 1,000 pairs")
    assert loss_warning({"broken": 5}).startswith("5 of 5 pairs are left out (broken 5)")
    warning = loss_warning({"kept": 8_000, "ratio": 900, "copied": 1_100})
    assert warning.startswith("2,000 of 10,000 pairs are left out (copied 1,100, ratio 900)")
