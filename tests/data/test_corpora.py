"""Corpora: nothing arrives half, no split leaks into another. No test needs the network."""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import re
import zipfile

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from publishing import PACK, left_over, lines, tar

from annotated.data import corpora, downloads
from annotated.data.corpora import (
    CORPORA,
    load_corpus,
    split_pairs,
    write_split,
)
from annotated.data.toy_language import ToySentence
from annotated.files import data_root

ENGLISH = {"train": ["A dog runs.", "Two cats sleep."], "valid": ["Rain falls."],
           "test": ["She reads."]}
GERMAN = {"train": ["Ein Hund läuft.", "Zwei Katzen schlafen."], "valid": ["Regen fällt."],
          "test": ["Sie liest."]}
PAIRS = {split: list(zip(ENGLISH[split], GERMAN[split], strict=True)) for split in ENGLISH}


def write_folder(folder, packing="", names=("train", "valid", "test")):
    folder.mkdir(parents=True, exist_ok=True)
    for split, stem in zip(PAIRS, names, strict=True):
        (folder / f"{stem}.en{packing}").write_bytes(PACK[packing](lines(ENGLISH[split])))
        (folder / f"{stem}.de{packing}").write_bytes(PACK[packing](lines(GERMAN[split])))
    return folder


def write_tables(folder, packing=""):
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in PAIRS.items():
        (folder / f"{split}.tsv{packing}").write_bytes(PACK[packing](lines("\t".join(pair)
                                                                           for pair in pairs)))
    return folder


# --- folders


def write_memories(folder, packing=""):
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in PAIRS.items():
        unit = "<tu><tuv lang='de'><seg>{1}</seg></tuv><tuv lang='en'><seg>{0}</seg></tuv></tu>"
        text = f"<tmx>{''.join(unit.format(*pair) for pair in pairs)}</tmx>"
        (folder / f"{split}.tmx{packing}").write_bytes(PACK[packing](text.encode()))
    return folder


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("write", [write_folder, write_tables, write_memories])
def test_any_folder_loads(tmp_path, write, packing):
    corpus = load_corpus(write(tmp_path / "mine", packing))
    assert (corpus.name, corpus.source_language, corpus.target_language) == ("mine", "en", "de")
    assert corpus.splits() == PAIRS
    assert load_corpus(str(tmp_path / "mine")).train == PAIRS["train"]


def test_a_folder_turns_round_and_knows_its_languages(tmp_path):
    folder = write_folder(tmp_path / "mine")
    back = load_corpus(folder, source_language="de", target_language="en")
    assert back.test == [("Sie liest.", "She reads.")]
    assert load_corpus(folder, target_language="en").test == back.test
    assert load_corpus(folder, source_language="de").test == back.test
    with pytest.raises(ValueError, match="no language 'fr': it has en, de"):
        load_corpus(folder, target_language="fr")
    with pytest.raises(ValueError, match="both 'en'"):
        load_corpus(folder, source_language="en", target_language="en")


def test_columns_follow_the_name_of_the_folder(tmp_path):
    folder = write_tables(tmp_path / "mine-en-de")
    assert load_corpus(folder).valid == [("Rain falls.", "Regen fällt.")]
    assert load_corpus(folder, target_language="en").valid == [("Regen fällt.", "Rain falls.")]
    # here the first column is the source, whatever it is called
    unnamed = write_tables(tmp_path / "mine")
    for known in ({"source_language": "xx", "target_language": "yy"}, {"source_language": "de"},
                  {"target_language": "en"}):
        corpus = load_corpus(unnamed, **known)
        assert corpus.valid == [("Rain falls.", "Regen fällt.")]
        assert known.items() <= vars(corpus).items()
        assert corpus.source_language != corpus.target_language
    with pytest.raises(ValueError, match="source and target language are both 'xx'"):
        load_corpus(unnamed, source_language="xx", target_language="xx")


@pytest.mark.parametrize("beside",
                         ["train.align", "train.en~", "train.de.bak", "train.scores.gz",
                          "train.log"])
def test_a_file_beside_the_training_text_is_no_language(tmp_path, beside):
    folder = write_folder(tmp_path / "mine")
    (folder / beside).write_bytes(b"0-0 1-1\n" * 2)
    corpus = load_corpus(folder)
    assert (corpus.source_language, corpus.target_language) == ("en", "de")
    assert corpus.train == PAIRS["train"]


def test_of_several_languages_the_user_chooses(tmp_path):
    folder = write_folder(tmp_path / "mine")
    for split, texts in ENGLISH.items():
        (folder / f"{split}.pt-BR").write_bytes(lines(texts))
    for languages in ({}, {"source_language": "en"}, {"target_language": "en"}):
        with pytest.raises(ValueError, match="several languages .en, de, pt-BR.: choose two with"):
            load_corpus(folder, **languages)
    assert load_corpus(folder, target_language="de").train == PAIRS["train"]
    brazil = load_corpus(folder, source_language="de", target_language="pt-BR")
    assert brazil.train[0] == ("Ein Hund läuft.", "A dog runs.")


