"""The toy language: right German, a function of the English, annotations that fit."""

import functools
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import spacy
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.data.toy_language import (
    ToySentence,
    generate_corpus,
    generate_sentence,
    german_adjective,
    german_determiner,
    lexicon,
    read_sentences,
    toy_tokens,
    write_sentences,
)

DATA = Path(__file__).parents[2] / "data" / "toy"
SPLITS = ("train", "valid", "test", "novel")

# What a German knows, written down by hand and not taken from the module.
ARTICLE = {
    "der": "man boy father son brother uncle king dog bird bear apple cake cheese tea juice "
           "letter table chair cupboard key coat bus train garden forest park station lake river "
           "tree",
    "die": "woman mother daughter sister aunt queen cat cow mouse pear tomato potato soup milk "
           "newspaper lamp door bag cup bottle jacket school church kitchen city village_school "
           "street bridge",
    "das": "girl child horse egg bread water book picture bed radio window knife glass shirt car "
           "house castle room village",
}
PLURAL = dict(pair.split("-") for pair in (
    "man-Männer woman-Frauen boy-Jungen girl-Mädchen child-Kinder son-Söhne daughter-Töchter "
    "brother-Brüder sister-Schwestern dog-Hunde cat-Katzen horse-Pferde bird-Vögel cow-Kühe "
    "mouse-Mäuse bear-Bären apple-Äpfel pear-Birnen tomato-Tomaten potato-Kartoffeln egg-Eier "
    "book-Bücher letter-Briefe newspaper-Zeitungen picture-Bilder table-Tische chair-Stühle "
    "bed-Betten lamp-Lampen key-Schlüssel cup-Tassen bottle-Flaschen car-Autos house-Häuser "
    "room-Zimmer tree-Bäume").split())
COMPOUNDS = {
    "der": "Küchentisch Küchenstuhl Küchenschrank Gartentisch Gartenstuhl Schulgarten Schulbus "
           "Stadtpark Apfelbaum Apfelkuchen Apfelsaft Tomatensaft Autoschlüssel Hausschlüssel",
    "die": "Küchenlampe Küchentür Schultasche Dorfschule Dorfkirche Dorfstraße Tomatensuppe "
           "Kartoffelsuppe Autotür Wasserflasche Milchflasche",
    "das": "Küchenfenster Küchenmesser Gartenhaus Schulbuch Wasserglas",
}
DECLENSION = {  # an old table, lamp, bed, and old tables, after each kind of word, in three cases
    ("the", "weak"): """
        der alte Tisch, die alte Lampe, das alte Bett, die alten Tische
        den alten Tisch, die alte Lampe, das alte Bett, die alten Tische
        dem alten Tisch, der alten Lampe, dem alten Bett, den alten Tischen""",
    ("this", "weak"): """
        dieser alte Tisch, diese alte Lampe, dieses alte Bett, diese alten Tische
        diesen alten Tisch, diese alte Lampe, dieses alte Bett, diese alten Tische
        diesem alten Tisch, dieser alten Lampe, diesem alten Bett, diesen alten Tischen""",
    ("my", "mixed"): """
        mein alter Tisch, meine alte Lampe, mein altes Bett, meine alten Tische
        meinen alten Tisch, meine alte Lampe, mein altes Bett, meine alten Tische
        meinem alten Tisch, meiner alten Lampe, meinem alten Bett, meinen alten Tischen""",
    ("no", "mixed"): """
        kein alter Tisch, keine alte Lampe, kein altes Bett, keine alten Tische
        keinen alten Tisch, keine alte Lampe, kein altes Bett, keine alten Tische
        keinem alten Tisch, keiner alten Lampe, keinem alten Bett, keinen alten Tischen""",
    ("", "strong"): """
        alter Tisch, alte Lampe, altes Bett, alte Tische
        alten Tisch, alte Lampe, altes Bett, alte Tische
        altem Tisch, alter Lampe, altem Bett, alten Tischen""",
}
# case, separable verbs, word order, negation, pronouns, relative clauses, prepositions
KNOWN = {
    "The man gives the queen a newspaper.": "Der Mann gibt der Königin eine Zeitung.",
    "The mother puts the red key on the table.":
        "Die Mutter legt den roten Schlüssel auf den Tisch.",
    "Every evening every man gives my son a red water bottle.":
        "Jeden Abend gibt jeder Mann meinem Sohn eine rote Wasserflasche.",
    "What must my tired aunt turn on?": "Was muss meine müde Tante einschalten?",
    "Has my friendly brother tidied up the big room?":
        "Hat mein freundlicher Bruder das große Zimmer aufgeräumt?",
    "Who does not pick up the hungry child?": "Wer holt das hungrige Kind nicht ab?",
    "Today the young mouse has slept.": "Heute hat die junge Maus geschlafen.",
    "While my daughter comes back, my hungry aunt works.":
        "Während meine Tochter zurückkommt, arbeitet meine hungrige Tante.",
    "The king gets up, but five girls come back.":
        "Der König steht auf, aber fünf Mädchen kommen zurück.",
    "Every child thinks that the man calls the girl.":
        "Jedes Kind denkt, dass der Mann das Mädchen anruft.",
    "The king does not help the women.": "Der König hilft den Frauen nicht.",
    "A girl does not eat a cake.": "Ein Mädchen isst keinen Kuchen.",
    "Who does not turn on lamps?": "Wer schaltet keine Lampen ein?",
    "No child knows that the king is very happy.":
        "Kein Kind weiß, dass der König sehr glücklich ist.",
    "The girl will eat potato soup because it is fresh.":
        "Das Mädchen wird Kartoffelsuppe essen, weil sie frisch ist.",
    "My father must invite the queen because he must thank her.":
        "Mein Vater muss die Königin einladen, weil er ihr danken muss.",
    "The aunt whom my daughter has thanked has cooked tomato soup.":
        "Die Tante, der meine Tochter gedankt hat, hat Tomatensuppe gekocht.",
    "My daughters see the bear that often eats the pear.":
        "Meine Töchter sehen den Bären, der die Birne oft frisst.",
    "Every boy has gone into the church with the cat.":
        "Jeder Junge ist mit der Katze in die Kirche gegangen.",
    "My sons always arrive at the station.": "Meine Söhne kommen immer am Bahnhof an.",
}


