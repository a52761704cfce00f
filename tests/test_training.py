"""The training loop against independent loops; the book's model and the command line on tiny corpora."""

import copy
import errno
import hashlib
import json
import math
import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import fields, replace
from itertools import chain, islice, repeat
from types import SimpleNamespace

import pytest
import torch
from helpers import one_thread
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from annotated import batches, checkpoints, runs, training
from annotated.batches import Batch, EncodedPairs, write_encoded
from annotated.checkpoints import MANIFEST, load_checkpoint
from annotated.chunked_loss import ChunkedLoss
from annotated.corpora import Corpus, load_corpus
from annotated.fast import SixteenBitDropout, prepare
from annotated.files import read_json_lines
from annotated.regularization import LabelSmoothingLoss
from annotated.runs import INTERRUPTED, run_checkpoints
from annotated.schedule import noam_rate
from annotated.tokens import BEGIN, END, PAD, WordTokenizer
from annotated.training import (
    TrainingConfig,
    backward_shard,
    book_model,
    encode_pairs,
    evaluating,
    index_stream,
    rehearse,
    shard,
    train,
    train_on,
    validation_loss,
)
from annotated.transformer import Transformer, TransformerConfig

PAIRS = [([4, 5, 6], [7, 8]), ([9], [10, 11, 12, 13]), ([5, 4, 9, 6, 14], [13, 7, 15]), ([14, 14], [8, 8, 10]),
         ([6], [15])]
TEXTS = [("the dog sleeps .", "der Hund schläft ."), ("a cat sleeps .", "eine Katze schläft ."),
         ("the cat sees a dog .", "die Katze sieht einen Hund ."),
         ("a dog sees the cat .", "ein Hund sieht die Katze .")]
QUICK = TrainingConfig(steps=6, max_tokens=16, warmup=3, factor=0.3, validate_every=2)


pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    return Transformer(TransformerConfig(16, **{"N": 1, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.0, **changes}))


def state(model):
    return torch.cat([weight.flatten() for weight in model.state_dict().values()])


def batch_stream(pairs, max_tokens, seed=0):
    """The batches of `index_stream`, padded."""
    for _, indices in index_stream(pairs, max_tokens, seed):
        yield Batch.collate([pairs[i] for i in indices])


def naive_nll(model, source, target):
    """Summed negative log-likelihood of one pair, computed token by token without batch, padding or mask."""
    total, x = 0.0, torch.tensor([[*source, END]])
    for t, wanted in enumerate([*target, END]):
        logits = model(x, torch.tensor([[BEGIN, *target[:t]]]))[0, -1]
        total = total - logits.log_softmax(-1)[wanted]
    return total


# The configuration

def test_defaults_are_the_papers_base_run():
    config = TrainingConfig()
    assert (config.steps, config.max_tokens, config.warmup, config.factor) == (100_000, 25_000, 4000, 1.0)
    assert (config.label_smoothing, config.precision) == (0.1, "fp32")
    big = training.PRESETS["big"]
    assert big[0] == TransformerConfig.big() and big[1].steps == 300_000
    assert training.PRESETS["base"][0] == TransformerConfig.base()
    assert training.PRESETS["base"][1] == config


@pytest.mark.parametrize("change, message", [
    ({"steps": 0}, "steps=0.*at least 1"), ({"steps": 1.5}, r"steps=1\.5.*whole number"), ({"warmup": 0}, "warmup=0"),
    ({"max_tokens": -1}, "max_tokens=-1"), ({"validate_every": True}, "validate_every=True"),
    ({"seed": -1}, "seed=-1.*at least 0"), ({"factor": 0.0}, r"factor=0\.0.*above 0"),
    ({"factor": math.nan}, "factor=nan"), ({"factor": math.inf}, "factor=inf"),
    ({"accumulate": 0}, "accumulate=0"), ({"save_every": 0}, "save_every=0"), ({"keep_last": 0}, "keep_last=0"),
    ({"label_smoothing": 1.0}, r"label_smoothing=1\.0"), ({"clip": -1.0}, r"clip=-1\.0.*0 for no bound"),
    ({"clip": math.inf}, "clip=inf"), ({"clip": math.nan}, "clip=nan"), ({"precision": "fp16"}, "precision='fp16'.*'fp32' or 'bf16'"),
    ({"patience": -1}, "patience=-1.*at least 0"),
])
def test_bad_configuration_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**change)


# Pairs and batches

def test_encode_pairs_agrees_with_encode():
    tokenizer = WordTokenizer.fit(TEXTS)
    expected = [(tokenizer.encode(source, "en"), tokenizer.encode(target, "de")) for source, target in TEXTS]
    assert encode_pairs(TEXTS, tokenizer) == expected and encode_pairs([], tokenizer) == []
    turned = [pair[::-1] for pair in TEXTS]
    assert encode_pairs(turned, tokenizer, "de", "en") == [pair[::-1] for pair in expected]
    with pytest.raises(ValueError, match="language is 'fr'"):
        encode_pairs(TEXTS, tokenizer, "fr", "de")


def content(batch):
    """The pairs of a batch, padding and special tokens removed."""
    return [(tuple(i for i in x if i > END), tuple(i for i in y if i > END))
            for x, y in zip(batch.source.tolist(), batch.target_out.tolist(), strict=True)]


def test_stream_covers_every_pair_once_an_epoch():
    pairs = [([4 + i] * (i % 5 + 1), [4 + i] * (i % 3 + 1)) for i in range(12)]
    wanted = Counter((tuple(source), tuple(target)) for source, target in pairs)
    stream, orders = batch_stream(pairs, max_tokens=12, seed=3), []
    for _ in range(4):
        epoch = []
        while len(epoch) < len(pairs):
            batch = next(stream)
            assert max(batch.source.numel(), batch.target_out.numel()) <= 12
            epoch += content(batch)
        assert Counter(epoch) == wanted
        orders.append(epoch)
    assert len({tuple(order) for order in orders}) == 4, "epochs in the same order"


