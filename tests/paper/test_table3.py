"""Table 3: counts by a closed form, rows, the sweep's resuming and refusing, verdicts by hand."""

import contextlib
import dataclasses
import io
import json
import math
import re

import pytest
import torch
from helpers import ROOT
from test_cli import write_corpus

from annotated import TrainingConfig, beam_search, cli, greedy_decode
from annotated.data.corpora import Corpus, load_corpus
from annotated.data.tokenizers import END, PAD, UNKNOWN, WordTokenizer
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.paper import table3
from annotated.paper.table3 import compare, read_results, rows, t_quantile, token_accuracy

PAPER = {row.name: row for row in rows()}


def formula(c):
    """Parameters, term by term from the shapes that the paper prints."""
    d_k, d_v = c.d_k or c.d_model // c.h, c.d_v or c.d_model // c.h
    attention = 2 * c.d_model * c.h * d_k + 2 * c.d_model * c.h * d_v
    feed_forward = 2 * c.d_model * c.d_ff + c.d_ff + c.d_model
    layers = c.N * (3 * attention + 2 * feed_forward + 5 * 2 * c.d_model)
    positions = 2 * c.max_length * c.d_model if c.positions == "learned" else 0
    return c.vocab_size * c.d_model + layers + positions


# The rows


@pytest.mark.parametrize("scale", table3.SCALES)
def test_c28_parameters_of_every_row_follow_the_formula(scale):
    for row in rows(scale, 37_000):
        assert table3.count_parameters(row.config) == formula(row.config), row.name


def changed(row, base):
    """The fields in which a row's two configurations differ from base's."""
    pairs = (row.config, base.config), (row.training, base.training)
    return {name: value for ours, theirs in pairs for name, value in vars(ours).items()
            if value != getattr(theirs, name)}


EXPECTED = {  # the changes of the paper's rows, written down once more from its table
    "base": {}, "A-h1": {"h": 1}, "A-h4": {"h": 4}, "A-h16": {"h": 16}, "A-h32": {"h": 32},
    "B-dk16": {"d_k": 16}, "B-dk32": {"d_k": 32}, "C-N2": {"N": 2}, "C-N4": {"N": 4},
    "C-N8": {"N": 8}, "C-dmodel256": {"d_model": 256}, "C-dmodel1024": {"d_model": 1024},
    "C-dff1024": {"d_ff": 1024}, "C-dff4096": {"d_ff": 4096}, "D-P0.0": {"dropout": 0.0},
    "D-P0.2": {"dropout": 0.2}, "D-eps0.0": {"label_smoothing": 0.0},
    "D-eps0.2": {"label_smoothing": 0.2}, "E-learned": {"positions": "learned"},
    "big": {"d_model": 1024, "d_ff": 4096, "h": 16, "dropout": 0.3, "steps": 300_000}}


def test_rows_differ_from_base_in_the_named_fields_only():
    assert {name: changed(row, PAPER["base"]) for name, row in PAPER.items()} == EXPECTED
    config, training = PAPER["base"].config, PAPER["base"].training
    assert dataclasses.astuple(config)[:5] == (37_000, 6, 512, 2048, 8) and config.d_k is None
    assert training.label_smoothing == config.dropout == 0.1 and training.steps == 100_000


