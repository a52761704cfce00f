"""Scaled dot-product and additive attention against PyTorch, plain loops, and the paper's claims."""

import math

import pytest
import torch
from helpers import EXACT, examples, inputs, random_mask
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.nn import functional as F

from annotated.model.attention import AdditiveAttention, DotProductAttention, masked_softmax, scaled_dot_product_attention

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def by_hand(query, key, value, mask):
    """softmax(QKᵀ/√d_k)V for 2-d inputs, with Python floats alone."""
    outputs, all_weights = [], []
    for i, q in enumerate(query.tolist()):
        exponentials = []
        for j, k in enumerate(key.tolist()):
            score = sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))
            exponentials.append(math.exp(score) if mask[i][j] else 0.0)
        total = sum(exponentials)
        weights = [e / total if total else 0.0 for e in exponentials]
        all_weights.append(weights)
        columns = zip(*value.tolist(), strict=True)
        outputs.append([sum(w * v for w, v in zip(weights, column, strict=True)) for column in columns])
    return torch.tensor(outputs, dtype=torch.float64), torch.tensor(all_weights, dtype=torch.float64)


def test_agrees_with_loops_over_python_numbers():
    query, key, value = (t.detach() for t in inputs((4, 3), (5, 3), (5, 2)))
    mask = random_mask(4, 5)
    mask[2] = False
    output, weights = scaled_dot_product_attention(query, key, value, mask)
    expected_output, expected_weights = by_hand(query, key, value, mask.tolist())
    torch.testing.assert_close(output, expected_output, **EXACT)
    torch.testing.assert_close(weights, expected_weights, **EXACT)


@pytest.mark.parametrize(
    "shape",
    [None, (5, 7), (1, 7), (5, 1), (2, 1, 1, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 5, 7), (3, 5, 1)],
    ids=str,
)
def test_output_and_gradients_equal_pytorchs_fused_function(shape):
    ours, theirs = (inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)) for _ in range(2))
    mask = None if shape is None else random_mask(*shape)
    output, weights = scaled_dot_product_attention(*ours, mask=mask)
    expected = F.scaled_dot_product_attention(*theirs, attn_mask=None if mask is None else mask.expand(2, 3, 5, 7))
    assert output.shape == (2, 3, 5, 6) and weights.shape == (2, 3, 5, 7)
    torch.testing.assert_close(output, expected, **EXACT)
    direction = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, **EXACT)


def test_gradient_by_finite_differences():
    mask = random_mask(3, 4)
    mask[1] = False
    assert torch.autograd.gradcheck(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), inputs((3, 2), (4, 2), (4, 3))
    )


# Dropout


def test_dropout_zeroes_the_share_it_should_and_keeps_the_mean():
    torch.manual_seed(0)
    query, key, value = inputs((4, 8), (6, 8), (6, 3))
    plain, weights = scaled_dot_product_attention(query, key, value)
    n = 4000
    many = [t.detach().expand(n, *t.shape) for t in (query, key, value)]
    outputs, dropped = scaled_dot_product_attention(*many, dropout=0.25)
    off = dropped == 0
    share = off.double().mean()
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / off.numel())
    torch.testing.assert_close(dropped[~off], (weights / 0.75).expand_as(dropped)[~off], **EXACT)  # the rest grow
    error = 5 * outputs.std(0) / math.sqrt(n)
    assert ((outputs.mean(0) - plain).abs() < error).all()
    torch.testing.assert_close(outputs, dropped @ many[2], **EXACT)  # the weights returned are those used


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_part_of_a_layer_is_the_function_with_dropout_in_training_only(dropout):
    part, (query, key, value) = DotProductAttention(dropout), inputs((2, 4, 8), (2, 6, 8), (2, 6, 3))
    mask = random_mask(2, 4, 6)
    for training in (True, False, True):
        torch.manual_seed(1)
        found = part.train(training)(query, key, value, mask)
        torch.manual_seed(1)
        expected = scaled_dot_product_attention(query, key, value, mask, dropout if training else 0.0)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert ((found[1] == 0) & mask).any() == (training and dropout > 0)


