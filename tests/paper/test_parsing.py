"""Trees as sequences and back, bracket scores by hand and by nltk, treebanks, baselines, the command (section 6.3)."""

import itertools
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import ROOT, cells, examples
from hypothesis import given
from hypothesis import strategies as st
from nltk import Tree as LibraryTree
from test_trees import trees

from annotated import results
from annotated.data.tokenizers import BEGIN, END
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.options import Parse
from annotated.paper import parsing
from annotated.paper.parsing import (
    LEAF,
    Malformed,
    ParsingVocabulary,
    Treebank,
    TreeGrammar,
    bracket_f1,
    delinearize,
    linearize,
    load_treebank,
    nearest_copy,
    parse_sentences,
    phrases,
    right_branching,
    signature,
    train_parser,
    tree_pairs,
)
from annotated.paper.trees import Tree, parse_tree, read_trees, stripped
from annotated.training import loop
from annotated.training.checkpoints import average_checkpoints, load_checkpoint
from annotated.training.loop import TrainingConfig

REAL = Path(os.environ.get("ANNOTATED_DATA") or ROOT.parent / "shared" / "data")
TOY = [parse_tree(line.split("\t")[3]) for line in (ROOT / "data/toy/test.tsv").read_text(encoding="utf-8").splitlines()]
DOG = "(S (NP (DT The) (NN dog)) (VP (VBZ sees) (NP (DT the) (JJ old) (NN house))) (. .))"


def real_trees(name, split, count=300):
    """Some stripped trees of a treebank that may lie beside the checkout."""
    folder = REAL / parsing.TREEBANKS[name]
    if not folder.is_dir():
        pytest.skip(f"{parsing.TREEBANKS[name]} is not beside the checkout (ANNOTATED_DATA names its folder)")
    found = read_trees(parsing.files.find_file(folder, f"{split}.trees"))
    return found, random.Random(0).sample(found, count)


# ---- text to trees and back


@examples(80)
@given(trees)
def test_round_trip_through_symbols(tree):
    symbols = linearize(tree)
    assert delinearize(symbols, tree.leaves()) == tree
    assert symbols.count(LEAF) == len(tree.words)
    again = delinearize(symbols, tree.words)
    assert again.words == tree.words and {leaf.label for leaf in again.leaves()} == {LEAF} and linearize(again) == symbols
    for leaves in ("words", "numbers", LEAF):
        vocabulary = ParsingVocabulary.fit([tree], leaves=leaves)
        assert vocabulary.symbols_of(vocabulary.encode_tree(tree)) == symbols


def test_linearised_by_hand():
    tree = parse_tree(DOG)
    assert " ".join(linearize(tree)) == "(S (NP XX XX )NP (VP XX (NP XX XX XX )NP )VP XX )S"
    assert tree.words == "The dog sees the old house .".split()
    assert [leaf.label for leaf in tree.leaves()] == "DT NN VBZ DT JJ NN .".split()


@pytest.mark.parametrize("name", ["gum", "craft"])
def test_round_trip_over_real_trees(name):
    found, some = real_trees(name, "dev" if name == "craft" else "test")
    assert len(found) == {"gum": 347, "craft": 2780}[name]
    for tree in some:
        clean = stripped(tree)
        assert delinearize(linearize(clean), clean.leaves()) == clean == parse_tree(str(clean)) == stripped(clean)
        assert clean.words == [leaf.children[0] for leaf in tree.leaves() if leaf.label != "-NONE-"]
        assert not [label for label, _, _ in phrases(clean) if re.search(r"[-=]", label)]


# ---- malformed output


@pytest.mark.parametrize("symbols, reason", [
    ("", "there is no output"), ("XX XX", "XX follows after the end"), ("(S XX XX )NP", r"\)NP closes \(S"),
    (")S", r"\)S closes nothing"), ("(S XX )S", "fewer leaves than words"), ("(S XX XX XX )S", "more leaves than words"),
    ("(S XX XX", r"1 bracket\(s\) are never closed"), ("(S (NP )NP XX XX )S", r"\(NP is empty"),
    ("(S XX XX )S )S", r"\)S follows"), ("(S XX word dog )S", "'word' is no bracket"), ("(S " * 101, "more than 100"),
    ("<unk> XX", "'<unk>' is no bracket"),
])
def test_malformed_output_gives_a_reason(symbols, reason):
    found = delinearize(symbols.split(), ["dogs", "sleep"])
    assert isinstance(found, Malformed) and not found and re.search(reason, found.reason)