@pytest.mark.parametrize("scale", ["multi30k", "multi30k-long", "toy", "toy-long"])
def test_small_rows_are_in_proportion(scale):
    small = {row.name: row for row in rows(scale, 500)}
    config = small["base"].config
    own = {**vars(config), "d_k": config.d_model // 8}
    printed = {"N": 6, "d_model": 512, "d_ff": 2048, "d_k": 64}
    for name, row in small.items():
        expected = {field: value * own[field] / printed[field] if field in printed else value
                    for field, value in EXPECTED[name].items()
                    if field != "steps"}  # as many updates for every row
        assert changed(row, small["base"]) == expected, name


@pytest.mark.parametrize(("scale", "message"), [
    ("huge", r"scale='huge' is unknown: give one of paper, multi30k, toy"),
    (table3.Scale(100, {"N": 4}, TrainingConfig()), "N=2, scaled from the paper's 6 to 4, is no"),
    (table3.Scale(100, {"d_ff": 33}, TrainingConfig()), "d_ff=1024, scaled from the paper's 2")])
def test_a_scale_that_will_not_do_is_refused(scale, message):
    with pytest.raises(ValueError, match=message):
        rows(scale)


# What is measured


def test_c25_accuracy_is_that_of_counting_token_by_token():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(12, N=1, d_model=16, d_ff=32, h=2, dropout=0.5)).eval()
    ids = torch.randint(4, 12, (30, 2, 9)).tolist()
    pairs = [(source[: 1 + i % 9], target[: 1 + i % 7]) for i, (source, target) in enumerate(ids)]
    right = total = 0
    for source, target in pairs:
        for i, token in enumerate([*target, END]):
            logits = model(torch.tensor([[*source, END]]), torch.tensor([[1, *target[:i]]]))
            right, total = right + int(logits[0, -1].argmax() == token), total + 1
    assert token_accuracy(model.train(), pairs) == right / total and model.training
    norm = model.decoder.layers[-1].residual[-1].norm
    for token, share in ((END, 30 / total), (PAD, 0)):  # END is right once a sentence; PAD never
        with torch.no_grad():
            model.embedding.weight.zero_()
            model.embedding.weight[token] = norm.bias.fill_(1.0)
        assert token_accuracy(model, pairs) == share


def test_c29_rows_are_scored_by_beam_4_with_alpha_06():
    texts = ["a b c d e f", "c b a f", "d d a", "f e d c b a a b", "b", "e e f a b"]
    tokenizer = WordTokenizer.fit([(text, "-") for text in texts])
    torch.manual_seed(5)  # a random model of which the kinds of search make different things
    config = TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=32, h=2)
    model = Transformer(config).double().eval()
    sources = [torch.tensor([[*tokenizer.encode(text, "en"), END]]) for text in texts]

    def bleu_of(outputs):
        """What `measure` finds where these ids are the references."""
        pairs = list(zip(texts, map(tokenizer.decode, outputs), strict=True))
        return table3.measure(model, tokenizer, Corpus("own", "en", "de", [], pairs, []))["bleu"]

    assert bleu_of([greedy_decode(model, source)[0] for source in sources]) < 90
    for beam, alpha in ((4, 0.6), (2, 0.6), (5, 0.6), (4, 0.0)):
        bleu = bleu_of([beam_search(model, source, beam, alpha)[0][0][0] for source in sources])
        assert bleu == pytest.approx(100) if (beam, alpha) == (4, 0.6) else bleu < 90


@pytest.mark.parametrize("scale", ["toy", "multi30k"])
def test_no_row_knows_words_of_the_sentences_it_is_scored_on(scale, monkeypatch):
    held_out = {"valid": [("quax quax", "quax")] * 50, "test": [("zyxxyz zyxxyz", "zyxxyz")] * 50}
    seen = [("the dog sleeps", "der Hund schläft")] * 9
    monkeypatch.setattr(table3, "load_in_memory",
                        lambda name: Corpus(name, "en", "de", seen, **held_out))
    _, tokenizer, _ = table3.read_task("own", scale)
    known = tokenizer.encode("the dog", "en")
    assert len(known) == 2 and UNKNOWN not in known
    for word in ("quax", "zyxxyz"):  # unknown, or a token for each letter and for the space
        ids = tokenizer.encode(word, "en")
        assert ids == [UNKNOWN] if scale == "toy" else len(ids) == 1 + len(word)


# Verdicts


@pytest.mark.parametrize(("measured", "printed", "expected"), [  # of a band of 0.5
    (-0.9, -0.9, "holds"), (0.9, 0.3, "holds"), (0.9, -0.9, "does not"), (-0.9, 0.2, "does not"),
    (-0.4, -0.9, "within noise"), (0.5, -0.9, "within noise"), (0.51, 0.9, "holds"),
    (0.4, 0.0, "alike"), (0.4, -0.1, "alike"), (0.6, -0.1, "does not"), (-0.6, 0.0, "does not")])
def test_c29_verdict_by_hand_made_numbers(measured, printed, expected):
    assert table3.verdict(measured, 0.5, printed, alike=0.1) == expected


# Student's t for 99.73 %, from table G.2 of the Guide to the expression of uncertainty in
# measurement (JCGM 100:2008)
GUIDE = {1: 235.80, 2: 19.21, 3: 9.22, 4: 6.62, 5: 5.51, 6: 4.90, 7: 4.53, 8: 4.28, 9: 4.09,
         10: 3.96, 20: 3.42, 40: 3.20, 100: 3.077}


