"""The training loop against independent loops, on tiny corpora."""

import copy
import json
import math
import os
import shutil
from dataclasses import replace
from itertools import islice

import pytest
import torch
from helpers import TEXTS, one_thread, state
from small_runs import PAIRS, QUICK, tiny
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from annotated.data.batches import Batch, gather
from annotated.data.corpora import Corpus
from annotated.data.prepared import EncodedPairs, write_encoded
from annotated.data.tokenizers import BEGIN, END, PAD, WordTokenizer
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training import loader, loop, run_state
from annotated.training.label_smoothing import LabelSmoothingLoss
from annotated.training.loader import BatchLoader
from annotated.training.loop import (
    TrainingConfig,
    encode_pairs,
    evaluating,
    rehearse,
    train,
    train_on,
    updates_in,
    validation_loss,
)
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


def sizes(tokenizer):
    return TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2)


def naive_nll(model, source, target):
    """Summed negative log-likelihood of one pair, token by token: no batch, padding or mask."""
    total, x = 0.0, torch.tensor([[*source, END]])
    for t, wanted in enumerate([*target, END]):
        logits = model(x, torch.tensor([[BEGIN, *target[:t]]]))[0, -1]
        total = total - logits.log_softmax(-1)[wanted]
    return total


def test_defaults_are_the_papers_base_run():
    config = TrainingConfig()
    assert (config.steps, config.max_tokens, config.warmup) == (100_000, 25_000, 4000)
    assert (config.factor, config.label_smoothing, config.precision) == (1.0, 0.1, "fp32")
    big = loop.PRESETS["big"]
    assert big[0] == TransformerConfig.big() and big[1].steps == 300_000
    assert loop.PRESETS["base"][0] == TransformerConfig.base()
    assert loop.PRESETS["base"][1] == config


@pytest.mark.parametrize("change, message", [
    ({"steps": 0}, "steps=0.*at least 1"), ({"steps": 1.5}, r"steps=1\.5.*whole number"),
    ({"validate_every": True}, "validate_every=True"), ({"seed": -1}, "seed=-1.*at least 0"),
    ({"factor": 0.0}, r"factor=0\.0.*above 0"), ({"factor": math.nan}, "factor=nan"),
    ({"label_smoothing": 1.0}, r"label_smoothing=1\.0"), ({"clip": math.inf}, "clip=inf"),
    ({"clip": -1.0}, r"clip=-1\.0.*0 for no bound"), ({"patience": -1}, "patience=-1.*at least 0"),
    ({"precision": "fp16"}, "precision='fp16'.*'fp32' or 'bf16'"),
])  # fmt: skip
def test_bad_configuration_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**change)


def test_encode_pairs_agrees_with_encode():
    tokenizer = WordTokenizer.fit(TEXTS)
    expected = [(tokenizer.encode(x, "en"), tokenizer.encode(y, "de")) for x, y in TEXTS]
    assert encode_pairs(TEXTS, tokenizer) == expected and encode_pairs([], tokenizer) == []
    turned = [pair[::-1] for pair in TEXTS]
    assert encode_pairs(turned, tokenizer, "de", "en") == [pair[::-1] for pair in expected]
    with pytest.raises(ValueError, match="language is 'fr'"):
        encode_pairs(TEXTS, tokenizer, "fr", "de")


def test_evaluating_restores_each_mode_even_after_an_error():
    model = tiny(dropout=0.5).train()
    model.encoder.eval()  # somebody froze a part
    modes = [module.training for module in model.modules()]
    with pytest.raises(KeyError), evaluating(model) as same:
        assert same is model and not torch.is_grad_enabled()
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()


def test_validation_loss_is_brute_force_whatever_the_batches():
    model = tiny(dropout=0.5).double().eval()
    with torch.no_grad():
        total = sum(naive_nll(model, *pair) for pair in PAIRS).item()
    expected = total / sum(len(target) + 1 for _, target in PAIRS)
    for max_tokens in (6, 10, 13, 4096):  # 6: one pair a batch
        assert abs(validation_loss(model.train(), PAIRS, max_tokens) - expected) < 1e-9
    with pytest.raises(ValueError, match="at least one pair"):
        validation_loss(tiny(), [])


