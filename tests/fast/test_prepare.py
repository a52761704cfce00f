"""Prepared parts against the plain ones: each alone, whole models, and what undoing gives back."""

import copy
import math
import operator
import os
import sys

import pytest
import torch
from helpers import EXACT, disturbed, examples, inputs, random_model, roundoff, run_python
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from annotated.data.batches import pad
from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import BEGIN, END
from annotated.fast import prepare as fast
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.fast.prepare import FusedAttention, JoinedAttention, SixteenBitDropout, prepare, undo
from annotated.model.attention import DotProductAttention
from annotated.model.multi_head import MultiHeadAttention
from annotated.model.positional import PositionalEncoding
from annotated.training.checkpoints import book_model
from annotated.training.label_smoothing import LabelSmoothingLoss
from annotated.translation.search import translate


def tiny(vocab_size=12, seed=0, **changes):
    """A random model in double precision, in eval mode."""
    sizes = {"N": 2, "dropout": 0.4, **changes}
    return disturbed(random_model(vocab_size, seed, **sizes).double())


SOURCE = pad([[4, 5, 6, 7, END], [8, END], [9, 9, 10, END]])
TARGET = pad([[BEGIN, 5, 6], [BEGIN, 7, 8, 9, 10, 11], [BEGIN, 4, 4, 4]])
RIGHT = pad([[5, 6, END], [7, 8, 9, 10, 11, END], [4, 4, 4, END]])


def learn(model, criterion, **options):
    """The logits, the loss, and the gradients of all parameters, by name."""
    model.zero_grad()
    hidden = model.hidden(SOURCE, TARGET)
    loss = criterion.of_hidden(hidden, model.embedding.weight, RIGHT, **options)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return model(SOURCE, TARGET), loss, gradients


def kinds_of(model):
    """The class of every module, by path."""
    return {path: type(module) for path, module in model.named_modules()}


@examples(80)
@given(st.sampled_from(["none", "causal", "padding", "both", "blind"]), st.booleans(),
       st.sampled_from([(1, 1), (1, 7), (5, 5), (4, 9), (3, 300)]), st.integers(0, 10**6))
def test_fused_attention_is_attention_with_its_gradients(mask, training, lengths, seed):
    draw, (queries, keys) = torch.Generator().manual_seed(seed), lengths
    qkv = inputs((2, 3, queries, 4), (2, 3, keys, 4), (2, 3, keys, 5), seed=seed)
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    padding = torch.arange(keys) < torch.tensor([keys, max(1, keys - 2)])[:, None, None, None]
    mask = {"none": None, "causal": causal, "padding": padding, "both": causal & padding,
            "blind": torch.rand(2, 1, queries, keys, generator=draw) < 0.3}[mask]
    output, weights = FusedAttention(DotProductAttention()).train(training)(*qkv, mask)
    expected, _ = DotProductAttention()(*qkv, mask)
    assert weights is None
    torch.testing.assert_close(output, expected, **EXACT)
    outer = torch.randn(output.shape, generator=draw, dtype=torch.float64)
    grads = (torch.autograd.grad(out, qkv, outer) for out in (output, expected))
    torch.testing.assert_close(*grads, **EXACT)


@pytest.mark.parametrize("training, dtype, rows, keys, fused", [
    (True, torch.float32, 1, 5, True), (False, torch.float32, 4, 5, True),
    (False, torch.bfloat16, 3, 5, True), (False, torch.bfloat16, 4, 5, False),
    (True, torch.bfloat16, 1, 512, False), (True, torch.bfloat16, 1, 513, True)])
def test_bf16_here_takes_the_formula_for_few_keys(training, dtype, rows, keys, fused, monkeypatch):
    calls, own = [], nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(nn.functional, own.__name__,
                        lambda *arguments: calls.append(1) or own(*arguments))
    x = torch.randn(rows, 1, keys, 4, dtype=dtype)
    FusedAttention(DotProductAttention()).train(training)(x[:, :, :3], x, x)
    assert bool(calls) is fused


@examples(30)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), min_size=1, max_size=4),
       st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(1, 9))
def test_kept_positions_are_those_computed_anew(parts, dtype, d_model):
    plain = PositionalEncoding(d_model)
    kept = fast.KeptPositions(plain)
    for start, length in parts:
        x = torch.randn(2, length, d_model).to(dtype)
        assert torch.equal(kept(x, start), plain(x, start)) and kept(x, start).dtype == dtype
    table = kept.table
    kept(x, start)
    assert kept.table is table, "made anew although it holds all"
    kept(x.to("meta"))
    kept(x)
    assert len(kept.table) == len(table), "it grows with each change of the device"


