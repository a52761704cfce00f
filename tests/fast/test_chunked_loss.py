"""The loss in chunks against PyTorch's own, in every precision, and how few logits it holds."""

import math

import pytest
import torch
from helpers import EXACT, examples, inputs
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from annotated.data.tokenizers import PAD
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.training.label_smoothing import LabelSmoothingLoss

# Errors of gradients in bf16 as a share of their norm: twice the most of 60 random models (0.014).
GRADIENTS = 0.028


def test_chunks_hold_few_logits_and_agree_in_half_precision(monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2400, 8), torch.randn(30_000, 8, requires_grad=True)
    target, chunks, product, grads = torch.randint(1, 30_000, (2400,)), [], torch.matmul, []
    monkeypatch.setattr(torch.Tensor, "__matmul__",
                        lambda x, y: chunks.append((len(x), y.size(1))) or product(x, y))
    # 128 MB are 1,118 rows in fp32, twice as many in bf16
    for low, expected in ((False, [800] * 3), (True, [1200] * 2)):
        chunks.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = ChunkedLoss(0.1).of_hidden(hidden, weight, target)
        grads += torch.autograd.grad(loss, weight)
        assert [n for n, columns in chunks if columns == 30_000 and n != 8] == expected
        kind = torch.bfloat16 if low else torch.float32
        logits = hidden.to(kind) @ weight.T.to(kind)
        plain = F.cross_entropy(logits.float(), target, label_smoothing=0.1)
        assert loss.dtype == torch.float32 and abs(loss / plain - 1) < 1e-4, "sums in half"
    assert grads[1].dtype == torch.float32
    assert 0 < (grads[1] - grads[0]).norm() / grads[0].norm() < GRADIENTS


@examples(40)
@given(st.integers(1, 12), st.integers(2, 20), st.integers(1, 9), st.floats(0, 0.9),
       st.sampled_from(["mean", "sum"]), st.integers(0, 10**6))
def test_in_chunks_as_in_one_piece(tokens, vocab_size, chunk, smoothing, reduction, seed):
    hidden, weight = inputs((2 * tokens, 5), (vocab_size, 5), seed=seed)
    pad_id = seed % vocab_size
    draw = torch.Generator().manual_seed(seed)
    target = torch.randint(0, vocab_size, (2, tokens), generator=draw)
    target[0, 0] = (pad_id + 1) % vocab_size
    criterion, both = ChunkedLoss(smoothing, pad_id, reduction), hidden.unflatten(0, (2, tokens))
    expected = F.cross_entropy(hidden @ weight.T, target.flatten(), label_smoothing=smoothing,
                               ignore_index=pad_id, reduction=reduction)
    got = criterion.of_hidden(both, weight, target, chunk=chunk)
    with torch.no_grad():
        ungraded = criterion.of_hidden(both, weight, target, chunk=chunk)
    torch.testing.assert_close((got, ungraded), (expected, expected), rtol=1e-9, atol=1e-9)
    grads = (torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (got, expected))
    torch.testing.assert_close(*grads, **EXACT)


@pytest.mark.parametrize("largest", [0.0, 1e4, -1e4])
def test_chunks_are_exact_where_the_right_token_has_no_probability_left(largest):
    torch.manual_seed(0)
    logits = torch.randn(1200, 50)
    target = torch.randint(1, 50, (1200,))
    logits[torch.arange(1200), target] -= 1000  # e^-1000 is no number of single precision
    logits += largest
    hidden, weight = logits.requires_grad_(), torch.eye(50)
    loss = ChunkedLoss(0.1, reduction="sum").of_hidden(hidden, weight, target, chunk=500)
    expected = F.cross_entropy(logits.double(), target, label_smoothing=0.1, reduction="sum")
    # 16 roundings: 11 for the halves of halves of 1,200 rows, 5 within a row
    assert abs(loss - expected) < 1e-6 * expected
    grads = (torch.autograd.grad(total, logits)[0] for total in (loss, expected))
    assert torch.allclose(*grads, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("graded", [True, False])
def test_on_a_gpu_padding_stays_in_and_counts_nothing(monkeypatch, reduction, graded):
    """Tensors that say they are on a GPU, where leaving padding out would mean to wait for it."""
    hidden, weight = inputs((6, 50, 16), (97, 16))
    target = torch.randint(0, 97, (6, 50)).index_fill(1, torch.arange(40, 50), PAD)
    plain = LabelSmoothingLoss(0.1, PAD, reduction=reduction).of_hidden(hidden, weight, target)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with torch.set_grad_enabled(graded):
        loss = ChunkedLoss(0.1, PAD, reduction).of_hidden(hidden, weight, target, chunk=64)
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-10, check_layout=False)
    if graded:
        grads = (torch.autograd.grad(total, (hidden, weight)) for total in (loss, plain))
        torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


@pytest.mark.parametrize("reduction, nothing", [("sum", 0.0), ("mean", math.nan)])
def test_chunks_of_padding_alone_are_as_the_plain_loss_has_them(reduction, nothing):
    hidden, weight = torch.randn(2, 9, 4, requires_grad=True), torch.randn(7, 4)
    target = torch.zeros(2, 9, dtype=torch.int64)
    chunked = ChunkedLoss(0.1, reduction=reduction).of_hidden(hidden, weight, target, chunk=3)
    plain = LabelSmoothingLoss(0.1, reduction=reduction).of_hidden(hidden, weight, target)
    assert repr(chunked.item()) == repr(plain.item()) == repr(nothing)
    if reduction == "sum":
        assert not torch.autograd.grad(chunked, hidden)[0].any()