@pytest.fixture(scope="module")
def corpus():
    return generate_corpus()


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
        write_sentences(tmp_path / f"{split}.tsv", corpus[split])
        committed = (DATA / f"{split}.tsv").read_bytes()
        assert (tmp_path / f"{split}.tsv").read_bytes() == committed, split
        assert read_sentences(DATA / f"{split}.tsv") == corpus[split]


def test_german_is_a_function_of_the_english(sentences):
    assert len({s.source for s in sentences}) == len(sentences)  # so the splits are disjoint, too
    translation = {}
    for s in sentences + sample(1, 1500) + sample(2, 1500):
        assert translation.setdefault(s.source, s.target) == s.target
    assert not any("you" in map(str.lower, s.source_tokens) for s in sentences)


def test_tokens_are_what_spacy_sees(sentences):
    english, german = spacy.blank("en").tokenizer, spacy.blank("de").tokenizer
    for s in sentences:
        assert [token.text
                for token in english(s.source)] == s.source_tokens == toy_tokens(s.source)
        assert [token.text for token in german(s.target)] == s.target_tokens == toy_tokens(s.target)


def test_novel_combinations_never_occur_elsewhere(corpus):
    """The table cells of the rule, found in the finished trees."""
    adjectives, numbers = list(lexicon().words["adjectives"]), list(lexicon().words["numbers"])
    rank = {name: index for index, name in enumerate(lexicon().nouns)}
    kept = {split: Counter() for split in SPLITS}
    for split in SPLITS:
        for s in corpus[split]:
            things = []
            for before, name, noun in noun_phrases(s):
                for tag, _, word in before:
                    word = word.lower()
                    if tag == "JJ" and word in adjectives and (adjectives.index(word)
                                                               + rank[name]) % 10 == 3:
                        kept[split]["adjective"] += 1
                    if tag == "CD" and (numbers.index(word) + rank[name]) % 5 == 2:
                        kept[split]["number"] += 1
                if noun[0] == "NN" and not set(lexicon().nouns[name].classes) & {"adult", "child",
                                                                                 "kin", "royal"}:
                    things.append(name)
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
        english, german = s.source_tokens, s.target_tokens
        assert [leaf[2] for leaf in leaves(parse(s.tree))] == english
        assert [leaf[1] for leaf in leaves(parse(s.tree))] == list(range(len(english)))
        assert s.tree.count("(") == s.tree.count(")") and parse(s.tree)[0] in ("S", "SQ", "SBARQ")
        assert list(s.alignment) == sorted(set(s.alignment))
        assert all(0 <= i < len(english) and 0 <= j < len(german) for i, j in s.alignment)
        assert {german[j] for j in set(range(len(german))) - {j for _, j in s.alignment}} <= {","}
        assert {english[i]
                for i in set(range(len(english))) - {i for i, _ in s.alignment}} <= {"do", "does"}
        assert s.source[0].isupper() and s.target[0].isupper() and s.source[-1] == s.target[-1]
        assert s.source[-1] in ".?"