def test_c29_the_band_is_as_wide_as_the_printed_tables_of_student_say():
    for freedom, t in GUIDE.items():
        assert t_quantile(freedom, 1 - 0.9973) == pytest.approx(t, rel=2e-3)
        assert t_quantile(freedom) == pytest.approx(t, rel=2e-3)  # three normal deviations
    two_sided = [round(t_quantile(freedom, 0.05), 2) for freedom in (2, 5, 10, 30)]
    assert two_sided == [4.30, 2.57, 2.23, 2.04]


def test_c29_pooled_deviation_and_band_by_hand():
    deviation = table3.pooled_deviation([[1, 3], [5], [10, 10, 13]])
    assert deviation == (pytest.approx(math.sqrt((2 + 6) / 3)), 3)
    band = table3.noise_band(0.3, 9, 1, 3)
    assert band == pytest.approx(GUIDE[9] * 0.3 * math.sqrt(4 / 3), rel=2e-3)
    with pytest.raises(ValueError, match="no row has two seeds"):
        table3.pooled_deviation([[1], [2]])


def test_c29_table_from_hand_made_results():
    scores = [("base", 0, 1.0, 20.0, 80.0), ("base", 1, 1.001, 20.01, 80.02),
              ("A-h1", 0, 1.5, 17.0, 70.0), ("C-N8", 0, 1.05, 19.5, 79.0),
              ("E-learned", 0, 1.5, 24.5, 90.0)]  # one degree of freedom: 236 standard errors
    exact = [dict(zip(("row", "seed", "loss", "bleu", "exact"), score, strict=True),
                  accuracy=0.5, parameters=7) for score in scores]
    results = [{name: result[name] for name in result if name != "exact"} for result in exact]
    lines, deviation = compare(rows(), results)
    assert deviation["loss"] == (pytest.approx(0.001 * math.sqrt(0.5)), 1)
    assert [line.row.name for line in lines] == ["base", "A-h1", "C-N8", "E-learned"]
    base, one_head, more_layers, learned = lines
    assert base.runs == 2 and not base.verdict
    assert one_head.difference["bleu"] == pytest.approx(-3.005)
    band = GUIDE[1] * 0.01 * math.sqrt(0.5) * math.sqrt(1.5)
    assert one_head.band["bleu"] == pytest.approx(band, rel=2e-3)
    assert one_head.verdict == {"loss": "holds", "bleu": "holds"}
    # printed: log(4.88 / 4.92) is within 0.01
    assert more_layers.verdict == {"loss": "alike", "bleu": "within noise"}
    assert learned.verdict == {"loss": "does not", "bleu": "does not"}
    with pytest.raises(ValueError, match="no result for the row base"):
        compare(rows(), results[2:])
    lines, deviation = compare(rows(), exact)  # judged by the printed BLEU
    assert deviation["exact"] == (pytest.approx(0.01 * math.sqrt(2)), 1)
    assert [line.verdict["exact"] for line in lines[1:]] == ["holds", "within noise", "does not"]
    assert "exact" not in compare(rows(), [*exact[:-1], results[-1]])[1], "of all rows or of none"


# The sweep