def test_a_joined_product_in_training_has_the_gradients_of_three():
    torch.manual_seed(0)
    plain, x = MultiHeadAttention(16, 2, d_k=3, d_v=5), torch.randn(2, 4, 16, requires_grad=True)
    leaves, grads, outer, calls = [x, *plain.parameters()], [], torch.randn(2, 4, 16), []
    plain.W_Q.register_forward_hook(lambda *_: calls.append(1))
    for layer in (JoinedAttention(plain).train(), plain):
        with torch.autocast("cpu", torch.bfloat16):
            grads.append(torch.autograd.grad(layer(x, x, x), leaves, outer))
    assert calls == [1], "the first way made no product of W_Q alone"
    for ours, expected in zip(*grads, strict=True):  # ten roundings in a row to bf16
        assert (ours - expected).norm() <= roundoff(torch.bfloat16, 10) * expected.norm()
    assert torch.equal(JoinedAttention(plain).train()(x, x, x), plain(x, x, x))
    assert calls == [1] * 3, "without autocast three products are made"
    y = torch.randn(2, 4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        for inputs in ((x, y, y), (x, x, y), (x, y, x)):  # nor of several inputs
            assert torch.equal(JoinedAttention(plain).train()(*inputs), plain(*inputs))


@pytest.mark.parametrize("outside", ["subclass", "bias", "pruned"])
def test_layers_from_outside_are_not_read_past(outside):
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny(dropout=0.0)
    for layer in (module for module in model.modules() if isinstance(module, MultiHeadAttention)):
        kind = Twice if outside == "subclass" else nn.Linear
        layer.W_V = kind(16, 16, bias=outside == "bias").double()
        if outside == "pruned":  # its weight is computed from another one at each call
            prune.identity(layer.W_V, "weight").weight_orig.data *= 2
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():  # double precision stays as it is
        ours = prepare(model.train())(SOURCE, TARGET)
        torch.testing.assert_close(ours, undo(model)(SOURCE, TARGET), **EXACT)


@examples(15)
@given(st.floats(0.01, 0.95), st.integers(0, 10**6),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_sixteen_bit_dropout_is_dropout(p, seed, dtype):
    torch.manual_seed(seed)
    x = (torch.rand(300, 1001) + 0.5).to(dtype).requires_grad_()  # no multiple of four
    outer, rate = torch.randn_like(x), round(p * 65536) / 65536
    y = SixteenBitDropout(nn.Dropout(p))(x)
    gone = y == 0
    assert y.dtype == dtype and y.shape == x.shape
    assert abs(gone.double().mean().item() - rate) < 5 * math.sqrt(rate * (1 - rate) / x.numel())
    scale = torch.tensor(65536 / (65536 - round(p * 65536)), dtype=torch.float64).to(dtype)
    assert torch.equal(y[~gone], (x * scale)[~gone])
    (slope,) = torch.autograd.grad(y, x, outer)
    assert torch.equal(slope, torch.where(gone, torch.zeros_like(outer), outer * scale))


def test_sixteen_bit_dropout_draws_independently():
    def drawn():
        dropped = SixteenBitDropout(nn.Dropout(0.3))(torch.ones(1000, 1000)) == 0
        return dropped.double().flatten() - 0.3

    torch.manual_seed(0)
    gone, again = drawn(), drawn()
    lags = 1, 2, 3, 4, 5, 8, 1000  # neighbours share a 64-bit word; none knows of the other
    for one, other in ((gone, again), *((gone[:-lag], gone[lag:]) for lag in lags)):
        assert abs((one * other).mean() / 0.21) < 0.005  # five standard errors
    torch.manual_seed(0)
    assert torch.equal(gone, drawn())


@pytest.mark.parametrize(("p", "rows", "training"), [
    (0.3, 100, True), (1.0, 1000, True), (0.3, 1000, False)])
def test_elsewhere_sixteen_bit_dropout_is_pytorchs(p, rows, training):
    x, outputs = torch.randn(rows, 1000), []
    for layer in (nn.Dropout(p), SixteenBitDropout(nn.Dropout(p))):
        torch.manual_seed(0)
        outputs.append(layer.train(training)(x))
    assert torch.equal(*outputs)


whole = pytest.mark.parametrize("norm_first, positions", [(False, "sinusoidal"), (True, "learned")])


@whole
@pytest.mark.parametrize("training", [True, False])
def test_a_prepared_model_is_the_plain_one_with_its_gradients_and_dropout(
        norm_first, positions, training):
    """In double precision, with padding on both sides; small tensors keep PyTorch's draws."""
    model = tiny(norm_first=norm_first, positions=positions, attention_dropout=0.2,
                 feed_forward_dropout=0.3).train(training)
    torch.manual_seed(5)
    expected = learn(model, LabelSmoothingLoss(0.1))
    torch.manual_seed(5)
    torch.testing.assert_close(learn(prepare(model), ChunkedLoss(0.1), chunk=4), expected, **EXACT)


def modes_of(model):
    return {path: module.training for path, module in model.named_modules()}


@whole
def test_every_plain_part_is_replaced_and_undo_gives_back_the_first_model(norm_first, positions):
    model, calls = tiny(norm_first=norm_first, positions=positions), []
    model.encoder.layers[0].train()  # modes of many kinds
    model.decoder.layers[1].residual[0].dropout.train()
    model.decoder.layers[0].residual[1].register_forward_hook(lambda *_: calls.append("before"))
    modules, modes, parameters = dict(model.named_modules()), modes_of(model), [*model.parameters()]
    changed = {DotProductAttention: FusedAttention, MultiHeadAttention: JoinedAttention,
               PositionalEncoding: fast.KeptPositions, nn.Dropout: SixteenBitDropout}
    kinds = {path: changed.get(kind, kind) for path, kind in kinds_of(model).items()}
    torch.manual_seed(0)
    expected = model(SOURCE, TARGET)
    for _ in range(2):
        assert kinds_of(prepare(model)) == kinds and modes_of(model) == modes
        assert all(map(operator.is_, model.parameters(), parameters))
    model(SOURCE, TARGET)
    assert undo(model) is model and undo(model) is model
    assert dict(model.named_modules()) == modules and modes_of(model) == modes
    torch.manual_seed(0)
    assert torch.equal(model(SOURCE, TARGET), expected) and calls == ["before"] * 3


@pytest.mark.parametrize("after", [undo, prepare])
def test_what_has_changed_meanwhile_outlasts_the_prepared_parts(after):
    model, calls = prepare(tiny().train()), []
    assert model.encoder.layers[0].residual[0].dropout.p == 0.4
    model.eval()
    model.encoder.layers[0].residual[1].dropout.train()
    layer = model.decoder.layers[0].self_attention
    layer.attention = own = DotProductAttention(0.25)
    layer.W_Q = mine = type("Mine", (nn.Linear,), {})(16, 16, bias=False).double()
    model.decoder.layers[1].residual[0].dropout.p = 0.125
    model.decoder.register_forward_hook(lambda *_: calls.append("forward"))
    model.encoder.layers[1].self_attention.register_full_backward_hook(
        lambda *_: calls.append("backward"))
    after(model)
    training = {path for path, module in model.named_modules() if module.training}
    layer = "decoder.layers.0.self_attention"
    assert training == {"encoder.layers.0.residual.1.dropout", f"{layer}.attention", f"{layer}.W_Q"}
    layer = model.decoder.layers[0].self_attention
    assert layer.W_Q is mine and getattr(layer.attention, "plain", layer.attention) is own
    assert model.decoder.layers[1].residual[0].dropout.p == 0.125
    undo(model)
    assert not any(isinstance(module, fast.PreparedPart) for module in model.modules())
    model(SOURCE, TARGET).sum().backward()
    assert calls == ["forward", "backward"]


def test_prepared_models_can_be_copied():
    model = prepare(tiny())
    copied = copy.deepcopy(model)
    for _ in range(2):
        assert torch.equal(copied(SOURCE, TARGET), model(SOURCE, TARGET))
        assert kinds_of(copied) == kinds_of(model)
        undo(copied), undo(model)
    copied.embedding.weight.data.zero_()
    assert model(SOURCE, TARGET).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_book_s_model_translates_alike_when_prepared(dtype):
    saved = book_model()
    plain, sentences = copy.deepcopy(saved.model).to(dtype), load_corpus("toy").test[:100]
    expected, ours = ([translate([source for source, _ in sentences], model, saved.tokenizer,
                                 beam=beam) for beam in (1, 4)]
                      for model in (plain, prepare(copy.deepcopy(plain))))
    assert ours == expected and len(set(expected[0])) > 90


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted on Linux")
def test_kept_memory_is_not_mapped_again_and_is_given_back_on_request():
    program = """
import ctypes, resource, torch
from annotated.fast.prepare import give_memory_back, keep_memory
torch.set_num_threads(1)
PR_SET_THP_DISABLE = 41  # a transparent huge page would count as one fault
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(20_000_000)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults * resource.getpagesize()
# freed blocks must grow together until one fits, the more of them the less the heap has been used
plain, could, first, later, full = faults(4), keep_memory(), faults(12), faults(4), resident()
print(plain, could, later, full - resident(), give_memory_back(), full - resident())
"""
    changes = "MALLOC", "LD_PRELOAD", "GLIBC"
    environment = {k: value for k, value in os.environ.items() if not k.startswith(changes)}
    plain, could, later, before, could_give, after = run_python(program, env=environment).split()
    if could != "True":
        pytest.skip("the C library here has no mallopt")
    assert int(plain) > 4 * 78e6 > int(later) / 0.6  # bytes; four times 80 MB
    assert could_give == "True" and int(before) < 1e6 and int(after) > 60e6


def test_without_such_a_c_library_memory_is_left_alone(monkeypatch):
    monkeypatch.setattr(fast, "_c_function", lambda name: None)
    assert (fast.keep_memory(), fast.give_memory_back()) == (False, False)