@examples(150)
@given(st.lists(st.sampled_from(["(S", ")S", "(NP", ")NP", "XX", "XX", "", "(", ")", "x", 7, None]), max_size=12), st.integers(0, 4))
def test_whatever_is_written_nothing_is_raised(symbols, length):
    found = delinearize(symbols, ["w"] * length)
    assert (isinstance(found, Tree) and linearize(found) == symbols and len(found.words) == length) or (not found and found.reason)


# ---- the score


def scored(predicted, gold, **options):
    return bracket_f1([text and parse_tree(text) for text in predicted], [parse_tree(text) for text in gold], **options)


def test_f1_by_hand():
    # gold S(0,5) NP(0,1) VP(1,5) NP(2,3) PP(3,5) NP(4,5); predicted the same with NP(2,5) beside NP(2,3): 6 of 7 and 6 of 6
    gold = "(S (NP (NN He)) (VP (VBZ eats) (NP (NN soup)) (PP (IN with) (NP (NNS spoons)))) (. .))"
    predicted = "(S (NP (NN He)) (VP (VBZ eats) (NP (NP (NN soup)) (PP (IN with) (NP (NNS spoons))))) (. .))"
    score = scored([predicted], [gold])
    assert (score.matched, score.predicted, score.gold) == (6, 7, 6)
    assert (score.precision, score.recall) == (pytest.approx(600 / 7), 100) and score.f1 == pytest.approx(1200 / 13)
    assert score.exact_match == 0 and scored([gold], [gold]).exact_match == 100


def test_punctuation_is_deleted_wherever_it_hangs():
    gold = "(S (NP (NN a) (, ,)) (VP (VB b) (: --) (`` ``) (NP (NN c)) ('' '')) (. .))"
    elsewhere = "(S (NP (XX a)) (XX ,) (VP (XX b) (PRN (XX --) (XX ``)) (NP (XX c) (XX '') (XX .))))"
    assert scored([elsewhere], [gold]).exact_match == 100 and scored([elsewhere], [gold]).predicted == 4
    kept = scored(["(S (NP (NN a)) (X (SYM %)))"], ["(S (NP (NN a)) (SYM %))"])  # another mark is a word like others
    assert (kept.matched, kept.predicted, kept.gold) == (2, 3, 2)


@pytest.mark.parametrize("predicted, gold, counts", [
    ("(TOP (S (NN a) (NN b)))", "(S (NN a) (NN b))", (1, 1, 1)),  # the root does not count
    ("(TOP (NP (NN a)) (VP (NN b)))", "(ROOT (NP (NN a)) (VP (NN b)))", (2, 2, 2)),
    ("(VP (NN a) (ADVP (RP b)))", "(VP (NN a) (PRT (RP b)))", (2, 2, 2)),  # ADVP = PRT
    ("(NP (NP (NN a) (NN b)))", "(NP (NN a) (NN b))", (1, 2, 1)),  # a multiset
    ("(NP (NN a) (NN b))", "(NP (NP (NN a) (NN b)))", (1, 1, 2)),
    ("(NP (VP (NN a)))", "(VP (NP (NN a)))", (2, 2, 2)),  # the order of unary brackets is not seen
    ("(NP-SBJ (NN a))", "(NP=1 (NN a))", (1, 1, 1)),
    ("(S (NP (X a)) (Y b))", "(S (NP (NN a)) (VB b))", (2, 2, 2)),  # tags do not count
    ("(S (NP (NN a)) (VB b))", "(S (NP (NN a)) (NP (-NONE- *)) (VB b))", (2, 2, 2)),
])
def test_conventions(predicted, gold, counts):
    score = scored([predicted], [gold])
    assert (score.matched, score.predicted, score.gold) == counts and score.errors == 0


def test_malformed_output_is_an_empty_tree_and_counted():
    gold = ["(S (NP (NN a)) (VP (VB b)))", "(NP (NN a))", "(NP (NN a))"]
    score = bracket_f1([Malformed("why"), None, parse_tree(gold[2])], [parse_tree(text) for text in gold])
    assert (score.matched, score.predicted, score.gold, score.errors) == (1, 1, 5, 2)
    assert score.precision == 100 and score.recall == 20 and score.well_formed == pytest.approx(100 / 3)
    assert score.exact_match == score.sentence_f1 == pytest.approx(100 / 3)


