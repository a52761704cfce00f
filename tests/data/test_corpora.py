"""Corpora: nothing arrives half, no split leaks into another. No test needs the network."""

import dataclasses
import gzip
import hashlib
import io
import re
import zipfile

import pytest
from publishing import PACK, left_over, lines, tar

from annotated.data import corpora, downloads
from annotated.data.corpora import CORPORA, load_corpus, split_pairs, write_split
from annotated.data.toy_language import ToySentence
from annotated.files import data_root

ENGLISH = {"train": ["A dog runs.", "Two cats sleep."], "valid": ["Rain falls."],
           "test": ["She reads."]}
GERMAN = {"train": ["Ein Hund läuft.", "Zwei Katzen schlafen."], "valid": ["Regen fällt."],
          "test": ["Sie liest."]}
PAIRS = {split: list(zip(ENGLISH[split], GERMAN[split], strict=True)) for split in ENGLISH}


UNIT = "<tu><tuv lang='de'><seg>{1}</seg></tuv><tuv lang='en'><seg>{0}</seg></tuv></tu>"


# --- folders


def write_folder(folder, packing="", kind="lines"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in PAIRS.items():
        memory = f"<tmx>{''.join(UNIT.format(*pair) for pair in pairs)}</tmx>".encode()
        texts = {"lines": {"en": lines(ENGLISH[split]), "de": lines(GERMAN[split])},
                 "tables": {"tsv": lines(map("\t".join, pairs))}, "memories": {"tmx": memory}}
        for ending, text in texts[kind].items():
            (folder / f"{split}.{ending}{packing}").write_bytes(PACK[packing](text))
    return folder


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", ["lines", "tables", "memories"])
def test_any_folder_loads(tmp_path, kind, packing):
    corpus = load_corpus(write_folder(tmp_path / "mine", packing, kind))
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
    folder = write_folder(tmp_path / "mine-en-de", kind="tables")
    assert load_corpus(folder).valid == [("Rain falls.", "Regen fällt.")]
    assert load_corpus(folder, target_language="en").valid == [("Regen fällt.", "Rain falls.")]
    # here the first column is the source, whatever it is called
    unnamed = write_folder(tmp_path / "mine", kind="tables")
    for known in ({"source_language": "xx", "target_language": "yy"}, {"source_language": "de"},
                  {"target_language": "en"}):
        corpus = load_corpus(unnamed, **known)
        assert corpus.valid == [("Rain falls.", "Regen fällt.")]
        assert known.items() <= vars(corpus).items()
        assert corpus.source_language != corpus.target_language


@pytest.mark.parametrize("beside", ["align", "en~", "de.bak", "scores.gz", "log"])
def test_a_file_beside_the_training_text_is_no_language(tmp_path, beside):
    folder = write_folder(tmp_path / "mine")
    (folder / f"train.{beside}").write_bytes(b"0-0 1-1\n" * 2)
    corpus = load_corpus(folder)
    assert (corpus.source_language, corpus.target_language) == ("en", "de")
    assert corpus.train == PAIRS["train"]


def test_of_several_languages_the_user_chooses(tmp_path):
    folder = write_folder(tmp_path / "mine")
    for split, texts in ENGLISH.items():
        (folder / f"{split}.pt-BR").write_bytes(lines(texts))
    for languages in ({}, {"source_language": "en"}, {"target_language": "en"}):
        with pytest.raises(ValueError, match="several languages .en, de, pt-BR.: choose two"):
            load_corpus(folder, **languages)
    assert load_corpus(folder, target_language="de").train == PAIRS["train"]
    brazil = load_corpus(folder, source_language="de", target_language="pt-BR")
    assert brazil.train[0] == ("Ein Hund läuft.", "A dog runs.")


def test_what_a_folder_lacks_and_an_unknown_name_are_named(tmp_path):
    (tmp_path / "prepared.json").touch()
    with pytest.raises(ValueError, match="is a prepared corpus, for training alone"):
        load_corpus(tmp_path)
    (tmp_path / "prepared.json").unlink()
    folder = write_folder(tmp_path / "mine")
    (folder / "test.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.de is missing"):
        load_corpus(folder)
    (folder / "test.en").unlink()
    assert "test" not in load_corpus(folder).splits(), "training needs none"
    (folder / "valid.en").unlink(), (folder / "valid.de").unlink()
    for path in folder.glob("*.de"):
        path.rename(path.with_suffix(".fr"))
    with pytest.raises(FileNotFoundError, match=r"mine has no valid split: put valid\.en and"):
        load_corpus(folder)
    (folder / "valid.tsv").write_bytes(b"A dog.\tUn chien.\n")
    assert load_corpus(folder).valid == [("A dog.", "Un chien.")]
    (folder / "train.de").write_bytes((folder / "train.fr").read_bytes())
    assert load_corpus(folder, target_language="fr").train == load_corpus(folder).train
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        load_corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"unknown corpus 'wmt99': known are toy, .* train\.en"):
        load_corpus("wmt99")