# The filling


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blind", [False, True], ids=["all rows see", "a row sees nothing"])
def test_a_forbidden_key_weighs_exactly_nothing_whatever_the_scores(dtype, blind):
    lowest = torch.finfo(dtype).min
    scores = torch.tensor([[1.0, 2.0, 3.0], [lowest, lowest, 0.0], [0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, False], [not blind, False, False]])
    weights = masked_softmax(scores, mask)
    assert (weights[~mask] == 0).all() and (weights[2] == torch.tensor([float(not blind), 0.0, 0.0])).all()
    torch.testing.assert_close(weights[0, :2], scores[0, :2].softmax(-1), rtol=4 * torch.finfo(dtype).eps, atol=0)
    weights[0].square().sum().backward()
    assert scores.grad.isfinite().all() and (scores.grad[~mask] == 0).all() and (scores.grad[0, :2] != 0).all()


# C4, C5: why the scale is there


@pytest.mark.parametrize("d_k", [1, 8, 64, 512])
def test_c4_the_function_brings_scores_back_to_variance_1(d_k):
    """The log of the ratio of two weights is the difference of their scores: variance 2 if each has variance 1."""
    generator = torch.Generator().manual_seed(d_k)
    n = 20_000
    query = torch.randn(n, 1, d_k, generator=generator, dtype=torch.float64)
    key = torch.randn(n, 2, d_k, generator=generator, dtype=torch.float64)
    _, weights = scaled_dot_product_attention(query, key, torch.zeros(n, 2, 1, dtype=torch.float64))
    difference = weights[:, 0, 0].log() - weights[:, 0, 1].log()
    assert abs(difference.var() / 2 - 1) < 4 * math.sqrt((2 + 6 / d_k) / n)


def test_c5_weights_stay_soft_and_keep_their_gradient_at_any_d_k():
    """Largest weight and its gradient p(1-p), median over 300 rows; the unscaled ones by undoing the scale."""
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


def test_c5_the_gradient_of_a_weight_by_its_score_is_p_times_1_minus_p():
    scores = inputs((6, 9), scale=3.0)[0]
    weights = masked_softmax(scores)
    for j in range(9):
        gradient = torch.autograd.grad(weights[:, j].sum(), scores, retain_graph=True)[0][:, j]
        torch.testing.assert_close(gradient, weights[:, j] * (1 - weights[:, j]), **EXACT)


