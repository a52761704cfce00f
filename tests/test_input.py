"""What people give the commands: honoured, or refused before any work; never silently wrong."""

import io
import json
import sys
from importlib.util import find_spec

import pytest
import sacrebleu
import torch
from helpers import TEXTS, one_thread, random_model
from test_cli import SMALL, refused, run, write_corpus

from annotated import bleu_report, prepare, scaled_dot_product_attention
from annotated.data.base_tokenizer import UNKNOWN
from annotated.data.prepared import prepare_corpus
from annotated.data.tokenizers import SubwordTokenizer, WordTokenizer, join_words, split_words
from annotated.results import read_json
from annotated.training.checkpoints import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures(one_thread.__name__)
WORDS = WordTokenizer.fit(TEXTS)


@pytest.fixture
def own(tmp_path):
    return write_corpus(tmp_path / "own")


@pytest.fixture
def model(tmp_path):
    """A folder with a model whose learned positions end at 60."""
    model = random_model(len(WORDS), seed=2, positions="learned", max_length=60)
    save_checkpoint(tmp_path / "model", model.eval(), WORDS, source_language="en",
                    target_language="de")
    return tmp_path / "model"


# --- training

def test_pairs_with_a_blank_side_are_not_learned_and_told(own, tmp_path, capsys):
    blank = [("a cat sleeps .", ""), ("the dog sees", "\u200b"), (" \u00a0", "ein Hund"),
             ("\ufeff", "die Katze"), ("a dog", "\t\u2060")]
    tokens = []
    for pairs in ([], blank):
        for side, language in enumerate(("en", "de")):
            with open(own / f"train.{language}", "a", encoding="utf-8") as file:
                file.writelines(f"{pair[side]}\n" for pair in pairs)
        run("train", own, "--out", tmp_path / str(len(pairs)), *SMALL)
        log = load_checkpoint(tmp_path / str(len(pairs))).info["log"]
        tokens.append([row["tokens"] for row in log])
    assert "own: 5 training pairs with a blank side are left out" in capsys.readouterr().err
    assert tokens[0] == tokens[1]


def test_the_size_of_a_vocabulary_is_honoured(own, tmp_path):
    for kind, size in (("words", 9), ("bpe", 262), ("bpe", 265)):
        out = tmp_path / f"{kind}{size}"
        run("train", own, "--out", out, *SMALL, "--tokenizer", kind, "--vocab-size", size)
        saved = load_checkpoint(out)
        assert len(saved.tokenizer) == saved.model.config.vocab_size == size
    assert "." in load_checkpoint(tmp_path / "words9").tokenizer.words  # the most frequent
    prepare_corpus(write_corpus(tmp_path / "more", TEXTS * 3), tmp_path / "p", 280)
    run("train", tmp_path / "p", "--out", tmp_path / "model", *SMALL[2:], "--vocab-size", "280")


def test_a_test_split_is_not_needed_to_train_but_to_score(own, tmp_path, capsys, monkeypatch):
    for language in ("en", "de"):
        (own / f"test.{language}").unlink()
    monkeypatch.chdir(own)
    run("train", ".", "--out", tmp_path / "model", *SMALL)
    assert load_checkpoint(tmp_path / "model").info["corpus"] == "own"
    for split in ("test", "novel"):
        message = refused("score", [tmp_path / "model", ".", split, tmp_path / "results"], capsys)
        assert f"has no split {split}: it has train, valid" in message
    assert not (tmp_path / "results" / "test.json").exists()


def test_a_parser_that_is_there_is_not_taken_for_another(tmp_path, capsys):
    first, other = (tmp_path / side / "mine" for side in ("one", "other"))
    for folder, label in ((first, "NP"), (other, "DP")):
        folder.mkdir(parents=True)
        for split in ("train", "dev", "test"):
            trees = f"(TOP (S ({label} (D the) (N dog)) (VP (V sleeps))))\n" * 4
            (folder / f"{split}.trees").write_text(trees, encoding="utf-8")
    decode = ["--out", tmp_path / "parser", "--beam", "1", "--extra", "5"]
    made = [*decode, *"--N 1 --d-model 16 --d-ff 16 --h 2 --save-every 2 --average 1".split()]
    made += "--copies 1 --steps 2".split()
    told = refused("parse", [first, *made, "--average", 3], capsys)
    assert "--average 3: 2 steps with --save-every 2 make 1 checkpoints" in told
    for arguments in (made, made, decode):  # as it is
        run("parse", first, *arguments)
    for folder, more, message in (
            (first, ["--steps", "4"], "was trained with steps 2, not 4: give another --out"),
            (first, ["--copies", "3"], "trained with copies 1, not 3"),
            (other, [], "holds no parser of this treebank mine")):
        assert message in refused("parse", [folder, *made, *more], capsys)


