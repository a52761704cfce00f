"""Corpora on the disk: what is written is read, and a folder says what it holds."""

import hashlib
import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from test_batches import assert_same
from test_cli import write_corpus

from annotated.data import prepared as module
from annotated.data.base_tokenizer import Tokenizer
from annotated.data.batches import Batch, as_arrays, gather
from annotated.data.corpora import Corpus, PairStream
from annotated.data.prepared import EncodedPairs, load_prepared, prepare_corpus, write_encoded
from annotated.data.tokenizers import (
    END,
    TOKENIZERS,
    SubwordTokenizer,
    WordTokenizer,
    byte_letters,
)

TEXTS = [(f"word{'y' * (n % 19)} {n}", f"Wort{'z' * (n % 13)} {n}") for n in range(200)]


class Letters:
    """A tokenizer that is easy to check: one id for each letter."""

    digest = Tokenizer.digest

    def __init__(self, size=300):
        self.size = size

    def __len__(self):
        return self.size

    def encode_batch(self, texts, language=None):
        assert language in ("en", "de")
        return [[3 + ord(letter) % (self.size - 3) for letter in text] for text in texts]

    def as_dict(self):
        return {"size": self.size}


@pytest.fixture
def folder(tmp_path):
    write_encoded(iter(TEXTS), Letters(), tmp_path / "pairs", chunk=7)
    return tmp_path / "pairs"


@pytest.mark.parametrize("size, dtype",
                         [(300, "<u2"), (65_536, "<u2"), (65_537, "<i4"), (1_000_000, "<i4")])
@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_encoded_pairs_are_the_list_of_pairs(tmp_path, chunk, size, dtype):
    texts = [*TEXTS, ("", ""), ("", "x"), ("x", ""), ("🙂" * 9, "日本")]
    wanted = [tuple(Letters(size).encode_batch(pair, "en")) for pair in texts]
    pairs = write_encoded(iter(texts), Letters(size), tmp_path / "p", chunk=chunk)
    assert pairs.manifest["dtype"] == dtype and len(pairs) == len(texts) and list(pairs) == wanted
    assert pairs[-1] == wanted[-1] and pairs[np.int64(5)] == wanted[5]
    assert pairs[3:9:2] == wanted[3:9:2] and type(pairs[0][0][0]) is int
    for wrong in (len(texts), -len(texts) - 1):
        with pytest.raises(IndexError):
            pairs[wrong]
    lengths = np.array([(len(source) + 1, len(target) + 1) for source, target in wanted])
    assert (pairs.lengths == lengths).all() and (as_arrays(wanted).lengths == lengths).all()
    assert pairs.longest == tuple(lengths.max(axis=0))
    pairs.release()
    assert pairs[7] == wanted[7]


