"""Trees in brackets: read, refused, stripped; treebanks; scores by hand; baselines."""

import gzip
import re

import pytest
from helpers import ROOT, examples
from hypothesis import example, given
from hypothesis import strategies as st

from annotated.data.toy_language import read_sentences
from annotated.paper import trees as module
from annotated.paper.trees import Tree, bracket_f1, load_treebank, parse_tree, stripped

words = st.text(st.characters(exclude_characters=" \t\r\n()", exclude_categories=["Cs"]),
                min_size=1, max_size=6).filter(lambda word: not re.search("-[LR]RB-", word))
leaves = st.builds(lambda tag, word: Tree(tag, (word,)), st.sampled_from(
    ["NN", "VB", ",", ".", "-LRB-", "XX"]), words | st.sampled_from(["(", ")", "XX", "(NP", ")NP"]))
trees = st.recursive(leaves, lambda inner: st.builds(
    lambda label, children: Tree(label, tuple(children)),
    st.sampled_from(["S", "NP", "VP", "PRT", "ADVP", "TOP", ""]),
    st.lists(inner, min_size=1, max_size=4)), max_leaves=14)
TOY = [parse_tree(line.split("\t")[3])
       for line in (ROOT / "data/toy/test.tsv").read_text(encoding="utf-8").splitlines()]
DOG = "(S (NP (DT The) (NN dog)) (VP (VBZ sees) (NP (DT the) (JJ old) (NN house))) (. .))"


# Reading


@examples(80)
@given(trees)
@example(Tree("NP", (Tree("NN", ("a\u00a0b\u0085\u2028d",)),)))  # white space of other kinds
def test_text_and_tree_are_the_same(tree):
    assert parse_tree(str(tree)) == tree


@pytest.mark.parametrize("text, reason", [
    ("(S (NP (NN a))", r"1 bracket\(s\) are never closed"), ("(S (NN a)))", r"'\)' stands outside"),
    ("(S (NN a)) (S (NN b))", "outside the brackets"), ("dog", "outside the brackets"),
    ("(S (NP))", r"\(NP\) is empty"),
    ("(S a (NN b))", r"\(S …\) holds a word beside something else"), ("  ", "there is no tree")])
def test_what_is_no_tree_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_tree(text)


def test_a_file_is_read_and_an_error_names_file_and_line_and_spares_the_next_tree(tmp_path):
    path, text = tmp_path / "some.trees.gz", "( (S (NP (PRP It))\n\t(VP (VBZ works))))\n\n"
    path.write_bytes(gzip.compress(f"\n{text}(NP (NNP -LRB-)\r\n (NN x))\n".encode()))
    first, second = module.read_trees(path)
    assert str(first) == "( (S (NP (PRP It)) (VP (VBZ works))))"
    assert str(second) == "(NP (NNP -LRB-) (NN x))" and second.words == ["(", "x"]
    path = tmp_path / "bad.trees"
    path.write_text("(NP (NN a))\n\n(S (NP (NN b))\n  (VP (VB c))\n(NP (NN d))\n", "utf-8")
    with pytest.raises(ValueError, match=r"bad\.trees, line 3: 1 bracket\(s\) are never closed"):
        module.read_trees(path)


@pytest.mark.parametrize("text, expected", [
    ("( (S (NP-SBJ-1 (-NONE- *)) (VP (VB go) (PP-DIR (IN to) (NP=2 (NN sea))))))",
     "(S (VP (VB go) (PP (IN to) (NP (NN sea)))))"),
    ("(TOP (S1 (ROOT (NP (NN x)))))", "(NP (NN x))"),
    ("(ROOT (NP (NN x)) (. .))", "(TOP (NP (NN x)) (. .))"), ("(ROOT (NN x))", "(TOP (NN x))"),
    ("(NN x)", "(TOP (NN x))"),
    ("(S (SBAR (S (NP (-NONE- *T*)))) (VP (VB go)))", "(S (VP (VB go)))"),
    ("(S (-LRB- -LRB-) (NP (NN x)))", "(S (-LRB- -LRB-) (NP (NN x)))"),
    ("(NP (NP (NN x)))", "(NP (NP (NN x)))"),
    ("(S (ADVP|PRT (PRP$ x)) (-- --) (, ,))", "(S (ADVP (PRP$ x)) (-- --) (, ,))"),
    ("( (S (NP (-NONE- *)) (-NONE- 0)))", "None")])
def test_stripped(text, expected):
    assert str(stripped(parse_tree(text))) == expected


# Treebanks