# --- unknown words

def test_unknown_is_learned_where_words_occur_once():
    texts = [(f"the dog sees w{n}", f"der Hund sieht w{n}x") for n in range(400)]
    tokenizer = WordTokenizer.fit(texts)
    pairs = [tuple(tokenizer.encode(text, language) for text, language in
                   zip(pair, ("en", "de"), strict=True)) for pair in texts]
    known = tokenizer.for_training(pairs, seed=1)
    assert known[:400] == pairs and len(known) == 440
    for source, target in known[400:]:
        assert source[-1] == target[-1] == UNKNOWN  # the word that occurs once, on both sides
        assert (source[:-1], target[:-1]) == (pairs[0][0][:-1], pairs[0][1][:-1])
    assert known == tokenizer.for_training(pairs, seed=1)
    twice = pairs * 2
    assert tokenizer.for_training(twice) == twice


@pytest.mark.parametrize("text, words", [
    ("the zebra sees a dog .\na zebra , a quagga .\nthe dog sleeps .\n", "zebra, ,, quagga"),
    ("the dog sleeps .\n", None), ("\n \n", None), ("The dog sleeps .\n", "The"),
    ("12 dogs\n", "12, dogs"), ("v w x y z é\n", "v, w, x, y, z …"), ("犬 .\n", "犬")])
