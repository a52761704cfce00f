"""The training loop against independent loops, on tiny corpora."""

import json
import math
import os
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
from helpers import TEXTS, one_thread, random_model, state
from small_runs import PAIRS, QUICK, Poisoned, tiny
from torch.nn import functional as F

from annotated.data.batches import Batch, gather
from annotated.data.corpora import Corpus
from annotated.data.prepared import EncodedPairs, write_encoded
from annotated.data.tokenizers import BEGIN, END, PAD, WordTokenizer
from annotated.model.transformer import TransformerConfig
from annotated.training import loader, loop, run_state
from annotated.training.callbacks import Callback
from annotated.training.checkpoints import load_checkpoint, run_checkpoints
from annotated.training.label_smoothing import LabelSmoothingLoss
from annotated.training.loader import BatchLoader
from annotated.training.loop import TrainingConfig, encode_pairs, train, train_on, validation_loss
from annotated.training.schedule import noam_rate

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def batch_stream(pairs, max_tokens, seed=0):
    """The batches of the loader, padded by the plain way."""
    loader = BatchLoader(pairs, TrainingConfig(max_tokens=max_tokens, seed=seed))
    for _, indices in loader.whole_batches():
        yield Batch.collate([pairs[i] for i in indices])


def trained(model, pairs=PAIRS, valid=PAIRS, config=QUICK, **changes):
    """The log of a training, with changes of its configuration."""
    return train(model, pairs, valid, replace(config, **changes), show_progress=False)


def test_defaults_are_the_papers_base_run():
    config = TrainingConfig()
    assert (config.steps, config.max_tokens, config.warmup) == (100_000, 25_000, 4000)
    assert (config.factor, config.label_smoothing, config.precision) == (1.0, 0.1, "fp32")
    big = loop.PRESETS["big"]
    assert big[0] == TransformerConfig.big() and big[1].steps == 300_000
    assert loop.PRESETS["base"][0] == TransformerConfig.base()
    assert loop.PRESETS["base"][1] == config


@pytest.mark.parametrize("name, value, mend", [
    ("steps", 0, "at least 1"), ("steps", 1.5, "a whole number"), ("validate_every", True, "at le"),
    ("seed", -1, "at least 0"), ("patience", -1, "at least 0"), ("factor", 0.0, "above 0"),
    ("factor", math.nan, "above 0"), ("label_smoothing", 1.0, "a number in"),
    ("clip", math.inf, "0 for no bound"), ("clip", -1.0, "0 for no bound"),
    ("precision", "fp16", "'fp32' or 'bf16'")])
def test_bad_configuration_is_refused(name, value, mend):
    with pytest.raises(ValueError, match=f"{name}={value!r} is invalid: give .*{mend}"):
        TrainingConfig(**{name: value})


def test_encode_pairs_agrees_with_encode():
    tokenizer = WordTokenizer.fit(TEXTS)
    expected = [(tokenizer.encode(x, "en"), tokenizer.encode(y, "de")) for x, y in TEXTS]
    assert encode_pairs(TEXTS, tokenizer) == expected and encode_pairs([], tokenizer) == []
    turned = [pair[::-1] for pair in TEXTS]
    assert encode_pairs(turned, tokenizer, "de", "en") == [pair[::-1] for pair in expected]
    with pytest.raises(ValueError, match="language is 'fr'"):
        encode_pairs(TEXTS, tokenizer, "fr", "de")


def test_validation_loss_is_that_of_each_pair_alone_whatever_the_batches():
    model, nats = tiny(dropout=0.5).double().eval(), 0.0
    for source, target in PAIRS:
        logits = model(torch.tensor([[*source, END]]), torch.tensor([[BEGIN, *target]]))[0]
        nats += F.cross_entropy(logits, torch.tensor([*target, END]), reduction="sum").item()
    expected = nats / sum(len(target) + 1 for _, target in PAIRS)
    for max_tokens in (6, 10, 13, 4096):  # 6: one pair a batch
        assert abs(validation_loss(model.train(), PAIRS, max_tokens) - expected) < 1e-9
    with pytest.raises(ValueError, match="at least one pair"):
        validation_loss(tiny(), [])