# --- the embedded corpus


def test_toy_is_the_same_from_files_and_from_the_generator(tmp_path, monkeypatch):
    splits = {**PAIRS, "novel": [("A novel.", "Ein Roman.")]}
    few = {split: [ToySentence(*pair, alignment=(), tree="") for pair in pairs]
           for split, pairs in splits.items()}
    monkeypatch.setattr(corpora, "checkout_data", lambda: None)
    monkeypatch.setattr(corpora, "generate_corpus", lambda: few)
    generated = load_corpus("toy", root=tmp_path)
    assert generated.splits() == splits
    assert (generated.source_language, generated.target_language) == ("en", "de")
    back = load_corpus("toy", root=tmp_path, source_language="de")
    assert (back.source_language, back.target_language) == ("de", "en")
    assert back.train[0] == ("Ein Hund läuft.", "A dog runs.")
    (tmp_path / "toy").mkdir()
    for split, pairs in splits.items():
        rows = (f"{a}\t{b}\talignment\ttree" for a, b in pairs)
        (tmp_path / "toy" / f"{split}.tsv").write_bytes(lines(rows))
    monkeypatch.setattr(corpora, "generate_corpus", None)  # from here on only files will do
    assert load_corpus("toy", root=tmp_path) == generated
    assert load_corpus("toy", root=tmp_path, target_language="en") == back


# --- multi30k: files of a publisher


def test_what_is_missing_is_fetched_once_and_held_to_its_digest(publisher, monkeypatch, tmp_path):
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
    (tmp_path / "multi30k").mkdir()
    # of a process that is no more
    (tmp_path / "multi30k" / ".val.en.gz.part-00").write_bytes(b"half")
    corpus = load_corpus("multi30k", root=tmp_path)
    assert corpus.splits() == PAIRS
    assert (corpus.source_language, corpus.target_language) == ("en", "de")
    assert sorted(publisher.asked) == sorted(path for path in publisher.files if ".fr" not in path)
    publisher.asked.clear()
    back = load_corpus("multi30k", root=tmp_path, target_language="en")
    assert back.train[0] == ("Ein Hund läuft.", "A dog runs.") and publisher.asked == []
    load_corpus("multi30k", root=tmp_path, source_language="fr")
    assert sorted(publisher.asked) == sorted(path for path in publisher.files if ".fr" in path)
    (tmp_path / "multi30k" / "train.en.gz").write_bytes(gzip.compress(b"other\ntext\n"))
    with pytest.raises(ValueError, match=r"train\.en\.gz has the SHA-256 digest \w{64}, expected"):
        load_corpus("multi30k", root=tmp_path)


@pytest.mark.skipif(not (data_root() / "multi30k" / "train.en.gz").is_file(),
                    reason="needs the publisher's files (ANNOTATED_DATA)")
def test_the_real_multi30k_files_have_the_digests():
    sizes = [len(pairs) for pairs in load_corpus("multi30k").splits().values()]
    assert sizes == [29_000, 1_014, 1_000]


# --- Tatoeba: an archive that is split here

MANY = [(f"sentence {n // 2}", f"Satz {n // 2}{'ab'[n % 2]}") for n in range(300)]
# one joins two groups, one is there twice
MANY += [("sentence 3", "Satz 9a"), ("sentence 4", "Satz 4a")]


def test_the_split_depends_on_the_sentences_alone_and_holds_them_all():
    splits = split_pairs(MANY, held_out=20)
    assert sorted(sum(splits.values(), [])) == sorted(set(MANY))
    for column in (0, 1):  # nothing leaks
        seen = [{pair[column] for pair in part} for part in splits.values()]
        assert sum(map(len, seen)) == len(set().union(*seen))
    # whole groups: one may be short
    assert all(18 < len(splits[split]) <= 20 for split in ("valid", "test"))
    with pytest.raises(ValueError, match="3 pairs are too few"):
        split_pairs([("a", "A"), ("b", "B"), ("c", "C")], held_out=2)
    again = split_pairs(MANY[::-1], held_out=20)
    assert all(set(splits[split]) == set(again[split]) for split in splits)
    assert splits["test"] != sorted(splits["test"])  # by hash, not by alphabet or length


