"""Label smoothing (section 5.4) against PyTorch and dense targets; dropout where the paper prints it."""

import math

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn
from torch.nn import functional as F

from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.label_smoothing import LabelSmoothingLoss


def value_and_gradient(loss, logits):
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@examples(60)
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
    assert abs(loss - F.cross_entropy(logits.float(), target, label_smoothing=0.1)) < 1e-5  # float32: 20 roundings of about 8


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2, "0.1", True, math.nan])
def test_bad_smoothing(smoothing):
    with pytest.raises(ValueError, match="smoothing=.*from 0 up to"):
        LabelSmoothingLoss(smoothing)


def test_bad_reduction_and_shapes():
    with pytest.raises(ValueError, match="reduction='none'.*'mean' or 'sum'"):
        LabelSmoothingLoss(reduction="none")
    with pytest.raises(TypeCheckError, match=r"(?s)'target'.*i64\[2,3\].*f32\[2,7,3\]"):
        LabelSmoothingLoss()(torch.zeros(2, 7, 3), torch.ones(2, 3, dtype=torch.int64))


def test_dropout_sits_where_the_paper_prints_it():
    model = Transformer(TransformerConfig.tiny(20, dropout=0.25))
    active = {name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0}
    assert all(module.p in (0, 0.25) for module in model.modules() if isinstance(module, nn.Dropout))
    embeddings = {"source_positions.dropout", "target_positions.dropout"}
    encoder = {f"encoder.layers.{layer}.residual.{k}.dropout" for layer in range(2) for k in range(2)}
    decoder = {f"decoder.layers.{layer}.residual.{k}.dropout" for layer in range(2) for k in range(3)}
    assert active == embeddings | encoder | decoder


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_hidden_vectors_as_of_their_logits(reduction):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True) for shape in ((2, 6), (9,)))
    target, options = torch.randint(0, 9, (2, 6)), {"label_smoothing": 0.1, "ignore_index": 0, "reduction": reduction}
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), target.flatten(), **options)
    got = LabelSmoothingLoss(0.1, reduction=reduction).of_hidden(hidden, weight, target)
    assert abs(got - expected) < 1e-12
    for one, other in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (got, expected)), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
