"""The report against sacreBLEU itself; costs against a counter."""

import hashlib
import json
import math
import os
import subprocess
import sys

import pytest
import sacrebleu
import torch
from torch.utils.flop_counter import FlopCounterMode

from annotated.model.multi_head import record_attention
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.translation import scores
from annotated.translation.scores import TABLE_2, bleu_report, hardware_flops, training_flops

PAIRS = [  # hypothesis, reference
    ("Die E-Mail Adresse des US-Präsidenten ist geheim.",
     "Die E-Mail-Adresse des US-Präsidenten ist geheim."),
    ("der Minister sagte, dass er nichts davon wisse.",
     "Der Minister sagte, er wisse nichts davon."),
    ('"Das ist ein schöner Tag", sagte sie.', "„Das ist ein guter Tag“, sagte sie."),
    ("Der Ex-Coach von Hannover kehrt zurück.",
     "Der Ex-Trainer von Hannover 96 kehrt zurück – heute.")]
HYPOTHESES, REFERENCES = map(list, zip(*PAIRS, strict=True))
REPORT = bleu_report(HYPOTHESES, REFERENCES, bootstrap=100)


# The report

def test_plain_entries_are_what_the_command_line_says(tmp_path):
    for name, lines in (("hypotheses", HYPOTHESES), ("references", REFERENCES)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = "references -i hypotheses -w 9 -m bleu chrf --confidence --confidence-n 100"
    said = subprocess.check_output([sys.executable, "-m", "sacrebleu", *options.split()],
                                   cwd=tmp_path, env={**os.environ, "SACREBLEU_SEED": "12345"})
    for result, name in zip(json.loads(said), ("sacrebleu", "chrf"), strict=True):
        entry = REPORT[name]
        assert entry.score == pytest.approx(result["score"], abs=1e-8)
        assert (entry.low + entry.high) / 2 == pytest.approx(result["confidence_mean"], abs=1e-5)
        # its resamples of chrF are in single precision: a rounding of up to 100 costs 4e-6
        assert (entry.high - entry.low) / 2 == pytest.approx(result["confidence_var"], abs=1e-6)
        assert entry.signature == result["signature"]


def moses(lines):
    """Moses tokens straight from the library, cut at spaces."""
    from sacremoses import MosesTokenizer

    # with escapes: they change no count
    return [MosesTokenizer(lang="de").tokenize(line) for line in lines]


def unsmoothed(hypotheses, references):
    """sacreBLEU itself of lines that are split at spaces."""
    return sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", smooth_method="none",
                                 force=True).score


def test_tokenised_entries_are_sacrebleu_on_moses_tokens():
    lines = [[" ".join(tokens) for tokens in moses(side)] for side in (HYPOTHESES, REFERENCES)]
    assert REPORT["tokenised"].score == pytest.approx(unsmoothed(*lines), abs=1e-9)
    lower = [[line.lower() for line in side] for side in lines]
    assert REPORT["tokenised_lowercase"].score == pytest.approx(unsmoothed(*lower), abs=1e-9)
    assert bleu_report(["ein Hund bellt"], ["ein Hund bellt"], bootstrap=0)["tokenised"].score == 0


def test_split_entry_with_plain_quotes_is_sacrebleu_on_replaced_text():
    """sacreBLEU itself, on Moses tokens split at hyphens, „ and “ replaced by hand."""
    def replaced(lines):
        straight = [line.translate({0x201E: 0x22, 0x201C: 0x22}) for line in lines]
        return [" ".join(tokens).replace("-", " ##AT##-##AT## ") for tokens in moses(straight)]

    score = unsmoothed(replaced(HYPOTHESES), replaced(REFERENCES))
    entry = REPORT["split_plain_quotes"]
    assert entry.score == pytest.approx(score, abs=1e-9)
    # one of four has other quotes than its reference
    assert entry.score > REPORT["compound_split"].score + 1
    assert entry.signature.startswith("quotes „“ to \" + moses(sacremoses")