def test_an_archive_is_fetched_and_split_once(publisher, monkeypatch, tmp_path):
    packed, address = io.BytesIO(), f"{publisher.address}/deu-eng.zip"
    with zipfile.ZipFile(packed, "w") as file:
        for name in ("_about.txt", "../../evil.txt", "deu.txt"):
            text = "".join(f"{a}\t{b}\tCC-BY 2.0 (France) #1\n" for a, b in MANY)
            file.writestr(name, text if name == "deu.txt" else "something else")
    publisher.files["/deu-eng.zip"] = packed.getvalue()
    known = dataclasses.replace(CORPORA["tatoeba-en-de"], address=address)
    monkeypatch.setitem(CORPORA, "tatoeba-en-de", known)
    monkeypatch.setattr(write_split, "__defaults__", (20,))
    corpus = load_corpus("tatoeba-en-de", root=tmp_path)
    assert corpus.splits() == split_pairs(MANY, held_out=20)
    publisher.files.clear()
    assert load_corpus("tatoeba-en-de", root=tmp_path) == corpus
    back = load_corpus("tatoeba-en-de", root=tmp_path, source_language="de", target_language="en")
    assert back.test == [pair[::-1] for pair in corpus.test]
    assert not list(tmp_path.parent.rglob("evil.txt")) and left_over(tmp_path) == []
    (tmp_path / "tatoeba-en-de" / "split" / "test.tsv.gz").unlink()
    with pytest.raises(FileNotFoundError, match="split lacks test.tsv.gz: delete it"):
        load_corpus("tatoeba-en-de", root=tmp_path)
    names = {path.name for path in (tmp_path / "tatoeba-en-de").glob("[!.]*")}
    assert names == {"deu-eng.zip", "downloads.json", "split"}


# --- WMT: archives, read in place and as a stream


@pytest.fixture
def wmt(publisher, monkeypatch):
    """WMT14 English–French as a local publisher serves it, with a German file among the others."""
    monkeypatch.setattr(downloads.fetch, "__defaults__", (None, 60, 1))
    def sides(stem, english, french):
        return {f"{stem}.en": english, f"{stem}.fr": french}

    sgm = '<DOC>\n<p>\n<seg id="1">{}</seg>\n</p>\n<hl>\n<seg id="2"> {} </seg>\n</hl></DOC>\n'
    latin = "Caf\xe9 br\xfbl\xe9\nL\u2028a\n".encode("latin-1", "ignore")
    giga, test = "giga-fren.release2.fixed", "test-full/newstest2014-fren"
    files = {
        "europarl-v7.tgz": sides("training/europarl-v7.fr-en", lines(["A dog.", "A cat.", ""]),
                                 lines(["Un chien.", "Un chat.", "Rien."]))
        | {"../outside.txt": b"!", "training/europarl-v7.de-en.de": b"Nein\n"},
        "commoncrawl.tgz": sides("./commoncrawl.fr-en", b"Burnt coffee\nThere\n", latin),
        "nc-v9.tgz": sides("training/news-commentary-v9.fr-en", b"News\r\n", b"Nouvelles\r\n"),
        "un.tgz": sides("un/undoc.2000.fr-en", b"Peace\n", b"Paix\n"),
        "giga-fren.tar": {f"{giga}.en.gz": gzip.compress(b"Web\n"),
                          f"{giga}.fr.gz": gzip.compress(b"Toile\n")},
        "dev.tgz": sides("dev/newstest2013", b"Yes\n", b"Oui\n"),
        "test-full.tgz": {f"{test}-src.en.sgm": sgm.format("Q&amp;A", "Two").encode(),
                          f"{test}-ref.fr.sgm": sgm.format("Q et R", "Deux").encode()}}
    known, archives = CORPORA["wmt14-en-fr"], {}
    for split, parts in known.archives.items():
        archives[split] = tuple((address.replace(downloads.WMT, publisher.address), member)
                                for address, member in parts)
        for address, _ in archives[split]:
            path = address.removeprefix(publisher.address)
            name = re.sub(".*/(training-(parallel-)?)?", "", path)
            publisher.files[path] = tar(files.pop(name), "w" if name.endswith("tar") else "w:gz")
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
    wmt.files = {path: body for path, body in wmt.files.items() if "europarl" not in path}
    archive = f"put the archive training-parallel-europarl-v7.tgz into {tmp_path}/wmt14"
    with pytest.raises(ConnectionError, match=f"{wmt.address}/wmt13/.*{archive}"):
        next(iter(load_corpus("wmt14-en-fr", root=tmp_path).train))