def test_other_words_are_an_error():
    for other in ("(NP (NN b))", "(NP (NN a) (NN a))"):
        score = scored([other], ["(NP (NN a))"])
        assert (score.matched, score.predicted, score.errors, score.f1) == (0, 0, 1, 0)
    nothing = scored([None], ["(NP (NN a))"])
    assert nothing.precision == 0 == nothing.f1


def test_an_error_is_no_exact_match_of_a_sentence_without_brackets():
    gold = ["(TOP (UH Yes))", "(NP (NN a))"]
    assert scored(["(TOP (UH Yes))", "(NP (NN a))"], gold).exact_match == 100
    assert scored([None, "(NP (NN a))"], gold).exact_match == 50


def test_unlabelled():
    score = scored(["(X (Y (NN a)) (Z (NN b)))"], ["(S (NP (NN a)) (VP (NN b)))"], labelled=False)
    assert score.f1 == 100 and scored(["(X (NP (NN a)) (Z (NN b)))"], ["(S (NP (NN a)) (VP (NN b)))"]).f1 == pytest.approx(100 / 3)


@pytest.mark.parametrize("predicted, gold, message", [
    ([], [], "0 predicted and 0 gold"), ([None], [None, None], "1 predicted and 2 gold"), ([None], [None], r"gold\[0\] is no tree"),
    ([None], [Tree("NP", (Tree("-NONE-", ("*",)),))], r"gold\[0\] is no tree"),
    ([None], [Tree("TOP", (Tree("NN", ("a",)),))], "no bracket"),
])
def test_bad_input_to_the_score(predicted, gold, message):
    with pytest.raises(ValueError, match=message):
        bracket_f1(predicted, gold)


def library_spans(text):
    """Brackets of a tree by nltk: its reader, spans from the places of its leaves, punctuation and the root left out."""
    tree = LibraryTree.fromstring(text, remove_empty_top_bracketing=True)
    leaves = [place for place in tree.treepositions("leaves") if tree[place[:-1]].label() not in (",", ":", "``", "''", ".")]
    spans = Counter()
    for place in tree.treepositions():
        inside = [i for i, leaf in enumerate(leaves) if leaf[: len(place)] == place]
        if isinstance(tree[place], LibraryTree) and tree[place].height() > 2 and inside and tree[place].label() not in ("TOP", "ROOT"):
            spans[tree[place].label().replace("PRT", "ADVP"), inside[0], inside[-1] + 1] += 1
    return spans


def shuffled_brackets(tree, draw):
    """Another tree over the same words: some labels changed, some brackets dissolved."""
    children = []
    for child in tree.children:
        inner = child if child.is_leaf else shuffled_brackets(child, draw)
        children += inner.children if not child.is_leaf and draw.random() < 0.2 else [inner]
    return Tree("NP" if draw.random() < 0.2 else tree.label, tuple(children))


@pytest.mark.parametrize("name", ["toy", "gum"])
def test_score_equals_a_count_by_another_library(name):
    gold = TOY[:150] if name == "toy" else [stripped(tree) for tree in real_trees("gum", "test", 100)[1]]
    draw = random.Random(1)
    predicted = [shuffled_brackets(tree, draw) for tree in gold]
    matched = proposed = wanted = 0
    for ours, theirs in zip(predicted, gold, strict=True):
        a, b = library_spans(str(ours)), library_spans(str(theirs))
        matched, proposed, wanted = matched + (a & b).total(), proposed + a.total(), wanted + b.total()
    score = bracket_f1(predicted, gold)
    assert (score.matched, score.predicted, score.gold) == (matched, proposed, wanted) and 0 < matched < wanted
    assert score.f1 == pytest.approx(200 * matched / (proposed + wanted))


# ---- baselines


def test_right_branching_by_hand():
    parse = right_branching([parse_tree(DOG)])  # VP and NP end with the sentence, once each: the outer one is counted first
    assert str(parse("a b , c .".split())) == "(S (XX a) (VP (XX b) (XX ,) (XX c) (XX .)))"
    assert str(parse(["a"])) == "(S (XX a))" and str(parse(["."])) == "(S (XX .))"
    assert str(parse("a b c".split())) == "(S (XX a) (VP (XX b) (XX c)))"
    assert str(parse("` a b".split())) == "(S (XX `) (XX a) (XX b))"