@pytest.mark.parametrize("language, form", [
    ("de", 'er sagt " 1,500 , gut " , ja'), ("en", 'er sagt " 1.500 , gut , " ja')])
def test_multi30k_form_normalises_marks_by_the_rules_of_its_language(language, form):
    """A number's space, and a comma beside a closing mark, become different things."""
    assert scores.multi30k_form(['Er sagt "1\u00a0500, gut", ja'], language) == [form]
    report = bleu_report(['Er sagt "1\u00a0500, gut", ja'], [form], language, bootstrap=0)
    if language == "de":  # where nothing is said
        assert scores.multi30k_form(['Er sagt "1\u00a0500, gut", ja']) == [form]
    assert report["multi30k"].score == pytest.approx(100)
    assert scores.multi30k_form(["A‘’Σ"]) == ['a " ς'], "lower-cased after its marks"
    forms = [scores.multi30k_form(["L'homme"], code) for code in ("fr", "en")]
    assert forms == [["l' homme"], ["l 'homme"]]


def test_every_entry_is_named_defined_and_signed():
    report = bleu_report(HYPOTHESES, REFERENCES, loss=1.0, bootstrap=100)
    assert list(report.entries) == list(scores.DEFINITIONS)
    assert "4 sentences" in str(report) and "100 resamples, seed 12345" in str(report)
    rows = str(report).splitlines()[1:]
    for row, (name, entry) in zip(rows, report.entries.items(), strict=True):
        assert row.startswith(f"{name} ") and f"{entry.score:.2f}" in row
        assert row.endswith(entry.definition) and ("[" in row) == (name != "perplexity")
        moses = name not in ("sacrebleu", "sacrebleu_lowercase", "chrf", "perplexity")
        assert ("sacremoses" in entry.signature) == moses
        assert ("tok:none|smooth:none" in entry.signature) == moses
        assert ("bs:100|seed:12345" in entry.signature) == (name != "perplexity")


@pytest.mark.parametrize("line, expected", [
    ("E-Mail-Adresse", "E ##AT##-##AT## Mail ##AT##-##AT## Adresse"), ("-5 Grad", "-5 Grad"),
    ("Nord- und Süd - oben", "Nord- und Süd - oben"),
    ("a-b-c", "a ##AT##-##AT## b-c"),  # as the usual script does it
])
def test_compounds_are_split_at_hyphens_inside_words(line, expected):
    assert scores.split_compounds(line) == expected


# Intervals

def test_intervals_hold_the_score_and_repeat_by_seed():
    assert bleu_report(HYPOTHESES, REFERENCES, bootstrap=100) == REPORT
    other = bleu_report(HYPOTHESES, REFERENCES, bootstrap=100, seed=7)
    for name, entry in other.entries.items():
        before = REPORT[name]
        assert entry.score == before.score and before.low < before.score < before.high
        assert (entry.low, entry.high) != (before.low, before.high)
        assert "seed:7" in entry.signature


def test_perplexity_is_exp_of_the_loss_and_says_per_what():
    report = bleu_report(HYPOTHESES, REFERENCES, loss=1.25, bootstrap=0, token="word piece")
    entry = report["perplexity"]
    assert entry.score == pytest.approx(math.exp(1.25), abs=1e-12)
    assert entry.low is None and entry.high is None
    assert "per word piece" in entry.definition and "per word piece" in entry.signature
    assert "perplexity" not in REPORT.entries


# The files

def test_report_is_written_with_its_sentences(tmp_path):
    path = tmp_path / "new" / "report.json"
    report = bleu_report(HYPOTHESES, REFERENCES, loss=1.0, bootstrap=100, path=path)
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.json", "report.txt"]
    sentences = (path.parent / "report.txt").read_bytes()
    assert sentences.decode("utf-8") == "".join(f"{line}\n" for line in HYPOTHESES)
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert facts == {"sentence_file": "report.txt", "sentences": 4, "bootstrap": 100, "seed": 12345,
                     "sentence_sha256": hashlib.sha256(sentences).hexdigest(),
                     "entries": {name: vars(entry) for name, entry in report.entries.items()},
                     "target_language": "de"}