def reference_train(model, pairs, config):
    """The loop once more: PyTorch's Adam and cross entropy, and sums divided by tokens by hand."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
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
        optimizer.step()


def test_training_equals_an_independent_loop():
    model = tiny().double()
    other = copy.deepcopy(model)
    trained(model)
    reference_train(other, PAIRS, QUICK)
    assert (state(model) - state(tiny().double())).abs().max() > 1e-2, "nothing was trained"
    assert (state(model) - state(other)).abs().max() < 1e-9


def test_log_tells_rate_tokens_and_losses():
    model = tiny()
    log, steps = trained(model, valid=PAIRS[:2], steps=5), (2, 4, 5)  # every second, and the last
    assert [row["step"] for row in log] == [*steps]
    rates = [noam_rate(k, 16, QUICK.warmup, QUICK.factor) for k in steps]
    assert [row["rate"] for row in log] == rates
    seen = [batch.tokens for batch in islice(batch_stream(PAIRS, QUICK.max_tokens, QUICK.seed), 5)]
    assert [row["tokens"] for row in log] == [sum(seen[:k]) for k in steps]
    assert log[-1]["valid_loss"] == validation_loss(model, PAIRS[:2], QUICK.max_tokens)
    assert all(row["valid_perplexity"] == math.exp(row["valid_loss"]) for row in log)
    json.dumps(log)


def test_training_loss_is_the_mean_since_the_last_row():
    singles, thirds = ([row["train_loss"] for row in trained(tiny(), validate_every=every)]
                       for every in (1, 3))
    means = [sum(singles[:3]) / 3, sum(singles[3:]) / 3]
    assert thirds == pytest.approx(means, rel=1e-6)  # sums in float32


def test_training_dropout_is_on_and_ends_in_eval_mode():
    model = tiny(dropout=0.5).eval()
    modes = []
    dropout = model.encoder.layers[0].residual[0].dropout
    hook = dropout.register_forward_hook(lambda module, *_: modes.append(module.training))
    trained(model, valid=PAIRS[:1], validate_every=6)
    hook.remove()
    assert modes == [True] * 7 + [False], "the rehearsal and six updates, then a validation"
    assert not any(module.training for module in model.modules())


def test_bf16_rounds_the_products_but_not_the_weights():
    exact, rounded, dtypes = tiny(), tiny(), []
    trained(exact, steps=3)
    layer = rounded.encoder.layers[0].feed_forward.W_1
    hook = layer.register_forward_hook(lambda _, __, out: dtypes.append(out.dtype))
    trained(rounded, valid=PAIRS[:1], steps=3, validate_every=9, precision="bf16")
    hook.remove()
    assert dtypes == [torch.bfloat16] * 4 + [torch.float32], "validation is in fp32"
    assert all(weight.dtype == torch.float32 for weight in rounded.parameters())
    assert 0 < (state(exact) - state(rounded)).abs().max() < 0.5


@pytest.mark.parametrize("split", ["train_pairs", "valid_pairs"])
def test_pairs_that_cannot_be_used_are_refused_before_the_first_step(split):
    model = tiny()
    too_long = [PAIRS[0], ([4] * 20, [5])]
    for pairs, message in (([], f"{split} is empty"),
                           (too_long, f"{split}: pair 1 has 21 tokens.*max_tokens=16")):
        given = {"train_pairs": PAIRS, "valid_pairs": PAIRS, split: pairs}
        with pytest.raises(ValueError, match=message):
            train(model, config=QUICK, show_progress=False, **given)
    assert torch.equal(state(model), state(tiny()))


def test_a_run_that_diverges_says_so():
    with pytest.raises(ValueError, match="validation loss is .* at step .*smaller factor"):
        trained(tiny(), factor=1e30)


def test_accumulation_changes_neither_updates_nor_rates():
    whole, parts = tiny().double(), tiny().double()
    for mine, other in zip(trained(whole), trained(parts, accumulate=3), strict=True):
        assert mine["rate"] == other["rate"]
        assert mine["train_loss"] == pytest.approx(other["train_loss"], abs=1e-9)
    assert (state(whole) - state(parts)).abs().max() < 1e-9


class Poisoned(Transformer):
    """Hidden vectors are NaN for a batch with the source token 9, after `healthy` calls."""

    healthy = 1  # the rehearsal

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(tiny().config)

    def hidden(self, source, target):
        self.healthy -= self.training
        bad = self.healthy < 0 and (source == 9).any()
        return super().hidden(source, target) * (math.nan if bad else 1)


def test_gradients_that_are_not_finite_are_skipped_and_logged(monkeypatch):
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: 1.0)
    model, taken = Poisoned(), []
    advance = run_state.RunState.advance
    monkeypatch.setattr(run_state.RunState, "advance",
                        lambda run, *given: taken.append(run.optimizer) or advance(run, *given))
    log = trained(model, max_tokens=6)  # one pair a batch
    skipped = [entry for row in log for entry in row.get("skipped", [])]
    assert skipped and all(9 in PAIRS[i][0] for entry in skipped for i in entry["pairs"])
    bad = [(batch.source == 9).any() for batch in islice(batch_stream(PAIRS, 6, QUICK.seed), 6)]
    assert [entry["step"] for entry in skipped] == [k for k, is_bad in enumerate(bad, 1) if is_bad]
    assert state(model).isfinite().all() and all(math.isfinite(row["train_loss"]) for row in log)
    counted = {entry["step"].item() for entry in taken[-1].state.values()}
    assert counted == {6 - len(skipped)}, "Adam counts the updates"
    assert log[-1]["rate"] == noam_rate(6, 16, QUICK.warmup, QUICK.factor), "the rate the steps"


def test_what_a_step_skipped_is_learned_late_and_named_as_it_was(monkeypatch):
    """On a GPU the numbers of a step come rounds later; here rounds of 3 steps."""
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: 1.0)
    always, logs, weights, errors = [([9, 4], [5, 6])] * 3, [], [], []
    for every in (1, 3):
        monkeypatch.setattr(run_state, "READ_EVERY", {"cpu": every})
        model = Poisoned()
        logs.append(trained(model, steps=16, max_tokens=6, validate_every=11))
        weights.append(state(model))
        message = "gradients of 4 steps in a row are not finite, the last at step 4 with training p"
        with pytest.raises(ValueError, match=message) as error:
            trained(Poisoned(), always, steps=30, max_skipped=4, validate_every=30)
        errors.append(str(error.value))
    assert logs[0] == logs[1] and any(row.get("skipped") for row in logs[0])
    assert torch.equal(*weights) and errors[0] == errors[1]


class Waits(TorchDispatchMode):
    """Counts where a number of a tensor is asked for: there the host waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        where = args[1] if function is aten.index.Tensor else ()
        kinds = [getattr(i, "dtype", None) for i in where]
        waits = (aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default)
        self.count += torch.bool in kinds or function in waits
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"clip": 0.5}, {"precision": "bf16"}])
def test_the_host_waits_for_nothing_in_a_step(changes, monkeypatch):
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: 1.0)
    with Waits() as waits:
        assert bool(torch.ones(1)) and waits.count == 1
        counts, real = [], loop.forward_backward
        monkeypatch.setattr(loop, "forward_backward",
                            lambda *given: counts.append(waits.count) or real(*given))
        trained(tiny(dropout=0.1), steps=9, validate_every=9, **changes)
    assert len(counts) == 10 and counts[-1] == counts[0], "from the rehearsal to the last step"


