"""The toy language: right German by tables written by hand, annotations that fit."""

import random
import tomllib
from pathlib import Path

import nltk
import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.data import toy_language
from annotated.data.toy_language import ToySentence, generate_sentence, lexicon, read_sentences

DATA = Path(__file__).parents[2] / "data" / "toy"
SPLITS = ("train", "valid", "test", "novel")
GERMAN = tomllib.loads((Path(__file__).parent / "german.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def corpus():
    return toy_language.generate_corpus()


@pytest.fixture(scope="module")
def sentences(corpus):
    return [sentence for split in SPLITS for sentence in corpus[split]]


# The corpus


def test_committed_files_are_reproduced_byte_for_byte(corpus, tmp_path):
    for split in SPLITS:
        toy_language.write_sentences(tmp_path / f"{split}.tsv", corpus[split])
        committed = (DATA / f"{split}.tsv").read_bytes()
        assert (tmp_path / f"{split}.tsv").read_bytes() == committed, split
        assert read_sentences(DATA / f"{split}.tsv") == corpus[split]


# Annotations


@examples(60)
@given(st.integers(0, 2**32))
def test_annotations_fit_any_sentence(seed):
    dice = random.Random(seed).random
    for s in [generate_sentence(dice) for _ in range(3)]:
        english, german = s.source_tokens, s.target_tokens
        tree = nltk.Tree.fromstring(s.tree)
        assert tree.leaves() == english and tree.label() in ("S", "SQ", "SBARQ")
        assert list(s.alignment) == sorted(set(s.alignment))
        for side, tokens, free in ((0, english, {"do", "does"}), (1, german, {","})):
            places, linked = set(range(len(tokens))), {link[side] for link in s.alignment}
            assert linked <= places and {tokens[i] for i in places - linked} <= free
        assert s.source[0].isupper() and s.target[0].isupper() and s.source[-1] == s.target[-1]
        assert s.source[-1] in ".?"


def test_alignment_conventions(sentences):
    links = {s.source: {(s.source_tokens[i], s.target_tokens[j]) for i, j in s.alignment}
             for s in sentences}
    for source, expected in GERMAN["alignment"].items():
        assert links[source] == {tuple(pair.split("-")) for pair in expected.split()}


# German


def test_known_translations(sentences):
    translations, known = {s.source: s.target for s in sentences}, GERMAN["translation"]
    assert {source: translations[source] for source in known} == known


def article_of(noun):
    return toy_language.german_determiner("the", "nom", noun.gender)


def test_genders_and_plurals_of_the_lexicon():
    nouns = lexicon().nouns
    assert {name: article_of(noun) for name, noun in nouns.items() if " " not in name} == {
        name: article for article, names in GERMAN["article"].items() for name in names.split()}
    plurals = {name: noun.german_plural for name, noun in nouns.items()}
    assert {name: plural for name, plural in plurals.items() if plural != "-"} == GERMAN["plural"]
    compounds = {noun.german: article_of(noun) for noun in nouns.values() if " " in noun.name}
    assert compounds == {noun: article for article, names in GERMAN["compounds"].items()
                         for noun in names.split()}
    changed = {noun.german: noun.oblique for noun in nouns.values() if noun.german != noun.oblique}
    assert changed == {"Junge": "Jungen", "Bär": "Bären"}


@pytest.mark.parametrize("table", GERMAN["declension"], ids=lambda table: table["after"])
def test_declension(table):
    things = [(lexicon().nouns[name], plural)
              for name, plural in (("table", 0), ("lamp", 0), ("bed", 0), ("table", 1))]
    for case, line in zip(("nom", "acc", "dat"), table["phrases"].split("\n"), strict=True):
        phrases = []
        for noun, plural in things:
            word, gender = table["after"], "p" if plural else noun.gender
            before = [toy_language.german_determiner(word, case, gender)] if word else []
            adjective = toy_language.german_adjective("alt", table["family"], case, gender)
            phrases.append(" ".join([*before, adjective, noun.form(case, bool(plural))]))
        assert ", ".join(phrases) == line


# Files and bad input


def test_a_table_is_read(tmp_path):
    path = tmp_path / "some.tsv"
    tree, links = "(S (NP (PRP We)) (VP (VBP sing)) (. .))", ((0, 0), (1, 1), (2, 2))
    path.write_text(f"We sing.\tWir singen.\t0-0 1-1 2-2\t{tree}\n", encoding="utf-8")
    assert read_sentences(path) == [ToySentence("We sing.", "Wir singen.", links, tree)]
