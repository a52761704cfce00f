"""The toy language: right German, a function of the English, annotations that fit."""

import functools
import random
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.data import toy_language
from annotated.data.tokenizers import split_words
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


def sample(seed, count=1):
    dice = random.Random(seed).random
    return [generate_sentence(dice) for _ in range(count)]


@functools.cache
def parse(text):
    """A bracketed tree as nested lists [label, child, ...]; a leaf is [tag, index, word]."""
    stack, count = [[]], 0
    for opening, word, closing in re.findall(r"\((\S+)|([^\s()]+)|(\))", text):
        if opening:
            stack.append([opening])
        elif word:
            stack[-1] += [count, word]
            count += 1
        elif closing:
            done = stack.pop()
            stack[-1].append(done)
    return stack[0][0]


def leaves(node):
    return [node] if isinstance(node[1], int) else [leaf for child in node[1:]
                                                    for leaf in leaves(child)]


def nodes(node):
    yield node
    if not isinstance(node[1], int):
        for child in node[1:]:
            yield from nodes(child)


def noun_phrases(sentence):
    """(leaves before the noun, its name, its leaf) of every noun phrase, from the tree alone."""
    singular = {noun.plural: name for name, noun in lexicon().nouns.items()
                if noun.plural not in ("-", "mass")}
    for node in nodes(parse(sentence.tree)):
        if node[0] == "NP" and all(isinstance(child[1], int)
                                   for child in node[1:]) and node[-1][0] in ("NN", "NNS"):
            head = [leaf[2].lower() for leaf in node[1:] if leaf[0] in ("NN", "NNS")]
            name = " ".join(singular.get(word, word) for word in head)
            if name in lexicon().nouns:  # "every day" is a time
                yield [leaf for leaf in node[1:] if leaf[0] not in ("NN", "NNS")], name, node[-1]


# The corpus


def test_committed_files_are_reproduced_byte_for_byte(corpus, tmp_path):
    for split in SPLITS:
        toy_language.write_sentences(tmp_path / f"{split}.tsv", corpus[split])
        committed = (DATA / f"{split}.tsv").read_bytes()
        assert (tmp_path / f"{split}.tsv").read_bytes() == committed, split
        assert read_sentences(DATA / f"{split}.tsv") == corpus[split]


def test_german_is_a_function_of_the_english(sentences):
    assert len({s.source for s in sentences}) == len(sentences)  # so the splits are disjoint, too
    translation = {}
    for s in sentences + sample(1, 1500) + sample(2, 1500):
        assert translation.setdefault(s.source, s.target) == s.target
    assert not any("you" in map(str.lower, s.source_tokens) for s in sentences)


def test_tokens_are_words_and_marks(sentences):
    """As tokenizers split them, which is as spaCy does (test_tokenizers.py)."""
    for s in sentences:
        for text, tokens, language in ((s.source, s.source_tokens, "en"),
                                       (s.target, s.target_tokens, "de")):
            assert tokens == toy_language.toy_tokens(text) == split_words(text, language)
    assert toy_language.toy_tokens("  Schläft   der Bär? ") == ["Schläft", "der", "Bär", "?"]


def test_novel_combinations_never_occur_elsewhere(corpus):
    """The table cells of the rule, found in the finished trees."""
    adjectives, numbers = (list(lexicon().words[kind]) for kind in ("adjectives", "numbers"))
    rank = {name: index for index, name in enumerate(lexicon().nouns)}
    people = {"adult", "child", "kin", "royal"}
    kept = {split: Counter() for split in SPLITS}
    for split, s in [(split, s) for split, some in corpus.items() for s in some]:
        things = []
        for before, name, noun in noun_phrases(s):
            for tag, word in ((tag, word.lower()) for tag, _, word in before):
                if tag == "JJ" and word in adjectives:
                    kept[split]["adjective"] += (adjectives.index(word) + rank[name]) % 10 == 3
                if tag == "CD":
                    kept[split]["number"] += (numbers.index(word) + rank[name]) % 5 == 2
            things += [name] * (noun[0] == "NN" and not people & set(lexicon().nouns[name].classes))
        if "it" in s.source_tokens:
            assert len(things) == 1, f"two things could be meant by 'it': {s.source}"
            kept[split]["pronoun"] += rank[things[0]] % 5 == 1
    assert all(sum(kept[split].values()) == 0 for split in ("train", "valid", "test")), kept
    assert all(kept["novel"][kind] >= 50 for kind in ("adjective", "number", "pronoun"))


# Annotations


@examples(60)
@given(st.integers(0, 2**32))
def test_annotations_fit_any_sentence(seed):
    for s in sample(seed, 3):
        english, german, tree = s.source_tokens, s.target_tokens, parse(s.tree)
        assert [leaf[1:] for leaf in leaves(tree)] == list(map(list, enumerate(english)))
        assert s.tree.count("(") == s.tree.count(")") and tree[0] in ("S", "SQ", "SBARQ")
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