# Bad input

@pytest.mark.parametrize("hypotheses, references, error, message", [
    ("ein Satz", ["ein Satz"], TypeError, "hypotheses must be a list of strings"),
    (["a"], [["a", "b"]], TypeError, "references must be a list of strings, one for each"),
    (["a", "b"], ["a"], ValueError, "2 hypotheses but 1 references: give one reference for each"),
    ([], [], ValueError, "0 hypotheses but 0 references"),
    (["a"], ["b\nc"], ValueError, r"references\[0\] contains a line break: replace it"),
    (["a\r"], ["b"], ValueError, r"hypotheses\[0\] contains a line break"),
    (["a"], ["a"], ValueError, r"path='report.txt' does not end in \.json")])
def test_what_will_not_do_is_refused(hypotheses, references, error, message):
    with pytest.raises(error, match=message):
        bleu_report(hypotheses, references, path="report.txt")


@pytest.mark.parametrize("name, value", [
    ("loss", math.nan), ("loss", math.inf), ("loss", 1000.0), ("bootstrap", 1), ("bootstrap", True),
    ("bootstrap", -3)])
def test_numbers_without_a_meaning_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        bleu_report(["a"], ["a"], **{name: value})


# Training cost (C23)

def test_c23_hardware_gives_the_printed_costs():
    printed = {row.system: row.flops_en_de for row in TABLE_2}
    assert float(f"{hardware_flops(12):.1e}") == printed["Transformer (base)"] == 3.3e18
    assert float(f"{hardware_flops(3.5 * 24):.1e}") == printed["Transformer (big)"] == 2.3e19
    assert hardware_flops(1, gpus=2, flops_per_second=10) == 72_000


@pytest.mark.parametrize("changes", [{}, {"d_k": 5, "d_v": 3}, {"norm_first": True},
                                     {"h": 1, "N": 1}])
def test_c23_flops_from_shapes_are_those_that_pytorch_counts(changes):
    config = TransformerConfig(31, **{"N": 3, "d_model": 12, "d_ff": 20, "h": 2, **changes})
    model, ids = Transformer(config), torch.randint(4, 31, (5, 16))
    # recording takes the explicit path
    with record_attention(model), FlopCounterMode(display=False) as counter:
        logits = model(ids[:, :9], ids[:, 9:])
    forward = counter.get_total_flops()
    with record_attention(model), FlopCounterMode(display=False) as counter:
        model(ids[:, :9], ids[:, 9:]).sum().backward()
    assert logits.shape == (5, 7, 31) and counter.get_total_flops() == 3 * forward
    assert training_flops(config, 5 * 9, 5 * 7, steps=1, sentences=5) == 3 * forward
    assert training_flops(config, 5 * 9, 5 * 7, steps=4, sentences=5) == 12 * forward


def test_scores_of_table_2_are_those_printed():
    assert [(row.en_de, row.en_fr) for row in TABLE_2] == [
        (23.75, None), (None, 39.2), (24.6, 39.92), (25.16, 40.46), (26.03, 40.56), (None, 40.4),
        (26.3, 41.16), (26.36, 41.29), (27.3, 38.1), (28.4, 41.8)]


def test_a_sentence_without_a_letter_in_common_is_scored():
    """sacreBLEU itself ends such a bootstrap with a TypeError."""
    texts = ["ab cd"], ["xy"]
    hypotheses, references = texts[0] + ["ab cd"] * 2, texts[1] + ["ab cd", "xy"]
    report = bleu_report(hypotheses, references, bootstrap=50)
    chrf = sacrebleu.corpus_chrf(hypotheses, [references])
    assert report["chrf"].score == pytest.approx(chrf.score)
    assert 0 <= report["chrf"].low < chrf.score < report["chrf"].high <= 100
