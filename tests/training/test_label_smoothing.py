"""Label smoothing (section 5.4) against PyTorch."""

import math

import pytest
import torch
from helpers import examples, inputs, roundoff
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from annotated.training.label_smoothing import LabelSmoothingLoss


@examples(60)
@given(st.integers(1, 6), st.integers(2, 30), st.floats(0, 0.95), st.floats(0, 0.8),
       st.integers(0, 10**6), st.sampled_from(["mean", "sum"]), st.floats(0.1, 30))
def test_equal_to_cross_entropy(length, vocab_size, smoothing, padded, seed, reduction, spread):
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = leaves = inputs((3, length, 5), (vocab_size, 5), seed=seed, scale=spread**0.5)
    logits, pad_id = hidden @ weight.T, seed % vocab_size
    target = torch.randint(0, vocab_size, (3, length), generator=draw)
    target[torch.rand(3, length, generator=draw) < padded] = pad_id
    target[0, 0] = (pad_id + 1) % vocab_size  # at least one real token
    criterion = LabelSmoothingLoss(smoothing, pad_id, reduction)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing,
                               ignore_index=pad_id, reduction=reduction)
    gradients = torch.autograd.grad(expected, leaves, retain_graph=True)
    for loss in (criterion(logits, target), criterion.of_hidden(hidden, weight, target)):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-9)
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        torch.testing.assert_close(grads, gradients, rtol=1e-12, atol=1e-9)


def test_half_precision_logits_give_a_single_precision_loss():
    torch.manual_seed(0)
    logits, target = torch.randn(20, 500).bfloat16(), torch.randint(1, 500, (20,))
    loss = LabelSmoothingLoss(0.1)(logits, target)
    expected = F.cross_entropy(logits.float(), target, label_smoothing=0.1)
    assert loss.dtype == torch.float32 and abs(loss - expected) < 1e-5  # 20 roundings of about 8


@pytest.mark.parametrize("options, message", [
    *(({"smoothing": value}, r"smoothing=.*\[0, 1\)") for value in (-0.1, 1.0, "0.1", math.nan)),
    ({"reduction": "none"}, "reduction='none'.*'mean' or 'sum'")])
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        LabelSmoothingLoss(**options)


@pytest.mark.parametrize("places, lowest, finite", [
    ([(0, 3)], -math.inf, False), ([(0, 3)], torch.finfo().min / 100, True),
    ([(0, 3), (1, 0)], -math.inf, False), ([(1, word) for word in (0, 1, 3, 4)], -math.inf, False),
    ([(0, 1)], -math.inf, None)])  # None: the right word itself is impossible
def test_an_impossible_word_costs_what_it_costs_in_pytorch(places, lowest, finite):
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, 2])
    for place in places:
        logits[place] = lowest
    loss = LabelSmoothingLoss(0.1)(logits, target)
    expected = F.cross_entropy(logits, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected, rtol=roundoff(torch.float32, 8), atol=0)
    assert loss.isfinite() == bool(finite)
    assert LabelSmoothingLoss(0.0)(logits, target).isfinite() == (finite is not None)