def test_a_corpus_is_called_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(write_folder(tmp_path / "mine"))
    assert load_corpus(".").name == "mine"


def test_what_a_folder_lacks_is_named(tmp_path):
    folder = write_folder(tmp_path / "mine")
    (folder / "test.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.de is missing"):
        load_corpus(folder)
    (folder / "test.en").unlink()
    assert "test" not in load_corpus(folder).splits(), "training needs none"
    (folder / "valid.en").unlink()
    (folder / "valid.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"mine has no valid split: put valid\.en and"):
        load_corpus(folder)
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        load_corpus(tmp_path / "nowhere")


def test_an_unknown_name_lists_the_known_ones_and_the_folder_form():
    with pytest.raises(ValueError,
                       match=r"unknown corpus 'wmt99': known are toy, .*folder with train\.en"):
        load_corpus("wmt99")


# --- the embedded corpus


def test_toy_is_the_same_from_files_and_from_the_generator(tmp_path, monkeypatch):
    few = {split: [ToySentence(*pair, alignment=(), tree="") for pair in pairs]
           for split, pairs in PAIRS.items()}
    few["novel"] = [ToySentence("A novel.", "Ein Roman.", alignment=(), tree="")]
    monkeypatch.setattr(corpora, "checkout_data", lambda: None)
    monkeypatch.setattr(corpora, "generate_corpus", lambda: few)
    generated = load_corpus("toy", root=tmp_path)
    assert generated.splits() == {**PAIRS, "novel": [("A novel.", "Ein Roman.")]}
    assert load_corpus("toy", root=tmp_path, source_language="de").train[0] == ("Ein Hund läuft.",
                                                                                "A dog runs.")
    (tmp_path / "toy").mkdir()
    for split, pairs in generated.splits().items():
        (tmp_path / "toy" / f"{split}.tsv").write_bytes(lines(f"{a}\t{b}\talignment\ttree"
                                                              for a, b in pairs))
    monkeypatch.setattr(corpora, "generate_corpus", None)  # from here on only files will do
    assert load_corpus("toy", root=tmp_path) == generated
    assert load_corpus("toy", root=tmp_path,
                       target_language="en").novel == [("Ein Roman.", "A novel.")]


# --- multi30k: files of a publisher


@pytest.fixture
def captions(publisher, monkeypatch):
    """multi30k as a local publisher serves it: a few lines, digests to match, the real layout."""
    known, digests = CORPORA["multi30k"], {}
    for split, stem in known.files.items():
        for language, texts in (("en", ENGLISH), ("de", GERMAN), ("fr", ENGLISH)):
            body = gzip.compress(lines(texts[split]))
            publisher.files[f"/raw/{stem}.{language}.gz"] = body
            digests[f"{stem}.{language}.gz"] = hashlib.sha256(body).hexdigest()
    monkeypatch.setitem(CORPORA, "multi30k",
                        dataclasses.replace(known, address=publisher.address + "/raw",
                                            digests=digests))
    return publisher


def test_what_is_missing_is_fetched_once(captions, tmp_path):
    (tmp_path / "multi30k").mkdir()
    # of a process that is no more
    (tmp_path / "multi30k" / ".val.en.gz.part-00").write_bytes(b"half")
    corpus = load_corpus("multi30k", root=tmp_path)
    assert corpus.splits() == PAIRS
    assert (corpus.source_language, corpus.target_language) == ("en", "de")
    assert sorted(captions.asked) == sorted(path for path in captions.files if ".fr" not in path)
    captions.asked.clear()
    assert load_corpus("multi30k", root=tmp_path,
                       target_language="en").train[0] == ("Ein Hund läuft.", "A dog runs.")
    assert captions.asked == []
    load_corpus("multi30k", root=tmp_path, source_language="fr")
    assert sorted(captions.asked) == sorted(path for path in captions.files if ".fr" in path)


def test_a_file_that_is_not_the_publishers_is_refused(captions, tmp_path):
    load_corpus("multi30k", root=tmp_path)
    (tmp_path / "multi30k" / "train.en.gz").write_bytes(gzip.compress(b"other\ntext\n"))
    with pytest.raises(ValueError,
                       match=r"train\.en\.gz has the SHA-256 digest \w{64}, expected \w{64}"):
        load_corpus("multi30k", root=tmp_path)


@pytest.mark.skipif(not (data_root() / "multi30k" / "train.en.gz").is_file(),
                    reason="needs the publisher's files (ANNOTATED_DATA)")
def test_the_real_multi30k_files_have_the_digests():
    assert [len(pairs) for pairs in load_corpus("multi30k").splits().values()] == [29_000, 1_014,
                                                                                   1_000]


# --- Tatoeba: an archive that is split here

MANY = [(f"sentence {n // 2}", f"Satz {n // 2}{'ab'[n % 2]}") for n in range(300)]
# one joins two groups, one is there twice
MANY += [("sentence 3", "Satz 9a"), ("sentence 4", "Satz 4a")]


@examples(50)
@given(st.lists(st.tuples(st.sampled_from("abcdefghijklmnop"),
                          st.sampled_from("ABCDEFGHIJKLMNOP")), max_size=14),
       st.integers(1, 4))
def test_no_split_of_any_pairs_leaks(pairs, held_out):
    with contextlib.suppress(ValueError):  # too few to split
        splits = split_pairs(pairs, held_out)
        for column in (0, 1):
            seen = [{pair[column] for pair in part} for part in splits.values()]
            assert sum(map(len, seen)) == len(set().union(*seen))


def test_the_split_depends_on_the_sentences_alone_and_holds_them_all():
    splits = split_pairs(MANY, held_out=20)
    assert sorted(sum(splits.values(), [])) == sorted(set(MANY))
    # whole groups: one may be short
    assert all(18 < len(splits[split]) <= 20 for split in ("valid", "test"))
    with pytest.raises(ValueError, match="3 pairs are too few"):
        split_pairs([("a", "A"), ("b", "B"), ("c", "C")], held_out=2)
    again = split_pairs(MANY[::-1], held_out=20)
    assert all(set(splits[split]) == set(again[split]) for split in splits)
    assert splits["test"] != sorted(splits["test"])  # by hash, not by alphabet or length


def archive(member="deu.txt", text=None):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("_about.txt", "who made it")
        file.writestr("../../evil.txt", "outside")
        file.writestr(member, text
                      or "".join(f"{a}\t{b}\tCC-BY 2.0 (France) #1\n" for a, b in MANY))
    return packed.getvalue()


@pytest.fixture
def flashcards(publisher, monkeypatch):
    publisher.files["/deu-eng.zip"] = archive()
    known = dataclasses.replace(CORPORA["tatoeba-en-de"], address=publisher.address
                                + "/deu-eng.zip")
    monkeypatch.setitem(CORPORA, "tatoeba-en-de", known)
    monkeypatch.setattr(write_split, "__defaults__", (20,))
    return publisher


def test_an_archive_is_fetched_and_split_once(flashcards, tmp_path):
    corpus = load_corpus("tatoeba-en-de", root=tmp_path)
    assert corpus.splits() == split_pairs(MANY, held_out=20)
    flashcards.files.clear()
    assert load_corpus("tatoeba-en-de", root=tmp_path) == corpus
    back = load_corpus("tatoeba-en-de", root=tmp_path, source_language="de", target_language="en")
    assert back.test == [pair[::-1] for pair in corpus.test]
    folder = tmp_path / "tatoeba-en-de"
    assert not list(tmp_path.parent.rglob("evil.txt")) and left_over(folder) == []
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["deu-eng.zip", "downloads.json",
                                                                  "split"]


@pytest.mark.parametrize("body, message", [
    (b"no archive", "what was downloaded is no complete .zip file"),
    (archive("other.txt"), "holds no file deu.txt"),
    (archive(text="one\ttwo\nno tab\n"), "line 2: 1 column"),
])
def test_a_bad_archive_is_named(flashcards, tmp_path, body, message):
    flashcards.files["/deu-eng.zip"] = body
    with pytest.raises(ValueError, match=rf"deu-eng\.zip.*{message}"):
        load_corpus("tatoeba-en-de", root=tmp_path)
    assert not (tmp_path / "tatoeba-en-de" / "split").exists()


# --- WMT: archives, read in place and as a stream


@pytest.fixture
def wmt(publisher, monkeypatch):
    """WMT14 English–French as a local publisher serves it, with a German file among the others."""
    monkeypatch.setattr(downloads.fetch, "__defaults__", (None, 1, 1))
    sgm = '<DOC>\n<p>\n<seg id="1">{}</seg>\n</p>\n<hl>\n<seg id="2"> {} </seg>\n</hl></DOC>\n'
    latin = "Caf\xe9 br\xfbl\xe9\nL\u2028a\n".encode("latin-1", "ignore")
    files = {
        "europarl-v7.tgz": tar({"../outside.txt": b"!", "training/europarl-v7.de-en.de": b"Nein\n",
                                "training/europarl-v7.fr-en.en": lines(["A dog.", "A cat.", ""]),
                                "training/europarl-v7.fr-en.fr": lines(["Un chien.", "Un chat.",
                                                                        "Rien."])}),
        "commoncrawl.tgz": tar({"./commoncrawl.fr-en.fr": latin,
                                "./commoncrawl.fr-en.en": b"Burnt coffee\nThere\n"}),
        "nc-v9.tgz": tar({"training/news-commentary-v9.fr-en.en": b"News\r\n",
                          "training/news-commentary-v9.fr-en.fr": b"Nouvelles\r\n"}),
        "un.tgz": tar({"un/undoc.2000.fr-en.en": b"Peace\n", "un/undoc.2000.fr-en.fr": b"Paix\n"}),
        "giga-fren.tar": tar({"giga-fren.release2.fixed.en.gz": gzip.compress(b"Web\n"),
                              "giga-fren.release2.fixed.fr.gz": gzip.compress(b"Toile\n")}, "w"),
        "dev.tgz": tar({"dev/newstest2013.en": b"Yes\n", "dev/newstest2013.fr": b"Oui\n"}),
        "test-full.tgz": tar({
            "test-full/newstest2014-fren-src.en.sgm": sgm.format("Q&amp;A", "Two").encode(),
            "test-full/newstest2014-fren-ref.fr.sgm": sgm.format("Q et R", "Deux").encode()}),
    }
    known, archives = CORPORA["wmt14-en-fr"], {}
    for split, parts in known.archives.items():
        archives[split] = tuple((address.replace(downloads.WMT, publisher.address), member)
                                for address, member in parts)
        for address, _ in archives[split]:
            path = address.removeprefix(publisher.address)
            publisher.files[path] = files.pop(re.sub(".*/(training-(parallel-)?)?", "", path))
    assert not files
    monkeypatch.setitem(CORPORA, "wmt14-en-fr", dataclasses.replace(known, archives=archives))
    return publisher


WMT_TRAIN = [("A dog.", "Un chien."), ("A cat.", "Un chat."), ("", "Rien."),
             ("Burnt coffee", "Caf\ufffd br\ufffdl\ufffd"),
             ("There", "La"), ("News", "Nouvelles"), ("Peace", "Paix"), ("Web", "Toile")]


def test_wmt_is_fetched_when_it_is_needed_and_once(wmt, tmp_path):
    corpus = load_corpus("wmt14-en-fr", root=tmp_path)
    assert (corpus.source_language, corpus.target_language) == ("en", "fr")
    assert corpus.valid == [("Yes", "Oui")] and corpus.test == [("Q&A", "Q et R"), ("Two", "Deux")]
    assert len(wmt.asked) == 2
    assert str(corpus) == "wmt14-en-fr (en to fr): train streamed, valid 1, test 2"
    # a stream begins anew with every loop
    assert list(corpus.train) == WMT_TRAIN == list(corpus.train)
    assert sorted(wmt.asked) == sorted(wmt.files) and not list(tmp_path.parent.rglob("outside.txt"))
    back = load_corpus("wmt14-en-fr", root=tmp_path, target_language="en")
    assert back.test[0] == ("Q et R", "Q&A") and next(iter(back.train)) == ("Un chien.", "A dog.")
    assert len(wmt.asked) == len(wmt.files)
    archive = tmp_path / "wmt14" / "training-giga-fren.tar"
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="giga-fren.tar has the SHA-256 digest"):
        list(corpus.train)


