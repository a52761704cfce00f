"""Ten changes from outside: each is saved, loaded, resumed, prepared, exported or refused."""

import contextlib
import math
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from helpers import EXACT, PAIRS, ROOT, TEXTS, one_thread, random_model, state
from test_cli import SMALL, write_corpus

from annotated import TransformerConfig, Translator, beam_search, charts, cli, greedy_decode, load
from annotated.charts.export import chart_page
from annotated.data.base_tokenizer import BEGIN, END, PAD, UNKNOWN
from annotated.data.batches import pad
from annotated.data.tokenizers import TOKENIZERS, fit_tokenizer, load_tokenizer
from annotated.fast.prepare import prepare, undo
from annotated.interop.hugging_face import export_to_hugging_face
from annotated.training.builders import BUILDERS, build_model, foreign_part
from annotated.training.loop import TrainingConfig, train, train_on
from annotated.training.schedule import SCHEDULES, noam_rate

REGISTRIES = BUILDERS, TOKENIZERS, SCHEDULES, cli.COMMANDS
before = [set(registry) for registry in REGISTRIES]
parts = import_module("outside_parts")
ADDED = [{name: registry.pop(name) for name in registry.keys() - names}
         for registry, names in zip(REGISTRIES, before, strict=True)]
SOURCE = pad([[4, 5, 6, 7, END], [8, END], [9, 9, 10, END]])
TARGET = pad([[BEGIN, 5, 6], [BEGIN, 7, 8, 9, 10, 11], [BEGIN, 4, 4, 4]])
LEARN = [([a, b], [b, a, a]) for a in range(UNKNOWN, 12) for b in range(UNKNOWN, 12)]
CHANGED = ["gelu", "rms_norm", "rotary"]
pytestmark = pytest.mark.usefixtures(one_thread.__name__)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The parts are in the registries while a test of this file runs, and not in those of
    others.
    """
    for registry, added in zip(REGISTRIES, ADDED, strict=True):
        for name, part in added.items():
            monkeypatch.setitem(registry, name, part)


def built(name, norm_first=False, seed=0, **sizes):
    """A random model of a builder."""
    torch.manual_seed(seed)
    sizes = {"N": 2, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.0} | sizes
    return build_model(TransformerConfig(12, norm_first=norm_first, **sizes), name).eval()


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_model_decodes_by_kept_keys_as_by_the_whole_prefix(name):
    model, expected = built(name).double(), []
    with torch.no_grad():
        plain = random_model(N=2).double()  # the same weights, where they have the same names
        plain.load_state_dict(model.state_dict(), strict=False)
        assert (plain(SOURCE, TARGET) - model(SOURCE, TARGET)).abs().max() > 1e-3, "no change"
        for ids in SOURCE:
            output = torch.tensor([[BEGIN]])
            while output.size(1) <= (ids != PAD).sum() + 5 and output[0, -1] != END:
                logits = model(ids[None], output)[0, -1]
                output = torch.cat([output, logits[END:].argmax().view(1, 1) + END], dim=1)
            expected.append([token for token in output[0, 1:].tolist() if token != END])
    beams = [pairs[0][0] for pairs in beam_search(model, SOURCE, extra=5)]
    for same in (model, prepare(model)):
        assert greedy_decode(same, SOURCE, extra=5) == expected
        assert [pairs[0][0] for pairs in beam_search(same, SOURCE, extra=5)] == beams


# Learned, prepared, resumed, saved, exported


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_model_learns_prepared_or_not_and_goes_on_bit_for_bit(name, tmp_path):
    def run(steps, folder=None, prepared=True):
        model = built(name).double()  # so that rounding stays far below the bound
        model = prepare(model) if prepared else model
        config = TrainingConfig(steps=steps, max_tokens=400, warmup=20, save_every=5,
                                validate_every=5)
        log = train(model, LEARN, LEARN[:9], config, False, folder)
        return model, [row["valid_loss"] for row in log]

    model, losses = run(20)
    assert losses[-1] < losses[0] - 0.3 and foreign_part(model) is None
    assert losses == pytest.approx(run(20, prepared=False)[1], rel=1e-6)
    run(10, tmp_path)
    again, resumed = run(20, tmp_path)
    assert resumed == losses and torch.equal(state(again), state(model))
    with pytest.raises(ValueError, match="another model .builder was .* is now None"):
        train(random_model(N=2), LEARN, LEARN[:9], TrainingConfig(steps=30), False, tmp_path)
    with torch.no_grad():
        fast, plain = model(SOURCE, TARGET), undo(model)(SOURCE, TARGET)
    torch.testing.assert_close(fast, plain, **EXACT)


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_model_is_loaded_as_it_was_and_cannot_leave_as_another(name, tmp_path):
    model, corpus = built(name, d_model=8, N=1), parts.reversal_corpus(12)
    tokenizer = fit_tokenizer("words", corpus, 99)
    Translator(model, tokenizer, {"source_language": "en"}).save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.model(SOURCE, TARGET), model(SOURCE, TARGET))
    with pytest.raises(ValueError, match="Marian has no such part"):
        export_to_hugging_face(model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_ones_own_comes_back(tmp_path):
    corpus = parts.Corpus("pairs", "en", "de", TEXTS + PAIRS, PAIRS, PAIRS)
    tokenizer = fit_tokenizer("letters", corpus, 60)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    for text in (text for pair in TEXTS for text in pair):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode([*again.encode(text), END, 7]) == text
    with pytest.raises(ValueError, match="takes a WordTokenizer or SubwordTokenizer"):
        export_to_hugging_face(random_model(len(tokenizer)), tokenizer, tmp_path / "out")


def test_a_corpus_made_in_python_is_learned_from():
    corpus = parts.reversal_corpus()
    tokenizer = fit_tokenizer("words", corpus, 99)
    config = TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2)
    settings = TrainingConfig(steps=8, max_tokens=99, warmup=4, factor=0.1, validate_every=4)
    _, log = train_on(corpus, tokenizer, config, settings, False)
    assert log[-1]["valid_loss"] < log[0]["valid_loss"]


def test_a_schedule_goes_on_where_it_stopped(tmp_path):
    def rates(steps, schedule="cosine", stop=None, folder=None):
        model, seen = random_model(), []
        config = TrainingConfig(steps=steps, max_tokens=400, warmup=4, factor=0.01, save_every=1,
                                validate_every=1, schedule=schedule)

        def report(row):
            seen.append(row["rate"])
            if row["step"] == stop:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            train(model, LEARN, LEARN[:9], config, False, folder, report=report)
        return seen, state(model)

    whole, weights = rates(12)
    down = [0.005 * (1 + math.cos(math.pi * (step - 4) / 8)) for step in range(5, 13)]
    assert whole == pytest.approx([0.0025, 0.005, 0.0075, 0.01, *down])
    rates(12, stop=6, folder=tmp_path)
    rest, again = rates(12, folder=tmp_path)
    assert rest == whole[12 - len(rest):] and torch.equal(again, weights)
    for steps, name, was in ((12, "noam", "schedule was 'cosine'"), (20, "cosine", "steps was 12")):
        with pytest.raises(ValueError, match=f"another training configuration .{was}"):
            rates(steps, name, folder=tmp_path)
    assert rates(3, "noam")[0] == pytest.approx([noam_rate(k, 16, 4, 0.01) for k in (1, 2, 3)])
    with pytest.raises(ValueError, match="schedule='step' is invalid: give one of SCHEDULES"):
        TrainingConfig(schedule="step")


def test_a_loss_of_ones_own_is_trained_with_and_validated_without_its_weights():
    config = TrainingConfig(steps=1, max_tokens=4000, warmup=1)
    model, plain = random_model(), random_model()
    with torch.no_grad():
        batch = pad([[*pair[0], END] for pair in LEARN]), pad([[BEGIN, *pair[1]] for pair in LEARN])
        right = pad([[*pair[1], END] for pair in LEARN]).unsqueeze(-1)
        log_p = plain(*batch).log_softmax(-1).gather(-1, right)
        expected = -((1 - log_p.exp()) ** 2 * log_p).mean()
    row, = train(model, LEARN, LEARN, config, False, loss=parts.FocalLoss)
    with torch.no_grad():
        nll = -model(*batch).log_softmax(-1).gather(-1, right).mean().item()
    assert [row["train_loss"], row["valid_loss"]] == pytest.approx([expected.item(), nll], rel=1e-5)


def test_a_decoding_rule_of_ones_own_is_the_loop_over_whole_prefixes():
    model, extra = built("transformer", seed=3).double(), 4
    outputs = parts.generate_without_repeating(model, SOURCE, extra)
    for ids, output in zip(SOURCE, outputs, strict=True):
        tokens = [*output, END][: (ids != PAD).sum() + extra]
        for n, token in enumerate(tokens):
            with torch.no_grad():
                logits = model(ids[None], torch.tensor([[BEGIN, *tokens[:n]]]))[0, -1]
            logits[[PAD, BEGIN, *tokens[:n]]] = -math.inf
            assert logits.argmax() == token
        assert len(set(output)) == len(output)
    assert any(len(set(ids)) < len(ids) for ids in greedy_decode(model, SOURCE, extra))
    assert parts.generate_without_repeating(prepare(model), SOURCE, extra) == outputs


def test_a_chart_of_ones_own_has_a_table_and_goes_onto_a_page():
    ax = parts.length_chart(["one", "two words", "two more", "and three words"])
    _, rows = charts.table(ax)
    assert [row[2] for row in rows] == [0, 1, 2, 1]
    assert chart_page({"": ax.figure}).count("<tr>") == 5


# From the terminal, all at once


def test_a_plugin_brings_builder_tokenizer_schedule_and_command(tmp_path, capsys):
    own, model = write_corpus(tmp_path / "own", TEXTS * 3), str(tmp_path / "model")

    def run(*words, **options):
        command = [sys.executable, "-m", "annotated", "--plugin", "outside_parts"]
        return subprocess.run([*command, *words], cwd=ROOT / "tests", capture_output=True,
                              encoding="utf-8", **options)

    chosen = "--builder rotary --tokenizer letters --schedule cosine --vocab-size 60 --device cpu"
    done = run("train", str(own), "--out", model, *SMALL, *chosen.split())
    assert done.returncode == 0, done.stderr
    saved = load(model)
    assert isinstance(saved.model.encoder.layers[0].self_attention.attention, parts.Rotary)
    assert isinstance(saved.tokenizer, parts.LetterTokenizer)
    assert saved.info["training"]["schedule"] == "cosine"
    text = "the cat sees a dog .\n\na dog sleeps .\n"
    done = run("translate", "--model", model, "--device", "cpu", input=text)
    assert done.stdout.splitlines() == saved.translate(text.splitlines(), beam=1), done.stderr
    assert run("shout", "--text", "hear", "--marks", "3").stdout == "HEAR!!!\n"
    assert cli.main(["--help"]) == 0 and "  shout " in capsys.readouterr().out
    for name in ("nowhere", "./nowhere"):
        with pytest.raises(SystemExit):
            cli.main(["--plugin", name, "shout"])
        assert f"plugin {name} cannot be imported (No module named" in capsys.readouterr().err
