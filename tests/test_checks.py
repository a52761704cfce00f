"""Page 66: the checks of learning and translating, stubs, and what `check` prints."""

import inspect
import json
import math
import re

import jaxtyping
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from wrong_parts import LEARNING, MODEL, changed, library_part, rows

from annotated import checks
from annotated.checks import CHECKS, PAGES, check, exercises, fault
from annotated.data.batches import Batch
from annotated.data.tokenizers import BEGIN, END, PAD
from annotated.model.masking import causal_mask
from annotated.training.loop import evaluating
from notebooks import pages

ANSWERS = {name: judge.args[0] for name, judge in exercises().items()}

@pytest.mark.parametrize("name", CHECKS)
def test_the_library_s_part_passes_its_check(name):
    assert fault(name, library_part(name)) is None


@pytest.mark.parametrize("name, old, new, words", rows(MODEL | LEARNING))
def test_a_mistake_gets_the_sentence_that_names_it(name, old, new, words):
    told = fault(name, changed(name, old, new))
    assert told is not None and words in told


def test_more_than_two_hundred_mistakes_are_tried_and_some_for_every_part():
    assert len(rows(MODEL | LEARNING)) > 200 and (MODEL | LEARNING).keys() == CHECKS.keys()


# Right solutions that look different


class SmoothedByPyTorch(nn.CrossEntropyLoss):
    def __init__(self, smoothing=0.1, pad_id=0, reduction="mean"):
        if not 0 <= smoothing < 1:
            raise ValueError("smoothing")
        super().__init__(ignore_index=pad_id, reduction=reduction, label_smoothing=smoothing)

    def forward(self, logits, target):
        return super().forward(logits.flatten(0, -2), target.flatten())

    def of_hidden(self, hidden, weight, target):
        return self(F.linear(hidden, weight), target)


def rate(step, d_model, warmup, factor=1.0):
    if step < 1:
        raise ValueError("steps are counted from 1")
    peak = factor / math.sqrt(d_model * warmup)
    return peak * (step / warmup if step < warmup else math.sqrt(warmup / step))


def plain_training(model, train_pairs, valid_pairs, config, show_progress=True, **_):
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    batch, log = Batch.collate(train_pairs), []
    options = {"ignore_index": 0, "label_smoothing": config.label_smoothing}
    for step in range(1, config.steps + 1):
        adam.param_groups[0]["lr"] = rate(step, model.config.d_model, config.warmup, config.factor)
        adam.zero_grad()
        logits = model.train()(batch.source, batch.target_in)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.target_out.flatten(), **options)
        loss.backward()
        adam.step()
        log.append({"step": step, "train_loss": loss.item(), "valid_loss": 0.0})
    model.eval()
    return log


def beam_alone(model, source, beam=4, alpha=0.6, extra=50, n_best=1, **_):
    """The plain beam of page 18, sentence by sentence."""
    found = []
    with evaluating(model):
        for row in source:
            row, hypotheses = row[row != PAD], [([BEGIN], 0.0, 0.0)]
            most = len(row) + extra
            while any(ids[-1] != END and len(ids) <= most for ids, *_ in hypotheses):
                kept = []
                for ids, log_p, score in hypotheses:
                    if ids[-1] == END or len(ids) > most:
                        kept.append((ids, log_p, score))
                        continue
                    p = model(row[None], torch.tensor([ids]))[0, -1].log_softmax(-1).tolist()
                    kept += [([*ids, k], log_p + p[k], (log_p + p[k]) / ((5 + len(ids)) / 6)**alpha)
                             for k in range(END, len(p))]
                hypotheses = sorted(kept, key=lambda one: -one[2])[:beam]
            found.append([([i for i in ids[1:] if i != END], score)
                          for ids, _, score in hypotheses[:n_best]])
    return found


def beam_of_one(model, source, extra=50, steps=None):
    return [ids for ((ids, _),) in beam_alone(model, source, 1, 0.0, extra)]