def test_unknown_words_are_reported_once(text, words, model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    run("translate", "--model", model)
    messages = [line for line in capsys.readouterr().err.splitlines() if "<unk>" in line]
    line = f"Words that the vocabulary lacks are read as <unk>: {words}"
    assert messages == ([line] if words else [])


# --- languages

CHINESE = ["老狗睡在桌子底下。", "我们明天在学校门口见面。", "他昨天给我打了电话。"]
PORTUGUESE = ["O cão dorme, e o gato também.", "Eu gosto disso.", "Nós vamos à escola."]
THAI = ["สุนัขแก่นอนอยู่ใต้โต๊ะ", "ฉันชอบกินข้าวผัด", "เราจะพบกันพรุ่งนี้"]


@pytest.mark.parametrize("language, lines, tokenize", [
    ("zh", CHINESE, "zh"), ("zh-CN", CHINESE, "zh"), ("zh_Hant_TW", CHINESE, "zh"),
    ("th", THAI, "char"), ("th-TH", THAI, "char"), ("pt-BR", PORTUGUESE, "13a")])
def test_a_language_is_scored_by_its_own_rules(language, lines, tokenize):
    near = [lines[0], *lines[2:], lines[1]]
    report = bleu_report(near, lines, language, bootstrap=0)
    by_hand = sacrebleu.corpus_bleu(near, [lines], tokenize=tokenize).score
    assert report["sacrebleu"].score == pytest.approx(by_hand) and by_hand < 99
    assert f"|tok:{tokenize}|" in report["sacrebleu"].signature
    assert ("tokenised" in report.entries) == (tokenize == "13a"), "Moses needs spaces"
    assert report["chrf"].score == pytest.approx(sacrebleu.corpus_chrf(near, [lines]).score)


@pytest.mark.parametrize("language, package", [
    ("ja", "MeCab"), ("ja_Jpan_JP", "MeCab"), ("ko", "mecab_ko"), ("ko-KR", "mecab_ko")])
def test_a_package_that_a_language_needs_is_named_before_decoding(
        language, package, own, tmp_path, monkeypatch, capsys):
    if find_spec(package):
        pytest.skip("it is installed")
    for split in ("train", "valid", "test"):
        (own / f"{split}.de").rename(own / f"{split}.{language}")
    pieces = SubwordTokenizer.fit(TEXTS, 270)
    save_checkpoint(tmp_path / "m", random_model(len(pieces)).eval(), pieces, source_language="en",
                    target_language=language)
    monkeypatch.setattr("annotated.translator.decode_parts", None)
    assert f"pip install 'sacrebleu[{language[:2]}]'" in refused(
        "score", [tmp_path / "m", own, "test", tmp_path / "results"], capsys)


@pytest.mark.parametrize("language", ["ja", "ja-JP", "th", "zh_Hans_CN"])
def test_a_language_without_spaces_is_not_split_into_words(language):
    with pytest.raises(ValueError, match=f"'{language}' puts no spaces between words: take pieces"):
        split_words("a", language)
    assert split_words("O cão dorme.", "pt-BR") == ["O", "cão", "dorme", "."]


@pytest.mark.parametrize("text", ["Ça va ?", "Quelle joie !", "Il dit : non.", "Oui ; non.",
                                  "L'ami, (le vrai) dort."])
def test_french_marks_keep_their_space(text):
    assert join_words(split_words(text, "fr"), "fr") == text
    assert " ?" not in join_words(split_words("How are you?", "en"), "en")


# --- scoring

def test_what_is_wrong_with_references_is_said_before_decoding(own, model, tmp_path, monkeypatch,
                                                               capsys):
    monkeypatch.setattr("annotated.translator.decode_parts", None)
    plain = write_corpus(tmp_path / "plain")
    score = [model, own, "test", tmp_path / "results", "--references", plain]
    for number, text in ((0, b"ein\rHund"), (2, b"\rein Hund"), (3, b"ein Hund\r\r")):
        lines = [b"eine Katze"] * 4
        lines[number] = text
        (plain / "test.de").write_bytes(b"\n".join(lines) + b"\n")
        assert f"references[{number}] contains a line break" in refused("score", score, capsys)
    for count in (1, 5):
        for language in ("en", "de"):
            (plain / f"test.{language}").write_text("a cat\n" * count, encoding="utf-8")
        assert f"4 hypotheses but {count} references" in refused("score", score, capsys)


def test_scores_of_another_model_are_not_written_over(own, model, tmp_path, capsys):
    results = tmp_path / "results"
    run("score", model, own, "test", results)
    first = read_json(results / "test.json")
    run("score", model, own, "test", results, "--beam", "2")  # the same model may be scored anew
    assert read_json(results / "test.json")["decoding"] != first["decoding"]
    other = random_model(len(WORDS), seed=3).eval()
    save_checkpoint(tmp_path / "other", other, WORDS, source_language="en", target_language="de")
    before = (results / "test.txt").read_bytes()
    for content in (None, "{", json.dumps({"entries": {}, "log": [1]})):
        if content is not None:
            (results / "test.json").write_text(content, encoding="utf-8")
        assert "holds the scores of another model: move it away" in refused(
            "score", [tmp_path / "other", own, "test", results], capsys)
    assert (results / "test.txt").read_bytes() == before


def test_a_model_of_lower_case_has_no_cased_figures(own, tmp_path):
    run("train", own, "--out", tmp_path / "m", *SMALL, "--normalize", "lowercase")
    run("score", tmp_path / "m", own, "test", tmp_path / "results")
    assert set(read_json(tmp_path / "results" / "test.json")["entries"]) == {
        "sacrebleu_lowercase", "tokenised_lowercase", "multi30k", "perplexity"}
    run("export", tmp_path / "m", "--out", tmp_path / "hf", "--scores",
        tmp_path / "results" / "test.json")
    assert "- Score: BLEU, lower-cased, " in (tmp_path / "hf" / "README.md").read_text("utf-8")


# --- the library


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.uint8, torch.float16])
def test_a_mask_that_is_not_boolean_is_named_plain_and_fused(unenforced, kind):
    """PyTorch would add the numbers."""
    fused = prepare(random_model().eval()).encoder.layers[0].self_attention.attention
    x = torch.randn(1, 2, 4, 4)
    for attention in (scaled_dot_product_attention, fused):
        with pytest.raises(TypeError, match=f"mask is {kind}: give bools, True where a query may"):
            attention(x, x, x, torch.ones(4, 4).tril().to(kind))
