"""Label smoothing (section 5.4) against PyTorch and dense targets; dropout where the paper prints it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from annotated.regularization import LabelSmoothingLoss, SixteenBitDropout, sixteen_bit_dropout
from annotated.transformer import Transformer, TransformerConfig


def value_and_gradient(loss, logits):
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(2, 30),
    st.floats(0, 0.95),
    st.floats(0, 0.8),
    st.integers(0, 10**6),
    st.sampled_from(["mean", "sum"]),
    st.floats(0.1, 30),
)
def test_equal_to_cross_entropy(batch, length, vocab_size, smoothing, padded, seed, reduction, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(batch, length, vocab_size, generator=generator, dtype=torch.float64) * spread
    ).requires_grad_()
    pad_id = seed % vocab_size
    target = torch.randint(0, vocab_size, (batch, length), generator=generator)
    target[torch.rand(batch, length, generator=generator) < padded] = pad_id
    target[0, 0] = (pad_id + 1) % vocab_size  # at least one real token
    got = value_and_gradient(LabelSmoothingLoss(smoothing, pad_id, reduction)(logits, target), logits)
    expected = value_and_gradient(
        F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing, ignore_index=pad_id, reduction=reduction
        ),
        logits,
    )
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-9)


def test_equal_to_dense_targets():
    torch.manual_seed(0)
    logits, target = torch.randn(5, 9, dtype=torch.float64), torch.tensor([3, 8, 1, 2, 2])
    dense = 0.9 * F.one_hot(target, 9).double() + 0.1 / 9
    expected = -(dense * logits.log_softmax(-1)).sum() / 5
    assert abs(LabelSmoothingLoss(0.1)(logits, target) - expected) < 1e-12


def test_padding_adds_nothing_and_pulls_at_nothing():
    torch.manual_seed(0)
    logits, target = (
        torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True),
        torch.tensor([[3, 5, 0, 0], [2, 0, 0, 0]]),
    )
    for reduction in ("mean", "sum"):
        criterion = LabelSmoothingLoss(0.1, reduction=reduction)
        loss, gradient = value_and_gradient(criterion(logits, target), logits)
        alone = criterion(logits[target != 0], target[target != 0])
        assert abs(loss - alone) < 1e-12
        assert (gradient[target == 0] == 0).all() and (gradient[target != 0] != 0).any()


def test_a_pad_id_outside_the_vocabulary_is_fine():
    torch.manual_seed(0)
    logits, target = torch.randn(3, 7, dtype=torch.float64), torch.tensor([0, -100, 4])
    expected = F.cross_entropy(logits, target, label_smoothing=0.1)
    assert abs(LabelSmoothingLoss(0.1, pad_id=-100)(logits, target) - expected) < 1e-12


def test_micro_batches_add_up_to_the_whole_batch():
    torch.manual_seed(0)
    logits, target = torch.randn(6, 5, 11, dtype=torch.float64, requires_grad=True), torch.randint(1, 11, (6, 5))
    target[3:, 2:] = 0  # parts with different numbers of tokens
    whole = value_and_gradient(LabelSmoothingLoss(0.1)(logits, target), logits)
    criterion, tokens = LabelSmoothingLoss(0.1, reduction="sum"), (target != 0).sum()
    parts = sum(criterion(logits[part], target[part]) / tokens for part in (slice(0, 1), slice(1, 4), slice(4, 6)))
    for one, other in zip(value_and_gradient(parts, logits), whole, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_the_best_gap_is_the_closed_form():
    V, eps = 40, 0.1
    gap = math.log((1 - eps + eps / V) / (eps / V))
    logits = torch.zeros(1, V, dtype=torch.float64)
    logits[0, 7] = gap
    logits.requires_grad_()
    _, gradient = value_and_gradient(LabelSmoothingLoss(eps)(logits, torch.tensor([7])), logits)
    assert gradient.abs().max() < 1e-12


def test_half_precision_logits_give_a_single_precision_loss():
    torch.manual_seed(0)
    logits, target = torch.randn(20, 500).bfloat16(), torch.randint(1, 500, (20,))
    loss = LabelSmoothingLoss(0.1)(logits, target)
    assert loss.dtype == torch.float32
    assert abs(loss - F.cross_entropy(logits.float(), target, label_smoothing=0.1)) < 1e-5


def test_chunks_in_half_precision_are_summed_in_single_precision():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4000, 8).bfloat16().requires_grad_(), torch.randn(50, 8).bfloat16()
    target = torch.randint(1, 50, (4000,))
    loss = LabelSmoothingLoss(0.1, reduction="sum").of_hidden(hidden, weight, target, chunk=64)
    logits = (hidden @ weight.T).double()
    expected = F.cross_entropy(logits, target, label_smoothing=0.1, reduction="sum")
    assert loss.dtype == torch.float32 and abs(loss / expected - 1) < 1e-5


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2, "0.1", True, math.nan])
def test_bad_smoothing(smoothing):
    with pytest.raises(ValueError, match="smoothing=.*from 0 up to"):
        LabelSmoothingLoss(smoothing)


def test_bad_reduction_and_shapes():
    with pytest.raises(ValueError, match="reduction='none'.*'mean' or 'sum'"):
        LabelSmoothingLoss(reduction="none")
    with pytest.raises(ValueError, match=r"logits have shape \(2, 7, 3\), target \(2, 3\)"):
        LabelSmoothingLoss()(torch.zeros(2, 7, 3), torch.ones(2, 3, dtype=torch.int64))


def test_dropout_sits_where_the_paper_prints_it():
    model = Transformer(TransformerConfig.tiny(20, dropout=0.25))
    active = {name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0}
    assert all(module.p in (0, 0.25) for module in model.modules() if isinstance(module, nn.Dropout))
    embeddings = {"source_positions.dropout", "target_positions.dropout"}
    encoder = {f"encoder.layers.{layer}.residual.{k}.dropout" for layer in range(2) for k in range(2)}
    decoder = {f"decoder.layers.{layer}.residual.{k}.dropout" for layer in range(2) for k in range(3)}
    assert active == embeddings | encoder | decoder


@pytest.mark.parametrize(("dropout", "training"), [(0.0, True), (0.0, False), (0.5, False)])
def test_dropout_is_off_at_rate_zero_and_in_eval_mode(dropout, training):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(20, dropout=dropout)).train(training)
    source, target = torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 6))
    assert torch.equal(model(source, target), model(source, target))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(2, 20), st.integers(1, 9), st.floats(0, 0.9), st.sampled_from(["mean", "sum"]),
       st.integers(0, 10**6))
def test_in_chunks_as_in_one_piece(tokens, vocab_size, chunk, smoothing, reduction, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_() for n in (2 * tokens, vocab_size))
    pad_id = seed % vocab_size
    target = torch.randint(0, vocab_size, (2, tokens), generator=generator)
    target[0, 0] = (pad_id + 1) % vocab_size
    criterion, both = LabelSmoothingLoss(smoothing, pad_id, reduction), hidden.unflatten(0, (2, tokens))
    expected = F.cross_entropy(hidden @ weight.T, target.flatten(), label_smoothing=smoothing, ignore_index=pad_id,
                               reduction=reduction)
    got = criterion.of_hidden(both, weight, target, chunk=chunk)
    assert abs(got - expected) < 1e-9 * max(1, tokens)
    with torch.no_grad():
        assert abs(criterion.of_hidden(both, weight, target, chunk=chunk) - expected) < 1e-9 * max(1, tokens)
    for one, other in zip(*(torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (got, expected)), strict=True):
        assert (one - other).abs().max() < 1e-9


def test_chunks_hold_few_logits_and_agree_in_half_precision(monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2400, 8), torch.randn(30_000, 8, requires_grad=True)
    target, chunks, rows = torch.randint(1, 30_000, (2400,)), [], []
    product, softmax = torch.Tensor.__matmul__, torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: (chunks.append((len(x), y.size(1))), product(x, y))[1])
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *a, **k: (rows.append(len(x)), softmax(x, *a, **k))[1])
    grads = {}
    for enabled, expected in ((False, [1200, 1200]), (True, [2400])):  # 256 MB are 2,236 rows in fp32, twice as many in bf16
        chunks.clear(), rows.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = LabelSmoothingLoss(0.1).of_hidden(hidden, weight, target)
        grads[enabled] = torch.autograd.grad(loss, weight)[0]
        assert [n for n, columns in chunks if columns == 30_000 and n != 8] == expected
        assert max(rows) * 30_000 <= 1 << 19 and sum(rows) == 2400
    assert grads[True].dtype == torch.float32
    assert 0 < (grads[True] - grads[False]).norm() / grads[False].norm() < 0.02


@pytest.mark.parametrize("largest", [0.0, 1e4, -1e4])
def test_chunks_are_exact_where_the_right_token_has_no_probability_left(largest):
    torch.manual_seed(0)
    logits = torch.randn(1200, 50)
    target = torch.randint(1, 50, (1200,))
    logits[torch.arange(1200), target] -= 1000  # e^-1000 is no number of single precision
    logits += largest
    hidden, weight = logits.requires_grad_(), torch.eye(50)
    loss = LabelSmoothingLoss(0.1, reduction="sum").of_hidden(hidden, weight, target, chunk=500)
    expected = F.cross_entropy(logits.double(), target, label_smoothing=0.1, reduction="sum")
    assert abs(loss - expected) < 1e-6 * expected
    assert torch.allclose(*(torch.autograd.grad(one, logits)[0] for one in (loss, expected)), atol=1e-6)


def test_the_sum_over_chunks_is_not_kept_in_half_precision():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1200, 8, requires_grad=True), torch.randn(900, 8, requires_grad=True)
    target = torch.randint(1, 900, (1200,))
    loss = LabelSmoothingLoss(0.1, reduction="sum").of_hidden(hidden.bfloat16(), weight.bfloat16(), target, chunk=500)
    assert loss.dtype == torch.float32
    exact = F.cross_entropy(hidden @ weight.T, target, label_smoothing=0.1, reduction="sum")
    assert abs(loss - exact) < 1e-3 * exact


def test_chunks_add_up_in_half_precision():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1200, 8, requires_grad=True), torch.randn(900, 8, requires_grad=True)
    target, grads = torch.randint(1, 900, (1200,)), []
    for chunk in (1199, 500):  # two chunks and three
        with torch.autocast("cpu", torch.bfloat16):
            loss = LabelSmoothingLoss(0.1).of_hidden(hidden, weight, target, chunk=chunk)
        grads.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    exact = F.cross_entropy(hidden @ weight.T, target, label_smoothing=0.1)
    for one, other, right in zip(*grads, (exact, *torch.autograd.grad(exact, (hidden, weight))), strict=True):
        assert (one - right).norm() < 0.02 * right.norm() and (other - right).norm() < 0.02 * right.norm()


def test_one_chunk_is_the_plain_loss_bit_for_bit():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(3, 20, 8), torch.randn(50, 8), torch.randint(0, 50, (3, 20))
    criterion = LabelSmoothingLoss(0.1, reduction="sum")
    assert criterion.of_hidden(hidden, weight, target) == criterion(hidden @ weight.T, target)


@settings(deadline=None, max_examples=15)
@given(st.floats(0.01, 0.95), st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_sixteen_bit_dropout_is_dropout(p, seed, dtype):
    torch.manual_seed(seed)
    x = (torch.rand(300, 1001) + 0.5).to(dtype).requires_grad_()  # no multiple of four
    outer, rate = torch.randn_like(x), round(p * 65536) / 65536
    y = SixteenBitDropout(p)(x)
    gone = y == 0
    assert y.dtype == dtype and y.shape == x.shape
    assert abs(gone.double().mean().item() - rate) < 5 * math.sqrt(rate * (1 - rate) / x.numel())  # five standard errors
    scale = torch.tensor(65536 / (65536 - round(p * 65536)), dtype=torch.float64).to(dtype)
    assert torch.equal(y[~gone], (x * scale)[~gone])
    (slope,) = torch.autograd.grad(y, x, outer)
    assert torch.equal(slope, torch.where(gone, torch.zeros_like(outer), outer * scale))


def test_sixteen_bit_dropout_draws_independently():
    torch.manual_seed(0)
    gone = (SixteenBitDropout(0.3)(torch.ones(1000, 1000)) == 0).double() - 0.3
    for lag in (1, 2, 3, 4, 5, 8, 1000):  # neighbours share a 64-bit word; none may know of the other
        flat = gone.flatten()
        assert abs((flat[:-lag] * flat[lag:]).mean() / 0.21) < 0.005  # five standard errors
    again = SixteenBitDropout(0.3)(torch.ones(1000, 1000))
    assert abs(((again == 0).double() - 0.3).mul(gone).mean() / 0.21) < 0.005
    torch.manual_seed(0)
    assert torch.equal(gone, (SixteenBitDropout(0.3)(torch.ones(1000, 1000)) == 0).double() - 0.3)


@pytest.mark.parametrize(("p", "rows", "training"), [(0.3, 100, True), (0.0, 1000, True), (1.0, 1000, True), (0.3, 1000, False)])
def test_elsewhere_sixteen_bit_dropout_is_pytorchs(p, rows, training):
    x, outputs = torch.randn(rows, 1000), []
    for kind in (nn.Dropout, SixteenBitDropout):
        torch.manual_seed(0)
        outputs.append(kind(p).train(training)(x))
    assert torch.equal(*outputs)


def test_a_models_dropout_is_exchanged_in_place():
    class Other(nn.Dropout):
        pass

    model = nn.Sequential(nn.Dropout(0.2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.4).eval()), Other(0.1))
    before, calls = list(model.modules()), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    assert sixteen_bit_dropout(model) is model and list(model.modules()) == before
    assert [type(m) for m in (model[0], model[1][1], model[2])] == [SixteenBitDropout, SixteenBitDropout, Other]
    assert (model[0].p, model[1][1].p, model[0].training, model[1][1].training) == (0.2, 0.4, True, False)
    model(torch.ones(3, 2))
    assert calls == [1]
