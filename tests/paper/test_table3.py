"""Table 3: counts against a closed form, rows against base, the sweep's resuming and refusing, verdicts by hand, kept results."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from annotated import cli
from annotated.data.corpora import Corpus, load_corpus
from annotated.data.tokenizers import END, PAD, UNKNOWN, WordTokenizer
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.paper import table3
from annotated.paper.table3 import (
    SCALES,
    TABLE_3,
    Scale,
    compare,
    count_parameters,
    noise_band,
    plan,
    pooled_deviation,
    read_results,
    rows,
    sweep,
    t_quantile,
    token_accuracy,
    verdict,
)
from annotated.training.loop import TrainingConfig
from annotated.translation.search import beam_search, greedy_decode

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "table3_multi30k.jsonl"
PAPER = {row.name: row for row in rows()}


def formula(c):
    """Parameters, term by term from the shapes that the paper prints."""
    d_k, d_v = c.d_k or c.d_model // c.h, c.d_v or c.d_model // c.h
    attention = 2 * c.d_model * c.h * d_k + 2 * c.d_model * c.h * d_v
    feed_forward = 2 * c.d_model * c.d_ff + c.d_ff + c.d_model
    layers = c.N * (3 * attention + 2 * feed_forward + 5 * 2 * c.d_model)
    return c.vocab_size * c.d_model + layers + (2 * c.max_length * c.d_model if c.positions == "learned" else 0)


# --- the rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_c28_parameters_of_every_row_follow_the_formula(scale):
    for row in rows(scale, 37_000):
        assert count_parameters(row.config) == formula(row.config), row.name


def changed(row, base):
    """The fields in which a row's two configurations differ from base's."""
    return {name: getattr(mine, name) for mine, theirs in ((row.config, base.config), (row.training, base.training))
            for name in (field.name for field in dataclasses.fields(mine)) if getattr(mine, name) != getattr(theirs, name)}


EXPECTED = {  # the changes of the paper's rows, written down once more from its table
    "base": {}, "A-h1": {"h": 1}, "A-h4": {"h": 4}, "A-h16": {"h": 16}, "A-h32": {"h": 32}, "B-dk16": {"d_k": 16}, "B-dk32": {"d_k": 32},
    "C-N2": {"N": 2}, "C-N4": {"N": 4}, "C-N8": {"N": 8}, "C-dmodel256": {"d_model": 256}, "C-dmodel1024": {"d_model": 1024},
    "C-dff1024": {"d_ff": 1024}, "C-dff4096": {"d_ff": 4096}, "D-P0.0": {"dropout": 0.0}, "D-P0.2": {"dropout": 0.2},
    "D-eps0.0": {"label_smoothing": 0.0}, "D-eps0.2": {"label_smoothing": 0.2}, "E-learned": {"positions": "learned"},
    "big": {"d_model": 1024, "d_ff": 4096, "h": 16, "dropout": 0.3, "steps": 300_000},
}


def test_rows_differ_from_base_in_the_named_fields_only():
    assert list(PAPER) == list(EXPECTED)
    for name, row in PAPER.items():
        assert changed(row, PAPER["base"]) == EXPECTED[name], name
    base = PAPER["base"]
    assert dataclasses.astuple(base.config)[:5] == (37_000, 6, 512, 2048, 8) and base.training.steps == 100_000
    assert base.training.label_smoothing == base.config.dropout == 0.1 and base.config.d_k is None


@pytest.mark.parametrize("scale", ["multi30k", "multi30k-long", "toy", "toy-long"])
def test_small_rows_are_in_proportion(scale):
    small = {row.name: row for row in rows(scale, 500)}
    base = small["base"]
    own = {"N": base.config.N, "d_model": base.config.d_model, "d_ff": base.config.d_ff, "d_k": base.config.d_model // 8}
    printed = {"N": 6, "d_model": 512, "d_ff": 2048, "d_k": 64}
    for name, row in small.items():
        want = {field: value * own[field] / printed[field] if field in own else value for field, value in EXPECTED[name].items()}
        want.pop("steps", None)  # as many updates for every row
        assert changed(row, base) == want, name


@pytest.mark.parametrize(("scale", "message"), [
    ("huge", r"scale='huge' is unknown: give one of paper, multi30k, toy"),
    (Scale(100, {"N": 4}, TrainingConfig()), r"N=2 of the paper's 6 is no whole number of 4"),
    (Scale(100, {"d_ff": 33}, TrainingConfig()), r"d_ff=1024 of the paper's 2048 is no whole number of 33"),
])
def test_a_scale_that_will_not_do_is_refused(scale, message):
    with pytest.raises(ValueError, match=message):
        rows(scale)


# --- what is measured ----------------------------------------------------------------------------------------------------


def test_c25_accuracy_is_that_of_counting_token_by_token():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(12, N=1, d_model=16, d_ff=32, h=2, dropout=0.5))
    ids = torch.randint(4, 12, (30, 2, 9)).tolist()
    pairs = [(source[: 1 + i % 9], target[: 1 + i % 7]) for i, (source, target) in enumerate(ids)]
    model.eval()
    right = total = 0
    for source, target in pairs:
        for i, wanted in enumerate([*target, END]):
            logits = model(torch.tensor([[*source, END]]), torch.tensor([[1, *target[:i]]]))[0, -1]
            right, total = right + int(logits.argmax() == wanted), total + 1
    assert token_accuracy(model.train(), pairs) == right / total and model.training
    with torch.no_grad():  # a model that always says END is right once a sentence, and padding does not count
        model.embedding.weight.zero_()
        model.embedding.weight[END] = 1.0
        model.decoder.layers[-1].residual[-1].norm.bias.fill_(1.0)
    assert token_accuracy(model, pairs) == 30 / total
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[PAD] = 1.0
    assert token_accuracy(model, pairs) == 0


def test_c29_rows_are_scored_by_beam_4_with_alpha_06():
    texts = [("a b c d e f", "-"), ("c b a f", "-"), ("d d a", "-"), ("f e d c b a a b", "-"), ("b", "-"), ("e e f a b", "-")]
    tokenizer = WordTokenizer.fit(texts)
    torch.manual_seed(5)  # a random model of which the kinds of search make different things
    model = Transformer(TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=32, h=2)).double().eval()
    sources = [torch.tensor([[*tokenizer.encode(text, "en"), END]]) for text, _ in texts]

    def bleu_of(outputs):
        """What `measure` finds where these ids are the references."""
        pairs = [(text, tokenizer.decode(ids)) for (text, _), ids in zip(texts, outputs, strict=True)]
        return table3.measure(model, tokenizer, Corpus("mine", "en", "de", [], pairs, []))["bleu"]

    assert bleu_of([greedy_decode(model, source)[0] for source in sources]) < 90
    for (beam, alpha), alike in {(4, 0.6): True, (2, 0.6): False, (5, 0.6): False, (4, 0.0): False}.items():
        bleu = bleu_of([beam_search(model, source, beam, alpha)[0][0][0] for source in sources])
        assert bleu == pytest.approx(100) if alike else bleu < 90


# --- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("measured", "band", "printed", "alike", "said"), [
    (-0.9, 0.5, -0.9, 0.1, "holds"), (0.9, 0.5, 0.3, 0.1, "holds"), (0.9, 0.5, -0.9, 0.1, "does not"), (-0.9, 0.5, 0.2, 0.1, "does not"),
    (-0.4, 0.5, -0.9, 0.1, "within noise"), (0.5, 0.5, -0.9, 0.1, "within noise"), (0.51, 0.5, 0.9, 0.1, "holds"),
    (0.4, 0.5, 0.0, 0.1, "alike"), (0.4, 0.5, -0.1, 0.1, "alike"), (0.6, 0.5, -0.1, 0.1, "does not"), (-0.6, 0.5, 0.0, 0.1, "does not"),
])
def test_c29_verdict_by_hand_made_numbers(measured, band, printed, alike, said):
    assert verdict(measured, band, printed, alike) == said


# Student's t for 99.73 %, from table G.2 of the Guide to the expression of uncertainty in measurement (JCGM 100:2008)
GUIDE = {1: 235.80, 2: 19.21, 3: 9.22, 4: 6.62, 5: 5.51, 6: 4.90, 7: 4.53, 8: 4.28, 9: 4.09, 10: 3.96, 20: 3.42, 40: 3.20, 100: 3.077}


def test_c29_the_band_is_as_wide_as_the_printed_tables_of_student_say():
    for freedom, t in GUIDE.items():
        assert t_quantile(freedom, 1 - 0.9973) == pytest.approx(t, rel=2e-3)
        assert t_quantile(freedom) == pytest.approx(t, rel=2e-3)  # of 370: three deviations of a normal number
    assert [round(t_quantile(freedom, 0.05), 2) for freedom in (2, 5, 10, 30)] == [4.30, 2.57, 2.23, 2.04]


def test_c29_pooled_deviation_and_band_by_hand():
    assert pooled_deviation([[1, 3], [5], [10, 10, 13]]) == (pytest.approx(math.sqrt((2 + 6) / 3)), 3)
    assert noise_band(0.3, 9, 1, 3) == pytest.approx(GUIDE[9] * 0.3 * math.sqrt(4 / 3), rel=2e-3)
    with pytest.raises(ValueError, match="no row has two seeds"):
        pooled_deviation([[1], [2]])


def test_c29_table_from_hand_made_results():
    def result(name, seed, loss, bleu):
        return {"row": name, "seed": seed, "loss": loss, "bleu": bleu, "accuracy": 0.5, "parameters": 7}

    results = [result("base", 0, 1.0, 20.0), result("base", 1, 1.001, 20.01), result("A-h1", 0, 1.5, 17.0), result("C-N8", 0, 1.05, 19.5),
               result("E-learned", 0, 1.5, 24.5)]  # one degree of freedom: 236 standard errors
    lines, deviation = compare(rows(), results)
    assert deviation["bleu"] == (pytest.approx(0.01 * math.sqrt(0.5)), 1)
    assert deviation["loss"] == (pytest.approx(0.001 * math.sqrt(0.5)), 1)
    found = {line.row.name: line for line in lines}
    assert list(found) == ["base", "A-h1", "C-N8", "E-learned"] and found["base"].runs == 2 and not found["base"].verdict
    assert found["A-h1"].difference["bleu"] == pytest.approx(-3.005)
    assert found["A-h1"].band["bleu"] == pytest.approx(GUIDE[1] * 0.01 * math.sqrt(0.5) * math.sqrt(1.5), rel=2e-3)
    assert found["A-h1"].verdict == {"loss": "holds", "bleu": "holds"}
    assert found["C-N8"].verdict == {"loss": "alike", "bleu": "within noise"}  # printed: log(4.88 / 4.92) is within 0.01
    assert found["E-learned"].verdict == {"loss": "does not", "bleu": "does not"}
    with pytest.raises(ValueError, match="no result for the row base"):
        compare(rows(), results[2:])
    counted = [result | {"exact": exact} for result, exact in zip(results, (80.0, 80.02, 70.0, 79.0, 90.0), strict=True)]
    lines, deviation = compare(rows(), counted)  # judged by the printed BLEU: A-h1 0.9 lower, C-N8 0.3 lower, E-learned 0.1 lower
    assert deviation["exact"] == (pytest.approx(0.01 * math.sqrt(2)), 1)
    assert [line.verdict["exact"] for line in lines[1:]] == ["holds", "within noise", "does not"]
    assert "exact" not in compare(rows(), [*counted[:-1], results[-1]])[1], "of all rows or of none"


@pytest.mark.parametrize("scale", ["toy", "multi30k"])
def test_no_row_knows_words_of_the_sentences_it_is_scored_on(scale, monkeypatch):
    held_out = {"valid": [("quax quax", "quax")] * 50, "test": [("zyxxyz zyxxyz", "zyxxyz")] * 50}
    seen = [("the dog sleeps", "der Hund schläft")] * 9
    monkeypatch.setattr(table3, "load_corpus", lambda name: Corpus(name, "en", "de", seen, **held_out))
    _, tokenizer, _ = table3.read_task("mine", scale)
    assert len(tokenizer.encode("the dog", "en")) == 2 and UNKNOWN not in tokenizer.encode("the dog", "en"), "words it was trained on"
    for word in ("quax", "zyxxyz"):
        ids = tokenizer.encode(word, "en")
        assert ids == [UNKNOWN] if scale == "toy" else len(ids) == 1 + len(word), "one id a letter, and one for the space"


# --- the sweep -----------------------------------------------------------------------------------------------------------


def test_every_row_has_its_first_seed_before_any_second():
    names = [row[0] for row in TABLE_3]
    tasks = plan(names)
    assert [seed for _, seed in tasks] == [0] * 20 + [1] * 20 + [2] * 20 and [name for name, _ in tasks] == names * 3
    assert plan(["C-N4", "base"], seeds=2) == [("C-N4", 0), ("base", 0), ("C-N4", 1), ("base", 1)]


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A folder with a few pairs of the toy corpus: what a sweep does with its runs does not depend on their number."""
    folder, corpus = tmp_path_factory.mktemp("few"), load_corpus("toy")
    for split, pairs in (("train", corpus.train[:400]), ("valid", corpus.valid[:9]), ("test", corpus.test[:9])):
        for language, sentences in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            (folder / f"{split}.{language}").write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
    return str(folder)


