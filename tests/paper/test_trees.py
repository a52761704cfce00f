"""Trees in brackets: text to tree and back, what is refused, files, and what is stripped (section 6.3)."""

import gzip

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from annotated.paper.trees import Tree, bare_label, parse_tree, read_trees, stripped

words = st.text(st.characters(exclude_characters=" \t\r\n()", exclude_categories=["Cs"]), min_size=1, max_size=6).filter(
    lambda word: "-LRB-" not in word and "-RRB-" not in word)
leaves = st.builds(lambda tag, word: Tree(tag, (word,)), st.sampled_from(["NN", "VB", ",", ".", "-LRB-", "XX"]),
                   words | st.sampled_from(["(", ")", "XX", "(NP", ")NP"]))
trees = st.recursive(leaves, lambda inner: st.builds(lambda label, children: Tree(label, tuple(children)), st.sampled_from(
    ["S", "NP", "VP", "PRT", "ADVP", "TOP", ""]), st.lists(inner, min_size=1, max_size=4)), max_leaves=14)


@examples(80)
@given(trees)
def test_text_and_tree_are_the_same(tree):
    assert parse_tree(str(tree)) == tree


def test_white_space_of_other_kinds_belongs_to_words():
    assert parse_tree("(NP (NN a\u00a0b) (NN c\u0085\u2028d))").words == ["a\u00a0b", "c\u0085\u2028d"]


@pytest.mark.parametrize("text, reason", [
    ("(S (NP (NN a))", r"1 bracket\(s\) are never closed"),
    ("(S (NN a)))", r"'\)' stands outside"),
    ("(S (NN a)) (S (NN b))", "outside the brackets"),
    ("dog", "outside the brackets"),
    ("(S (NP))", r"\(NP\) is empty"),
    ("(S ())", r"\(\) is empty"),
    ("(S a (NN b))", r"\(S …\) holds a word beside something else"),
    ("(S a b)", "beside something else"),
    ("  ", "there is no tree"),
    ("(S " * 103 + "a" + ")" * 103, "more than 102 brackets"),
])
def test_what_is_no_tree_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_tree(text)


def test_reading_a_file(tmp_path):
    path = tmp_path / "some.trees.gz"
    path.write_bytes(gzip.compress(b"\n( (S (NP (PRP It))\n\t(VP (VBZ works))))\n\n(NP (NNP -LRB-)\r\n (NN x))\n"))
    assert [str(tree) for tree in read_trees(path)] == ["( (S (NP (PRP It)) (VP (VBZ works))))", "(NP (NNP -LRB-) (NN x))"]
    assert read_trees(path)[1].words == ["(", "x"]


def test_an_error_names_file_and_line_and_spares_the_next_tree(tmp_path):
    path = tmp_path / "bad.trees"
    path.write_text("(NP (NN a))\n\n(S (NP (NN b))\n  (VP (VB c))\n(NP (NN d))\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.trees, line 3: 1 bracket\(s\) are never closed"):
        read_trees(path)


@pytest.mark.parametrize("label, bare", [
    ("NP-SBJ-1", "NP"), ("NP=2", "NP"), ("ADVP|PRT", "ADVP"), ("WHNP-1", "WHNP"), ("-LRB-", "-LRB-"), ("-NONE-", "-NONE-"),
    ("PRP$", "PRP$"), ("", ""), ("--", "--"), ("S", "S"), (",", ","),
])
def test_bare_labels(label, bare):
    assert bare_label(label) == bare


@pytest.mark.parametrize("text, expected", [
    ("( (S (NP-SBJ-1 (-NONE- *)) (VP (VB go) (PP-DIR (IN to) (NP=2 (NN sea))))))", "(S (VP (VB go) (PP (IN to) (NP (NN sea)))))"),
    ("(ROOT (NP (NN x)))", "(NP (NN x))"),
    ("(TOP (S1 (ROOT (NP (NN x)))))", "(NP (NN x))"),
    ("(ROOT (NP (NN x)) (. .))", "(TOP (NP (NN x)) (. .))"),
    ("(ROOT (NN x))", "(TOP (NN x))"),
    ("(NN x)", "(TOP (NN x))"),
    ("(S (SBAR (S (NP (-NONE- *T*)))) (VP (VB go)))", "(S (VP (VB go)))"),
    ("(S (-LRB- -LRB-) (NP (NN x)) (-RRB- -RRB-))", "(S (-LRB- -LRB-) (NP (NN x)) (-RRB- -RRB-))"),
    ("(NP (NP (NN x)))", "(NP (NP (NN x)))"),
])
def test_stripped(text, expected):
    assert str(stripped(parse_tree(text))) == expected


def test_nothing_but_traces_is_nothing():
    assert stripped(parse_tree("( (S (NP (-NONE- *)) (-NONE- 0)))")) is None