def treebank(folder, **texts):
    folder.mkdir(parents=True)
    for stem, text in texts.items():
        (folder / f"{stem}.trees").write_text(text, encoding="utf-8")
    return folder


def test_toy_is_the_english_side_of_the_corpus(monkeypatch):
    some = read_sentences(ROOT / "data/toy/test.tsv")
    splits = dict.fromkeys(("train", "valid", "test", "novel"), some)
    monkeypatch.setattr(module, "generate_corpus", lambda: splits)
    toy = load_treebank("toy")
    assert str(toy) == "toy: train 500, valid 500, test 500, novel 500 trees"
    assert toy.test == TOY


def test_a_folder_or_a_name(tmp_path, monkeypatch):
    train = "( (S (NP-SBJ (NN a)) (VP (VB b) (NP (-NONE- *)))))\n( (-NONE- *))\n"
    folder = treebank(tmp_path / "treebank-gum-cc-by", train=train, dev="(NP (NN a))\n",
                      test="(NP (NN b))\n")
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path))
    for bank in (load_treebank("gum"), load_treebank("gum", tmp_path), load_treebank(folder)):
        assert list(map(str, bank.train)) == ["(S (NP (NN a)) (VP (VB b)))"]
        assert len(bank.valid) == len(bank.test) == 1


def test_missing_files_are_named(tmp_path):
    message = r"craft-open does not hold train\.trees, dev\.trees and test\.trees.*ANNOTATED_DATA"
    with pytest.raises(FileNotFoundError, match=message):
        load_treebank("craft", tmp_path)
    with pytest.raises(FileNotFoundError, match="treebanks with a name: toy, gum, craft"):
        load_treebank("nonesuch")
    tree = "(NP (NN a))\n"
    with pytest.raises(ValueError, match="valid holds no tree"):
        load_treebank(treebank(tmp_path / "own", train=tree, dev="( (-NONE- *))\n", test=tree))


# The score


def scored(predicted, gold):
    return bracket_f1([text and parse_tree(text) for text in predicted], map(parse_tree, gold))


def counts(predicted, gold):
    score = scored([predicted], [gold])
    assert score.errors == 0
    return score.matched, score.predicted, score.gold


def test_f1_by_hand():
    # gold S(0,5) NP(0,1) VP(1,5) NP(2,3) PP(3,5) NP(4,5); predicted has NP(2,5) as well: 6 of 7
    with_spoons = "(PP (IN with) (NP (NNS spoons)))"
    gold = f"(S (NP (NN He)) (VP (VBZ eats) (NP (NN soup)) {with_spoons}) (. .))"
    predicted = f"(S (NP (NN He)) (VP (VBZ eats) (NP (NP (NN soup)) {with_spoons})) (. .))"
    score = scored([predicted], [gold])
    assert (score.matched, score.predicted, score.gold) == (6, 7, 6)
    assert (score.precision, score.recall) == (pytest.approx(600 / 7), 100)
    assert score.f1 == pytest.approx(1200 / 13)
    assert score.exact_match == 0 and scored([gold], [gold]).exact_match == 100


def test_punctuation_is_deleted_wherever_it_hangs():
    gold = "(S (NP (NN a) (, ,)) (VP (VB b) (: --) (`` ``) (NP (NN c)) ('' '')) (. .))"
    elsewhere = ("(S (NP (XX a)) (XX ,) (VP (XX b) (PRN (XX --) (XX ``)) "
                 "(NP (XX c) (XX '') (XX .))))")
    assert counts(elsewhere, gold) == (4, 4, 4)
    # another mark is a word like others
    assert counts("(S (NP (NN a)) (X (SYM %)))", "(S (NP (NN a)) (SYM %))") == (2, 3, 2)


@pytest.mark.parametrize("predicted, gold, expected", [
    ("(TOP (S (NN a) (NN b)))", "(S (NN a) (NN b))", (1, 1, 1)),  # the root does not count
    ("(TOP (NP (NN a)) (VP (NN b)))", "(ROOT (NP (NN a)) (VP (NN b)))", (2, 2, 2)),
    ("(VP (NN a) (ADVP (RP b)))", "(VP (NN a) (PRT (RP b)))", (2, 2, 2)),  # ADVP = PRT
    ("(NP (NP (NN a) (NN b)))", "(NP (NN a) (NN b))", (1, 2, 1)),  # a multiset
    ("(NP (NN a) (NN b))", "(NP (NP (NN a) (NN b)))", (1, 1, 2)),
    ("(NP (VP (NN a)))", "(VP (NP (NN a)))", (2, 2, 2)),  # unary brackets have no order
    ("(NP-SBJ (NN a))", "(NP=1 (NN a))", (1, 1, 1)),
    ("(S (NP (X a)) (Y b))", "(S (NP (NN a)) (VB b))", (2, 2, 2)),  # tags do not count
    ("(S (NP (NN a)) (VB b))", "(S (NP (NN a)) (NP (-NONE- *)) (VB b))", (2, 2, 2)),
    ("(X (NP (NN a)) (Z (NN b)))", "(S (NP (NN a)) (VP (NN b)))", (1, 3, 3))])