def reference_train(model, pairs, config):
    """The loop once more: PyTorch's Adam and cross entropy, and sums divided by tokens by hand.

    (loss, norm of the gradient, rate, tokens) of each update.
    """
    optimizer, rows = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9), []
    batches = islice(batch_stream(pairs, config.max_tokens, config.seed), config.steps)
    for step, batch in enumerate(batches, start=1):
        rate = noam_rate(step, model.config.d_model, config.warmup, config.factor)
        optimizer.param_groups[0]["lr"], total, tokens = rate, 0.0, 0
        for source, *target in zip(batch.source, batch.target_in, batch.target_out, strict=True):
            real = int((target[1] != PAD).sum())  # one sentence at a time, without its padding
            logits = model(source[source != PAD][None], target[0][None, :real])[0]
            total = total + F.cross_entropy(logits, target[1][:real], reduction="sum",
                                            label_smoothing=config.label_smoothing)
            tokens += real
        optimizer.zero_grad()
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        optimizer.step()
        rows.append((total.item() / tokens, norm.item(), rate, tokens))
    return rows


@pytest.mark.parametrize("read_every", [1, 2])  # 2: as on a GPU, numbers come rounds later
@pytest.mark.parametrize("changes", [
    {}, {"validate_every": 3}, {"accumulate": 3}, {"clip": 0.3}, {"clip": 1e9}], ids=str)
def test_training_and_its_log_equal_an_independent_loop(changes, read_every, monkeypatch):
    monkeypatch.setattr(run_state, "READ_EVERY", {"cpu": read_every})
    config = replace(QUICK, steps=5, **changes)
    model, other = tiny().double(), tiny().double()
    log, rows = trained(model, PAIRS, PAIRS[:2], config), reference_train(other, PAIRS, config)
    assert (state(model) - state(tiny().double())).abs().max() > 1e-2, "nothing was trained"
    # PyTorch clips by the norm + 1e-6: at most 3e-6 of a step, since no norm is below 0.3
    assert min(norm for _, norm, *_ in rows) > 0.3
    assert (state(model) - state(other)).abs().max() < (1e-5 if config.clip == 0.3 else 1e-9)
    steps = [step for step in range(1, 6) if step % config.validate_every == 0 or step == 5]
    for row, start, end in zip(log, [0, *steps], steps, strict=False):
        losses, norms, rates, _ = zip(*rows[start:end], strict=True)
        assert (row["step"], row["rate"]) == (end, rates[-1])
        assert row["tokens"] == sum(tokens for *_, tokens in rows[:end])
        means = sum(losses) / len(losses), sum(norms) / len(norms)
        assert (row["train_loss"], row["gradient_norm"]) == pytest.approx(means, rel=1e-5)
        assert row["valid_perplexity"] == math.exp(row["valid_loss"])
    assert len(log) == len(steps) == len(json.loads(json.dumps(log)))
    assert log[-1]["valid_loss"] == pytest.approx(validation_loss(model, PAIRS[:2]), abs=1e-9)


def test_training_has_dropout_and_bf16_and_validation_neither():
    model, seen = tiny(dropout=0.5).eval(), []
    model.encoder.layers[0].feed_forward.W_1.register_forward_hook(
        lambda layer, _, out: seen.append((layer.training, out.dtype)))
    trained(model, valid=PAIRS[:1], steps=3, validate_every=9, precision="bf16")
    # the rehearsal and three updates, then a validation
    assert seen == [(True, torch.bfloat16)] * 4 + [(False, torch.float32)]
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("split", ["train_pairs", "valid_pairs"])
def test_pairs_that_cannot_be_used_are_refused_before_the_first_step(split, monkeypatch):
    model = tiny()
    too_long = [PAIRS[0], ([4] * 20, [5])]
    for pairs, message in (([], f"{split} is empty"),
                           (too_long, f"{split}: pair 1 has 21 tokens.*max_tokens=16")):
        given = {"train_pairs": PAIRS, "valid_pairs": PAIRS, split: pairs}
        with pytest.raises(ValueError, match=message):
            train(model, config=QUICK, show_progress=False, **given)
    assert torch.equal(state(model), state(tiny()))
    with pytest.raises(ValueError, match="more than max_length=4: raise max_length"):
        train(tiny(positions="learned", max_length=4), PAIRS, PAIRS, QUICK, False)
    monkeypatch.setattr(loop, "PAD_TO_MULTIPLE", {"cpu": 8})  # as on a GPU
    with pytest.raises(ValueError, match="more than max_length=8: raise max_length"):
        train(tiny(positions="learned", max_length=15), [([4] * 9, [5])] * 2, PAIRS, QUICK, False)