def test_stream_depends_on_the_seed_alone():
    pairs = [([4 + i] * 2, [4 + i] * 2) for i in range(20)]
    take = {seed: [content(batch) for batch in islice(batch_stream(pairs, 9, seed), 20)] for seed in (0, 1)}
    assert take[0] == [content(batch) for batch in islice(batch_stream(pairs, 9, 0), 20)] and take[0] != take[1]


# Evaluating

def test_evaluating_restores_each_mode_even_after_an_error():
    model = tiny(dropout=0.5).train()
    model.encoder.eval()  # somebody froze a part
    modes = [module.training for module in model.modules()]
    with pytest.raises(KeyError), evaluating(model) as same:
        assert same is model and not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        raise KeyError
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()


def test_validation_loss_is_brute_force_whatever_the_batches():
    model = tiny(dropout=0.5).double().train()
    with torch.no_grad():
        model.eval()
        total = sum(naive_nll(model, *pair) for pair in PAIRS).item()
        model.train()
    expected = total / sum(len(target) + 1 for _, target in PAIRS)
    for max_tokens in (6, 10, 13, 4096):  # 6: one pair a batch
        assert abs(validation_loss(model, PAIRS, max_tokens) - expected) < 1e-9
        assert model.training
    assert abs(validation_loss(model.eval(), PAIRS) - expected) < 1e-9 and not model.training


def test_validation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one pair"):
        validation_loss(tiny(), [])


# The loop

