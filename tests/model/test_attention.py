"""Scaled dot-product and additive attention against PyTorch, formulas, and the paper's claims."""

import itertools
import math

import pytest
import torch
from helpers import EXACT, inputs, random_mask, roundoff
from torch.nn import functional as F

from annotated.model.attention import (
    AdditiveAttention,
    DotProductAttention,
    masked_softmax,
    scaled_dot_product_attention,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("shape", [None, (5, 7), (2, 1, 1, 7), (1, 3, 5, 7), (3, 5, 1)], ids=str)
def test_output_and_gradients_equal_pytorchs_fused_function(shape):
    qkv = inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6))
    mask = None if shape is None else random_mask(*shape)
    output, weights = scaled_dot_product_attention(*qkv, mask=mask)
    whole = None if mask is None else mask.expand(2, 3, 5, 7)
    expected = F.scaled_dot_product_attention(*qkv, attn_mask=whole)
    assert weights.shape == (2, 3, 5, 7)
    torch.testing.assert_close(output, expected, **EXACT)
    (direction,) = inputs(output.shape, seed=2)
    grads = (torch.autograd.grad(out, qkv, direction) for out in (output, expected))
    torch.testing.assert_close(*grads, **EXACT)


def test_dropout_is_pytorchs_on_the_weights_and_in_training_only():
    part, (query, key, value) = DotProductAttention(0.5), inputs((2, 4, 8), (2, 6, 8), (2, 6, 3))
    mask = random_mask(2, 4, 6)
    _, plain = scaled_dot_product_attention(query, key, value, mask)
    for training in (True, False, True):
        torch.manual_seed(1)
        output, weights = part.train(training)(query, key, value, mask)
        torch.manual_seed(1)
        expected = F.dropout(plain, 0.5, training)
        assert torch.equal(weights, expected) and torch.equal(output, expected @ value)
        assert ((weights == 0) & mask).any() == training


# The filling


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_forbidden_key_weighs_exactly_nothing_whatever_the_scores(dtype):
    lowest = torch.finfo(dtype).min
    rows = [[1.0, 2.0, 3.0], [lowest, lowest, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    scores = torch.tensor(rows, dtype=dtype, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    weights = masked_softmax(scores, mask)
    assert (weights[~mask] == 0).all() and weights[2:].tolist() == [[1.0, 0.0, 0.0], [0.0] * 3]
    assert (weights[1, :2] > 0).all(), "nothing is lower than what fills a forbidden place"
    # a subtraction, an exponential, a sum and a division of two numbers: four roundings
    rtol = roundoff(dtype, 8)  # on either side
    torch.testing.assert_close(weights[0, :2], scores[0, :2].softmax(-1), rtol=rtol, atol=0)
    weights[0].square().sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[~mask] == 0).all() and (scores.grad[0, :2] != 0).all()


# C4, C5: why the scale is there


@pytest.mark.parametrize("d_k", [1, 8, 64, 512])
def test_c4_the_function_brings_scores_back_to_variance_1(d_k):
    """Two scores of variance 1 differ by a variance of 2: the log of the ratio of their weights."""
    generator = torch.Generator().manual_seed(d_k)
    n = 20_000
    query = torch.randn(n, 1, d_k, generator=generator, dtype=torch.float64)
    key = torch.randn(n, 2, d_k, generator=generator, dtype=torch.float64)
    _, weights = scaled_dot_product_attention(query, key, torch.zeros(n, 2, 1, dtype=torch.float64))
    difference = weights[:, 0, 0].log() - weights[:, 0, 1].log()
    assert abs(difference.var() / 2 - 1) < 4 * math.sqrt((2 + 6 / d_k) / n)


def test_c5_weights_stay_soft_and_keep_their_gradient_at_any_d_k():
    """The gradient p(1-p) of the largest weight, median over 300 rows."""
    generator = torch.Generator().manual_seed(0)
    slopes = {}
    for d_k in (16, 256, 4096):
        query = torch.randn(300, 1, d_k, generator=generator, dtype=torch.float64)
        key = torch.randn(300, 10, d_k, generator=generator, dtype=torch.float64)
        for name, factor in (("scaled", 1.0), ("unscaled", math.sqrt(d_k))):
            _, weights = scaled_dot_product_attention(factor * query, key, key)
            largest = weights.max(-1).values
            slopes[name, d_k] = (largest * (1 - largest)).median().item()
    assert all(0.15 < slopes["scaled", d_k] <= 0.25 for d_k in (16, 256, 4096))
    assert slopes["unscaled", 256] < 0.05 * slopes["unscaled", 16]
    assert slopes["unscaled", 4096] < 1e-6 * slopes["unscaled", 256]


# C9: the mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dot product", "additive"])
def test_c9_masked_weights_are_0_rows_sum_to_1_and_nothing_is_nan(dtype, kind):
    torch.manual_seed(0)
    additive = AdditiveAttention(8, 8, 5).to(dtype)
    function = scaled_dot_product_attention if kind == "dot product" else additive
    query, key, value = tensors = inputs((2, 6, 8), (2, 5, 8), (2, 5, 3), dtype=dtype)
    mask = random_mask(2, 6, 5)
    mask[0, 3], mask[1, :, 4], mask[1, 0, 0] = False, False, True
    output, weights = function(query, key, value, mask)
    assert weights.dtype == dtype and (weights[~mask] == 0).all() and (weights[mask] > 0).all()
    sums = torch.where(mask.any(-1), 1.0, 0.0).to(dtype)
    # each of five weights is rounded, and so is their sum: eight halves of an epsilon hold it
    torch.testing.assert_close(weights.sum(-1), sums, rtol=0, atol=roundoff(dtype, 8))
    assert (output[0, 3] == 0).all()
    output.float().square().sum().backward()
    assert all(t.isfinite().all() for t in (output, weights, *(t.grad for t in tensors)))
    unseen = query.grad[0, 3], key.grad[1, 4], value.grad[1, 4]  # attends to nothing, is not seen
    assert all((gradient == 0).all() for gradient in unseen)


def test_scaling_before_the_product_keeps_half_precision_finite():
    """256 · 20 · 20 is over 65,504; divided by √256 it is 6,400."""
    query = key = torch.full((2, 256), 20.0, dtype=torch.float16)
    output, weights = scaled_dot_product_attention(query, key, torch.eye(2, dtype=torch.float16))
    assert (weights == 0.5).all() and output.isfinite().all()


# Additive attention


def test_additive_attention_agrees_with_its_formula_pair_by_pair():
    torch.manual_seed(0)
    attention = AdditiveAttention(4, 6, 5).double()
    query, key, value = inputs((2, 3, 4), (2, 5, 6), (2, 5, 7))
    mask = random_mask(2, 3, 5)
    mask[1, 1] = False
    output, weights = attention(query, key, value, mask)
    W_q, W_k, b = attention.W_q.weight, attention.W_k.weight, attention.W_k.bias
    for n, i in itertools.product(range(2), range(3)):
        hidden = [torch.tanh(W_q @ query[n, i] + W_k @ key[n, j] + b) for j in range(5)]
        exponentials = (torch.stack(hidden) @ attention.v.weight[0]).exp() * mask[n, i]
        expected = exponentials / exponentials.sum().clamp(min=1e-300)
        torch.testing.assert_close(weights[n, i], expected, **EXACT)
        torch.testing.assert_close(output[n, i], expected @ value[n], **EXACT)