def test_alignment_conventions(sentences):
    links = {s.source: {(s.source_tokens[i], s.target_tokens[j]) for i, j in s.alignment}
             for s in sentences}
    known = {
        "Now my sister turns on the kitchen lamp.":
            "Now-Jetzt my-meine sister-Schwester turns-schaltet turns-ein on-ein the-die "
            "kitchen-Küchenlampe lamp-Küchenlampe .-.",
        "A girl does not eat a cake.":
            "A-Ein girl-Mädchen not-keinen a-keinen eat-isst cake-Kuchen .-.",
        "The sister wants to get up.":
            "The-Die sister-Schwester wants-will to-will get-aufstehen up-aufstehen .-.",
        "The boy looks for the knife.":
            "The-Der boy-Junge looks-sucht for-sucht the-das knife-Messer .-.",
        "The son waits for the train every evening.":
            "The-Der son-Sohn waits-wartet for-auf the-den train-Zug "
            "every-jeden evening-Abend .-.",
    }
    for source, expected in known.items():
        assert links[source] == {tuple(pair.split("-")) for pair in expected.split()}


# German


@pytest.mark.parametrize("source", KNOWN)
def test_known_translation(source, sentences):
    assert {s.source: s.target for s in sentences}[source] == KNOWN[source]


def test_genders_and_plurals_of_the_lexicon():
    nouns = lexicon().nouns
    assert sorted(" ".join(ARTICLE.values()).replace("_", " ").split()) == sorted(
        [name for name in nouns if " " not in name] + ["village", "school"])
    for article, names in ARTICLE.items():
        for name in names.split():
            assert german_determiner("the", "nom",
                                     nouns[name.replace("_", " ")].gender) == article, name
    assert {name: noun.german_plural for name, noun in nouns.items() if noun.german_plural
            != "-"} == PLURAL
    two = [noun for noun in nouns.values() if " " in noun.name]
    compounds = {noun.german: german_determiner("the", "nom", noun.gender) for noun in two}
    assert compounds == {noun: article for article, names in COMPOUNDS.items()
                         for noun in names.split()}
    changed = {noun.german: noun.oblique for noun in nouns.values() if noun.german != noun.oblique}
    assert changed == {"Junge": "Jungen", "Bär": "Bären"}


@pytest.mark.parametrize("word, family", DECLENSION)
def test_declension(word, family):
    things = [(lexicon().nouns[name], plural)
              for name, plural in (("table", 0), ("lamp", 0), ("bed", 0), ("table", 1))]
    for case, line in zip(("nom", "acc", "dat"), DECLENSION[word, family].split("\n")[1:],
                          strict=True):
        phrases = []
        for noun, plural in things:
            gender = "p" if plural else noun.gender
            before = [german_determiner(word, case, gender)] if word else []
            adjective = german_adjective("alt", family, case, gender)
            phrases.append(" ".join([*before, adjective, noun.form(case, bool(plural))]))
        assert ", ".join(phrases) == line.strip()