def test_a_run_that_diverges_says_so():
    with pytest.raises(ValueError, match="validation loss is .* at step .*smaller factor"):
        trained(tiny(), factor=1e30)


@pytest.mark.parametrize("every", [1, 3])
def test_gradients_that_are_not_finite_are_skipped_and_logged(every, monkeypatch):
    """On a GPU the numbers of a step come rounds later; here rounds of 3 steps."""
    monkeypatch.setattr(run_state, "READ_EVERY", {"cpu": every})
    model, keep, runs = Poisoned(tiny().config), Callback(), []
    keep.on_end = runs.append
    config = replace(QUICK, steps=16, max_tokens=6, validate_every=11)  # one pair a batch
    log = train(model, PAIRS, PAIRS, config, False, callbacks=[keep])
    skipped = [entry for row in log for entry in row.get("skipped", [])]
    assert all(9 in PAIRS[i][0] for entry in skipped for i in entry["pairs"])
    bad = [(batch.source == 9).any() for batch in islice(batch_stream(PAIRS, 6, QUICK.seed), 16)]
    assert [entry["step"] for entry in skipped] == [k for k, is_bad in enumerate(bad, 1) if is_bad]
    assert state(model).isfinite().all() and all(math.isfinite(row["train_loss"]) for row in log)
    counted = {entry["step"].item() for entry in runs[0].optimizer.state.values()}
    assert counted == {16 - len(skipped)}, "Adam counts the updates"
    assert log[-1]["rate"] == noam_rate(16, 16, QUICK.warmup, QUICK.factor), "the rate the steps"
    (row,) = trained(Poisoned(tiny().config), PAIRS[1:2], steps=2, max_skipped=9, validate_every=2)
    assert row["train_loss"] is row["gradient_norm"] is None, "NaN is no JSON"
    message = "gradients of 4 steps in a row are not finite, the last at step 4 with training pairs"
    with pytest.raises(ValueError, match=message):
        trained(Poisoned(tiny().config), PAIRS[1:2], steps=30, max_skipped=4, validate_every=30)


# one of 16 tokens is more than three of 5, which take the more memory as three of 8
ROUNDED = [([5] * 4, [6] * 4)] * 3 + [([5] * 15, [6])]


@pytest.mark.parametrize("multiple, pairs", [(1, PAIRS), (8, PAIRS), (8, ROUNDED)])
def test_largest_batch_runs_first_and_leaves_no_trace(multiple, pairs, monkeypatch):
    for module in (loader, loop):
        monkeypatch.setattr(module, "PAD_TO_MULTIPLE", {"cpu": multiple})
    model, shapes = tiny(dropout=0.3), []
    hook = model.encoder.register_forward_pre_hook(lambda _, x: shapes.append(x[0].shape[:2]))
    trained(model, pairs, pairs[:1], steps=20, validate_every=20)
    hook.remove()
    needs = [shape.numel() * (16 + shape[1]) for shape in shapes]
    assert needs[0] == max(needs)
    assert not any(shape[1] % multiple for shape in shapes[:-1]), "the last is of the validation"
    torch.manual_seed(3)
    loop.rehearse(model.train(), PAIRS, LabelSmoothingLoss(reduction="sum"), QUICK)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), drawn)
    assert all(weight.grad is None for weight in model.parameters())