def command(few, folder, *more):
    return [sys.executable, "-m", "annotated", "vary", few, "--scale", "toy", "--out", str(folder / "out.jsonl"),
            "--work", str(folder / "work"), "--rows", "base", "C-N2", "--seeds", "1", "--steps", "5", "--sentences", "3", *more]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def swept(few, tmp_path_factory):
    """A sweep of two short runs from the command line."""
    folder = tmp_path_factory.mktemp("sweep")
    said = subprocess.run(command(few, folder), env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    return folder, said.stdout


def test_sweep_writes_a_result_a_run_and_does_not_run_it_again(swept, few):
    folder, said = swept
    assert "[2/2] C-N2 seed 0: perplexity " in said and f"2 results in {folder / 'out.jsonl'}" in said
    assert [path for path in (folder / "work").iterdir() if path.is_dir()] == []  # checkpoints of finished runs are gone
    before = (folder / "out.jsonl").stat().st_mtime_ns, (folder / "out.jsonl").read_bytes()
    results = sweep(few, folder / "out.jsonl", folder / "work", "toy", ["base", "C-N2"], 1, steps=5, sentences=3, report=len)
    assert before == ((folder / "out.jsonl").stat().st_mtime_ns, (folder / "out.jsonl").read_bytes())
    assert sorted(result["row"] for result in results) == [result["row"] for result in read_results(folder / "out.jsonl")]
    base = results[0]
    assert base["row"] == "base" and base["model"]["N"] == 3 and results[1]["model"]["N"] == 1 and base["training"]["steps"] == 5
    assert base["perplexity"] == pytest.approx(math.exp(base["loss"])) and 0 <= base["accuracy"] <= 1 and 0 <= base["bleu"] <= 100
    assert base["parameters"] == formula(TransformerConfig(**base["model"]))
    assert "nrefs:1|case:mixed" in base["bleu_signature"] and base["seconds"]["starts"] == 1 and base["log"][-1]["step"] == 5


def test_sweep_refuses_results_of_another_configuration(swept, few, capsys):
    folder, _ = swept
    with pytest.raises(ValueError, match=r"out\.jsonl: base seed 0 was made with another training \(steps was 5 and is now 6\): give an"):
        sweep(few, folder / "out.jsonl", folder / "work", "toy", ["base"], 1, steps=6, sentences=3)
    with pytest.raises(ValueError, match="no row F: there are base, A-h1"):
        sweep(few, folder / "out.jsonl", folder / "work", "toy", ["base", "F"], sentences=3)
    with pytest.raises(ValueError, match=r"another data"):
        sweep(few, folder / "out.jsonl", folder / "work", "toy", ["base"], 1, steps=5, sentences=4)
    with pytest.raises(SystemExit) as ended:  # not a ValueError: that would be a traceback
        cli.main(command(few, folder, "--steps", "6")[3:])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "steps was 5 and is now 6" in said and "Traceback" not in said


def test_two_processes_share_a_sweep_and_not_a_run(few, tmp_path):
    corpus, tokenizer, known = table3.read_task(few, "toy", 2, 3)
    with table3.FileLock(tmp_path / "base.seed0.lock"):
        with pytest.raises(table3.Timeout):
            table3.run_row(known["base"], 0, corpus, tokenizer, tmp_path / "out.jsonl", tmp_path)
        sweep(few, tmp_path / "out.jsonl", tmp_path, "toy", ["base", "C-N2"], 1, steps=2, sentences=3, report=len)
    assert [result["row"] for result in read_results(tmp_path / "out.jsonl")] == ["C-N2"], "the other's was not left to it"


# --- the kept results ------------------------------------------------------------------------------------------------------


def kept():
    return read_results(RESULTS)


def test_c29_kept_results_are_of_the_rows_as_the_code_has_them():
    results = kept()
    assert len(results) >= 20
    sizes = {result["model"]["vocab_size"] for result in results}
    assert len(sizes) == 1
    known = {row.name: row for row in rows("multi30k", sizes.pop())}
    assert {result["row"] for result in results} == set(known), "a row has no result"
    for result in results:
        row = known[result["row"]]
        assert result["model"] == dataclasses.asdict(row.config), result["row"]
        training = {"clip": 0.0, "patience": 0} | result["training"]  # runs from before there were these had none
        assert training == dataclasses.replace(row.training, seed=result["seed"]).facts(), result["row"]
        assert result["parameters"] == formula(row.config) and result["decoding"] == table3.DECODING
        assert result["log"][-1]["step"] == row.training.steps
        assert result["perplexity"] == pytest.approx(math.exp(result["loss"])) == result["log"][-1]["valid_perplexity"]
        assert not re.search(r"/tmp|/home|/root|/work/", json.dumps(result))
    assert len({(result["row"], result["seed"]) for result in results}) == len(results)
    assert len({(result["data"], result["vocabulary"], result["bleu_signature"]) for result in results}) == 1