def test_agreement_in_the_corpus(sentences):
    """Article, adjective ending and noun agree in gender, wherever there is an adjective."""
    stems = {name: line.split(" | ")[0].removesuffix("e")
             for name, line in lexicon().words["adjectives"].items()}
    checked = Counter()
    for s in sentences:
        german_of = dict(s.alignment)
        for before, name, noun in noun_phrases(s):
            gender = "p" if noun[0] == "NNS" else lexicon().nouns[name].gender
            if len(before) != 2 or before[1][2] not in stems or before[0][0] not in ("DT", "PRP$"):
                continue
            article, adjective = s.target_tokens[german_of[before[1][1]] - 1:][:2]
            key = re.sub(r"^(mein|sein|ihr|kein|ein)(?=(e|en|em|er|)$)", "", article.lower())
            kind = GERMAN["ending"][re.sub("^(dies|jed)", "-", key)]
            ending = adjective.removeprefix(stems[before[1][2]])
            assert kind.get(gender) == ending, f"{s.target}: {article} {adjective} ({gender})"
            checked[gender] += 1
    assert min(checked[g] for g in "mfnp") > 200


def finite_leaf(clause):
    """The leaf of the English verb whose German partner is the finite verb."""
    predicate = [leaf for child in clause[1:] if child[0] == "VP" for leaf in leaves(child)]
    verb = next(leaf for leaf in predicate if leaf[0] in ("VBZ", "VBP", "MD"))
    helps = verb[2] in ("do", "does")
    return next(leaf for leaf in predicate if leaf[0] == "VB") if helps else verb


def test_verb_second_in_main_clauses(sentences):
    """Before the finite verb of a statement stands exactly one constituent."""
    fronts = Counter()
    for s in sentences:
        tree = parse(s.tree)
        inner = [child for child in tree[1:] if child[0] == "S"] or [tree]  # the main clauses
        for clause in inner if tree[0] == "S" else ():
            inside = {leaf[1] for leaf in leaves(clause)}
            verb = min(j for i, j in s.alignment if i == finite_leaf(clause)[1])
            before = {i for i, j in s.alignment if i in inside and j < verb}
            owners = [child for child in clause[1:] if child[0] != ","
                      and {leaf[1] for leaf in leaves(child)} & before]
            assert len(owners) == 1 and owners[0][0] != "VP", f"{s.source} -> {s.target}"
            fronts[owners[0][0]] += 1
    assert set(fronts) == {"NP", "PP", "ADVP", "SBAR"} and fronts["SBAR"] > 250


def test_verb_last_in_subordinate_clauses(sentences):
    """Behind the finite verb of a subordinate clause comes nothing of that clause."""
    kinds = Counter()
    for s in sentences:
        for node in nodes(parse(s.tree)):
            if node[0] == "SBAR":
                inside = {leaf[1] for leaf in leaves(node)}
                verb = finite_leaf(node[-1])
                last = max(j for i, j in s.alignment if i in inside)
                assert (verb[1], last) in s.alignment, f"{s.source} -> {s.target}"
                kinds["relative" if node[1][0] == "WHNP" else leaves(node[1])[0][2].lower()] += 1
    assert set(kinds) == {"relative", "because", "although", "while", "when", "before", "that"}
    assert min(kinds.values()) > 100


# Files and bad input


GOOD = "We sing.\tWir singen.\t0-0 1-1 2-2\t(S (NP (PRP We)) (VP (VBP sing)) (. .))\n"


@pytest.mark.parametrize("text, message", [
    (GOOD + "We sing.\tWir singen.\n", "line 2: .*not enough values"),
    (GOOD + "\n", "line 2: .*not enough values"),
    (GOOD + GOOD.replace("0-0 1-1", "0-0 1:1"), "line 2: .*not enough values"),
    (GOOD.replace("2-2", "2-3"), "line 1: .*index out of range"),
    (GOOD.replace("2-2", "2-x"), "line 1: .*invalid literal.*expected source, target"),
    (GOOD + GOOD.replace("VBP sing", "VBP sings"), "line 2: .*of the tree are not the tokens"),
    ("", "is empty"), ("Der B\ud8e4r.", "line 1: not UTF-8"),
])
def test_bad_lines_are_named_and_good_ones_read(tmp_path, text, message):
    path = tmp_path / "some.tsv"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=rf"some\.tsv.*{message}"):
        read_sentences(path)
    path.write_text(GOOD, encoding="utf-8")
    tree, links = "(S (NP (PRP We)) (VP (VBP sing)) (. .))", ((0, 0), (1, 1), (2, 2))
    assert read_sentences(path) == [ToySentence("We sing.", "Wir singen.", links, tree)]
