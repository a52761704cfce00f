"""Formats: the same pairs from lines, tables, TMX and parquet; damage is named with its place."""

import gzip
import sys
import zipfile
from xml.sax.saxutils import escape

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.data.corpora import PairStream, load_corpus
from annotated.data.formats import read_pairs, read_table, read_tmx, texts_of
from annotated.data.prepared import prepare_corpus

PLAIN = [("A dog runs.", "Ein Hund läuft."), ('She said "yes".', '"Ja", sagte sie.')]
TABLES = {  # as programs write them, tabs as |: the same two pairs
    "plain": 'A dog runs.|Ein Hund läuft.\nShe said "yes".|"Ja", sagte sie.\n',
    "Tatoeba": '1|A dog runs.|77|Ein Hund läuft.\n2|She said "yes".|78|"Ja", sagte sie.\n',
    "header": 'source|target\nA dog runs.|Ein Hund läuft.\nShe said "yes".|"Ja", sagte sie.\n',
    "languages": 'de|id|en\nEin Hund läuft.|1|A dog runs.\n"Ja", sagte sie.|2|She said "yes".\n',
    "spreadsheet": 'A dog runs.|Ein Hund läuft.\n"She said ""yes""."|"""Ja"", sagte sie."\n',
    "numbered": '0|A dog runs.|Ein Hund läuft.|CC\n1|She said "yes".|"Ja", sagte sie.|CC\n'}


@pytest.mark.parametrize("source, target", [(3, 5), (5, 3), (1, 2)])
def test_files_of_different_length_name_both_and_both_counts(tmp_path, source, target):
    for name, count in (("a", source), ("b.gz", target)):
        pack = gzip.compress if name == "b.gz" else bytes
        (tmp_path / name).write_bytes(pack(b"line\n" * count))
    with pytest.raises(ValueError, match=rf"a has {source} lines but .*b\.gz has {target}: line n"):
        list(read_pairs(tmp_path / "a", tmp_path / "b.gz"))


# --- tables


def test_a_table_keeps_two_columns_and_names_a_bad_line(tmp_path):
    (tmp_path / "t.tsv").write_bytes("a\tä\tmore\nb\tß\n".encode())
    assert read_table(tmp_path / "t.tsv") == [("a", "ä"), ("b", "ß")]
    assert read_table(tmp_path / "t.tsv", ("en", "de"), ("de", "en")) == [("ä", "a"), ("ß", "b")]
    (tmp_path / "n.tsv").write_bytes(b"en\tde\tscore\na\tb\t-0.98\nc\td\t1e-3\n")
    with pytest.raises(ValueError, match=r"names en, de, score, and not both of fr and de"):
        read_table(tmp_path / "n.tsv", ("de", "fr"), ("fr", "de"))
    (tmp_path / "n.tsv").write_bytes(b"-0.98\ta\tb\n1e-3\tc\td\n")
    assert read_table(tmp_path / "n.tsv") == [("a", "b"), ("c", "d")]
    (tmp_path / "bad.tsv").write_bytes(b"a\tb\nno tab\n")
    with pytest.raises(ValueError, match="names no columns, and de and fr are not both among en"):
        read_table(tmp_path / "t.tsv", ("en", "de"), ("de", "fr"))
    with pytest.raises(ValueError, match=r"bad\.tsv, line 2: 1 column"):
        read_table(tmp_path / "bad.tsv")
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("in.tsv", "a\tä\n")
    assert read_table(tmp_path / "t.zip", member="in.tsv") == [("a", "ä")]
    with pytest.raises(ValueError, match=r"t\.zip holds no file other\.tsv"):
        read_table(tmp_path / "t.zip", member="other.tsv")


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_read_as_the_program_that_wrote_it_meant_it(tmp_path, kind):
    for split in ("train", "valid"):
        text = TABLES[kind].replace("|", "\t")
        (tmp_path / f"{split}.tsv").write_text(text, encoding="utf-8", newline="")
    assert load_corpus(tmp_path).train == PLAIN
    back = load_corpus(tmp_path, source_language="de", target_language="en")
    first = PLAIN if kind != "languages" else [pair[::-1] for pair in PLAIN]
    assert back.train == first, "without names the first column is the source"