def reference_train(model, pairs, config):
    """The loop once more: PyTorch's Adam and cross entropy, the rate's formula, sums divided by tokens by hand."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    for step, batch in enumerate(islice(batch_stream(pairs, config.max_tokens, config.seed), config.steps), start=1):
        optimizer.param_groups[0]["lr"] = noam_rate(step, model.config.d_model, config.warmup, config.factor)
        total, tokens = 0.0, 0
        for source, target_in, target_out in zip(batch.source, batch.target_in, batch.target_out, strict=True):
            real = int((target_out != PAD).sum())  # one sentence at a time, without its padding
            logits = model(source[source != PAD][None], target_in[None, :real])[0]
            smoothing = config.label_smoothing
            total = total + F.cross_entropy(logits, target_out[:real], label_smoothing=smoothing, reduction="sum")
            tokens += real
        optimizer.zero_grad()
        (total / tokens).backward()
        optimizer.step()


def test_training_equals_an_independent_loop():
    model = tiny().double()
    other = copy.deepcopy(model)
    train(model, PAIRS, PAIRS, QUICK, show_progress=False)
    reference_train(other, PAIRS, QUICK)
    assert (state(model) - state(tiny().double())).abs().max() > 1e-2, "nothing was trained"
    assert (state(model) - state(other)).abs().max() < 1e-9


def test_gradient_of_a_step_is_a_mean_over_tokens():
    config = replace(QUICK, steps=1, max_tokens=4096, label_smoothing=0.0)  # one batch, sentences of unequal length
    model = tiny().double()
    other = copy.deepcopy(model)
    train(model, PAIRS, PAIRS, config, show_progress=False)
    (sum(naive_nll(other, *pair) for pair in PAIRS) / sum(len(target) + 1 for _, target in PAIRS)).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() < 1e-9  # `train` leaves the gradient of its last step


def test_a_handful_of_pairs_is_learned_by_heart():
    model = tiny(seed=1)
    config = TrainingConfig(steps=80, max_tokens=64, warmup=20, factor=0.2, label_smoothing=0.0, validate_every=80)
    log = train(model, PAIRS, PAIRS, config, show_progress=False)
    assert log[-1]["valid_loss"] < 0.03 and log[-1]["train_loss"] > log[-1]["valid_loss"]


def test_same_seed_same_weights():
    def weights(seed, draws):
        model = tiny(dropout=0.3)
        torch.rand(draws)  # the generator's state before does not matter
        train(model, PAIRS, PAIRS, replace(QUICK, seed=seed), show_progress=False)
        return state(model)

    assert torch.equal(weights(0, draws=1), weights(0, draws=2))
    assert not torch.equal(weights(0, draws=1), weights(1, draws=1))


def test_log_tells_rate_tokens_and_losses():
    model = tiny()
    log = train(model, PAIRS, PAIRS[:2], replace(QUICK, steps=5), show_progress=False)
    assert [row["step"] for row in log] == [2, 4, 5], "every second step, and the last"
    assert [row["rate"] for row in log] == [noam_rate(k, 16, QUICK.warmup, QUICK.factor) for k in (2, 4, 5)]
    seen = [batch.tokens for batch in islice(batch_stream(PAIRS, QUICK.max_tokens, QUICK.seed), 5)]
    assert [row["tokens"] for row in log] == [sum(seen[:k]) for k in (2, 4, 5)]
    assert log[-1]["valid_loss"] == validation_loss(model, PAIRS[:2], QUICK.max_tokens)
    assert all(row["valid_perplexity"] == math.exp(row["valid_loss"]) for row in log)
    json.dumps(log)


def test_training_loss_is_the_mean_since_the_last_row():
    every = train(tiny(), PAIRS, PAIRS, replace(QUICK, validate_every=1), show_progress=False)
    third = train(tiny(), PAIRS, PAIRS, replace(QUICK, validate_every=3), show_progress=False)
    singles = [row["train_loss"] for row in every]
    assert [row["train_loss"] for row in third] == pytest.approx([sum(singles[:3]) / 3, sum(singles[3:]) / 3], rel=1e-6)  # sums in float32


def test_training_dropout_is_on_and_ends_in_eval_mode():
    model = tiny(dropout=0.5).eval()
    modes = []
    dropout = model.encoder.layers[0].residual[0].dropout
    hook = dropout.register_forward_hook(lambda module, *_: modes.append(module.training))
    train(model, PAIRS, PAIRS[:1], replace(QUICK, validate_every=6), show_progress=False)
    hook.remove()
    assert modes == [True] * 7 + [False], "the rehearsal and six updates with dropout, one validation without"
    assert not any(module.training for module in model.modules())


def test_bf16_rounds_the_products_but_not_the_weights():
    exact, rounded, dtypes = tiny(), tiny(), []
    train(exact, PAIRS, PAIRS, replace(QUICK, steps=3), show_progress=False)
    hook = rounded.encoder.layers[0].feed_forward.W_1.register_forward_hook(lambda _, __, out: dtypes.append(out.dtype))
    train(rounded, PAIRS, PAIRS[:1], replace(QUICK, steps=3, validate_every=9, precision="bf16"), show_progress=False)
    hook.remove()
    assert dtypes == [torch.bfloat16] * 4 + [torch.float32], "the rehearsal and three updates; validation is in fp32"
    assert all(weight.dtype == torch.float32 for weight in rounded.parameters())
    assert 0 < (state(exact) - state(rounded)).abs().max() < 0.5


def test_progress_is_shown_only_on_request(capsys):
    train(tiny(), PAIRS, PAIRS, QUICK, show_progress=False)
    assert capsys.readouterr() == ("", "")
    train(tiny(), PAIRS, PAIRS, QUICK)
    assert "valid" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train_pairs", "valid_pairs"])
def test_pairs_that_cannot_be_used_are_refused_before_the_first_step(split):
    model = tiny()
    too_long = [PAIRS[0], ([4] * 20, [5])]
    for pairs, message in (([], f"{split} is empty"), (too_long, f"{split}: pair 1 has 21 tokens.*max_tokens=16")):
        given = {"train_pairs": PAIRS, "valid_pairs": PAIRS, split: pairs}
        with pytest.raises(ValueError, match=message):
            train(model, config=QUICK, show_progress=False, **given)
    assert torch.equal(state(model), state(tiny()))


def test_a_run_that_diverges_says_so():
    with pytest.raises(ValueError, match="validation loss is .* at step .*smaller factor"):
        train(tiny(), PAIRS, PAIRS, replace(QUICK, factor=1e30), show_progress=False)


# Ranks and micro-batches

@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_shares_deal_out_a_batch(parts):
    batch = training.Batch.collate(PAIRS)
    dealt = [shard(batch, part, parts) for part in range(parts)]
    assert sum((content(one) for one in dealt if one.tokens), []) != [] and all(len(one.source) for one in dealt)
    assert Counter(pair for one in dealt if one.tokens for pair in content(one)) == Counter(content(batch))
    assert sum(one.tokens for one in dealt) == batch.tokens
    sizes = [len(one.source) for one in dealt if one.tokens]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world, accumulate", [(1, 2), (1, 7), (2, 1), (3, 2)])
def test_gradient_does_not_depend_on_ranks_and_micro_batches(world, accumulate):
    batch, criterion, model = training.Batch.collate(PAIRS), LabelSmoothingLoss(0.1, reduction="sum"), tiny().double()
    other, loss = copy.deepcopy(model), 0.0
    LabelSmoothingLoss(0.1)(other(batch.source, batch.target_in), batch.target_out).backward()
    for rank in range(world):
        config = replace(QUICK, accumulate=accumulate)
        loss += backward_shard(model, batch, criterion, config, rank, world).item()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine.grad / world - theirs.grad).abs().max() < 1e-9
    whole = LabelSmoothingLoss(0.1)(other(batch.source, batch.target_in), batch.target_out).item()
    assert loss == pytest.approx(whole, abs=1e-9)


def test_accumulation_changes_neither_updates_nor_rates():
    one, three, log = tiny().double(), tiny().double(), []
    for model, accumulate in ((one, 1), (three, 3)):
        log.append(train(model, PAIRS, PAIRS, replace(QUICK, accumulate=accumulate), show_progress=False))
    assert (state(one) - state(three)).abs().max() < 1e-9
    assert [row["rate"] for row in log[0]] == [row["rate"] for row in log[1]]
    assert [row["train_loss"] for row in log[0]] == pytest.approx([row["train_loss"] for row in log[1]], abs=1e-9)


# Faults

class Poisoned(Transformer):
    """A model whose hidden vectors are NaN for a batch that holds the source token 9, from its `healthy` + first call on."""

    healthy = 1  # the rehearsal

    def hidden(self, source, target):
        self.healthy -= self.training
        return super().hidden(source, target) * (math.nan if self.healthy < 0 and (source == 9).any() else 1)


def poisoned():
    torch.manual_seed(0)
    return Poisoned(tiny().config)


def test_gradients_that_are_not_finite_are_skipped_and_logged(monkeypatch):
    monkeypatch.setattr(training, "validation_loss", lambda *_, **__: 1.0)
    model, taken = poisoned(), []
    steps = runs.enter
    monkeypatch.setattr(runs, "enter", lambda run, arrived: (taken.append(run.optimizer), steps(run, arrived))[1])
    log = train(model, PAIRS, PAIRS, replace(QUICK, max_tokens=6), show_progress=False)  # one pair a batch
    skipped = [entry for row in log for entry in row.get("skipped", [])]
    assert skipped and all(9 in PAIRS[i][0] for entry in skipped for i in entry["pairs"])
    stream = islice(batch_stream(PAIRS, 6, QUICK.seed), 6)
    assert [entry["step"] for entry in skipped] == [k for k, batch in enumerate(stream, 1) if (batch.source == 9).any()]
    assert state(model).isfinite().all() and all(math.isfinite(row["train_loss"]) for row in log)
    counted = {entry["step"].item() for entry in taken[-1].state.values()}
    assert counted == {6 - len(skipped)}, "Adam counts the updates"
    assert log[-1]["rate"] == noam_rate(6, 16, QUICK.warmup, QUICK.factor), "the schedule counts the steps"


def test_too_many_such_steps_in_a_row_end_the_run():
    always = [([9, 4], [5, 6])] * 3
    message = r"gradients of 4 steps in a row are not finite, the last at step 4 with training pairs \["
    with pytest.raises(ValueError, match=message):
        train(poisoned(), always, PAIRS, replace(QUICK, max_skipped=4, validate_every=6), show_progress=False)


def test_what_a_step_skipped_is_learned_late_and_named_as_it_was(monkeypatch):
    """On a GPU the numbers of a step come rounds later; here rounds of 3 steps."""
    monkeypatch.setattr(training, "validation_loss", lambda *_, **__: 1.0)
    config, logs, weights = replace(QUICK, steps=16, max_tokens=6, validate_every=11), [], []
    for every in (1, 3):
        monkeypatch.setattr(runs, "READ_EVERY", {"cpu": every})
        model = poisoned()
        logs.append(train(model, PAIRS, PAIRS, config, show_progress=False))
        weights.append(state(model))
    assert logs[0] == logs[1] and any(row.get("skipped") for row in logs[0]) and torch.equal(*weights)
    always, told = [([9, 4], [5, 6])] * 3, []
    for every in (1, 3):
        monkeypatch.setattr(runs, "READ_EVERY", {"cpu": every})
        with pytest.raises(ValueError, match=r"gradients of 4 steps in a row are not finite, the last at step 4 with") as error:
            train(poisoned(), always, PAIRS, replace(QUICK, steps=30, max_skipped=4, validate_every=30), show_progress=False)
        told.append(str(error.value))
    assert told[0] == told[1]


class Waits(TorchDispatchMode):
    """Counts where a number of a tensor is asked for: there the host waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        boolean = function is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default)
        self.count += boolean or function in waits
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"clip": 0.5}, {"precision": "bf16"}])
def test_the_host_waits_for_nothing_in_a_step(changes, monkeypatch):
    monkeypatch.setattr(training, "validation_loss", lambda *_, **__: 1.0)
    with Waits() as asked:
        assert bool(torch.ones(1)) and asked.count == 1
        counts = []
        real = training.backward_parts
        monkeypatch.setattr(training, "backward_parts", lambda *given: (counts.append(asked.count), real(*given))[1])
        train(tiny(dropout=0.1), PAIRS, PAIRS, replace(QUICK, steps=9, validate_every=9, **changes), show_progress=False)
    assert len(counts) == 10 and counts[-1] == counts[0], "between the rehearsal and the last step nothing is asked for"