def test_right_branching_takes_the_commonest_label_at_the_right_edge():
    # At the right edge, over two words or more: PP, PP, VP. Elsewhere NP is commonest, and ADJP over the last word alone.
    trees = [parse_tree(f"(S (NP (NN a) (NN b)) (NP (NN a) (NN b)) (VP (VB c) (ADJP (JJ d))){tail} (. .))" if tail else
                        "(SINV (NP (NN a) (NN b)) (VP (VB c) (ADJP (JJ d))) (. .))")
             for tail in (" (PP (IN e) (NP (ADJP (JJ f))))", " (PP (IN e) (NP (ADJP (JJ f))))", "")]
    assert str(right_branching(trees)("a b c .".split())) == "(S (XX a) (PP (XX b) (XX c) (XX .)))"
    assert str(right_branching(trees[2:])("a b c".split())) == "(SINV (XX a) (VP (XX b) (XX c)))"
    assert str(right_branching([parse_tree("(X (NN a))")])("a b c".split())) == "(X (XX a) (X (XX b) (XX c)))"


def test_nearest_copy():
    trees = [parse_tree("(S (NP (NN a)) (VP (VB b)))"), parse_tree("(NP (NN A) (NN c))"), parse_tree("(X (NN a))")]
    parse = nearest_copy(trees)
    assert str(parse(["a", "c"])) == "(NP (XX a) (XX c))" and str(parse(["z", "b"])) == "(S (NP (XX z)) (VP (XX b)))"
    assert parse("d e f".split()) == right_branching(trees)("d e f".split())


# ---- vocabulary and pairs


def test_words_are_written_as_leaves():
    tree = parse_tree("(NP (NN XX) (-LRB- -LRB-) (NN dog) (NN dog))")
    vocabulary = ParsingVocabulary.fit([tree])
    words, ids = vocabulary.encode_words(tree.words), vocabulary.encode_tree(tree)
    assert LEAF not in vocabulary.symbol_ids and ids[1:-1] == words and words[2] == words[3] and len(set(words)) == 3
    again = ParsingVocabulary(vocabulary.symbols, vocabulary.words)
    assert again.symbols_of(ids) == linearize(tree) and delinearize(again.symbols_of(ids), tree.leaves()) == tree
    assert again.symbols_of([3, words[0]]) == ["<unk>", LEAF] and again.encode_tree(parse_tree("(VP (NN dog))"))[0] == 3
    with pytest.raises(ValueError, match="leaves='tags': give one of 'words', 'numbers', 'XX'"):
        ParsingVocabulary.fit([tree], leaves="tags")


def test_numbers_are_written_as_leaves():
    dogs = parse_tree("(NP (NN XX) (NN 3) (NN dog) (NN dog))")
    tree = parse_tree(f"(S (A {' '.join(['(N a)'] * 9)}) (B {' '.join(['(N b)'] * 120)}))")
    vocabulary = ParsingVocabulary.fit([dogs, tree], leaves="numbers")
    assert len(vocabulary.numbers) == parsing.NUMBERS == 128 < len(tree.words)
    for start in (0, 5, 127):
        ids = vocabulary.encode_words(tree.words, start)
        assert ids[1::2] == [vocabulary.word_ids[word] for word in tree.words]
        assert ids[::2] == [vocabulary.symbol_ids[str((start + i) % 128)] for i in range(129)]
        leaves = [index for index in vocabulary.encode_tree(tree, ids) if index in vocabulary.numbers]
        assert leaves == ids[::2] and vocabulary.symbols_of(vocabulary.encode_tree(tree, ids)) == linearize(tree)
    again = ParsingVocabulary(vocabulary.symbols, vocabulary.words)
    ids = again.encode_tree(dogs)
    assert [again.table[index] for index in ids] == ["(NP", "0", "1", "2", "3", ")NP"] and again.symbols_of(ids) == linearize(dogs)
    assert again.symbols_of(again.encode_words(dogs.words)) == [LEAF, "word XX", LEAF, "word 3", LEAF, "word dog", LEAF, "word dog"]


def test_counting_begins_anywhere_in_copies():
    vocabulary = ParsingVocabulary.fit(TOY, leaves="numbers")
    pairs = tree_pairs(TOY, vocabulary, copies=2, seed=1, parts=True)
    plain, copies, parts = pairs[: len(TOY)], pairs[len(TOY): 2 * len(TOY)], pairs[2 * len(TOY):]
    starts = [[source[0] - vocabulary.numbers[0] for source, _ in some] for some in (plain, copies, parts)]
    assert set(starts[0]) == {0} and all(len(set(some)) > 60 and set(some) <= set(range(128)) for some in starts[1:])
    for source, target in pairs:
        assert source[::2] == [index for index in target if index in vocabulary.numbers]