def test_too_little_memory_is_named_before_the_first_update(monkeypatch):
    model = tiny()

    def full(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")

    monkeypatch.setattr(model, "hidden", full)
    message = "largest batch, .* pairs of up to 5 tokens, does not .*smaller max_tokens"
    with pytest.raises(MemoryError, match=message):
        trained(model)
    monkeypatch.setattr(model, "hidden", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):  # a mistake of the model's
        trained(model)
    monkeypatch.setattr(model, "hidden", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained(model)


def test_compile_is_asked_for_only_on_request(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward) or forward)
    trained(tiny())
    assert compiled == []
    model = tiny()
    trained(model, compile=True)
    layers = [*model.encoder.layers, *model.decoder.layers]
    assert [forward.__self__ for forward in compiled] == layers
    assert list(model.state_dict()) == list(tiny().state_dict())
    assert all("forward" not in vars(layer) for layer in layers), "what comes later is not compiled"


@pytest.mark.long  # the compiler takes minutes
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_compiled_layers_give_the_same_losses_and_one_serves_all_of_its_kind(unenforced):
    graphs, counters = [], torch._dynamo.utils.counters
    for layers in (1, 3):
        torch.compiler.reset()
        counters.clear()
        eager, fused = tiny(N=layers), tiny(N=layers)
        logs = [trained(model, validate_every=1, compile=model is fused)
                for model in (eager, fused)]
        graphs.append(counters["stats"]["unique_graphs"])
        for row, other in zip(*logs, strict=True):
            for name in ("train_loss", "valid_loss"):  # some 100 roundings of a loss near 3
                assert row[name] == pytest.approx(other[name], abs=1e-5)
        assert (state(eager) - state(fused)).abs().max() < 1e-3
    assert graphs[0] == graphs[1] > 0, "deeper stacks are compiled anew"


def test_pairs_on_the_disk_train_as_the_list_does_and_few_of_them_are_read(tmp_path, monkeypatch):
    tokenizer, read, logs, real = WordTokenizer.fit(TEXTS), [], [], gather
    disk = write_encoded(TEXTS * 200, tokenizer, tmp_path / "encoded")
    memory = encode_pairs(TEXTS * 200, tokenizer)
    monkeypatch.setattr(EncodedPairs, "__getitem__", lambda *_: pytest.fail("a pair by itself"))
    for module in (loader, loop):
        monkeypatch.setattr(module, "gather", lambda pairs, indices, *part:
                            read.extend(indices) or real(pairs, indices, *part))
    for number, pairs in enumerate((memory, disk)):
        torch.manual_seed(0)
        read.clear()
        logs.append(train(random_model(len(tokenizer)), pairs, memory[:4], QUICK, False,
                          tmp_path / str(number), tokenizer))
    assert logs[0] == logs[1] and 0 < len(read) < 80
    kept = load_checkpoint(run_checkpoints(tmp_path / "1")[-1]).tokenizer
    assert kept.as_dict() == tokenizer.as_dict()


def test_train_on_names_the_split_that_is_too_small_and_seeds_the_first_weights():
    def train_it(pairs, valid, **changes):
        corpus, tokenizer = Corpus("toy", "en", "de", pairs, valid, []), WordTokenizer.fit(TEXTS)
        sizes, config = random_model(len(tokenizer)).config, replace(QUICK, **changes)
        return state(train_on(corpus, tokenizer, sizes, config, show_progress=False)[0])

    with pytest.raises(ValueError, match=r"corpus toy: train has 1 pair\(s\), expected 2 or more"):
        train_it(TEXTS[:1], TEXTS)
    with pytest.raises(ValueError, match=r"corpus toy: valid has 0 pair\(s\)"):
        train_it(TEXTS, [])
    ends = [train_it(TEXTS, TEXTS, steps=1, factor=1e-9, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(ends[0], ends[1]) and (ends[0] - ends[2]).abs().max() > 0.01


def test_another_padding_than_that_of_the_batches_is_refused():
    with pytest.raises(ValueError, match="pad_id=3: give 0, which batches have"):
        trained(tiny(pad_id=3))


@pytest.mark.parametrize("per_update, taken", [(0.1, 1000), (0.2, 750), (1.0, 400), (30.0, 400)])
def test_a_slow_machine_takes_as_many_updates_as_fit_but_enough(monkeypatch, per_update, taken):
    clock, calls = [100.0], []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])

    def run(updates):
        calls.append(updates)
        clock[0] += updates * per_update

    assert loop.updates_in(150, 1000, run, least=0.4) == taken and calls == [20]