def test_conventions(predicted, gold, expected):
    assert counts(predicted, gold) == expected


def test_brackets_are_open_to_a_depth_of_102():
    trees = ["(A " * depth + "(NN a)" + ")" * depth for depth in (101, 102)]
    assert str(parse_tree(trees[0])) == trees[0]
    with pytest.raises(ValueError, match="more than 102 brackets are open at once"):
        parse_tree(trees[1])


def test_malformed_output_is_an_empty_tree_and_counted():
    score = scored([None, "", "(NP (NN a))"],
                   ["(S (NP (NN a)) (VP (VB b)))", "(NP (NN a))", "(NP (NN a))"])
    assert (score.matched, score.predicted, score.gold, score.errors) == (1, 1, 5, 2)
    assert (score.precision, score.recall) == (100, 20)
    assert score.exact_match == score.sentence_f1 == score.well_formed == pytest.approx(100 / 3)


def test_other_words_are_an_error_and_no_exact_match_of_a_sentence_without_brackets():
    for other in (None, "(NP (NN b))", "(NP (NN a) (NN a))"):
        score = scored([other], ["(NP (NN a))"])
        assert (score.matched, score.predicted, score.errors, score.f1) == (0, 0, 1, 0)
        assert score.precision == 0
    gold = ["(TOP (UH Yes))", "(NP (NN a))"]
    assert scored(gold, gold).exact_match == 100
    assert scored([None, gold[1]], gold).exact_match == 50


@pytest.mark.parametrize("predicted, gold, message", [
    ([], [], "0 predicted and 0 gold"), ([None], [None, None], "1 predicted and 2 gold"),
    ([None], [None], r"gold\[0\] is no tree"),
    ([None], [Tree("NP", (Tree("-NONE-", ("*",)),))], r"gold\[0\] is no tree"),
    ([None], [Tree("TOP", (Tree("NN", ("a",)),))], "no bracket")])
def test_bad_input_to_the_score(predicted, gold, message):
    with pytest.raises(ValueError, match=message):
        bracket_f1(predicted, gold)


# Parsers without a model


def test_right_branching_by_hand():
    # VP and NP end with the sentence, once each: the outer bracket is counted first
    parse = module.right_branching([parse_tree(DOG)])
    for sentence, tree in (("a b , c .", "(S (XX a) (VP (XX b) (XX ,) (XX c) (XX .)))"),
                           ("a", "(S (XX a))"), (".", "(S (XX .))"),
                           ("a b c", "(S (XX a) (VP (XX b) (XX c)))"),
                           ("` a b", "(S (XX `) (XX a) (XX b))")):
        assert str(parse(sentence.split())) == tree


def test_right_branching_takes_the_commonest_label_at_the_right_edge():
    # There, over two words or more: PP, PP, VP. Elsewhere NP is commonest, ADJP over the last word.
    left, right = "(NP (NN a) (NN b))", "(PP (IN e) (NP (ADJP (JJ f))))"
    verb = "(VP (VB c) (ADJP (JJ d)))"
    bank = [f"(S {left} {left} {verb} {right} (. .))"] * 2 + [f"(SINV {left} {verb} (. .))"]
    for some, expected in ((bank, "(S (XX a) (PP (XX b) (XX c)))"),
                           (bank[2:], "(SINV (XX a) (VP (XX b) (XX c)))"),
                           (["(X (NN a))"], "(X (XX a) (X (XX b) (XX c)))")):
        assert str(module.right_branching(map(parse_tree, some))(["a", "b", "c"])) == expected


def test_nearest_copy():
    bank = [parse_tree("(S (NP (NN a)) (VP (VB b)))"), parse_tree("(NP (NN A) (NN c))"),
            parse_tree("(X (NN a))")]
    parse = module.nearest_copy(bank)
    assert str(parse(["a", "c"])) == "(NP (XX a) (XX c))"
    assert str(parse(["z", "b"])) == "(S (NP (XX z)) (VP (XX b)))"
    assert parse("d e f".split()) == module.right_branching(bank)("d e f".split())