def test_phrases_to_train_on():
    tree = parse_tree(DOG)
    assert list(map(str, parsing.inner_phrases(tree)))[:1] == ["(NP (DT The) (NN dog))"] and len(parsing.inner_phrases(tree)) == 3
    chain = parse_tree("(S (VP (VP (VB a) (NP (NN b) (NN c)))))")  # the outer VP is over the same words as the sentence
    assert list(map(str, parsing.inner_phrases(chain))) == ["(NP (NN b) (NN c))"]
    vocabulary = ParsingVocabulary.fit([tree])
    pairs = tree_pairs([tree, tree], vocabulary, copies=2, parts=True)
    assert len(pairs) == 4 + 3 and [vocabulary.symbols_of(target) for _, target in pairs[4:]] == list(
        map(linearize, parsing.inner_phrases(tree)))
    assert [len(source) for source, _ in pairs[4:]] == [len(part.words) for part in parsing.inner_phrases(tree)]


def test_rare_and_unknown_words_become_signatures():
    trees = [parse_tree(f"(NP (NN {word}))") for word in ("walking", "dog", "dog", "Rare")]
    vocabulary = ParsingVocabulary.fit(trees, min_frequency=2)
    assert "dog" in vocabulary.word_ids and "walking" not in vocabulary.word_ids
    walking, unseen = vocabulary.encode_words(["walking", "zilking"])
    assert walking == unseen != vocabulary.encode_words(["dog"])[0]
    assert vocabulary.encode_words(["42%"]) == [3]  # a signature that training never showed
    assert [signature(word) for word in ("BRCA-2", "Cats", "is")] == ["unknown caps digit hyphen", "unknown capital -s", "unknown letters"]


@pytest.mark.parametrize("dropout", [0.0, 1.0, 3.0])
def test_a_word_is_hidden_the_more_rarely_the_more_often_it_occurs(dropout):
    trees = [parse_tree(f"(NP (NN {word}))") for word, count in (("once", 1), ("thrice", 3), ("often", 19)) for _ in range(count)]
    vocabulary, copies = ParsingVocabulary.fit(trees), 2001
    pairs = tree_pairs(trees, vocabulary, copies, seed=2, word_dropout=dropout)[len(trees):]
    hidden = Counter()
    for i, (source, _) in enumerate(pairs):
        (word,) = trees[i % len(trees)].words
        hidden[word] += source != vocabulary.encode_words([word])
    for word, count in (("once", 1), ("thrice", 3), ("often", 19)):
        rate, shown = dropout / (dropout + count), (copies - 1) * count
        assert abs(hidden[word] / shown - rate) <= 5 * (rate * (1 - rate) / shown) ** 0.5, word


# ---- treebanks


def write_treebank(folder, texts):
    folder.mkdir(parents=True)
    for stem, text in texts.items():
        (folder / f"{stem}.trees").write_text(text, encoding="utf-8")


def test_toy_is_the_english_side_of_the_corpus():
    toy = load_treebank("toy")
    assert [len(split) for split in (toy.train, toy.valid, toy.test, toy.novel)] == [10_000, 500, 500, 500] and toy.test == TOY
    assert str(toy) == "toy: train 10,000, valid 500, test 500, novel 500 trees"


def test_a_folder_or_a_name(tmp_path, monkeypatch):
    train = "( (S (NP-SBJ (NN a)) (VP (VB b) (NP (-NONE- *)))))\n( (-NONE- *))\n"
    texts = {"train": train, "dev": "(NP (NN a))\n", "test": "(NP (NN b))\n"}
    write_treebank(tmp_path / "treebank-gum-cc-by", texts)
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))
    for found in (load_treebank("gum"), load_treebank("gum", tmp_path), load_treebank(tmp_path / "treebank-gum-cc-by")):
        assert list(map(str, found.train)) == ["(S (NP (NN a)) (VP (VB b)))"] and len(found.valid) == len(found.test) == 1


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"craft-open does not hold train\.trees, dev\.trees and test\.trees.*ANNOTATED_DATA"):
        load_treebank("craft", tmp_path)
    with pytest.raises(FileNotFoundError, match="treebanks with a name: toy, gum, craft"):
        load_treebank("nonesuch")
    write_treebank(tmp_path / "own", {"train": "(NP (NN a))\n", "dev": "( (-NONE- *))\n", "test": "(NP (NN a))\n"})
    with pytest.raises(ValueError, match="valid holds no tree"):
        load_treebank(tmp_path / "own")


