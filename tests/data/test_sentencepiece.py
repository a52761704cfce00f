"""SentencePiece: the package's ids and texts in five scripts; Japanese and Arabic are learned."""

import io
import itertools
import random
import sys
from importlib.util import find_spec

import pytest
import sentencepiece
from helpers import random_model

from annotated import Corpus, TrainingConfig, TransformerConfig, bleu_report, train_on, translate
from annotated.data.base_tokenizer import BEGIN, END, PAD, UNKNOWN
from annotated.data.normalization import Normalizer
from annotated.data.sentencepiece import MarianTokenizer, SentencePieceTokenizer
from annotated.data.tokenizers import fit_tokenizer, load_tokenizer
from annotated.training.checkpoints import load_checkpoint, save_checkpoint

LETTERS = ["abcdefghijklmnopqrstuvwxyzäöüßéñçÅ", "абвгдежзийклмнопрстуфхцчшщъыьэюяё",
           "αβγδεζηθικλμνξοπρστυφχψωάέήίόύώς",
           "あいうえおかきくけこさしすせそカキクケコ日本語犬猫眠走東京",
           "ابتثجحخدذرزسشصضطظعغفقكلمنهويءةى"]
ODD = ["", " ", "  two  spaces ", "<s></s><pad><unk>", "½ ﬁre ① Ｆｕｌｌ", "e\u0301 é", "tab\tline",
       "▁ bar", "👩‍👩‍👧 ok", "\u200fעברית\u200e", "3,5 % … “so”", "한국어 ไทย हिन्दी"]


def sentences(count):
    """So many sentences of made-up words, in each of five scripts, and odd ones."""
    draw = random.Random(0)
    for letters in LETTERS:
        words = ["".join(draw.choices(letters, k=draw.randint(1, 8))) for _ in range(300)]
        space = "" if "犬" in letters else " "
        for _ in range(count):
            yield space.join(draw.choices(words, k=draw.randint(1, 12))) + draw.choice(".?!")
    yield from ODD


TRAINING = [text for text in sentences(60) if text.strip()]
PAIRS = list(zip(TRAINING, TRAINING[::-1], strict=True))


@pytest.fixture(scope="module")
def own():
    return SentencePieceTokenizer.fit(PAIRS, vocab_size=900)


@pytest.fixture(scope="module")
def foreign():
    """A model as the package makes it: unknown 0, begin 1, end 2, no padding, no bytes."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING), model_writer=written, vocab_size=500, minloglevel=2)
    return written.getvalue()


def test_5000_sentences_in_five_scripts_have_the_package_s_ids_and_texts(own, foreign):
    texts = list(sentences(1000))
    assert len(texts) > 5000
    for tokenizer, shift in ((own, 0), (SentencePieceTokenizer(foreign), 1)):
        package = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.proto)
        expected = package.encode(texts)
        assert tokenizer.encode_batch(texts) == [
            [UNKNOWN if index == package.unk_id() else index + shift for index in ids]
            for ids in expected]
        for text, ids, theirs in zip(texts, tokenizer.encode_batch(texts), expected, strict=True):
            assert tokenizer.decode([BEGIN, *ids, END, PAD]) == package.decode(theirs), text
            assert not {PAD, BEGIN, END} & set(ids)
        assert len(tokenizer) == len(package) + shift
        pieces = tokenizer.pieces(tokenizer.encode(TRAINING[0]))
        assert pieces == package.encode(TRAINING[0], out_type=str)
    package = sentencepiece.SentencePieceProcessor(model_proto=own.proto)
    assert (package.pad_id(), package.bos_id(), package.eos_id(), package.unk_id()) == (
        PAD, BEGIN, END, UNKNOWN)
    assert not any(UNKNOWN in ids
                   for ids in own.encode_batch(texts)), "what is rare falls into bytes"


def test_the_vocabulary_is_of_both_sides():
    tokenizer = SentencePieceTokenizer.fit([("ab ba b", "жш шж ж")] * 9, 300)
    assert all(len(tokenizer.encode(word)) < 4 for word in ("ab", "жш")), "letters in bytes"


def test_it_is_saved_and_loaded_with_a_model(own, foreign, tmp_path):
    for number, tokenizer in enumerate((own, SentencePieceTokenizer(foreign))):
        folder = tmp_path / str(number)
        save_checkpoint(folder, random_model(len(tokenizer)), tokenizer, source_language="en")
        saved = load_checkpoint(folder)
        assert saved.tokenizer.proto == tokenizer.proto and len(saved.tokenizer) == len(tokenizer)
        assert saved.tokenizer.encode_batch(ODD) == tokenizer.encode_batch(ODD)
    (tmp_path / "spm.model").write_bytes(foreign)
    corpus = Corpus("mine", "en", "de", PAIRS, PAIRS[:2], [])
    assert fit_tokenizer(str(tmp_path / "spm.model"), corpus, 9).proto == foreign
    assert fit_tokenizer("sentencepiece", corpus, 800).decode([4 + 97]) != ""


def test_marians_pair_cuts_each_language_by_its_own_model_and_is_saved(own, foreign, tmp_path):
    """Beside Transformers' own, also as saved by OPUS-MT: test_hugging_face.py."""
    tables = own.table[4:] + SentencePieceTokenizer(foreign).table[4:]
    pair = MarianTokenizer([own.proto, foreign], dict.fromkeys(tables), ("en", "ru"))
    pair.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    for language, proto in (("en", own.proto), ("ru", foreign)):
        package = sentencepiece.SentencePieceProcessor(model_proto=proto)
        for text in TRAINING[::10]:
            ids, pieces = again.encode(text, language), package.encode(text, out_type=str)
            assert pair.encode(text, language) == ids and again.pieces(ids) == pieces
    assert again.decode([BEGIN, *ids, END, PAD]) == package.decode(pieces)
    assert again.languages == ("en", "ru") and again.encode(">>x<< a")[0] == UNKNOWN