def test_every_row_has_its_first_seed_before_any_second():
    assert table3.plan(["C-N4", "base"], seeds=2) == [
        ("C-N4", 0), ("base", 0), ("C-N4", 1), ("base", 1)]
    assert len(table3.plan(PAPER)) == 60


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A folder with a few pairs of the toy corpus."""
    return str(write_corpus(tmp_path_factory.mktemp("few") / "own", load_corpus("toy").train[:20]))


def command(few, folder, *more):
    return ["vary", few, "--scale", "toy", "--out", str(folder / "out.jsonl"), "--work",
            str(folder / "work"), "--rows", "base", "C-N2", "--seeds", "1", "--steps", "5",
            "--sentences", "3", *more]


@pytest.fixture(scope="module")
def swept(few, tmp_path_factory):
    """(folder, what was printed) of a sweep of two short runs from the command line."""
    folder = tmp_path_factory.mktemp("sweep")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(command(few, folder))
    return folder, printed.getvalue()


def again(few, folder, *names, steps=5, sentences=3):
    """The same sweep by a call; it prints nothing."""
    return table3.sweep(few, folder / "out.jsonl", folder / "work", "toy", names, 1, steps=steps,
                 sentences=sentences, report=len)


def test_sweep_writes_a_result_a_run_and_does_not_run_it_again(swept, few):
    folder, printed = swept
    path = folder / "out.jsonl"
    assert "[2/2] C-N2 seed 0: perplexity " in printed and f"2 results in {path}" in printed
    # checkpoints of finished runs are gone
    assert not [path for path in (folder / "work").iterdir() if path.is_dir()]
    before = path.stat().st_mtime_ns, path.read_bytes()
    base, small = again(few, folder, "base", "C-N2")
    assert before == (path.stat().st_mtime_ns, path.read_bytes())
    assert {result["row"] for result in read_results(path)} == {"base", "C-N2"}
    assert (base["row"], base["model"]["N"], small["model"]["N"]) == ("base", 3, 1)
    assert base["training"]["steps"] == base["log"][-1]["step"] == 5
    assert base["perplexity"] == pytest.approx(math.exp(base["loss"]))
    assert 0 <= base["accuracy"] <= 1 and 0 <= base["bleu"] <= 100
    assert base["parameters"] == formula(TransformerConfig(**base["model"]))
    assert "nrefs:1|case:mixed" in base["bleu_signature"] and base["seconds"]["starts"] == 1


def test_sweep_refuses_results_of_another_configuration(swept, few, capsys):
    folder, _ = swept
    for given, message in (
            ({"steps": 6}, r"out\.jsonl: base seed 0 was made with another training \(steps was 5 "
                           r"and is now 6\): give another --out"),
            ({"sentences": 4}, "another data")):
        with pytest.raises(ValueError, match=message):
            again(few, folder, "base", **given)
    (folder / "log.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="log.jsonl holds other lines than results of vary"):
        table3.sweep(few, folder / "log.jsonl", folder / "work", "toy", ["base"], 1)
    with pytest.raises(ValueError, match="no row F: there are base, A-h1"):
        again(few, folder, "base", "F")
    with pytest.raises(SystemExit) as ended:  # not a ValueError: that would be a traceback
        cli.main(command(few, folder, "--steps", "6"))
    assert ended.value.code == 2 and "steps was 5 and is now 6" in capsys.readouterr().err


def test_two_processes_share_a_sweep_and_not_a_run(few, tmp_path):
    out, work = tmp_path / "out.jsonl", tmp_path / "work"
    work.mkdir()
    corpus, tokenizer, known = table3.read_task(few, "toy", 2, 3)
    with table3.FileLock(work / "base.seed0.lock"):
        with pytest.raises(table3.Timeout):
            table3.run_row(known["base"], 0, corpus, tokenizer, out, work)
        again(few, tmp_path, "base", "C-N2", steps=2)
    # the base run was left to the other process
    assert [result["row"] for result in read_results(out)] == ["C-N2"]


# The kept results


def test_c29_kept_results_are_of_the_rows_as_the_code_has_them():
    results = read_results(path := ROOT / "results" / "table3_multi30k.jsonl")
    assert len(results) >= 20
    (size,) = {result["model"]["vocab_size"] for result in results}
    known = {row.name: row for row in rows("multi30k", size)}
    assert {result["row"] for result in results} == set(known), "a row has no result"
    for result in results:
        row = known[result["row"]]
        assert result["model"] == dataclasses.asdict(row.config), result["row"]
        training = dataclasses.replace(row.training, seed=result["seed"]).facts()
        assert {"clip": 0.0, "patience": 0} | result["training"] == training
        assert table3.finished_result(path, result | {"training": training}) == result  # goes on
        assert result["parameters"] == formula(row.config)
        assert result["decoding"] == table3.DECODING
        last, perplexity = result["log"][-1], pytest.approx(math.exp(result["loss"]))
        assert last["step"] == row.training.steps
        assert result["perplexity"] == perplexity and last["valid_perplexity"] == perplexity
        assert not re.search(r"/tmp|/home|/root|/work/", json.dumps(result))
    assert len({(result["row"], result["seed"]) for result in results}) == len(results)
    task = ("data", "vocabulary", "bleu_signature")
    assert len({tuple(result[name] for name in task) for result in results}) == 1