# ---- the model


SMALL = Treebank("small", TOY[:60], TOY[60:70], TOY[:6])


def small_sentence(draw):
    """A tree of a small grammar: adjectives and prepositional phrases come and go, so that there are 36 shapes."""
    def leaf(tag, words):
        return Tree(tag, (draw.choice(words.split()),))

    def noun_phrase(depth):
        adjective = [leaf("JJ", "old red small")] if draw.random() < 0.4 else []
        phrase = Tree("NP", (leaf("DT", "the a every"), *adjective, leaf("NN", "dog cat girl king house tree")))
        if depth and draw.random() < 0.4:
            return Tree("NP", (phrase, Tree("PP", (leaf("IN", "near with under"), noun_phrase(depth - 1)))))
        return phrase

    return Tree("S", (noun_phrase(1), Tree("VP", (leaf("VB", "sees likes finds hears"), noun_phrase(1)))))


@pytest.fixture(scope="module")
def learned():
    """A parser that has learned the small grammar, its treebank, and sentences whose shapes the training trees never have."""
    draw, shapes = random.Random(0), {}
    for tree in dict.fromkeys(small_sentence(draw) for _ in range(3000)):
        shapes.setdefault(tuple(linearize(tree)), []).append(tree)
    hidden = sorted(shapes)[::5]
    test = [tree for shape in hidden for tree in shapes[shape][:8]]
    train = [tree for shape in shapes if shape not in hidden for tree in shapes[shape]]
    draw.shuffle(train)
    vocabulary = ParsingVocabulary.fit(train[:800])
    config = TransformerConfig(len(vocabulary), N=1, d_model=64, d_ff=128, h=2, dropout=0.0)
    training = TrainingConfig(steps=800, max_tokens=300, warmup=80, factor=0.5, validate_every=800, label_smoothing=0.0)
    treebank = Treebank("small grammar", train[:800], test[:10], test)
    model, log, left_out = train_parser(treebank, vocabulary, config, training, show_progress=False)
    assert left_out == 0 and log[-1]["step"] == 800
    return model, vocabulary, treebank


def test_c30_the_unchanged_transformer_learns_trees_of_shapes_it_never_saw(learned):
    model, vocabulary, treebank = learned
    assert type(model) is Transformer and len(treebank.test) >= 50
    assert not {tuple(linearize(tree)) for tree in treebank.test} & {tuple(linearize(tree)) for tree in treebank.train}
    words = [tree.words for tree in treebank.test]
    copying, branching = nearest_copy(treebank.train), right_branching(treebank.train)
    found, copied, right = (bracket_f1(trees, treebank.test) for trees in (
        parse_sentences(model, vocabulary, words, beam=1), list(map(copying, words)), list(map(branching, words))))
    assert copied.exact_match == right.exact_match == 0  # no shape of these is there to be copied
    assert found.exact_match > 40 and found.precision > 95
    assert found.f1 > copied.f1 + 10 and found.f1 > right.f1 + 10


@pytest.fixture
def untrained():
    """A parser that has learned nothing."""
    vocabulary = ParsingVocabulary.fit(SMALL.train)
    return Transformer(TransformerConfig(len(vocabulary), N=1, d_model=8, d_ff=8, h=1)), vocabulary


def test_paper_settings_are_the_defaults(untrained, monkeypatch):
    seen = []
    monkeypatch.setattr(parsing, "beam_search", lambda model, source, *settings: seen.append(settings) or [[([5], 0.0)]] * len(source))
    found = parse_sentences(*untrained, [["a", "b"]])
    assert seen == [(21, 0.3, 300)] and not found[0]
    options = Parse("gum", "x")
    assert (options.beam, options.alpha, options.extra) == (21, 0.3, 300)


@pytest.mark.parametrize("sentences, error, message", [
    (["a dog"], TypeError, r"sentences\[0\] is one string"), ([["a"], []], ValueError, r"sentences\[1\] has no word"),
])
def test_bad_sentences(untrained, sentences, error, message):
    with pytest.raises(error, match=message):
        parse_sentences(*untrained, sentences)


