"""The layers of section 4 against PyTorch's own, and Table 1 against what runs in them."""

import math

import pytest
import torch
from helpers import EXACT, examples, inputs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from annotated.model.attention import AdditiveAttention, scaled_dot_product_attention
from annotated.paper import layer_types as module
from annotated.paper.layer_types import LAYERS, layer_operations, path_length, windows


def random(*shape, seed=0):
    return inputs(shape, seed=seed)[0]


X = torch.zeros(1, 5, 4)

# The layers


@pytest.mark.parametrize("k, dilation, causal", [
    (1, 1, False), (3, 1, False), (4, 2, False), (5, 2, False), (3, 4, True), (2, 1, True)])
def test_convolutions_equal_pytorchs(k, dilation, causal):
    x, left = random(2, 11, 6), (k - 1 if causal else k // 2) * dilation
    padded = F.pad(x.transpose(1, 2), (left, (k - 1) * dilation - left))
    layer = module.ConvolutionalLayer(6, k, dilation, causal).double()
    theirs = F.conv1d(padded, layer.W.weight.view(6, 6, k), layer.W.bias, dilation=dilation)
    torch.testing.assert_close(layer(x), theirs.transpose(1, 2), **EXACT)
    layer = module.SeparableConvolutionalLayer(6, k, dilation, causal).double()
    filtered = F.conv1d(padded, layer.w.transpose(1, 2), dilation=dilation, groups=6)
    torch.testing.assert_close(layer(x), layer.W(filtered.transpose(1, 2)), **EXACT)


def test_recurrent_layer_equals_pytorchs_and_its_sweeps_end_there():
    layer, x = module.RecurrentLayer(6).double(), random(3, 9, 6)
    theirs = nn.RNN(6, 6, batch_first=True).double()
    theirs.load_state_dict({"weight_ih_l0": layer.W.weight, "weight_hh_l0": layer.U.weight,
                            "bias_ih_l0": layer.W.bias, "bias_hh_l0": torch.zeros(6)})
    torch.testing.assert_close(layer(x), theirs(x)[0], **EXACT)
    sweeps = layer.sweeps(x)
    assert len(sweeps) == 9
    for step, states in enumerate(sweeps, 1):  # step s is right for the first s positions
        torch.testing.assert_close(states[:, :step], layer(x)[:, :step], **EXACT)
        assert step == 9 or not torch.allclose(states[:, step], layer(x)[:, step])


# Restricted attention


def full(query, key, value, r, keys=None):
    """PyTorch's attention under an n × n mask; rows that see nothing become zeros."""
    n = query.size(-2)
    distance = torch.arange(n) - torch.arange(n)[:, None]
    mask = (distance.abs() <= r // 2) & (distance <= (r - 1) // 2)
    mask = mask if keys is None else mask & keys
    mask = mask.expand(*query.shape[:-1], n)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return output.masked_fill(~mask.any(-1, keepdim=True), 0.0)


@examples(30)
@given(st.integers(1, 17), st.integers(1, 9), st.integers(0, 10_000))
def test_restricted_attention_with_padding_equals_full_attention_and_is_never_nan(n, r, seed):
    inputs = [random(2, 3, n, 4, seed=seed + i) for i in range(3)]
    keys = random(2, 1, 1, n, seed=seed) > 0  # many queries see nothing at all
    outputs = module.restricted_attention(*inputs, r, keys), full(*inputs, r, keys)
    torch.testing.assert_close(*outputs, **EXACT)
    sees = [[i - r // 2 <= j <= i + (r - 1) // 2 for j in range(n)] for i in range(n)]
    assert module.band_mask(n, r).tolist() == sees
    direction = random(2, 3, n, 4, seed=9).detach()
    slopes = (torch.autograd.grad(output, inputs, direction) for output in outputs)
    torch.testing.assert_close(*slopes, **EXACT)  # equal, and so finite


def test_restricted_attention_computes_blocks_with_a_halo_and_no_more(n=1024):
    x, kept = random(1, n, 8), []
    products = counted(lambda x: module.restricted_attention(x, x, x, 16), x)
    assert products == 2 * n * (2 * 16 - 1) * 8
    with saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        output = module.restricted_attention(x, x, x, 16)
    assert output.shape == x.shape and 0 < max(kept) <= 2 * 16 * n  # nothing of n × n


# C19: operations


def counted(work, *inputs):
    """Multiplications in the matrix products that run; PyTorch counts the additions as well."""
    with FlopCounterMode(display=False) as counter:
        work(*inputs)
    return counter.get_total_flops() // 2


def attend(x):
    return scaled_dot_product_attention(x, x, x)[0]


def attend_in_windows(x, r):
    around = windows(x, r)
    return (x.unsqueeze(-2) @ around).softmax(-1) @ around.transpose(-2, -1)


def made(kind, d, k, r, i=1):
    """A layer of this kind; `i`: how often its places are stretched k times, if they are."""
    return {"self-attention": module.SelfAttention(d, h=2),
            "restricted self-attention": module.RestrictedSelfAttention(d, 2, r),
            "recurrent": module.RecurrentLayer(d), "convolution": module.ConvolutionalLayer(d, k),
            "dilated convolution": module.ConvolutionalLayer(d, k, dilation=k**i, causal=True),
            "separable convolution": module.SeparableConvolutionalLayer(d, k)}[kind]


def runs(kind, d, k, r):
    """What Table 1 counts of a layer: of attention without its projections."""
    return {"self-attention": attend, "restricted self-attention":
            lambda x: attend_in_windows(x, r)}.get(kind) or made(kind, d, k, r)


@pytest.mark.parametrize("kind", LAYERS)
def test_c19_the_formula_is_what_runs(kind):
    for n, d, k, r in ((10, 8, 3, 4), (32, 8, 5, 7), (9, 24, 4, 16)):
        operations = layer_operations(kind, n, d, k=k, r=r)
        assert counted(runs(kind, d, k, r), torch.randn(1, n, d)) == operations


@pytest.mark.parametrize("kind", LAYERS)
def test_c19_sequential_operations_grow_with_n_in_the_recurrent_layer_alone(kind):
    chains = [module.sequential_products(runs(kind, 8, 3, 4)(random(1, n, 8).float()))
              for n in (5, 20, 300)]
    products_in_a_row = 1 if kind in ("convolution", "dilated convolution") else 2
    assert chains == ([5, 20, 300] if kind == "recurrent" else [products_in_a_row] * 3)


# C20: the crossing


@pytest.mark.parametrize("d", [1, 7, 64, 512])
def test_c20_attention_needs_fewer_operations_exactly_while_n_is_below_d(d):
    for n in {1, d - 1, d, d + 1, 2 * d, 10 * d} - {0}:
        attention = layer_operations("self-attention", n, d)
        recurrent = layer_operations("recurrent", n, d)
        assert (attention < recurrent) == (n < d) and (attention == recurrent) == (n == d)


# C21: paths


def states_of(kind, n, k, r, d=4):
    torch.manual_seed(0)
    if kind == "recurrent":
        return module.RecurrentLayer(d).double().sweeps
    steps = min(path_length(kind, n, k=k, r=r), 12)  # after 12, a narrow window never arrives
    return module.stack_states([made(kind, d, k, r, i).double() for i in range(steps)])


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("n, k, r", [(1, 3, 3), (2, 3, 3), (9, 3, 5), (10, 3, 6), (10, 4, 4),
                                     (9, 5, 9), (7, 2, 2), (8, 2, 1), (5, 1, 5)])
def test_c21_path_length_is_when_the_last_pair_is_connected(kind, n, k, r):
    states, x = states_of(kind, n, k, r), random(1, n, 4).detach()
    one_sided = kind in ("recurrent", "dilated convolution")
    reached = [module.reached_by_gradient(states, x, position) > 0 for position in range(n)]
    arrived = torch.stack(reached, dim=1)  # (steps, from, to)
    pairs = torch.ones(n, n, dtype=torch.bool).triu(0 if one_sided else -n)
    done = [bool(step[pairs].all()) for step in arrived]
    expected = path_length(kind, n, k=k, r=r)
    assert (done.index(True) + 1 if any(done) else math.inf) == expected
    assert not arrived[:, ~pairs].any()  # in a one-sided layer nothing ever moves to the left


# C6: what additive attention keeps and costs; the page measures how well it learns


def kept(attention, queries, keys, d_k):
    numbers = {}
    query, key, value = random(queries, d_k), random(keys, d_k, seed=1), random(keys, 3, seed=2)
    note = lambda t: numbers.update({t.data_ptr(): t.numel()}) or t  # noqa: E731
    with saved_tensors_hooks(note, lambda t: t):
        output, _ = attention(query, key, value)
    assert output.requires_grad
    return sum(numbers.values())


@pytest.mark.parametrize("d_k", [4, 32, 128])
def test_c6_additive_attention_keeps_a_hidden_vector_for_each_pair(d_k):
    pairs = 30 * 40
    additive = kept(AdditiveAttention(d_k, d_k, d_k).double(), 30, 40, d_k)
    product = kept(scaled_dot_product_attention, 30, 40, d_k)
    assert additive >= pairs * d_k
    assert product <= 3 * pairs + 3 * (30 + 40) * (d_k + 3)  # pairs plus d_k, not times d_k


# Bad input


@pytest.mark.parametrize("call, message", [
    (lambda: windows(X[0], 0), "width=0: expected a whole number from 1 up"),
    (lambda: module.ConvolutionalLayer(4, k=3, dilation=0)(X), "dilation=0: expected"),
    (lambda: module.band_mask(4, 0), "r=0: expected"),
    (lambda: module.restricted_attention(X, X, X, 0), "r=0: expected a whole number from 1 up"),
    (lambda: module.restricted_attention(X, X, X, 3, module.band_mask(5, 3)),
     r"mask has shape \(5, 5\): expected \(..., 1, 5\)"),
    (lambda: layer_operations("lstm", 4, 4), "kind='lstm': expected one of self-attention, restr"),
    (lambda: layer_operations("convolution", 4, 4), "k=None: expected a whole number from 1 up"),
    (lambda: layer_operations("restricted self-attention", 4, 4, r=0), "r=0: expected"),
    (lambda: path_length("recurrent", 0), "n=0: expected"),
    (lambda: module.sequential_products(X), "output has no gradient graph"),
])
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