def test_only_its_own_rules_normalise(own):
    assert own.decode(own.encode("½  of\tthe ﬁre")) == "1⁄2 of the fire"
    lower = SentencePieceTokenizer.fit(PAIRS, 900, normalizer=Normalizer(lowercase=True))
    assert lower.encode("ABC Ω") == lower.encode("abc ω") and lower.normalizer.lowercase
    for form in ({"moses": True}, {"punctuation": True}):
        with pytest.raises(ValueError,
                           match="normalises by its own rules: leave punctuation and moses out"):
            SentencePieceTokenizer.fit(PAIRS, 900, normalizer=Normalizer(**form))


def test_what_cannot_be_learned_is_named():
    with pytest.raises(ValueError, match="learns no unigram model of 20 pieces from these pairs"):
        SentencePieceTokenizer.fit(PAIRS, 20)
    with pytest.raises(TypeError, match="expected .source, target. strings"):
        SentencePieceTokenizer.fit([("a", None)], 900)


def test_a_file_that_is_no_model_and_a_missing_package_are_named(own, tmp_path, monkeypatch):
    (tmp_path / "spm.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match="this is no SentencePiece model"):
        SentencePieceTokenizer.from_file(tmp_path / "spm.model")
    own.save(tmp_path / "tokenizer.json")
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "cut.json").write_text(text.replace('"proto": "', '"proto": "!'), encoding="utf-8")
    with pytest.raises(ValueError, match="is not a tokenizer that save wrote"):
        load_tokenizer(tmp_path / "cut.json")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match="sentencepiece"):
        load_tokenizer(tmp_path / "tokenizer.json")


# --- languages without spaces, and from right to left

THINGS = {"dog": ("犬", "الكلب"), "child": ("子供", "الطفل"), "man": ("男", "الرجل")}
DEEDS = {"sleeps": ("眠る", "ينام"), "runs": ("走る", "يركض"), "sings": ("歌う", "يغني")}
WAYS = {"here": ("ここで", "هنا"), "today": ("今日", "اليوم")}


def small_corpus(language):
    """18 sentences in English and in Japanese (verb last, no spaces) or Arabic (verb first)."""
    column, pairs = ("ja", "ar").index(language), []
    form = "{0}は{2}{1}。" if language == "ja" else "{1} {0} {2}."
    for words in itertools.product(THINGS.items(), DEEDS.items(), WAYS.items()):
        (thing, deed, way), others = zip(*words, strict=True)
        target = form.format(*(translations[column] for translations in others))
        pairs.append((f"The {thing} {deed} {way}.", target))
    return Corpus("small", "en", language, pairs, pairs[::6], pairs[::6])


@pytest.mark.parametrize("language, kind, size",
                         [("ja", "sentencepiece", 350), ("ar", "words", 60)])
def test_languages_without_spaces_and_from_right_to_left_are_learned_and_scored(
        language, kind, size):
    corpus = small_corpus(language)
    tokenizer = fit_tokenizer(kind, corpus, size)
    config = TransformerConfig(len(tokenizer), N=1, d_model=32, d_ff=64, h=4, dropout=0.0)
    training = TrainingConfig(steps=200, max_tokens=400, warmup=50, factor=0.4, validate_every=200)
    model, _ = train_on(corpus, tokenizer, config, training, False)
    sources, references = map(list, zip(*corpus.train, strict=True))
    outputs = translate(sources, model, tokenizer)
    if language == "ja" and not find_spec("MeCab"):
        with pytest.raises(ImportError, match=r"pip install 'sacrebleu\[ja\]'"):
            bleu_report(outputs, references, language, bootstrap=0)
        assert sum(map(str.__eq__, outputs, references)) > len(references) * 0.6
    else:
        report = bleu_report(outputs, references, language, bootstrap=0)
        assert report["sacrebleu"].score > 90 and report["chrf"].score > 90
