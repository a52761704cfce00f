"""Corpora: text is read as written, nothing arrives half, no split leaks into another. No test needs the network."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import threading
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated import corpora
from annotated.corpora import (
    CORPORA,
    fetch,
    fetch_known,
    load_corpus,
    read_lines,
    read_parallel,
    read_table,
    split_pairs,
    whole_file,
    write_split,
)
from annotated.toy_language import ToySentence

ENGLISH = {"train": ["A dog runs.", "Two cats sleep."], "valid": ["Rain falls."], "test": ["She reads."]}
GERMAN = {"train": ["Ein Hund läuft.", "Zwei Katzen schlafen."], "valid": ["Regen fällt."], "test": ["Sie liest."]}
PAIRS = {split: list(zip(ENGLISH[split], GERMAN[split], strict=True)) for split in ENGLISH}
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def lines(texts):
    return "".join(f"{text}\n" for text in texts).encode("utf-8")


def write_folder(folder, packing="", names=("train", "valid", "test")):
    folder.mkdir(parents=True, exist_ok=True)
    for split, stem in zip(PAIRS, names, strict=True):
        (folder / f"{stem}.en{packing}").write_bytes(PACK[packing](lines(ENGLISH[split])))
        (folder / f"{stem}.de{packing}").write_bytes(PACK[packing](lines(GERMAN[split])))
    return folder


def write_tables(folder, packing=""):
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in PAIRS.items():
        (folder / f"{split}.tsv{packing}").write_bytes(PACK[packing](lines("\t".join(pair) for pair in pairs)))
    return folder


def left_over(folder):
    return [path.name for path in folder.rglob("*") if path.name.endswith(".part")]


class Publisher(http.server.BaseHTTPRequestHandler):
    """Serves the dictionary `files` of its server; a name in `cut` stops after half of the bytes it promised."""

    def do_GET(self):
        self.server.asked.append(self.path)
        body = self.server.files.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if body:
            self.wfile.write(body[: len(body) // 2] if self.path in self.server.cut else body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def publisher():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Publisher)
    server.files, server.cut, server.asked = {}, set(), []
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


# --- reading text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACK)
def test_text_is_read_as_written(tmp_path, packing):
    path = tmp_path / f"text.en{packing}"
    path.write_bytes(PACK[packing]("one\u2028still one\n\u0085two\x0b\x0c\x1c\n  three \n\nfive".encode()))
    assert read_lines(path) == ["one\u2028still one", "\u0085two\x0b\x0c\x1c", "  three ", "", "five"]


def test_windows_line_ends_and_a_leading_byte_order_mark_go_but_nothing_else(tmp_path):
    path = tmp_path / "text.en"
    path.write_bytes("\ufeffone\r\ntwo\rstill two\r\n\ufeffthree\r\r\n".encode())
    assert read_lines(path) == ["one", "two\rstill two", "\ufeffthree\r"]


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=["Cs"])), min_size=1))
def test_every_list_of_lines_survives_writing_and_reading(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("lines") / "text.gz"
    path.write_bytes(gzip.compress(lines(texts)))
    assert read_lines(path) == texts


def test_invalid_utf8_names_file_and_line(tmp_path):
    path = tmp_path / "latin.de"
    path.write_bytes("gut\nauch gut\nschön".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.de, line 3: not valid UTF-8"):
        read_lines(path)


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "empty.en").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.en is empty"):
        read_lines(tmp_path / "empty.en")


@pytest.mark.parametrize("packing", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "not packed", "flipped"])
def test_a_damaged_packed_file_is_named(tmp_path, packing, damage):
    good = PACK[packing](os.urandom(500) + b"\n")
    middle = len(good) // 2
    bad = {"cut": good[:-10], "not packed": b"plain text\n",
           "flipped": good[:middle] + bytes([good[middle] ^ 0xFF]) + good[middle + 1:]}[damage]
    (tmp_path / f"a.en{packing}").write_bytes(bad)
    with pytest.raises(ValueError, match=rf"a\.en\{packing} is damaged .*delete it"):
        read_lines(tmp_path / f"a.en{packing}")


def test_files_of_different_length_name_both_and_both_counts(tmp_path):
    (tmp_path / "t.en").write_bytes(b"one\ntwo\nthree\n")
    (tmp_path / "t.de").write_bytes(b"eins\nzwei\n")
    with pytest.raises(ValueError, match=r"t\.en has 3 lines but .*t\.de has 2"):
        read_parallel(tmp_path / "t.en", tmp_path / "t.de")


def test_a_table_keeps_two_columns_and_names_a_bad_line(tmp_path):
    (tmp_path / "t.tsv").write_bytes("a\tä\tmore\nb\tß\n".encode())
    assert read_table(tmp_path / "t.tsv") == [("a", "ä"), ("b", "ß")]
    assert read_table(tmp_path / "t.tsv", 1, 0) == [("ä", "a"), ("ß", "b")]
    (tmp_path / "bad.tsv").write_bytes(b"a\tb\nno tab\n")
    with pytest.raises(ValueError, match=r"bad\.tsv, line 2: 1 column"):
        read_table(tmp_path / "bad.tsv")


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("write", [write_folder, write_tables])
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
    unnamed = write_tables(tmp_path / "mine")  # here the first column is the source, whatever it is called
    assert load_corpus(unnamed, source_language="xx", target_language="yy").valid == [("Rain falls.", "Regen fällt.")]


def test_val_and_dev_are_valid_too(tmp_path):
    assert load_corpus(write_folder(tmp_path / "a", names=("train", "val", "test"))).splits() == PAIRS
    assert load_corpus(write_folder(tmp_path / "b", names=("train", "dev", "test"))).splits() == PAIRS


def test_what_a_folder_lacks_is_named(tmp_path):
    folder = write_folder(tmp_path / "mine")
    (folder / "test.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.de is missing"):
        load_corpus(folder)
    (folder / "test.en").unlink()
    with pytest.raises(FileNotFoundError, match=r"mine has no test split: put test\.en and test\.de"):
        load_corpus(folder)
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        load_corpus(tmp_path / "nowhere")


def test_an_unknown_name_lists_the_known_ones_and_the_folder_form():
    with pytest.raises(ValueError, match=r"unknown corpus 'wmt99': known are toy, multi30k, .*folder with train\.en"):
        load_corpus("wmt99")


# --- the root -------------------------------------------------------------------------------------------------------


def test_the_root_is_argument_then_variable_then_checkout_then_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert corpora.data_root(tmp_path / "argument") == tmp_path / "argument"
    assert corpora.data_root() == tmp_path / "variable"
    monkeypatch.delenv("ANNOTATED_DATA")
    monkeypatch.setattr(corpora, "checkout_data", lambda: tmp_path / "checkout")
    assert corpora.data_root() == tmp_path / "checkout"
    monkeypatch.setattr(corpora, "checkout_data", lambda: None)
    assert corpora.data_root() == tmp_path / "cache" / "annotated"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert corpora.data_root() == tmp_path / "home" / ".cache" / "annotated"


def test_toy_is_the_same_from_files_and_from_the_generator(tmp_path, monkeypatch):
    few = {split: [ToySentence(*pair, alignment=(), tree="") for pair in pairs] for split, pairs in PAIRS.items()}
    few["novel"] = [ToySentence("A novel.", "Ein Roman.", alignment=(), tree="")]
    monkeypatch.setattr(corpora, "checkout_data", lambda: None)
    monkeypatch.setattr(corpora, "generate_corpus", lambda: few)
    made = load_corpus("toy", root=tmp_path)
    assert made.splits() == {**PAIRS, "novel": [("A novel.", "Ein Roman.")]}
    assert load_corpus("toy", root=tmp_path, source_language="de").train[0] == ("Ein Hund läuft.", "A dog runs.")
    (tmp_path / "toy").mkdir()
    for split, pairs in made.splits().items():
        (tmp_path / "toy" / f"{split}.tsv").write_bytes(lines(f"{a}\t{b}\talignment\ttree" for a, b in pairs))
    monkeypatch.setattr(corpora, "generate_corpus", None)  # from here on only files will do
    assert load_corpus("toy", root=tmp_path) == made
    assert load_corpus("toy", root=tmp_path, target_language="en").novel == [("Ein Roman.", "A novel.")]


def test_the_embedded_corpus_needs_no_root_of_its_own(tmp_path):
    toy = load_corpus("toy", root=tmp_path)  # nothing there: it comes from the checkout or from the generator
    assert len(toy.train) >= 10_000 and set(toy.splits()) == {*PAIRS, "novel"} and list(tmp_path.iterdir()) == []


# --- the disk -------------------------------------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file"
    with whole_file(path) as file:
        file.write(b"old")
        assert not path.exists()
    with pytest.raises(RuntimeError), whole_file(path) as file:
        file.write(b"half of the ne")
        raise RuntimeError
    assert path.read_bytes() == b"old" and left_over(tmp_path) == []


def test_bytes_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (done.append(name), real(*a)))
    with whole_file(tmp_path / "file") as file:
        file.write(b"text")
    assert done == ["fsync", "replace"]


def test_what_a_killed_process_left_is_cleared_after_a_day_and_not_before(tmp_path):
    for name, age in (("file.aa.part", 90_000), ("file.bb.part", 10), ("other.cc.part", 90_000)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (os.path.getmtime(tmp_path / name) - age,) * 2)
    with whole_file(tmp_path / "file") as file:
        file.write(b"text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file.bb.part", "other.cc.part"]


# --- downloads ------------------------------------------------------------------------------------------------------


def test_fetch_brings_the_publishers_bytes(publisher, tmp_path, capsys):
    publisher.files["/a.gz"] = body = os.urandom(200_000)
    digest = hashlib.sha256(body).hexdigest()
    assert fetch(publisher.address + "/a.gz", tmp_path / "a.gz", digest) == digest
    assert (tmp_path / "a.gz").read_bytes() == body
    assert "a.gz: 100%" in capsys.readouterr().err  # the progress bar


@pytest.mark.parametrize("fault", ["404", "cut short", "wrong digest", "nobody there"])
def test_a_failed_download_says_so_and_leaves_nothing(publisher, tmp_path, fault):
    publisher.files["/a.gz"] = body = os.urandom(100_000)
    address, digest, error = publisher.address + "/a.gz", None, ConnectionError
    path = tmp_path / "a.gz"
    message = rf"could not fetch {address} .*put it at {path}"
    if fault == "404":
        del publisher.files["/a.gz"]
    elif fault == "cut short":
        publisher.cut.add("/a.gz")
    elif fault == "wrong digest":
        digest, error = "0" * 64, ValueError
        message = f"{hashlib.sha256(body).hexdigest()}, expected {digest}: {path} was not written"
    else:
        address = "http://127.0.0.1:9/a.gz"
        message = rf"could not fetch {address}"
    with pytest.raises(error, match=message):
        fetch(address, path, digest)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_leaves_the_older_file(publisher, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"older")
    publisher.files["/a.gz"] = os.urandom(1000)
    with pytest.raises(ValueError):
        fetch(publisher.address + "/a.gz", tmp_path / "a.gz", "0" * 64)
    assert (tmp_path / "a.gz").read_bytes() == b"older"


def test_a_digest_that_nobody_published_is_recorded_once_and_held_to(publisher, tmp_path):
    publisher.files["/a.zip"] = first = os.urandom(1000)
    path = tmp_path / "a.zip"
    fetch_known(publisher.address + "/a.zip", path, {})
    record = json.loads((tmp_path / "downloads.json").read_text())["a.zip"]
    assert record == {"address": publisher.address + "/a.zip", "bytes": 1000,
                      "sha256": hashlib.sha256(first).hexdigest()}
    path.unlink()
    publisher.files["/a.zip"] = os.urandom(1000)
    with pytest.raises(ValueError, match=f"expected {record['sha256']}"):
        fetch_known(publisher.address + "/a.zip", path, {})
    assert not path.exists()


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "downloads.json").write_text("{")
    with pytest.raises(ValueError, match=r"downloads\.json is damaged .*delete it"):
        fetch_known("http://127.0.0.1:9/a", tmp_path / "a", {})


@pytest.fixture
def captions(publisher, monkeypatch):
    """multi30k as a local publisher serves it: a few lines, digests to match, in the real layout."""
    known, digests = CORPORA["multi30k"], {}
    for split, stem in known.files.items():
        for language, texts in (("en", ENGLISH), ("de", GERMAN), ("fr", ENGLISH)):
            body = gzip.compress(lines(texts[split]))
            publisher.files[f"/raw/{stem}.{language}.gz"] = body
            digests[f"{stem}.{language}.gz"] = hashlib.sha256(body).hexdigest()
    monkeypatch.setitem(CORPORA, "multi30k",
                        dataclasses.replace(known, address=publisher.address + "/raw", digests=digests))
    return publisher


def test_what_is_missing_is_fetched_once(captions, tmp_path):
    (tmp_path / "multi30k").mkdir()
    (tmp_path / "multi30k" / "val.en.gz.00.part").write_bytes(b"half")  # of a process that is no more
    corpus = load_corpus("multi30k", root=tmp_path)
    assert corpus.splits() == PAIRS and (corpus.source_language, corpus.target_language) == ("en", "de")
    assert sorted(captions.asked) == sorted(path for path in captions.files if ".fr" not in path)
    captions.asked.clear()
    assert load_corpus("multi30k", root=tmp_path, target_language="en").train[0] == ("Ein Hund läuft.", "A dog runs.")
    assert captions.asked == []
    load_corpus("multi30k", root=tmp_path, source_language="fr")
    assert sorted(captions.asked) == sorted(path for path in captions.files if ".fr" in path)


def test_processes_that_start_together_fetch_once(captions, tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(load_corpus("multi30k", root=tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [corpus.splits() for corpus in found] == [PAIRS] * 4 and len(captions.asked) == 6


def test_a_file_that_is_not_the_publishers_is_refused(captions, tmp_path):
    load_corpus("multi30k", root=tmp_path)
    (tmp_path / "multi30k" / "train.en.gz").write_bytes(gzip.compress(b"other\ntext\n"))
    with pytest.raises(ValueError, match=r"train\.en\.gz has the SHA-256 digest [0-9a-f]{64}, expected [0-9a-f]{64}"):
        load_corpus("multi30k", root=tmp_path)


def test_offline_the_error_names_address_folder_and_files(captions, tmp_path):
    captions.files.clear()
    with pytest.raises(ConnectionError) as error:
        load_corpus("multi30k", root=tmp_path)
    for part in (captions.address, str(tmp_path / "multi30k"), "train.en.gz", "test_2016_flickr.de.gz", "DATA"):
        assert part in str(error.value)
    assert left_over(tmp_path) == []


def test_the_real_multi30k_digests_are_those_of_real_files():
    """Where the publisher's files are at hand (ANNOTATED_DATA), they match; the table's form is checked everywhere."""
    known = CORPORA["multi30k"]
    assert set(known.digests) == {f"{stem}.{tag}.gz" for stem in known.files.values() for tag in known.languages}
    assert all(len(bytes.fromhex(digest)) == 32 for digest in known.digests.values())
    if (corpora.data_root() / "multi30k" / "train.en.gz").is_file():
        sizes = [len(pairs) for pairs in load_corpus("multi30k").splits().values()]
        assert sizes == [29_000, 1_014, 1_000]


# --- Tatoeba: an archive that is split here -------------------------------------------------------------------------

MANY = [(f"sentence {n // 2}", f"Satz {n // 2}{'ab'[n % 2]}") for n in range(300)]
MANY += [("sentence 3", "Satz 9a"), ("sentence 4", "Satz 4a")]  # one joins two groups, one is there twice


def test_no_sentence_stands_in_two_splits():
    splits = split_pairs(MANY, held_out=20)
    for column in (0, 1):
        seen = [{pair[column] for pair in pairs} for pairs in splits.values()]
        assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    joined = [split for split, pairs in splits.items() for pair in pairs if pair[0] in ("sentence 3", "sentence 9")]
    assert len(joined) == 5 and len(set(joined)) == 1
    assert sorted(sum(splits.values(), [])) == sorted(set(MANY))
    assert all(18 < len(splits[split]) <= 20 for split in ("valid", "test"))  # whole groups: one may be short


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcdefghijklmnop"), st.sampled_from("ABCDEFGHIJKLMNOP")), max_size=14),
       st.integers(1, 4))
def test_no_split_of_any_pairs_leaks(pairs, held_out):
    with contextlib.suppress(ValueError):  # too few to split
        splits = split_pairs(pairs, held_out)
        for column in (0, 1):
            seen = [{pair[column] for pair in part} for part in splits.values()]
            assert sum(map(len, seen)) == len(set().union(*seen))


def test_the_split_depends_on_the_sentences_alone():
    splits = split_pairs(MANY, held_out=20)
    again = split_pairs(MANY[::-1], held_out=20)
    assert all(set(splits[split]) == set(again[split]) for split in splits)
    assert splits["test"] != sorted(splits["test"])  # by hash, not by alphabet or length


def test_too_few_pairs_to_split_is_an_error():
    with pytest.raises(ValueError, match="3 pairs are too few"):
        split_pairs([("a", "A"), ("b", "B"), ("c", "C")], held_out=2)


def archive(member="deu.txt", text=None):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("_about.txt", "who made it")
        file.writestr("../../evil.txt", "outside")
        file.writestr(member, text or "".join(f"{a}\t{b}\tCC-BY 2.0 (France) #1\n" for a, b in MANY))
    return packed.getvalue()


@pytest.fixture
def flashcards(publisher, monkeypatch):
    publisher.files["/deu-eng.zip"] = archive()
    known = dataclasses.replace(CORPORA["tatoeba-en-de"], address=publisher.address + "/deu-eng.zip")
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
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["deu-eng.zip", "downloads.json", "split"]


def test_a_split_that_lies_there_is_used_as_it_is(flashcards, tmp_path):
    write_tables(tmp_path / "tatoeba-en-de", ".xz")
    assert load_corpus("tatoeba-en-de", root=tmp_path).splits() == PAIRS and flashcards.asked == []


def test_a_split_is_written_whole_or_not_at_all(flashcards, tmp_path, monkeypatch):
    real, calls = gzip.compress, []

    def fails_at_the_third(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no space left")
        return real(*arguments, **options)

    monkeypatch.setattr(gzip, "compress", fails_at_the_third)
    with pytest.raises(RuntimeError):
        load_corpus("tatoeba-en-de", root=tmp_path)
    folder = tmp_path / "tatoeba-en-de"
    assert not (folder / "split").exists() and left_over(folder) == []
    assert load_corpus("tatoeba-en-de", root=tmp_path).splits() == split_pairs(MANY, held_out=20)


@pytest.mark.parametrize("body, message", [
    (b"no archive", "cannot read deu.txt"),
    (archive("other.txt"), "cannot read deu.txt"),
    (archive(text="one\ttwo\nno tab\n"), "record 2 has no tab"),
])
def test_a_bad_archive_is_named(flashcards, tmp_path, body, message):
    flashcards.files["/deu-eng.zip"] = body
    with pytest.raises(ValueError, match=rf"deu-eng\.zip.*{message}"):
        load_corpus("tatoeba-en-de", root=tmp_path)
    assert not (tmp_path / "tatoeba-en-de" / "split").exists()


def test_a_changed_archive_is_not_split(flashcards, tmp_path):
    load_corpus("tatoeba-en-de", root=tmp_path)
    folder = tmp_path / "tatoeba-en-de"
    for path in (folder / "split").iterdir():
        path.unlink()
    (folder / "split").rmdir()
    (folder / "deu-eng.zip").write_bytes(archive(text="a\tb\n" * 100))
    with pytest.raises(ValueError, match="expected"):
        load_corpus("tatoeba-en-de", root=tmp_path)


def test_a_corpus_prints_in_one_line(tmp_path):
    corpus = load_corpus(write_folder(tmp_path / "mine"))
    assert str(corpus) == "mine (en to de): train 2, valid 1, test 1"
    assert "dog" not in repr(corpus)