@pytest.mark.parametrize("leaves, length", [("words", 60), ("numbers", 30)])  # a numbered word is two symbols
def test_trees_too_long_for_a_batch_are_left_out(leaves, length):
    long = Tree("S", tuple(Tree("NN", ("w",)) for _ in range(length)))
    treebank = Treebank("x", [*TOY[:4], long], [TOY[4], long], TOY[:1])
    vocabulary = ParsingVocabulary.fit(treebank.train, leaves=leaves)
    config = TransformerConfig(len(vocabulary), N=1, d_model=8, d_ff=8, h=1)
    training = TrainingConfig(steps=1, max_tokens=60, validate_every=1)
    _, _, left_out = train_parser(treebank, vocabulary, config, training, show_progress=False)
    assert left_out == 1


def test_with_patience_the_parser_is_the_mean_of_the_checkpoints_up_to_the_best(tmp_path, monkeypatch):
    losses = [4.0, 3.0, 2.0, 2.5, 2.5, 9.0]
    asked = iter(losses)
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: next(asked))
    settings = TrainingConfig(steps=40, max_tokens=60, validate_every=2, save_every=1, keep_last=1, patience=2)
    sizes, pairs = TransformerConfig(9, N=1, d_model=8, d_ff=8, h=1), parsing.PARSERS["toy"][2]
    treebank = Treebank("x", TOY[:4], TOY[4:5], TOY[:1])
    parsing.save_parser(tmp_path / "parser", treebank, sizes, settings, pairs, average=3, show_progress=False)
    saved = load_checkpoint(tmp_path / "parser")
    assert [row["valid_loss"] for row in saved.info["log"]] == losses[:5]
    assert saved.info["averaged"] == ["step-00000004", "step-00000005", "step-00000006"], "rows: 2, 4, 6, 8 and 10"
    mean = average_checkpoints([tmp_path / "parser-checkpoints" / name for name in saved.info["averaged"]])
    assert all(torch.equal(weight, mean[name]) for name, weight in saved.model.state_dict().items())
    assert saved.info["seconds"]["starts"] == 1


OWN = {  # sentences in the Penn Treebank's manner, brackets by hand; the scores of whole test sets are in results/
    "gum": ["(S (NP (XX Attention)) (VP (XX is) (NP (NP (XX all)) (SBAR (S (NP (XX you)) (VP (XX need)))))) (. .))",
            "(S (NP (XX The) (XX committee)) (VP (XX rejected) (NP (XX the) (XX plan))) (. .))"],
    "craft": ["(S (NP (NP (XX Cells)) (SBAR (WHNP (XX that)) (S (VP (XX lack) (NP (XX the) (XX gene)))))) (VP (XX do) (XX not) "
              "(VP (XX divide))) (. .))",
              "(S (NP (XX The) (XX protein)) (VP (XX was) (VP (XX expressed) (PP (XX in) (NP (XX adult) (XX mice))))) (. .))"]}


def kept_parser(name):
    """The model among the results, and its vocabulary."""
    kept = load_checkpoint(ROOT / "results" / "models" / name)
    return kept.model, ParsingVocabulary(**kept.info["vocabulary"])


@pytest.mark.parametrize("name", OWN)
def test_the_kept_parsers_parse_what_their_training_never_held(name):
    gold = [parse_tree(text) for text in OWN[name]]
    found = parse_sentences(*kept_parser(name), [tree.words for tree in gold], beam=4, constrained=True)
    assert bracket_f1(found, gold).f1 == 100


def test_the_split_that_is_asked_for_is_scored(learned):
    model, vocabulary, treebank = learned
    for split, gold in (("valid", treebank.valid), ("test", treebank.test[:12])):
        rows, trees = parsing.parsing_scores(model, vocabulary, treebank, beam=1, extra=30, sentences=12, split=split)
        assert rows["greedy"] == bracket_f1(trees, gold) and rows["greedy"].sentences == len(gold) == len(trees)


def test_results_that_are_kept_add_up():
    for path in sorted((ROOT / "results").glob("parsing_*.json")):
        found = results.read_json(path)
        assert {"data", "seed", "machine", "command", "metric", "log"} <= set(found)
        for score in found["scores"].values():
            assert score["f1"] == pytest.approx(200 * score["matched"] / (score["predicted"] + score["gold"]))
            assert score["well_formed"] == pytest.approx(100 * (1 - score["errors"] / score["sentences"]))