@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_a_long_gradient_is_shortened_and_its_norm_logged(clip, monkeypatch):
    norms, steps = [], torch.optim.Adam.step
    model, other = tiny().double(), tiny().double()
    config = replace(QUICK, validate_every=3)
    log = train(model, PAIRS, PAIRS, replace(config, clip=clip), show_progress=False)

    def clipped(optimizer, *given):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(weights, clip).item())
        return steps(optimizer, *given)

    monkeypatch.setattr(torch.optim.Adam, "step", clipped)
    reference_train(other, PAIRS, config)
    # The clipping of PyTorch divides by the norm + 1e-6, a share of 3e-6 of a step at most, since no norm is below 0.3.
    assert (state(model) - state(other)).abs().max() < 1e-5 < (state(model) - state(tiny().double())).abs().max()
    assert [row["gradient_norm"] for row in log] == pytest.approx([sum(norms[:3]) / 3, sum(norms[3:]) / 3], rel=1e-6)
    assert min(norms) > 0.3


LOSSES = [5.0, 4.0, 4.5, 3.0, 3.5, 3.0, 3.2, 3.1, 2.0]  # lowest in row 4; equal is not lower


@pytest.mark.parametrize("patience, rows", [(0, 9), (1, 3), (2, 6), (4, 8), (5, 9)])
def test_a_training_ends_when_the_validation_loss_stands_still(patience, rows, tmp_path, monkeypatch):
    asked = iter(LOSSES)
    monkeypatch.setattr(training, "validation_loss", lambda *_, **__: next(asked))
    config = replace(QUICK, steps=18, save_every=18, patience=patience)
    log = train(tiny(), PAIRS, PAIRS, config, show_progress=False, run_folder=tmp_path)
    assert [row["valid_loss"] for row in log] == LOSSES[:rows] and log[-1]["step"] == 2 * rows
    assert [path.name for path in run_checkpoints(tmp_path)] == [f"step-{2 * rows:08}"]
    again = train(tiny(), PAIRS, PAIRS, config, show_progress=False, run_folder=tmp_path)
    assert again == log, "a run that has ended ends again at once"
    more = train(tiny(), PAIRS, PAIRS, replace(config, patience=9), show_progress=False, run_folder=tmp_path)
    assert [row["valid_loss"] for row in more] == LOSSES, "with more patience it goes on"