def test_the_digest_stands_for_the_contents(tmp_path):
    made = (TEXTS, 300), (TEXTS, 300), (TEXTS[::-1], 300), (TEXTS, 301), (TEXTS[:-1], 300)
    digests = [write_encoded(texts, Letters(size), tmp_path / str(n)).digest
               for n, (texts, size) in enumerate(made)]
    assert digests[0] == digests[1] and len(set(digests)) == 4
    assert digests[0] == hashlib.sha256((tmp_path / "0" / "manifest.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("file", ["ids.bin", "offsets.bin", "lengths.bin"])
@pytest.mark.parametrize("damage, message", [
    ("truncated", "bytes, expected"), ("longer", "bytes, expected"), ("missing", "is missing"),
    ("flipped", "has other contents")])
def test_a_damaged_folder_is_refused_by_the_name_of_the_file(folder, file, damage, message):
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / file).write_bytes({"truncated": data[:-8], "longer": data + b"xx"}.get(damage, data))
    if damage == "missing":
        (folder / file).unlink()
    with pytest.raises(ValueError, match=f"{file} .*{message}.*: encode the corpus again"):
        EncodedPairs(folder, check=True)
    if damage == "flipped":  # only who reads it all can see that
        assert len(EncodedPairs(folder)) == 200
    else:
        with pytest.raises(ValueError, match=message):
            EncodedPairs(folder)


def test_pairs_are_written_whole_or_not_at_all(tmp_path):
    for texts, length, message in (([], None, r"no pairs to encode as p \(0 were longer"),
                                   (TEXTS, 3, "200 were longer than max_length=3")):
        with pytest.raises(ValueError, match=message):
            write_encoded(texts, Letters(), tmp_path / "p", max_length=length)
    assert list(tmp_path.iterdir()) == []
    write_encoded(TEXTS, Letters(), tmp_path / "p")
    with pytest.raises(FileExistsError, match="exists already"):
        write_encoded(TEXTS, Letters(), tmp_path / "p")


def test_writing_takes_the_memory_of_a_chunk(tmp_path):
    many = ((f"word {n} " * 9, f"Wort {n} " * 9) for n in range(4000))
    tracemalloc.start()
    pairs = write_encoded(many, Letters(), tmp_path / "p", chunk=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pairs.manifest["files"]["ids.bin"]["bytes"] > 1e6 and peak < 0.7e6


def test_folders_and_lists_gather_the_same(folder):
    pairs, indices = EncodedPairs(folder), np.array([7, 199, 0, 0, 42])
    assert as_arrays(pairs) is pairs
    assert_same(gather(pairs, indices), Batch.collate([pairs[index] for index in indices]))
    gather(pairs, indices).source.fill_(9)  # a copy: the files do not change
    assert max(pairs.ids) < 300


def test_pairs_without_a_word_are_gathered(tmp_path):
    pairs = write_encoded([("", ""), ("", "")], Letters(), tmp_path / "empty")
    assert_same(gather(pairs, np.array([1, 0])), Batch.collate([([], []), ([], [])]))


def test_a_tokenizer_with_special_ids_is_refused_when_its_pairs_are_written(tmp_path):
    class Ends(Letters):
        def encode_batch(self, texts, language=None):
            return [[*ids, END] for ids in super().encode_batch(texts, language)]

    with pytest.raises(ValueError, match="pair 0 holds the special id 2: give ids as `encode`"):
        write_encoded(TEXTS, Ends(), tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


NOISE = [("", "leer"), ("kaputt\ufffd", "broken"), ("a b c d e", "f"), ("same", "same")]


@pytest.fixture
def corpus(monkeypatch):
    small = Corpus("mine", "en", "de", PairStream((lambda: TEXTS, lambda: NOISE)),
                  [*TEXTS[:5], ("", "leer")], [])
    monkeypatch.setattr(module, "load_corpus", lambda *given: small)
    return small


def test_a_corpus_is_prepared_once(corpus, tmp_path, monkeypatch, capsys):
    """What cleaning drops teaches the vocabulary nothing; validation is not cleaned."""
    copied = [("zyxxyz", "zyxxyz")] * 500  # by far the most frequent word
    corpus.train = PairStream((lambda: copied, lambda: TEXTS, lambda: NOISE))
    prepared = prepare_corpus("mine", tmp_path / "p", 300)
    assert "mine: 504 of 704 pairs are left out (copied 501, " in capsys.readouterr().err
    assert (prepared.name, prepared.source_language, prepared.target_language) == ("mine", "en",
                                                                                   "de")
    for pairs, texts in ((prepared.train, TEXTS), (prepared.valid, corpus.valid)):
        assert [tuple(map(prepared.tokenizer.decode, pair)) for pair in pairs] == texts
    assert prepared.facts["cleaning"] == {"kept": 200, "empty": 1, "broken": 1, "ratio": 1,
                                          "copied": 501, "overlong in tokens": 0}
    assert prepared.tokenizer.as_dict() == SubwordTokenizer.fit(TEXTS, 300).as_dict()
    monkeypatch.setattr(module, "load_corpus", None)  # from here on nothing is read again
    for again in (prepare_corpus("mine", tmp_path / "p", 300),
                  load_prepared(tmp_path / "p", check=True)):
        assert again.train.digest == prepared.train.digest
        assert list(again.valid) == list(prepared.valid)
        assert again.tokenizer.as_dict() == prepared.tokenizer.as_dict()
        assert again.facts == prepared.facts
    for change, message in (({"vocab_size": 310}, "vocab_size 300, not 310"),
                            ({"seed": 1}, "seed 0, not 1"), ({"copies": 3}, "copies 0, not 3"),
                            ({"name": "other"}, "corpus 'mine', not 'other'"),
                            ({"normalize": ("moses",)}, r"normalize \[\], not \['moses'\]"),
                            ({"target_language": "fr"},
                             r"languages \['en', 'de'\], not \['en', 'fr'\]")):
        with pytest.raises(ValueError, match=f"was prepared with {message}: give another folder"):
            prepare_corpus(**{"name": "mine", "folder": tmp_path / "p", "vocab_size": 300} | change)


def test_a_folder_written_by_hand_is_read(tmp_path):
    """The files as they have always been: folders stay of use when the code goes on."""
    data = {"ids.bin": np.array([5, 6, 7, 8, 9], "<u2"), "offsets.bin": np.array([0, 3], "<i8"),
            "lengths.bin": np.array([[2, 3], [3, 1]], "<i4")}
    for name, array in data.items():
        (tmp_path / name).write_bytes(array.tobytes())
    files = {name: {"bytes": array.nbytes, "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
             for name, array in data.items()}
    manifest = {"pairs": 2, "tokens": 5, "longest": [3, 3], "dtype": "<u2", "dropped": 0,
                "languages": ["en", "de"], "vocabulary": "0" * 64, "files": files}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    pairs = EncodedPairs(tmp_path, check=True)
    assert list(pairs) == [([5], [6, 7]), ([8, 9], [])] and pairs.longest == (3, 3)


def test_progress_is_told_on_request(corpus, tmp_path, capsys):
    prepare_corpus("mine", tmp_path / "quiet", 300)
    assert capsys.readouterr().err == ""
    prepare_corpus("mine", tmp_path / "told", 300, show_progress=True)
    output = capsys.readouterr().err
    for words in ("1 of 2, vocabulary: 204 pairs", "2 of 2, encoding: 100%", "200/200", "of about"):
        assert words in output


def test_the_vocabulary_may_be_learned_from_a_share(corpus, tmp_path):
    whole, sample, again = (prepare_corpus("mine", tmp_path / str(n), 290, share=share,
                                         seed=4).tokenizer.as_dict()
                          for n, share in enumerate((1.0, 0.1, 0.1)))
    assert sample == again and sample != whole


def test_the_form_belongs_to_the_tokenizer_and_comes_back(corpus, tmp_path):
    """By the substitutions of Moses' normalize-punctuation.perl."""
    corpus.train, corpus.valid = [*TEXTS, ("“x” – y’s", "„x“ – y")], [("“y” – x’s", "„y“ – x")]
    plain = [[*TEXTS, ('"x" - y\'s', '"x" - y')], [('"y" - x\'s', '"y" - x')]]
    prepared, unchanged = (prepare_corpus("mine", tmp_path / str(len(form)), 300, normalize=form)
                      for form in (("punctuation",), ()))
    assert prepared.tokenizer.as_dict() == SubwordTokenizer.fit(plain[0], 300).as_dict()
    for pairs, texts in zip((prepared.train, prepared.valid), plain, strict=True):
        assert [tuple(map(prepared.tokenizer.decode, pair)) for pair in pairs] == texts
    assert "„" in unchanged.tokenizer.decode(unchanged.train[len(TEXTS)][1])
    back = load_prepared(tmp_path / "1").tokenizer
    assert back.encode("“y” – x’s", "en") == back.encode('"y" - x\'s', "en") == prepared.valid[0][0]


def test_a_source_that_changed_is_prepared_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_corpus(tmp_path / "mine", TEXTS)
    prepared = prepare_corpus(folder, tmp_path / "p", 300)
    assert prepare_corpus(folder, tmp_path / "p", 300).train.digest == prepared.train.digest
    assert prepare_corpus("~/mine", tmp_path / "q", 300).facts["sources"].keys() == {
        "train.de", "train.en", "valid.de", "valid.en"}
    (folder / "notes.txt").write_text("of no matter", encoding="utf-8")
    assert prepare_corpus(folder, tmp_path / "p", 300).train.digest == prepared.train.digest
    for another in ("train.fr", "train_0.parquet"):
        (folder / another).write_text("une autre langue", encoding="utf-8")
        with pytest.raises(ValueError, match="was prepared with sources .* give another folder"):
            prepare_corpus(folder, tmp_path / "p", 300)
        (folder / another).unlink()
    for file in ("train.en", "train.de", "valid.en", "valid.de"):
        before = (folder / file).read_text(encoding="utf-8")
        (folder / file).write_text(before.replace("1", "7", 1), encoding="utf-8")
        with pytest.raises(ValueError, match="was prepared with sources .* give another folder"):
            prepare_corpus(folder, tmp_path / "p", 300)
        (folder / file).write_text(before, encoding="utf-8")


def test_copies_are_cut_anew_and_say_the_same(corpus, tmp_path):
    plain, copied, again, other = (
        prepare_corpus("mine", tmp_path / str(n), 400, copies=copies, seed=seed)
        for n, (copies, seed) in enumerate(((0, 0), (3, 0), (3, 0), (3, 1))))
    assert [tuple(map(copied.tokenizer.decode, pair)) for pair in copied.train] == TEXTS * 3
    assert copied.train.digest == again.train.digest != other.train.digest
    assert copied.valid.digest == plain.valid.digest
    assert copied.tokenizer.as_dict() == plain.tokenizer.as_dict()
    assert copied.facts["cleaning"] == plain.facts["cleaning"] | {"kept": 600}
    first, second, third = (list(copied.train)[start : start + 200] for start in (0, 200, 400))
    assert first != second != third != first


@pytest.mark.parametrize("wrong",
                         [{"copies": -1}, {"copies": 1001}, {"copies": 2, "model": "wordpiece"},
                          {"share": 0.0}, {"share": 7.0}, {"share": float("nan")}])
def test_options_that_cannot_be_honoured_are_named_before_anything_is_read(wrong, tmp_path):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value} is invalid: give "):
        prepare_corpus("nothing", tmp_path / "p", 600, **wrong)
    assert not list(tmp_path.iterdir())


def test_long_sentences_are_left_out_of_training_and_counted(corpus, tmp_path):
    longer = prepare_corpus("mine", tmp_path / "all", 300).train.lengths.max(axis=1)
    prepared = prepare_corpus("mine", tmp_path / "p", 300, max_length=4)
    assert len(prepared.train) == (longer <= 4).sum() < 200 and max(prepared.train.longest) <= 4
    assert len(prepared.valid) == 6
    cleaning = prepared.facts["cleaning"]
    assert cleaning["kept"] == len(prepared.train) and sum(cleaning.values()) == 204


def test_what_was_left_out_is_said_where_nothing_is_left(corpus, tmp_path, capsys):
    with pytest.raises(ValueError, match="pairs is empty"):
        prepare_corpus("mine", tmp_path / "p", 300, max_length=1)
    assert "204 of 204 pairs are left out (overlong 201" in capsys.readouterr().err


def test_pairs_are_counted_for_a_tokenizer_that_reads_none(corpus, tmp_path, monkeypatch):
    class Fixed(WordTokenizer):
        fit_corpus = classmethod(lambda cls, *_: WordTokenizer.fit(TEXTS))

    monkeypatch.setitem(TOKENIZERS, "fixed", Fixed)
    plain, fixed = (prepare_corpus("mine", tmp_path / kind, 300, model=kind)
                    for kind in ("bpe", "fixed"))
    assert fixed.facts["cleaning"] == plain.facts["cleaning"]


def test_a_preparation_that_fails_leaves_nothing(corpus, tmp_path):
    corpus.train = PairStream((lambda: iter(TEXTS), lambda: (_ for _ in ()).throw(RuntimeError)))
    with pytest.raises(RuntimeError):
        prepare_corpus("mine", tmp_path / "p", 300)
    corpus.train, corpus.valid = TEXTS, []
    with pytest.raises(ValueError, match="no pairs to encode"):
        prepare_corpus("mine", tmp_path / "p", 300)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    with pytest.raises(FileNotFoundError, match="holds no prepared corpus"):
        load_prepared(tmp_path / "p")
    (tmp_path / "p").mkdir()  # a folder of something else
    with pytest.raises(ValueError, match="holds no prepared corpus: give another folder"):
        prepare_corpus("mine", tmp_path / "p", 300)


@pytest.mark.parametrize("part", ["tokenizer", "train", "valid", "prepared.json"])
def test_parts_of_two_preparations_do_not_go_together(corpus, tmp_path, part):
    prepare_corpus("mine", tmp_path / "one", 300)
    corpus.train, corpus.valid = TEXTS[::-1], TEXTS[7:9]
    prepare_corpus("mine", tmp_path / "two", 290)
    name = part + ".json" * (part == "tokenizer")
    (tmp_path / "one" / name).rename(tmp_path / "gone")
    (tmp_path / "two" / name).rename(tmp_path / "one" / name)
    with pytest.raises(ValueError, match="is not the one that prepared.json names"):
        load_prepared(tmp_path / "one")
    (tmp_path / "one" / "prepared.json").write_text("{")
    with pytest.raises(ValueError, match="prepared.json is damaged"):
        load_prepared(tmp_path / "one")


def test_languages_are_handed_on_and_a_folder_of_the_other_way_round_is_refused(
        tmp_path, monkeypatch):
    asked, back = [], [pair[::-1] for pair in TEXTS]
    turned = Corpus("toy", "de", "en", back, back[:5], [])
    monkeypatch.setattr(module, "load_corpus", lambda *given: asked.append(given) or turned)
    for _ in range(2):
        made = prepare_corpus("toy", tmp_path / "p", 300, root=tmp_path, source_language="de")
        assert made.source_language == "de" and asked == [("toy", tmp_path, "de", None)]
    with pytest.raises(ValueError, match=r"languages \['de', 'en'\], not \['en', 'de'\]"):
        prepare_corpus("toy", tmp_path / "p", 300)


# --- BPE-dropout

PLAIN = SubwordTokenizer.fit(TEXTS, 400)


@examples(100)
@given(text=st.text(st.characters(exclude_categories=["Cs"])),
       rate=st.sampled_from([0.1, 0.5, 1.0]), seed=st.integers(0, 9))
def test_every_cut_says_the_same_and_the_seed_decides_it(text, rate, seed):
    cut, text = module.DroppedMerges(PLAIN, rate, seed).encode(text), PLAIN.normalizer(text)
    assert PLAIN.decode(cut) == text and cut == module.DroppedMerges(PLAIN, rate, seed).encode(text)
    assert rate < 1 or len(cut) == len((" " + text).encode() if text else b"")


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_merges_are_dropped_as_often_as_they_should_be(rate):
    """abc with the merges ab, bc: the first kept one is made, and nothing fits after it."""
    plain = SubwordTokenizer([*sorted(byte_letters()), "ab", "bc"], [("a", "b"), ("b", "c")])
    dropped, draws = module.DroppedMerges(plain, rate, seed=1), 20_000
    counts = Counter(map(tuple, (dropped.cut("abc") for _ in range(draws))))
    wanted = {("ab", "c"): 1 - rate, ("a", "bc"): rate * (1 - rate), ("a", "b", "c"): rate * rate}
    assert set(counts) == set(wanted)
    for pieces, chance in wanted.items():
        assert abs(counts[pieces] / draws - chance) < 5 * (chance * (1 - chance) / draws) ** 0.5