# word before the adjective -> gender -> endings of the adjective, in any case
ALLOWED = {
    "der": {"m": "e", "f": "en"}, "die": {"f": "e", "p": "en"}, "das": {"n": "e"},
           "den": {"m": "en", "p": "en"},
    "dem": {"m": "en", "n": "en"}, "im": {"m": "en", "n": "en"}, "am": {"m": "en"},
           "zum": {"m": "en", "n": "en"},
    "zur": {"f": "en"}, "ins": {"n": "e"},
    "": {"m": "er e", "n": "es", "f": "e", "p": "e"},  # after ein, kein, mein …
    "e": {"f": "e", "p": "en"}, "en": {"m": "en", "p": "en"}, "em": {"m": "en", "n": "en"},
           "er": {"f": "en"},
}


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
            adjective = s.target_tokens[german_of[before[1][1]]]
            ending = adjective.removeprefix(stems[before[1][2]])
            article = s.target_tokens[german_of[before[1][1]] - 1].lower()
            stem = re.match(r"(mein|sein|ihr|kein|ein)(e|en|em|er|)$", article)
            if re.match(r"dies|jed", article):  # like der, with other letters
                kind = {"er": {"m": "e", "f": "en"}, "e": {"f": "e", "p": "en"}, "es": {"n": "e"},
                        "en": {"m": "en", "p": "en"},
                        "em": {"m": "en", "n": "en"}}[re.sub(r"dies|jed", "", article)]
            elif stem:
                kind = {**ALLOWED[stem[2]], **({"m": "er"} if not stem[2] else {})}
            else:
                kind = ALLOWED[article]
            assert kind.get(gender) == ending, f"{s.target}: {article} {adjective} ({gender})"
            checked[gender] += 1
    assert min(checked[g] for g in "mfnp") > 200


def finite_leaf(clause):
    """The leaf of the English verb whose German partner is the finite verb."""
    predicate = [leaf for child in clause[1:] if child[0] == "VP" for leaf in leaves(child)]
    verb = next(leaf for leaf in predicate if leaf[0] in ("VBZ", "VBP", "MD"))
    return next(leaf for leaf in predicate if leaf[0]
                == "VB") if verb[2] in ("do", "does") else verb


def main_clauses(tree):
    if tree[0] == "S":
        inside = [child for child in tree[1:] if child[0] == "S"]
        yield from inside or [tree]


def test_verb_second_in_main_clauses(sentences):
    """Before the finite verb of a statement stands exactly one constituent."""
    fronts = Counter()
    for s in sentences:
        for clause in main_clauses(parse(s.tree)):
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


@pytest.mark.parametrize("line, message", [
    ("We sing.\tWir singen.\n", "not enough values"), ("\n", "not enough values"),
    (GOOD.replace("0-0 1-1", "0-0 1:1"), "not enough values"),
    (GOOD.replace("2-2", "2-3"), "index out of range"),
                                           (GOOD.replace("2-2", "2-x"), "invalid literal"),
    (GOOD.replace("VBP sing", "VBP sings"), "the leaves of the tree are not the tokens"),
])
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.tsv"
    path.write_text(GOOD + line, encoding="utf-8")
    with pytest.raises(ValueError,
                       match=rf"bad\.tsv, line 2: .*{message}.*expected source, target"):
        read_sentences(path)


def test_good_lines_empty_files_and_wrong_encodings(tmp_path):
    path = tmp_path / "some.tsv"
    path.write_text(GOOD, encoding="utf-8")
    tree = "(S (NP (PRP We)) (VP (VBP sing)) (. .))"
    assert read_sentences(path) == [ToySentence("We sing.", "Wir singen.",
                                                ((0, 0), (1, 1), (2, 2)), tree)]
    for data, message in ((b"", "is empty"),
                          ("Der B\u00e4r.".encode("latin-1"), "line 1: not UTF-8")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"some\.tsv.*{message}"):
            read_sentences(path)


def test_tokens():
    assert toy_tokens("If it rains, the cat sleeps.") == ["If", "it", "rains", ",", "the", "cat",
                                                          "sleeps", "."]
    assert toy_tokens("  Schläft   der Bär? ") == ["Schläft", "der", "Bär", "?"]
    assert toy_tokens("") == []
