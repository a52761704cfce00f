"""The training loop against independent loops, on tiny corpora."""

import copy
import json
import math
import os
import shutil
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from helpers import one_thread, state
from small_runs import PAIRS, QUICK, tiny
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from annotated.data.batches import Batch, as_arrays, gather
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
    forward_backward,
    rehearse,
    train,
    train_on,
    updates_in,
    validation_loss,
)
from annotated.training.schedule import noam_rate

TEXTS = [("the dog sleeps .", "der Hund schläft ."), ("a cat sleeps .", "eine Katze schläft ."),
         ("the cat sees a dog .", "die Katze sieht einen Hund ."),
         ("a dog sees the cat .", "ein Hund sieht die Katze .")]

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def batch_stream(pairs, max_tokens, seed=0):
    """The batches of the loader, padded by the plain way."""
    for _, indices in BatchLoader(pairs, TrainingConfig(max_tokens=max_tokens, seed=seed)).whole_batches():
        yield Batch.collate([pairs[i] for i in indices])


def naive_nll(model, source, target):
    """Summed negative log-likelihood of one pair, computed token by token without batch, padding or mask."""
    total, x = 0.0, torch.tensor([[*source, END]])
    for t, wanted in enumerate([*target, END]):
        logits = model(x, torch.tensor([[BEGIN, *target[:t]]]))[0, -1]
        total = total - logits.log_softmax(-1)[wanted]
    return total


def test_defaults_are_the_papers_base_run():
    config = TrainingConfig()
    assert (config.steps, config.max_tokens, config.warmup, config.factor) == (100_000, 25_000, 4000, 1.0)
    assert (config.label_smoothing, config.precision) == (0.1, "fp32")
    big = loop.PRESETS["big"]
    assert big[0] == TransformerConfig.big() and big[1].steps == 300_000
    assert loop.PRESETS["base"][0] == TransformerConfig.base()
    assert loop.PRESETS["base"][1] == config


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


def test_encode_pairs_agrees_with_encode():
    tokenizer = WordTokenizer.fit(TEXTS)
    expected = [(tokenizer.encode(source, "en"), tokenizer.encode(target, "de")) for source, target in TEXTS]
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


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_gradients_of_the_parts_of_a_batch_add_up_to_that_of_the_whole(parts):
    batch, model, arrays, indices = Batch.collate(PAIRS), tiny().double(), as_arrays(PAIRS), np.arange(len(PAIRS))
    other, total = copy.deepcopy(model), LabelSmoothingLoss(0.1, reduction="sum")
    whole = LabelSmoothingLoss(0.1)(other(batch.source, batch.target_in), batch.target_out)
    whole.backward()
    loss = sum(forward_backward(model, [gather(arrays, indices, part, parts)], batch.tokens, total) for part in range(parts))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() < 1e-9
    assert loss.item() == pytest.approx(whole.item(), abs=1e-9)


def test_accumulation_changes_neither_updates_nor_rates():
    one, three, log = tiny().double(), tiny().double(), []
    for model, accumulate in ((one, 1), (three, 3)):
        log.append(train(model, PAIRS, PAIRS, replace(QUICK, accumulate=accumulate), show_progress=False))
    assert (state(one) - state(three)).abs().max() < 1e-9
    assert [row["rate"] for row in log[0]] == [row["rate"] for row in log[1]]
    assert [row["train_loss"] for row in log[0]] == pytest.approx([row["train_loss"] for row in log[1]], abs=1e-9)


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
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: 1.0)
    model, taken = poisoned(), []
    advance = run_state.RunState.advance
    monkeypatch.setattr(run_state.RunState, "advance", lambda run, *given: (taken.append(run.optimizer), advance(run, *given))[1])
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
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: 1.0)
    config, logs, weights = replace(QUICK, steps=16, max_tokens=6, validate_every=11), [], []
    for every in (1, 3):
        monkeypatch.setattr(run_state, "READ_EVERY", {"cpu": every})
        model = poisoned()
        logs.append(train(model, PAIRS, PAIRS, config, show_progress=False))
        weights.append(state(model))
    assert logs[0] == logs[1] and any(row.get("skipped") for row in logs[0]) and torch.equal(*weights)
    always, told = [([9, 4], [5, 6])] * 3, []
    for every in (1, 3):
        monkeypatch.setattr(run_state, "READ_EVERY", {"cpu": every})
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
    monkeypatch.setattr(loop, "validation_loss", lambda *_, **__: 1.0)
    with Waits() as asked:
        assert bool(torch.ones(1)) and asked.count == 1
        counts = []
        real = loop.forward_backward
        monkeypatch.setattr(loop, "forward_backward", lambda *given: (counts.append(asked.count), real(*given))[1])
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