def test_paper_table_has_the_printed_figures():
    page = cells(ROOT / "notebooks/22_parsing.ipynb")
    table = next(cell.source for cell in page if cell.source.startswith("TABLE_4"))
    assert re.findall(r"\b(\d\d\.\d)\)", table) == "88.3 90.4 90.4 91.7 91.3 91.3 91.3 92.1 92.1 92.7 93.0 93.3".split()


# --- decoding under the grammar ---


def all_trees(vocabulary, words, room):
    """Every output that ends within `room` symbols and reads as a tree of the words, by trying all sequences of symbols."""
    symbols, found = [vocabulary.symbol_ids[symbol] for symbol in vocabulary.symbols], set()
    for length in range(3, room):
        for ids in itertools.product(symbols, repeat=length):
            if delinearize(vocabulary.symbols_of(ids), words):
                found.add(ids)
    return found


def allowed_outputs(grammar, room):
    """Every output that the grammar allows, symbol by symbol; none may run into the limit."""
    open_ones, found = [(BEGIN,)], set()
    while open_ones:
        prefix = open_ones.pop()
        following = grammar.following(0, prefix)
        assert following, "a dead end"
        for symbol in following:
            if symbol == END:
                found.add(prefix[1:])
                assert len(prefix) <= room
            else:
                open_ones.append((*prefix, symbol))
    return found


@pytest.mark.parametrize("words, labels, room", [(["a"], "XY", 6), (["a", "b"], "XY", 8), (["a", "b", "c"], "X", 9), (["a", "b"], "X", 9)])
def test_the_grammar_allows_the_trees_of_a_sentence_and_nothing_else(words, labels, room):
    trees = [parse_tree(f"({label} (T a))") for label in labels]
    vocabulary = ParsingVocabulary.fit(trees, leaves=LEAF)
    grammar = TreeGrammar(vocabulary, [words], extra=room - len(words) - 1)
    assert allowed_outputs(grammar, room) == all_trees(vocabulary, words, room)


@pytest.mark.parametrize("leaves", ["words", "numbers", LEAF])
def test_an_untrained_model_writes_trees_under_the_grammar_with_every_kind_of_leaf(leaves):
    trees = [parse_tree("(S (NP (T a) (T b)) (VP (T c)))"), parse_tree("(S (X (T d)))")]
    vocabulary = ParsingVocabulary.fit(trees, leaves=leaves)
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(len(vocabulary))).eval()
    sentences = [["a", "b", "c"], ["d"], ["a", "new", "42%", "and", "b"]]
    for beam in (1, 3):
        found = parse_sentences(model, vocabulary, sentences, beam, extra=20, constrained=True)
        assert [tree.words for tree in found] == sentences
    assert not any(parse_sentences(model, vocabulary, sentences, 3, extra=20)), "unconstrained, this model writes none"


def test_a_wide_constrained_beam_finds_the_most_probable_tree():
    """Of all trees of two words within eight symbols, each scored by the model in one pass."""
    vocabulary = ParsingVocabulary.fit([parse_tree("(X (T a))"), parse_tree("(Y (T a))")], leaves=LEAF)
    torch.manual_seed(1)
    model = Transformer(TransformerConfig.tiny(len(vocabulary))).eval()
    words, extra = ["a", "a"], 5
    source = torch.tensor([[*vocabulary.encode_words(words), END]])

    def log_p(ids):
        with torch.no_grad():
            each = model(source, torch.tensor([[BEGIN, *ids]]))[0].log_softmax(dim=-1)
        return each[range(len(ids) + 1), [*ids, END]].sum().item()

    best = max(all_trees(vocabulary, words, len(words) + 1 + extra), key=log_p)
    (tree,) = parse_sentences(model, vocabulary, [words], beam=200, alpha=0.0, extra=extra, constrained=True)
    assert tree == delinearize(vocabulary.symbols_of(best), words)


def test_under_the_grammar_learned_positions_cut_no_tree_off():
    vocabulary = ParsingVocabulary.fit([parse_tree("(S (NP (T a) (T b)) (VP (T c)))")])
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(len(vocabulary), positions="learned", max_length=8)).eval()
    norm = model.decoder.layers[-1].residual[-1].norm
    with torch.no_grad():  # it always wants to open a bracket
        norm.weight.zero_(), norm.bias.normal_()
        model.embedding.weight[vocabulary.symbol_ids["(NP"]] = norm.bias
    (tree,) = parse_sentences(model, vocabulary, [["a", "b", "c"]], 2, constrained=True)
    assert tree and tree.words == ["a", "b", "c"]