@pytest.mark.parametrize("name, part", [
    ("LabelSmoothingLoss", SmoothedByPyTorch), ("noam_rate", rate), ("train", plain_training),
    ("greedy_decode", beam_of_one), ("beam_search", beam_alone)])  # fmt: skip
def test_another_right_solution_passes(name, part):
    assert fault(name, part) is None


# Exercises of the pages


def test_every_exercise_of_the_workbook_s_pages_has_a_check():
    asked = []
    for path in pages(PAGES):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(one["source"]) for one in cells if one["cell_type"] == "markdown")
        text = text.partition("## Exercises")[2].partition("### Solutions")[0]
        asked += [f"{path.name[:2]}, exercise {n}" for n in re.findall(r"^(\d)\. ", text, re.M)]
    assert list(ANSWERS) == asked and len(asked) > 30


@pytest.mark.parametrize("name, right", ANSWERS.items())
def test_right_answers_pass_and_a_wrong_or_missing_one_is_named(name, right):
    assert fault(name, right) is None and right
    for asked, answer in right.items():
        wrong = not answer if isinstance(answer, bool) else 1.1 * answer + 0.01
        assert fault(name, right | {asked: wrong}).startswith(f"`{asked}` is not {wrong}: compute")
        for given in (right | {asked: ...}, {key: right[key] for key in right.keys() - {asked}}):
            assert fault(name, given).startswith(f"`{asked}` is still empty: write a number")
    assert "is still empty: write a number" in fault(name, None)


def test_an_answer_may_be_rounded_or_a_tensor_and_words_are_none():
    for fewer in (7_077_888, 7.1e6, torch.tensor(7_077_888)):
        assert fault("02, exercise 2", {"parameters fewer": fewer}) is None
    told = fault("02, exercise 2", {"parameters fewer": "seven million"})
    assert told == "`parameters fewer` is 'seven million': write a number, True or False"


def test_there_are_no_exercises_without_the_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "CHECKOUT", tmp_path)
    assert exercises.__wrapped__() == {}
    with pytest.raises(ValueError, match="no check for '09, exercise 1': give one of masked"):
        fault("09, exercise 1", {})


# Stubs


def test_one_method_that_is_empty_is_named():
    module = inspect.getmodule(library_part("MultiHeadAttention"))
    space, code = dict(vars(module)), inspect.getsource(library_part("MultiHeadAttention"))
    exec(code.replace("return x.unflatten(-1, (self.h, -1)).transpose(1, 2)", "..."), space)
    assert "`MultiHeadAttention.split` is still empty" in fault(
        "MultiHeadAttention", space["MultiHeadAttention"])
    exec(f"{code}\n    def causal(self):\n        return False\n", space)  # short, yet not empty
    assert fault("MultiHeadAttention", space["MultiHeadAttention"]) is None


# What is printed, and what stays as it was


def test_check_prints_one_line_and_takes_the_notebook_s_definition(capsys, monkeypatch):
    check("causal_mask", causal_mask)
    import __main__

    monkeypatch.setattr(__main__, "causal_mask", lambda length, device=None: torch.ones(
        length, length).triu() > 0, raising=False)
    check("causal_mask")
    check("padding_mask")
    check("02, exercise 2", {"parameters fewer": 7_077_888})
    right, wrong, missing, answer = capsys.readouterr().out.splitlines()
    assert answer == "✓ 02, exercise 2 is right"
    assert right == "✓ causal_mask is right"
    assert wrong.startswith("✗ causal_mask: it is turned round")
    assert "there is no padding_mask yet" in missing
    with pytest.raises(ValueError, match="no check for 'attention': give one of masked_softmax"):
        check("attention")


def test_a_check_leaves_random_numbers_and_shape_checks_as_they_were(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fault("scaled_dot_product_attention", library_part("scaled_dot_product_attention"))
    assert torch.equal(torch.get_rng_state(), before)
    assert jaxtyping.config.jaxtyping_disable is False