@pytest.mark.parametrize("multiple, pairs", [(1, PAIRS), (8, PAIRS), (8, [([5] * 4, [6] * 4)] * 3 + [([5] * 15, [6])])])
def test_largest_batch_runs_first_and_leaves_no_trace(multiple, pairs, monkeypatch):
    """The last pairs: one of 16 tokens is more than three of 5, which take the more memory as three of 8."""
    monkeypatch.setattr(loader, "PAD_TO_MULTIPLE", {"cpu": multiple})
    monkeypatch.setattr(loop, "PAD_TO_MULTIPLE", {"cpu": multiple})
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


def test_pairs_on_the_disk_train_as_the_list_does(tmp_path):
    tokenizer = WordTokenizer.fit(TEXTS)
    disk = write_encoded(TEXTS, tokenizer, tmp_path / "encoded")
    memory, logs = encode_pairs(TEXTS, tokenizer), []
    config = TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2)
    for pairs in (memory, disk):
        torch.manual_seed(0)
        logs.append(train(Transformer(config), pairs, pairs, replace(QUICK, steps=9), show_progress=False))
    assert isinstance(disk, EncodedPairs) and logs[0] == logs[1] and len(logs[0]) == 5


def test_starting_does_not_read_the_pairs_on_the_disk(tmp_path, monkeypatch):
    tokenizer = WordTokenizer.fit(TEXTS)
    disk = write_encoded(TEXTS * 200, tokenizer, tmp_path / "one")
    read, real = [], gather
    monkeypatch.setattr(EncodedPairs, "__getitem__", lambda self, index: pytest.fail("a pair by itself"))
    for module in (loader, loop):
        monkeypatch.setattr(module, "gather", lambda pairs, indices, *part: read.extend(indices) or real(pairs, indices, *part))
    model = Transformer(TransformerConfig(len(tokenizer), N=1, d_model=16, d_ff=16, h=2))
    log = train(model, disk, encode_pairs(TEXTS[:1], tokenizer), replace(QUICK, steps=1), False, tmp_path / "run", tokenizer)
    assert len(log) == 1 and 0 < len(read) < 20, "four steps of at most 16 tokens, three of them ahead, and one pair to validate"


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
    ends = []
    for seed in (0, 0, 1):
        barely = replace(QUICK, steps=1, factor=1e-9, seed=seed)
        ends.append(state(train_on(corpus(), tokenizer, config, barely, show_progress=False)[0]))
    assert torch.equal(ends[0], ends[1]) and (ends[0] - ends[2]).abs().max() > 0.01


def test_presets_of_the_book_give_at_most_a_million_parameters():
    model = Transformer(replace(loop.PRESETS["toy"][0], vocab_size=1000))  # more types than the corpus has
    assert sum(weight.numel() for weight in model.parameters()) <= 1_000_000


def test_another_padding_than_that_of_the_batches_is_refused():
    with pytest.raises(ValueError, match="pad_id=3: give 0, which batches have"):
        train(tiny(pad_id=3), PAIRS, PAIRS, QUICK, show_progress=False)


@pytest.mark.parametrize("per_update, taken", [(0.01, 1000), (0.1, 1000), (0.2, 750), (0.25, 600), (1.0, 400), (30.0, 400)])
def test_a_slow_machine_takes_as_many_updates_as_fit_but_not_too_few(monkeypatch, per_update, taken):
    clock, made = [100.0], []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])

    def run(updates):
        made.append(updates)
        clock[0] += updates * per_update

    assert updates_in(150, 1000, run, least=0.4) == taken and made == [20]