# C9: the mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dot product", "additive"])
def test_c9_masked_weights_are_0_rows_sum_to_1_and_nothing_is_nan(dtype, kind):
    torch.manual_seed(0)
    function = scaled_dot_product_attention if kind == "dot product" else AdditiveAttention(8, 8, 5).to(dtype)
    query, key, value = tensors = inputs((2, 6, 8), (2, 5, 8), (2, 5, 3), dtype=dtype)
    mask = random_mask(2, 6, 5)
    mask[0, 3], mask[1, :, 4], mask[1, 0, 0] = False, False, True
    output, weights = function(query, key, value, mask)
    assert weights.dtype == dtype and (weights[~mask] == 0).all() and (weights[mask] > 0).all()
    sums = torch.where(mask.any(-1), 1.0, 0.0).to(dtype)
    torch.testing.assert_close(weights.sum(-1), sums, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert (output[0, 3] == 0).all()
    output.float().square().sum().backward()
    assert all(t.isfinite().all() for t in (output, weights, *(t.grad for t in tensors)))
    assert (query.grad[0, 3] == 0).all(), "a query with nothing to attend to gets no gradient"
    assert (key.grad[1, 4] == 0).all() and (value.grad[1, 4] == 0).all(), "nor does a key that nobody sees"


def test_scaling_before_the_product_keeps_half_precision_finite():
    """256 · 20 · 20 is over 65,504; divided by √256 it is 6,400."""
    query = key = torch.full((2, 256), 20.0, dtype=torch.float16)
    output, weights = scaled_dot_product_attention(query, key, torch.eye(2, dtype=torch.float16))
    assert torch.equal(weights, torch.full((2, 2), 0.5, dtype=torch.float16)) and output.isfinite().all()


# Properties


sizes = st.integers(1, 6)


@examples(40)
@given(queries=sizes, keys=sizes, d_k=sizes, d_v=sizes, seed=st.integers(0, 10**6), masked=st.booleans())
def test_rows_sum_to_1_and_outputs_stay_between_the_values(queries, keys, d_k, d_v, seed, masked):
    query, key, value = inputs((queries, d_k), (keys, d_k), (keys, d_v), seed=seed, scale=4.0)
    mask = random_mask(queries, keys, seed=seed) if masked else torch.ones(queries, keys, dtype=torch.bool)
    output, weights = scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(weights.sum(-1), mask.any(-1).double(), **EXACT)
    assert (weights >= 0).all() and (weights[~mask] == 0).all()
    some = mask.any(-1)
    assert (output[some] <= value.max(0).values + 1e-9).all() and (output[some] >= value.min(0).values - 1e-9).all()


@examples(40)
@given(keys=st.integers(2, 7), seed=st.integers(0, 10**6), data=st.data())
def test_masking_a_key_is_the_same_as_removing_it(keys, seed, data):
    query, key, value = inputs((3, 4), (keys, 4), (keys, 3), seed=seed)
    kept = data.draw(st.lists(st.booleans(), min_size=keys, max_size=keys).filter(any))
    mask = torch.tensor(kept)
    output, _ = scaled_dot_product_attention(query, key, value, mask[None])
    torch.testing.assert_close(output, scaled_dot_product_attention(query, key[mask], value[mask])[0], **EXACT)


# Additive attention


def test_additive_attention_agrees_with_its_formula_pair_by_pair():
    torch.manual_seed(0)
    attention = AdditiveAttention(4, 6, 5).double()
    query, key, value = inputs((2, 3, 4), (2, 5, 6), (2, 5, 7))
    mask = random_mask(2, 3, 5)
    mask[1, 1] = False
    output, weights = attention(query, key, value, mask)
    W_q, W_k, b, v = attention.W_q.weight, attention.W_k.weight, attention.W_k.bias, attention.v.weight[0]
    for n in range(2):
        for i in range(3):
            scores = torch.stack([v @ torch.tanh(W_q @ query[n, i] + W_k @ key[n, j] + b) for j in range(5)])
            exponentials = scores.exp() * mask[n, i]
            expected = exponentials / exponentials.sum() if mask[n, i].any() else exponentials
            torch.testing.assert_close(weights[n, i], expected, **EXACT)
            torch.testing.assert_close(output[n, i], expected @ value[n], **EXACT)


# Shapes that do not fit: the annotation names the argument


def tensors(query=(2, 4, 8), key=(2, 5, 8), value=(2, 5, 3)):
    return torch.zeros(query), torch.zeros(key), torch.zeros(value)


def refused(name, actual=""):
    """TypeCheckError that names the parameter and, if given, the shape that came."""
    return pytest.raises(TypeCheckError, match=rf"typechecking parameter '{name}'.\s*Actual value: .*{actual}")


@pytest.mark.parametrize(
    "shapes, mask, name, actual",
    [
        ({"query": (8,)}, None, "query", r"f32\[8\]"),
        ({"value": (2, 4, 3)}, None, "value", r"f32\[2,4,3\]"),
        ({"query": (2, 4, 6)}, None, "key", r"f32\[2,5,8\]"),  # d_k is 6 by then
        ({"key": (3, 5, 8), "value": (1, 5, 3)}, None, "key", r"f32\[3,5,8\]"),
        ({}, torch.ones(4, 5), "mask", r"f32\[4,5\]"),
        ({}, torch.ones(5, dtype=torch.bool), "mask", r"bool\[5\]"),
        ({}, torch.ones(5, 4, dtype=torch.bool), "mask", r"bool\[5,4\]"),
        ({}, torch.ones(1, 3, 4, 5, dtype=torch.bool), "mask", r"bool\[1,3,4,5\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, mask, name, actual):
    for attention in (scaled_dot_product_attention, DotProductAttention()):
        with refused(name, actual):
            attention(*tensors(**shapes), mask=mask)