@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_a_long_gradient_is_shortened_and_its_norm_logged(clip, monkeypatch):
    norms, steps = [], torch.optim.Adam.step
    model, other = tiny().double(), tiny().double()
    log = trained(model, validate_every=3, clip=clip)

    def clipped(optimizer, *given):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(weights, clip).item())
        return steps(optimizer, *given)

    monkeypatch.setattr(torch.optim.Adam, "step", clipped)
    reference_train(other, PAIRS, QUICK)
    # PyTorch divides by the norm + 1e-6: at most 3e-6 of a step, since no norm is below 0.3
    assert (state(model) - state(other)).abs().max() < 1e-5
    means = [sum(norms[:3]) / 3, sum(norms[3:]) / 3]
    assert [row["gradient_norm"] for row in log] == pytest.approx(means, rel=1e-6)
    assert min(norms) > 0.3


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
    rehearse(model.train(), PAIRS, LabelSmoothingLoss(reduction="sum"), QUICK)
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


@pytest.mark.long  # the compiler takes a minute
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_compiled_model_gives_the_same_losses(unenforced):  # the checker is not for compiled code
    torch.compiler.reset()
    eager, fused = tiny(), tiny()
    logs = [trained(model, validate_every=1, compile=model is fused) for model in (eager, fused)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    for row, other in zip(*logs, strict=True):
        for name in ("train_loss", "valid_loss"):  # some 100 roundings of a loss near 3
            assert row[name] == pytest.approx(other[name], abs=1e-5)
    assert (state(eager) - state(fused)).abs().max() < 1e-3


@pytest.mark.long
def test_one_compiled_layer_serves_all_of_its_kind(unenforced, monkeypatch):
    compiling, counters = torch.compile, torch._dynamo.utils.counters
    monkeypatch.setattr(torch, "compile",
                        lambda forward, **options: compiling(forward, backend="eager", **options))
    graphs = []
    for layers in (1, 3):
        torch.compiler.reset()
        counters.clear()
        trained(tiny(N=layers), compile=True)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0, "deeper stacks are compiled anew"


def test_pairs_on_the_disk_train_as_the_list_does(tmp_path):
    tokenizer = WordTokenizer.fit(TEXTS)
    disk = write_encoded(TEXTS, tokenizer, tmp_path / "encoded")
    memory, logs = encode_pairs(TEXTS, tokenizer), []
    for pairs in (memory, disk):
        torch.manual_seed(0)
        logs.append(trained(Transformer(sizes(tokenizer)), pairs, pairs, steps=9))
    assert isinstance(disk, EncodedPairs) and logs[0] == logs[1] and len(logs[0]) == 5


def test_starting_does_not_read_the_pairs_on_the_disk(tmp_path, monkeypatch):
    tokenizer = WordTokenizer.fit(TEXTS)
    disk = write_encoded(TEXTS * 200, tokenizer, tmp_path / "encoded")
    read, real = [], gather
    monkeypatch.setattr(EncodedPairs, "__getitem__", lambda *_: pytest.fail("a pair by itself"))
    for module in (loader, loop):
        monkeypatch.setattr(module, "gather", lambda pairs, indices, *part:
                            read.extend(indices) or real(pairs, indices, *part))
    valid, config = encode_pairs(TEXTS[:1], tokenizer), replace(QUICK, steps=1)
    model = Transformer(sizes(tokenizer))
    log = train(model, disk, valid, config, False, tmp_path / "run", tokenizer)
    assert len(log) == 1 and 0 < len(read) < 20  # four steps of at most 16 tokens


def test_train_on_names_the_split_that_is_too_small_and_seeds_the_first_weights():
    def train_it(pairs, valid, **changes):
        corpus, tokenizer = Corpus("toy", "en", "de", pairs, valid, []), WordTokenizer.fit(TEXTS)
        config = replace(QUICK, **changes)
        return state(train_on(corpus, tokenizer, sizes(tokenizer), config, show_progress=False)[0])

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

    assert updates_in(150, 1000, run, least=0.4) == taken and calls == [20]