@pytest.mark.parametrize("multiple, pairs", [(1, PAIRS), (8, PAIRS), (8, [([5] * 4, [6] * 4)] * 3 + [([5] * 15, [6])])])
def test_largest_batch_runs_first_and_leaves_no_trace(multiple, pairs, monkeypatch):
    """The last pairs: one of 16 tokens is more than three of 5, which take the more memory as three of 8."""
    monkeypatch.setattr(runs, "MULTIPLE", {"cpu": multiple})
    model, sizes = tiny(dropout=0.3), []
    hook = model.encoder.register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[:2]))
    train(model, pairs, pairs[:1], replace(QUICK, steps=20, validate_every=20), show_progress=False)
    hook.remove()
    needs = [shape.numel() * (16 + shape[1]) for shape in sizes]
    assert needs[0] == max(needs)
    assert not any(shape[1] % multiple for shape in sizes[:-1]), "the last is of the validation"
    torch.manual_seed(3)
    rehearse(model.train(), PAIRS, LabelSmoothingLoss(reduction="sum"), QUICK)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), drawn) and all(weight.grad is None for weight in model.parameters())


def test_too_little_memory_is_named_before_the_first_update(monkeypatch):
    model = tiny()

    def full(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(model, "hidden", full)
    with pytest.raises(MemoryError, match="largest batch, .* pairs of up to 5 tokens, does not .*smaller max_tokens"):
        train(model, PAIRS, PAIRS, QUICK, show_progress=False)
    monkeypatch.setattr(model, "hidden", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, PAIRS, PAIRS, QUICK, show_progress=False)


def test_report_gets_every_row_with_the_speed():
    told = []
    log = train(tiny(), PAIRS, PAIRS, QUICK, show_progress=False, report=told.append)
    assert all(row.pop("tokens_per_second") > 0 for row in told) and told == log and len(log) == 3


def test_compile_is_asked_for_only_on_request(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward) or forward)
    train(tiny(), PAIRS, PAIRS, QUICK, show_progress=False)
    assert compiled == []
    model = tiny()
    train(model, PAIRS, PAIRS, replace(QUICK, compile=True), show_progress=False)
    layers = [*model.encoder.layers, *model.decoder.layers]
    assert [forward.__self__ for forward in compiled] == layers and list(model.state_dict()) == list(tiny().state_dict())
    assert all("forward" not in vars(layer) for layer in layers), "what comes after the training is not compiled"


@pytest.mark.long  # the compiler takes a minute
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_compiled_model_gives_the_same_losses(unenforced):  # the checker is not for compiled code
    quick = replace(QUICK, validate_every=1)
    torch.compiler.reset()
    eager, fused = tiny(), tiny()
    logs = [train(model, PAIRS, PAIRS, replace(quick, compile=model is fused), False) for model in (eager, fused)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    for name in ("train_loss", "valid_loss"):
        # float32: fused sums go in another order, some 100 roundings of a loss near 3 and less in each step's gradient.
        assert [row[name] for row in logs[1]] == pytest.approx([row[name] for row in logs[0]], abs=1e-5)
    assert (state(eager) - state(fused)).abs().max() < 1e-3 < (state(eager) - state(tiny())).abs().max()


@pytest.mark.long
def test_one_compiled_layer_serves_all_of_its_kind(unenforced, monkeypatch):
    compiling, counters = torch.compile, torch._dynamo.utils.counters
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiling(forward, backend="eager", **options))
    graphs = []
    for layers in (1, 3):
        torch.compiler.reset()
        counters.clear()
        train(tiny(N=layers), PAIRS, PAIRS, replace(QUICK, compile=True), False)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0, "deeper stacks are compiled anew"


def test_speed_is_real_target_tokens_a_second(monkeypatch, capsys):
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=chain([100.0], repeat(104.0)).__next__))
    told = []
    log = train(tiny(), PAIRS, PAIRS[:1], QUICK, report=told.append)
    assert [row["tokens_per_second"] for row in told] == [row["tokens"] / 4 for row in log]
    batches = islice(batch_stream(PAIRS, QUICK.max_tokens, QUICK.seed), QUICK.steps)
    seen = sum(i != PAD for batch in batches for row in batch.target_out.tolist() for i in row)
    assert f"{seen / 4:,.0f} tokens/s, train" in capsys.readouterr().err


# Corpora on the disk

def encoded(folder, texts=TEXTS):
    """Texts as pairs on the disk, and their tokenizer."""
    tokenizer = WordTokenizer.fit(TEXTS)
    return write_encoded(texts, tokenizer, folder), tokenizer


def test_pairs_on_the_disk_train_as_the_list_does(tmp_path):
    disk, tokenizer = encoded(tmp_path / "encoded")
    memory, logs = encode_pairs(TEXTS, tokenizer), []
    config = TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2)
    for pairs in (memory, disk):
        torch.manual_seed(0)
        logs.append(train(Transformer(config), pairs, pairs, replace(QUICK, steps=9), show_progress=False))
    assert isinstance(disk, EncodedPairs) and logs[0] == logs[1] and len(logs[0]) == 5


def test_other_pairs_on_the_disk_are_another_corpus(tmp_path):
    disk, tokenizer = encoded(tmp_path / "one")
    other, _ = encoded(tmp_path / "other", [*TEXTS[:3], TEXTS[0]])

    def go(pairs, steps):
        model = Transformer(TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2))
        return train(model, pairs, disk, replace(LONG, steps=steps), False, tmp_path / "run", tokenizer)

    assert len(go(disk, 4)) == 2 and len(go(disk, 8)) == 4
    with pytest.raises(ValueError, match="another corpus"):
        go(other, 12)


def test_what_does_not_fit_is_named_for_pairs_on_the_disk(tmp_path):
    disk, tokenizer = encoded(tmp_path / "one")
    longest = max(max(len(source), len(target)) for source, target in disk) + 1
    first = [max(len(source), len(target)) + 1 for source, target in disk].index(longest)
    model = Transformer(TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2))
    with pytest.raises(ValueError, match=f"train_pairs: pair {first} has {longest} tokens.*max_tokens={longest - 1}"):
        train(model, disk, disk, replace(QUICK, max_tokens=longest - 1), False)