def test_wmt_offline_names_address_archive_and_folder(wmt, tmp_path):
    for path in [path for path in wmt.files if "europarl" in path]:
        del wmt.files[path]
    corpus = load_corpus("wmt14-en-fr", root=tmp_path)
    archive = "put the archive training-parallel-europarl-v7.tgz into"
    with pytest.raises(ConnectionError,
                       match=rf"{wmt.address}/wmt13/.*{archive} {tmp_path}/wmt14"):
        next(iter(corpus.train))


def test_the_real_addresses_are_of_one_publisher_and_marked_untried():
    for name, other in (("wmt14-en-de", "de"), ("wmt14-en-fr", "fr")):
        known = CORPORA[name]
        parts = [part for split in known.archives.values() for part in split]
        assert known.languages == ("en", other)
        assert set(known.archives) == set(known.files) == set(PAIRS)
        assert all(address.startswith("https://www.statmt.org/wmt1") for address, _ in parts)
        assert all("{language}" in member for _, member in parts)
    assert [len(CORPORA[f"wmt14-en-{tag}"].archives["train"]) for tag in ("de", "fr")] == [3, 5]
    source = open(downloads.__file__, encoding="utf-8").read()
    assert "they are untried" in source[: source.index('WMT = "')].splitlines()[-1]
    if (data_root() / "wmt14-en-de" / "newstest2014.en.gz").is_file():
        corpus = load_corpus("wmt14-en-de")
        assert len(corpus.valid) == 3000 and len(corpus.test) == 3003