# --- translation memories


def memory(units, head="<tmx version='1.4'>", attribute="xml:lang"):
    """A TMX file of units, each a list of (language, XML of the segment)."""
    variants = ("".join(f"<tuv {attribute}='{code}'><prop>x</prop><seg>{text}</seg></tuv>"
                        for code, text in unit) for unit in units)
    body = "".join(f"<tu tuid='{n}'>{unit}</tu>" for n, unit in enumerate(variants))
    return f"<?xml version='1.0'?>{head}<header/><body>{body}</body></tmx>".encode()


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=9)


@examples(60)
@given(pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_a_memory_gives_back_any_texts(pairs, tmp_path_factory):
    path = tmp_path_factory.mktemp("tmx") / "t.tmx.gz"
    units = [[("en", escape(a)), ("DE-de", escape(b))] for a, b in pairs]
    path.write_bytes(gzip.compress(memory(units)))
    assert read_tmx(path, "en", "de") == pairs
    assert read_tmx(path, "de-AT", "en-GB") == [pair[::-1] for pair in pairs]


@pytest.mark.parametrize("head, attribute",
                         [("<tmx version='1.1'>", "lang"),
                          ("<tmx xmlns='http://www.lisa.org/tmx14'>", "xml:lang")])
def test_a_memory_is_read_in_any_of_its_versions(tmp_path, head, attribute):
    units = [[("en", "Press <bpt i='1'>&lt;b></bpt>OK<ept i='1'/>"),
              ("de", "Auf <hi type='x'>OK</hi>\n  drücken")],
             [("en", "no German"), ("fr", "pas d'allemand")],
             [("en", ""), ("de", "leer")],
             [("de", "one"), ("de", "two"), ("pt_BR", "um"), ("pt-PT", "dois")]]
    (tmp_path / "t.tmx").write_bytes(memory(units, head, attribute))
    assert read_tmx(tmp_path / "t.tmx", "en", "de") == [("Press OK", "Auf OK drücken"),
                                                        ("", "leer")]
    assert read_tmx(tmp_path / "t.tmx", "pt", "de") == [("um", "one")]
    assert read_tmx(tmp_path / "t.tmx", "pt-PT", "de") == [("dois", "one")]
    with pytest.raises(ValueError,
                       match=r"has no unit in en and ja; its languages: de, en, fr, pt-br, pt-pt"):
        read_tmx(tmp_path / "t.tmx", "en", "ja")


WHOLE = memory([[("en", "a"), ("de", "b")]])


@pytest.mark.parametrize("data", [WHOLE[:-9], b"", b"plain text", WHOLE.replace(b">a<", b">&no;<")])
def test_a_damaged_memory_is_named(tmp_path, data):
    (tmp_path / "t.tmx").write_bytes(data)
    with pytest.raises(ValueError, match=r"t\.tmx is not a complete TMX file"):
        read_tmx(tmp_path / "t.tmx", "en", "de")


# --- the library `datasets`


def test_the_texts_of_a_row():
    assert texts_of({"translation": {"de": "b", "en": "a"}}) == {"de": "b", "en": "a"}
    assert texts_of({"id": 1, "en": "a", "de": None}) == {"en": "a", "de": ""}
    assert texts_of({"en": "a", "translation": "b"}) == {"en": "a", "translation": "b"}


@pytest.mark.parametrize("head", ["de-DE\ten_US", "note\tde\tEN-gb"])
def test_the_first_line_may_name_languages_with_their_regions(tmp_path, head):
    cells = ["x"] * head.startswith("note") + ["Hund", "dog"]
    (tmp_path / "t.tsv").write_text(head + "\n" + "\t".join(cells) + "\n")
    assert read_table(tmp_path / "t.tsv", ("en", "de"), ("en", "de")) == [("dog", "Hund")]


def write_parquet(folder, pairs, nested=True, shards=2):
    """A folder as it is on the hub: shards of a training split, and a validation split."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    folder.mkdir(parents=True)
    for n in range(shards + 1):
        some = pairs[n::shards] if n < shards else pairs[:3]
        rows = [{"de": b, "en": a} for a, b in some]
        name = f"train-{n:05}-of-{shards:05}" if n < shards else "validation-00000-of-00001"
        rows = [{"translation": row} for row in rows] if nested else rows
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


PAIRS = [(f"the dog number {n} sleeps", f"der Hund Nummer {n} schläft") for n in range(40)]


@pytest.mark.parametrize("nested", [True, False])
def test_a_folder_of_parquet_is_a_corpus_and_a_stream(tmp_path, monkeypatch, nested):
    folder = write_parquet(tmp_path / "mine", PAIRS, nested)
    corpus = load_corpus(folder)
    expected = PAIRS[::2] + PAIRS[1::2]
    assert (corpus.name, corpus.source_language, corpus.target_language) == ("mine", "en", "de")
    assert corpus.train == expected and corpus.valid == PAIRS[:3] and corpus.test == []
    assert load_corpus(folder, target_language="en").train[0] == PAIRS[0][::-1]
    streamed = load_corpus(f"datasets:{folder}").train
    assert isinstance(streamed, PairStream) and list(streamed) == expected == list(streamed)
    monkeypatch.setattr("annotated.data.corpora._IN_MEMORY", 39)
    assert list(load_corpus(folder).train) == expected
    assert isinstance(load_corpus(folder).train, PairStream)
    with pytest.raises(ValueError, match="has no language 'fr': it has en, de"):
        load_corpus(folder, target_language="fr")
    (folder / "validation-00000-of-00001.parquet").unlink()
    with pytest.raises(ValueError, match="mine has no split validation: it has train"):
        load_corpus(folder)


def test_a_folder_of_parquet_is_prepared_like_the_same_text_in_files(tmp_path):
    (tmp_path / "files").mkdir()
    for split, pairs in (("train", PAIRS), ("valid", PAIRS[:3])):
        text = "\n".join(map("\t".join, pairs))
        (tmp_path / "files" / f"{split}.tsv").write_text(text, encoding="utf-8")
    folder = write_parquet(tmp_path / "parquet", PAIRS, shards=1)
    lines, rows = (prepare_corpus(source, tmp_path / f"from-{source.name}", 300)
                   for source in (tmp_path / "files", folder))
    assert rows.train.digest == lines.train.digest and rows.valid.digest == lines.valid.digest
    assert rows.tokenizer.as_dict() == lines.tokenizer.as_dict()


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in (tmp_path, "datasets:wmt14:de-en"):
        with pytest.raises(ImportError, match="datasets"):
            load_corpus(name)


def test_a_name_of_the_hub_goes_to_the_library_with_its_configuration(monkeypatch):
    asked = []

    def load_dataset(*given, **options):
        asked.append((given, options))
        return {"train": [{"translation": {"de": "b", "en": "a"}}],
                "validation": [{"translation": {"de": "d", "en": "c"}}]}

    monkeypatch.setitem(sys.modules, "datasets",
                        type("datasets", (), {"load_dataset": staticmethod(load_dataset)}))
    corpus = load_corpus("datasets:wmt14:de-en")
    assert asked == [(("wmt14", "de-en"), {"streaming": True})]
    assert list(corpus.train) == [("a", "b")] and corpus.valid == [("c", "d")]
    load_corpus("datasets:me/mine", target_language="en")
    assert asked[1] == (("me/mine", None), {"streaming": True})