def test_starting_does_not_read_the_pairs_on_the_disk(tmp_path, monkeypatch):
    disk, tokenizer = encoded(tmp_path / "one", TEXTS * 200)
    read, real = [], batches.gather
    monkeypatch.setattr(EncodedPairs, "__getitem__", lambda self, index: pytest.fail("a pair by itself"))
    monkeypatch.setattr(batches, "gather", lambda pairs, indices, *part: read.extend(indices) or real(pairs, indices, *part))
    model = Transformer(TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2))
    log = train(model, disk, encode_pairs(TEXTS[:1], tokenizer), replace(LONG, steps=1), False, tmp_path / "run", tokenizer)
    assert len(log) == 1 and 0 < len(read) < 10, "one step of at most 16 tokens in two parts, and one pair to validate"


# Long runs

LONG = replace(QUICK, steps=12, save_every=3, keep_last=2, accumulate=2)


def digests(folder):
    """What identifies the last checkpoint of a run: weights, optimiser, random numbers, log."""
    return json.loads((run_checkpoints(folder)[-1] / MANIFEST).read_text())["files"]


def run(folder, seed=0, config=LONG, pairs=PAIRS, hook=None, **changes):
    """Train a small model with dropout in a run folder; the model that goes on starts with other weights."""
    model = tiny(seed, dropout=0.3, **changes)
    if hook is not None:
        model.encoder.register_forward_pre_hook(hook)
    return train(model, pairs, PAIRS[:2], config, show_progress=False, run_folder=folder), model


def interrupt(after):
    """A hook that sends SIGTERM to this process at its forward pass number `after`."""
    calls = []
    return lambda *_: (calls.append(1), len(calls) == after and os.kill(os.getpid(), signal.SIGTERM))[0]


@pytest.fixture
def undisturbed(tmp_path):
    log, model = run(tmp_path / "undisturbed")
    return digests(tmp_path / "undisturbed"), log, state(model)


def test_sigterm_saves_and_the_run_goes_on_bit_for_bit(undisturbed, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:  # in step 4: the rehearsal, two micro-batches a step, two validation batches
        run(tmp_path / "run", hook=interrupt(after=1 + 2 * 3 + 2 + 1))
    assert stopped.value.code == INTERRUPTED == 75 and signal.getsignal(signal.SIGTERM) is before
    assert [path.name[-2:] for path in run_checkpoints(tmp_path / "run")] == ["03", "04"], "not saved at the next step"
    log, model = run(tmp_path / "run", seed=5)
    assert digests(tmp_path / "run") == undisturbed[0] and log == undisturbed[1]
    assert torch.equal(state(model), undisturbed[2])
    assert run(tmp_path / "run", seed=6)[0] == log, "a finished run is not trained on"


def test_the_log_of_a_run_that_broke_off_has_each_validation_once_in_the_end(tmp_path):
    def break_off(*_):
        calls.append(1)
        if len(calls) == 1 + 2 * 4 + 2 * 2 + 1:  # in step 5: the rehearsal, two parts a step, two batches each of two validations
            raise KeyboardInterrupt

    calls, config, kept = [], replace(LONG, validate_every=2), tmp_path / "run" / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", hook=break_off, config=config)
    assert [path.name[-2:] for path in run_checkpoints(tmp_path / "run")] == ["03"], "step 4 comes again"
    assert [row["step"] for row in read_json_lines(kept)] == [2, 4], "while the run goes, one can see how it goes"
    log, _ = run(tmp_path / "run", seed=5, config=config)
    assert read_json_lines(kept) == log and [row["step"] for row in log] == [2, 4, 6, 8, 10, 12]


def test_run_folder_changes_nothing_and_keeps_the_last(undisturbed, tmp_path):
    model = tiny(dropout=0.3)
    log = train(model, PAIRS, PAIRS[:2], LONG, show_progress=False)
    assert log == undisturbed[1] and torch.equal(state(model), undisturbed[2])
    assert [path.name for path in run_checkpoints(tmp_path / "undisturbed")] == ["step-00000009", "step-00000012"]
    assert torch.equal(state(load_checkpoint(tmp_path / "undisturbed" / "step-00000012").model), undisturbed[2])


def test_sigterm_is_heard_late_where_numbers_are_read_late(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "READ_EVERY", {"cpu": 2})
    config = replace(LONG, save_every=100, validate_every=12)
    with pytest.raises(SystemExit) as stopped:  # in step 4; the round of steps 3 and 4 comes with that of 5 and 6
        run(tmp_path / "run", hook=interrupt(after=1 + 2 * 3 + 1), config=config)
    assert stopped.value.code == INTERRUPTED and [path.name[-2:] for path in run_checkpoints(tmp_path / "run")] == ["06"]
    log, model = run(tmp_path / "run", seed=5, config=config)
    assert log[-1]["valid_loss"] == undisturbed[1][-1]["valid_loss"] and torch.equal(state(model), undisturbed[2])


def test_what_sigterm_wrote_stays_out_of_the_average_and_is_removed(tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path / "run", hook=interrupt(after=1 + 2 * 3 + 2 + 1))
    assert [path.name[-2:] for path in run_checkpoints(tmp_path / "run", scheduled=True)] == ["03"]
    run(tmp_path / "run", config=replace(LONG, steps=7))
    assert [path.name[-2:] for path in run_checkpoints(tmp_path / "run")] == ["06", "07"] == \
           [path.name[-2:] for path in run_checkpoints(tmp_path / "run", scheduled=True)]


def as_of_an_earlier_version(folder):
    """Take from a training checkpoint what earlier versions did not write, in place."""
    progress, info = json.loads((folder / "progress.json").read_text()), json.loads((folder / "info.json").read_text())
    del progress["place"], progress["norms"], info["scheduled"]
    for row in progress["log"]:
        del row["gradient_norm"]
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, value in (("progress.json", progress), ("info.json", info)):
        (folder / name).write_text(json.dumps(value))
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("earlier", [False, True])
def test_going_on_begins_in_its_epoch_or_where_an_earlier_version_would_have(undisturbed, tmp_path, monkeypatch, earlier):
    run(tmp_path / "run", config=replace(LONG, steps=9))
    last = run_checkpoints(tmp_path / "run")[-1]
    place = json.loads((last / "progress.json").read_text())["place"]
    if earlier:
        as_of_an_earlier_version(last)
    cut, real = [], batches.epoch_batches
    monkeypatch.setattr(batches, "epoch_batches", lambda pairs, size, seed, **rest: (cut.append(seed), real(pairs, size, seed, **rest))[1])
    log, model = run(tmp_path / "run", seed=5)
    assert torch.equal(state(model), undisturbed[2]) and log[-1]["valid_loss"] == undisturbed[1][-1]["valid_loss"]
    assert cut[0] == ((0, 0) if earlier else (0, place[0])) and place[0] > 1, "replayed, or not begun where it stopped"
    assert json.loads((run_checkpoints(tmp_path / "run")[-1] / "progress.json").read_text())["place"] == \
           json.loads((run_checkpoints(tmp_path / "undisturbed")[-1] / "progress.json").read_text())["place"]


def test_a_run_does_not_go_on_from_weights_alone(tmp_path):
    run(tmp_path / "run", config=replace(LONG, keep_last=4))
    for folder in run_checkpoints(tmp_path / "run")[-2:]:
        (folder / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="none of its 4 checkpoints is whole .step-00000006, step-00000003 lack the optimiser"):
        run(tmp_path / "run", config=replace(LONG, keep_last=4, steps=14))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "progress.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_damaged_checkpoint_is_named_and_the_one_before_it_is_used(undisturbed, tmp_path, capsys, name, damage):
    run(tmp_path / "run", config=replace(LONG, steps=6))
    file = run_checkpoints(tmp_path / "run")[-1] / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.unlink() if damage == "missing" else file.write_bytes(data if damage == "flipped" else data[:-7])
    log, model = run(tmp_path / "run", seed=5)
    told = capsys.readouterr().err
    assert "step-00000006" in told and (name in told or name == "manifest.json") and "damaged-step-00000006" in told
    assert digests(tmp_path / "run") == undisturbed[0] and log == undisturbed[1]
    assert len(list((tmp_path / "run").glob("damaged-*"))) == 1, "put aside, not deleted"


def test_run_without_a_whole_checkpoint_is_refused(tmp_path):
    run(tmp_path / "run", config=replace(LONG, steps=6))
    for folder in run_checkpoints(tmp_path / "run"):
        (folder / "progress.json").unlink()
    with pytest.raises(ValueError, match="none of its 2 checkpoints is whole"):
        run(tmp_path / "run")


def test_another_vocabulary_configuration_or_corpus_is_refused_by_name(tmp_path):
    words = WordTokenizer.fit(TEXTS)
    train(Transformer(TransformerConfig(len(words), N=1, d_model=16, d_ff=32, h=2)), PAIRS[:2], PAIRS[:1], LONG, False,
          tmp_path / "words", words)
    others = WordTokenizer.fit([("a", "b"), *TEXTS])
    with pytest.raises(ValueError, match="step-00000012 was made with another vocabulary"):
        train(Transformer(TransformerConfig(len(others), N=1, d_model=16, d_ff=32, h=2)), PAIRS[:2], PAIRS[:1], LONG,
              False, tmp_path / "words", others)
    run(tmp_path / "run")
    longer = replace(LONG, steps=14, save_every=5)
    with pytest.raises(ValueError, match="another model .d_ff was 32 and is now 64"):
        run(tmp_path / "run", config=longer, d_ff=64)
    with pytest.raises(ValueError, match="another training configuration .warmup was 3 and is now 4"):
        run(tmp_path / "run", config=replace(longer, warmup=4))
    with pytest.raises(ValueError, match="another corpus"):
        run(tmp_path / "run", config=longer, pairs=PAIRS[:4])
    assert [row["step"] for row in run(tmp_path / "run", config=longer)[0]] == [2, 4, 6, 8, 10, 12, 14]


def test_every_number_that_decides_a_run_must_be_the_same_when_it_goes_on(tmp_path):
    run(tmp_path / "run")
    free = {"steps": 14, "save_every": 5, "keep_last": 3, "max_skipped": 2, "patience": 9}
    other = {"max_tokens": 32, "accumulate": 1, "warmup": 4, "factor": 0.4, "label_smoothing": 0.2, "validate_every": 3,
             "precision": "bf16", "compile": True, "seed": 1, "clip": 2.0}
    assert free.keys() | other.keys() == {field.name for field in fields(TrainingConfig)}
    for name, value in other.items():
        with pytest.raises(ValueError, match=f"made with another training configuration .{name} was .* and is now {value!r}"):
            run(tmp_path / "run", config=replace(LONG, steps=14, **{name: value}))
    assert run(tmp_path / "run", config=replace(LONG, **free))[0][-1]["step"] == 14


def test_full_disk_leaves_the_checkpoint_before_intact(undisturbed, tmp_path, monkeypatch):
    real, writes = checkpoints.save_file, []

    def full(tensors, path):
        writes.append(path)
        if len(writes) == 4:  # the optimiser of the second checkpoint
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["log.jsonl", "step-00000003"]
    assert run(tmp_path / "run", seed=5)[0] == undisturbed[1] and digests(tmp_path / "run") == undisturbed[0]


def test_training_goes_on_while_a_checkpoint_is_written_and_its_error_ends_the_run(tmp_path, monkeypatch):
    passes, seen, real = [], [], checkpoints.save_file

    def slow(tensors, path):
        before, deadline = len(passes), time.time() + 20
        while len(passes) == before and time.time() < deadline:  # until the loop goes on
            time.sleep(0.001)
        seen.append(len(passes) - before)
        real(tensors, path)
        if len(seen) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", slow)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path / "run", config=replace(LONG, steps=40, save_every=10, validate_every=40),
            hook=lambda *_: (passes.append(1), time.sleep(0.005))[0])
    assert seen[0] > 0, "the loop stood still"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000010"]


# From a corpus to the book's model

def corpus(train_pairs=TEXTS, valid=TEXTS[:2]):
    return Corpus("toy", "en", "de", list(train_pairs), list(valid), TEXTS[:1])


def test_train_on_names_the_split_that_is_too_small():
    tokenizer = WordTokenizer.fit(TEXTS)
    config = TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2)
    with pytest.raises(ValueError, match=r"corpus toy: train has 1 pair\(s\), expected 2 or more"):
        train_on(corpus(TEXTS[:1]), tokenizer, config, QUICK, show_progress=False)
    with pytest.raises(ValueError, match=r"corpus toy: valid has 0 pair\(s\)"):
        train_on(corpus(valid=[]), tokenizer, config, QUICK, show_progress=False)


def test_seed_decides_the_first_weights_too():
    tokenizer = WordTokenizer.fit(TEXTS)
    config = TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2)
    runs = []
    for seed in (0, 0, 1):
        barely = replace(QUICK, steps=1, factor=1e-9, seed=seed)
        runs.append(state(train_on(corpus(), tokenizer, config, barely, show_progress=False)[0]))
    assert torch.equal(runs[0], runs[1]) and (runs[0] - runs[2]).abs().max() > 0.01


def test_the_books_model_comes_with_the_package_for_single_precision():
    saved, (sizes, config) = book_model(), training.PRESETS["toy"]
    assert {weight.dtype for weight in saved.model.state_dict().values()} == {torch.float32} and not saved.model.training
    assert saved.model.config == replace(sizes, vocab_size=len(saved.tokenizer)) and TrainingConfig(**saved.info["training"]) == config
    assert saved.tokenizer.as_dict() == WordTokenizer.fit(load_corpus("toy").train).as_dict()


def test_presets_of_the_book_give_at_most_a_million_parameters():
    model = Transformer(replace(training.PRESETS["toy"][0], vocab_size=1000))  # more types than the corpus has
    assert sum(weight.numel() for weight in model.parameters()) <= 1_000_000


def test_every_process_has_random_numbers_of_its_own_and_the_first_those_of_one_alone(monkeypatch):
    drawn = []
    for rank in range(4):
        monkeypatch.setattr(runs, "ranks", lambda rank=rank: (rank, 4))
        training.Run(tiny(), QUICK, (PAIRS, PAIRS[:2]))
        drawn.append(torch.rand(8).tolist())
    torch.manual_seed(QUICK.seed)
    assert drawn[0] == torch.rand(8).tolist() and len(set(map(tuple, drawn))) == 4


def test_going_on_with_other_processes_repeats_no_random_numbers(monkeypatch, tmp_path):
    """Neither those the run began with nor those of another process."""
    _, model = run(tmp_path / "run", config=replace(LONG, steps=3))
    drawn = []
    for rank in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(runs, "ranks", lambda rank=rank: (rank, 3))
            going_on = training.Run(tiny(seed=5, dropout=0.3), LONG, (PAIRS, PAIRS[:2]), tmp_path / "run")
        drawn.append(torch.rand(8).tolist())
        training.resume(going_on)
        drawn.append(torch.rand(8).tolist())
        assert going_on.progress["step"] == 3 and torch.equal(state(going_on.model), state(model))
    assert len(set(map(tuple, drawn))) == 6


def test_a_prepared_model_draws_sixteen_bits_for_dropout_and_goes_on_with_the_same_masks(tmp_path):
    wide = {"d_model": 256, "d_ff": 16, "dropout": 0.3}  # 64 pairs of 9 tokens are more numbers than PyTorch's own way is kept for
    pairs = [([3 + i % 12] * 8, [3 + (i * 5) % 12] * 8) for i in range(64)]
    config = TrainingConfig(steps=2, max_tokens=576, warmup=2, validate_every=2, save_every=1)
    losses = []
    for folder, stops in (("whole", (2,)), ("parts", (1, 2))):
        for steps in stops:
            torch.manual_seed(0)
            model = prepare(tiny(**wide))
            log = train(model, pairs, pairs[:2], replace(config, steps=steps), False, tmp_path / folder, loss=ChunkedLoss)
        assert {type(m) for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {SixteenBitDropout}
        losses.append((log[-1]["valid_loss"], model.embedding.weight.detach().clone()))
    assert losses[0][0] == losses[1][0] and torch.equal(losses[0][1], losses[1][1])


def test_another_padding_than_that_of_the_batches_is_refused():
    with pytest.raises(ValueError, match="pad_id=3: give 0, which batches have"):
        train(tiny(pad_id=3), PAIRS, PAIRS, QUICK, show_progress=False)


def test_a_run_folder_on_one_rank_only_is_a_difference(monkeypatch, tmp_path):
    told = []

    def seen(facts):
        told.append(facts)
        raise KeyError

    monkeypatch.setattr(runs, "ranks", lambda: (0, 2))
    monkeypatch.setattr(runs, "check_agreement", seen)
    for folder in (None, tmp_path / "run"):
        with pytest.raises(KeyError):
            train(tiny(), PAIRS, PAIRS, QUICK, show_progress=False, run_folder=folder)
    assert runs.first_difference(*told) == ("run folder", "run folder", False, True)
