"""Multi-head attention against nn.MultiheadAttention, a loop over heads, and the paper's claims."""

import copy
import pickle

import pytest
import torch
from helpers import EXACT, examples, inputs, random_mask
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from annotated.fast import prepare
from annotated.model.multi_head import MultiHeadAttention, record_attention
from annotated.model.transformer import Transformer, TransformerConfig


def make(d_model=24, h=4, seed=0, **options):
    torch.manual_seed(seed)
    return MultiHeadAttention(d_model, h, **options).double()


def widths(layer):
    """(d_k, d_v), from the stored matrices."""
    return layer.W_Q.out_features // layer.h, layer.W_V.out_features // layer.h


def one_head_after_the_other(layer, query, key, value, mask):
    """The equation of section 3.2.2 with indices, from the rows of the stored matrices; mask (batch, h, q, k)."""
    batch, heads, (d_k, d_v) = query.size(0), [], widths(layer)
    for i in range(layer.h):
        k_rows = slice(i * d_k, (i + 1) * d_k)
        v_rows = slice(i * d_v, (i + 1) * d_v)
        Q, K = query @ layer.W_Q.weight[k_rows].T, key @ layer.W_K.weight[k_rows].T
        V = value @ layer.W_V.weight[v_rows].T
        outputs = []
        for n in range(batch):
            exponentials = (Q[n] @ K[n].T / d_k**0.5).exp() * mask[n, i]
            weights = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
            outputs.append(weights @ V[n])
        heads.append(torch.stack(outputs))
    return torch.cat(heads, dim=-1) @ layer.W_O.weight.T


# Against PyTorch's module


def pytorchs(layer):
    """nn.MultiheadAttention with the same weights (it has one width for all heads and no other)."""
    theirs = nn.MultiheadAttention(layer.W_Q.in_features, layer.h, bias=False, batch_first=True).double()
    stacked = torch.cat([layer.W_Q.weight, layer.W_K.weight, layer.W_V.weight])
    theirs.load_state_dict({"in_proj_weight": stacked, "out_proj.weight": layer.W_O.weight})
    return theirs


@pytest.mark.parametrize("use", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("recording", [False, True])
def test_output_gradients_and_weights_equal_pytorchs_module(use, recording):
    layer = make()
    theirs = pytorchs(layer)
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])  # sentence 1 is padded
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    queries = 5 if use == "cross" else 7
    query, memory, direction = inputs((2, queries, 24), (2, 7, 24), (2, queries, 24))
    results = []
    for ours in (True, False):
        q, m = query.detach().clone().requires_grad_(), memory.detach().clone().requires_grad_()
        source = m if use == "cross" else q
        if ours:
            mask = real[:, None, None] & causal if use == "decoder" else real[:, None, None]
            if recording:
                with record_attention(layer) as recorded:
                    output = layer(q, source, source, mask)
                weights = recorded[""]
            else:
                output, weights = layer(q, source, source, mask), None
        else:  # its masks say True = may not attend
            output, weights = theirs(
                q, source, source, key_padding_mask=~real, average_attn_weights=False,
                attn_mask=~causal if use == "decoder" else None,
            )
        (output * direction).sum().backward()
        results.append((output, weights, q.grad, m.grad))
    (output, weights, *gradients), (expected, expected_weights, *expected_gradients) = results
    torch.testing.assert_close(output, expected, **EXACT)
    if recording:
        torch.testing.assert_close(weights, expected_weights, **EXACT)
    for mine, other in zip(gradients, expected_gradients, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, **EXACT)
    stacked = torch.cat([W.weight.grad for W in (layer.W_Q, layer.W_K, layer.W_V)])
    torch.testing.assert_close(stacked, theirs.in_proj_weight.grad, **EXACT)
    torch.testing.assert_close(layer.W_O.weight.grad, theirs.out_proj.weight.grad, **EXACT)


# Against the loop


@pytest.mark.parametrize("d_k, d_v", [(None, None), (3, 5), (None, 9), (7, None)])
@pytest.mark.parametrize("shape", [(1, 7), (2, 1, 1, 7), (2, 1, 5, 7), (1, 4, 5, 1), (2, 4, 5, 7)])
def test_masks_and_widths_agree_with_a_loop_over_heads_recorded_or_not(shape, d_k, d_v):
    layer = make(d_k=d_k, d_v=d_v)
    assert widths(layer) == (d_k or 6, d_v or 6)
    query, key, value = inputs((2, 5, 24), (2, 7, 24), (2, 7, 24))
    mask = random_mask(*shape)
    expected = one_head_after_the_other(layer, query, key, value, mask.expand(2, 4, 5, 7))
    torch.testing.assert_close(layer(query, key, value, mask), expected, **EXACT)
    with record_attention(layer):
        torch.testing.assert_close(layer(query, key, value, mask), expected, **EXACT)


# Masks, dropout, and the steps by themselves


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_c9_a_row_with_nothing_to_attend_to_gives_zeros_recorded_or_not(device, dtype):
    layer = make(d_model=64, h=4).to(device, dtype)
    mask = random_mask(3, 1, 6, 6).to(device)
    mask[0, 0, 2], mask[2] = False, False  # one query; a sentence that is nothing but padding
    results = []
    for recording in (False, True):
        x = inputs((3, 6, 64))[0].detach().to(device, dtype).requires_grad_()
        if recording:
            with record_attention(layer):
                output = layer(x, x, x, mask)
        else:
            output = layer(x, x, x, mask)
        output.square().sum().backward()
        assert (output[0, 2] == 0).all() and (output[2] == 0).all()
        assert output.isfinite().all() and x.grad.isfinite().all() and (x.grad[2] == 0).all()
        results.append((output, x.grad))
    for silent, watched in zip(*results, strict=True):
        assert torch.equal(silent, watched)


def test_dropout_only_while_training():
    layer = make(dropout=0.5)
    x = inputs((2, 6, 24))[0].detach()
    layer.eval()
    still = layer(x, x, x)
    torch.testing.assert_close(layer(x, x, x), still, rtol=0, atol=0)
    torch.testing.assert_close(still, one_head_after_the_other(layer, x, x, x, torch.ones(2, 4, 6, 6)), **EXACT)
    layer.train()
    torch.manual_seed(0)
    assert not torch.allclose(layer(x, x, x), still)
    with record_attention(layer) as weights:
        layer(x, x, x)
    zeros = (weights[""] == 0).double().mean()
    assert 0.3 < zeros < 0.7
    many = x[:1].expand(4000, 6, 24)
    outputs = layer(many, many, many)
    assert ((outputs.mean(0) - still[0]).abs() < 5 * outputs.std(0) / 4000**0.5).all()  # the mean is kept


def test_the_steps_in_a_row_are_the_layer_and_several_rows_may_ask_the_same_keys():
    layer, (query, memory) = make(d_k=3, d_v=5), inputs((6, 2, 24), (3, 7, 24))
    mask = random_mask(3, 1, 1, 7)
    K, V = layer.keys_and_values(memory, 2 * memory)
    assert layer.queries(query).shape == (6, 4, 2, 3) and K.shape == (3, 4, 7, 3) and V.shape == (3, 4, 7, 5)
    each = memory.repeat_interleave(2, dim=0)  # rows 0 and 1 ask sentence 0, 2 and 3 ask 1, …
    expected = layer(query, each, 2 * each, mask.repeat_interleave(2, dim=0))
    together = layer.output(layer.attend(layer.queries(query.reshape(3, 4, 24)), K, V, mask))
    torch.testing.assert_close(together.view(6, 2, 24), expected, **EXACT)
    alone = layer.queries(query), *layer.keys_and_values(each, 2 * each)
    assert all(torch.equal(a, b) for a, b in zip(alone, layer.project(query, each, 2 * each), strict=True))


# Recording


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleDict({"self_attention": make()})
        self.layers = nn.ModuleList([nn.ModuleDict({"cross_attention": make(h=2, seed=1)})])

    def forward(self, x, memory, mask=None):
        x = self.first["self_attention"](x, x, x, mask)
        return self.layers[0]["cross_attention"](x, memory, memory)


def test_recording_gives_path_shape_and_order_of_axes():
    model = Pair()
    x, memory = inputs((3, 5, 24), (3, 7, 24))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    silent = model(x, memory, causal)
    with record_attention(model) as weights:
        output = model(x, memory, causal)
    torch.testing.assert_close(output, silent, **EXACT)
    assert {path: tuple(w.shape) for path, w in weights.items()} == {
        "first.self_attention": (3, 4, 5, 5),
        "layers.0.cross_attention": (3, 2, 5, 7),
    }
    own = weights["first.self_attention"]
    torch.testing.assert_close(own.sum(-1), torch.ones(3, 4, 5).double(), **EXACT)  # sums run over keys, the last axis
    assert (own[..., ~causal] == 0).all() and (own[..., causal] > 0).all()
    assert not own.requires_grad


def parts(model):
    return [m.attention for m in model.modules() if isinstance(m, MultiHeadAttention)]


def test_nested_blocks_both_record_and_the_outer_goes_on():
    model = Pair()
    x, memory = inputs((1, 5, 24), (1, 7, 24))
    own = parts(model)
    with record_attention(model) as outer:
        with record_attention(model.first) as inner:
            model(x, memory)
        assert set(inner) == {"self_attention"} and len(outer) == 2
        assert torch.equal(inner["self_attention"], outer["first.self_attention"])
        first = outer["first.self_attention"]
        model(2 * x, memory)
        assert not torch.equal(outer["first.self_attention"], first), "the last call counts"
        assert torch.equal(inner["self_attention"], first), "the inner block has ended"
        with pytest.raises(ZeroDivisionError), record_attention(model.first) as failing:
            model(3 * x, memory)
            raise ZeroDivisionError
        third = outer["first.self_attention"]
        assert torch.equal(failing["self_attention"], third)
        model(x, memory)
        assert torch.equal(outer["first.self_attention"], first), "the outer block goes on after an error in the inner"
        assert torch.equal(failing["self_attention"], third)
    assert all(a is b for a, b in zip(parts(model), own, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_follows_the_mode_while_recording_and_the_mode_outlives_the_block(training):
    model, x = nn.ModuleList([make(dropout=0.5)]).train(training), inputs((2, 6, 24))[0].detach()
    with record_attention(model) as weights:
        model[0](x, x, x)
        assert (weights["0"] == 0).any() == training
        model.train(not training)
        model[0](x, x, x)
        assert (weights["0"] == 0).any() != training
    assert torch.equal(model[0](x, x, x), model[0](x, x, x)) == training, "no dropout in eval mode"


def small_model():
    torch.manual_seed(0)
    config = TransformerConfig.tiny(30, d_model=24, d_ff=32, h=4, d_k=3, attention_dropout=0.3)
    return Transformer(config).eval(), torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0]]), torch.tensor([[1, 4, 5], [1, 7, 0]])


def test_a_prepared_model_is_recorded_as_the_plain_one_and_is_fast_again_afterwards():
    model, source, target = small_model()
    with record_attention(model) as expected:
        plain = model(source, target)
    own = parts(prepare.prepare(model))
    assert all(type(part) is prepare.FusedAttention for part in own) and len(own) == 6
    with record_attention(model) as weights:
        with record_attention(model.decoder) as inner:
            logits = model(source, target)
    assert all(a is b for a, b in zip(parts(model), own, strict=True))
    assert weights.keys() == expected.keys() and len(inner) == 4
    for path, w in expected.items():
        torch.testing.assert_close(weights[path], w, rtol=0, atol=1e-6)  # numbers below 1, some 16 roundings on either way: 2^-24 each
    assert all(torch.equal(w, weights["decoder." + path]) for path, w in inner.items())
    for other in (logits, model(source, target)):
        torch.testing.assert_close(other, plain, rtol=0, atol=1e-5)  # ten sub-layers of them
    assert len(weights) == 6, "nothing came after the block"


class Blind(nn.Module):
    """PyTorch's fused function, which does not show its weights."""

    def forward(self, Q, K, V, mask=None):
        return F.scaled_dot_product_attention(Q, K, V, mask), None


def test_a_part_that_makes_no_weights_is_refused_once_it_runs_and_only_then():
    model = Pair()
    x, memory = inputs((1, 5, 24), (1, 7, 24))
    last = model.layers[0]["cross_attention"]
    last.attention, before = Blind(), model(x, memory)
    torch.testing.assert_close(model(x, memory), before, **EXACT)
    with record_attention(model) as weights:
        with pytest.raises(ValueError, match=r"^layers\.0\.cross_attention: Blind makes no weights: nothing to record"):
            model(x, memory)
    assert list(weights) == ["first.self_attention"] and type(last.attention) is Blind
    with record_attention(last), pytest.raises(ValueError, match="^the layer: Blind makes no weights"):
        last(x, memory, memory)


def test_a_model_can_be_copied_pickled_and_saved():
    layer = make()
    x = inputs((1, 5, 24))[0]
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x, x, x), layer(x, x, x))
    assert set(layer.state_dict()) == {"W_Q.weight", "W_K.weight", "W_V.weight", "W_O.weight"}


def test_record_attention_says_when_there_is_nothing_to_record():
    with pytest.raises(ValueError, match="model is a Linear without any MultiHeadAttention"):
        with record_attention(nn.Linear(2, 2)):
            pass


# C7: cost


@pytest.mark.parametrize("h", [1, 2, 8, 64])
@pytest.mark.parametrize("n", [3, 20])
def test_c7_matrix_operations_do_not_depend_on_the_number_of_heads(h, n):
    layer, x = MultiHeadAttention(64, h), torch.randn(2, n, 64)
    with torch.no_grad(), record_attention(layer), FlopCounterMode(display=False) as counter:
        layer(x, x, x)
    assert counter.get_total_flops() == 2 * (8 * n * 64**2 + 4 * n**2 * 64)  # two sentences


def test_c7_fixed_heads_are_the_taps_of_a_convolution():
    """Positions as extra components: each head's query picks its neighbour's one-hot, W_V and W_O hold the kernel."""
    n, d, h = 6, 3, 3
    width = d + n  # content, then position
    layer = MultiHeadAttention(width, h, d_k=n, d_v=d).double()
    kernel = inputs((d, d, h))[0].detach()  # (out, in, tap)
    for W in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O):
        W.weight.data.zero_()
    for i, offset in enumerate((-1, 0, 1)):
        shift = torch.eye(n, dtype=torch.float64).roll(offset, dims=1)  # row p: one-hot of position p + offset
        layer.W_Q.weight.data[i * n : (i + 1) * n, d:] = 1000 * shift.T
        layer.W_K.weight.data[i * n : (i + 1) * n, d:] = torch.eye(n)
        layer.W_V.weight.data[i * d : (i + 1) * d, :d] = torch.eye(d)
        layer.W_O.weight.data[:d, i * d : (i + 1) * d] = kernel[:, :, i]
    content = inputs((1, n, d), seed=3)[0].detach()
    x = torch.cat([content, torch.eye(n, dtype=torch.float64)[None]], dim=-1)
    circular = F.pad(content.transpose(1, 2), (1, 1), mode="circular")
    expected = F.conv1d(circular, kernel).transpose(1, 2)
    torch.testing.assert_close(layer(x, x, x)[..., :d], expected, **EXACT)


# C8: what one head cannot do


def sharp(h, places):
    """A layer whose heads look sharply at positions; tokens are 4 numbers of content and 6 of position; W_O copies.

    places: for each head the positions among which it divides its attention evenly.
    """
    layer = MultiHeadAttention(10, h, d_k=6, d_v=4).double()
    for W in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O):
        W.weight.data.zero_()
    for i, wanted in enumerate(places):
        for place in wanted:
            layer.W_Q.weight.data[6 * i + place, 0] = 1000.0
        layer.W_K.weight.data[6 * i : 6 * i + 6, 4:] = torch.eye(6)
        layer.W_V.weight.data[4 * i : 4 * i + 4, :4] = torch.eye(4)
    layer.W_O.weight.data[: 4 * h] = torch.eye(4 * h)
    return layer


def test_c8_one_head_averages_and_two_heads_keep_both():
    a, b = inputs((4,), (4,))
    query = torch.zeros(1, 1, 10).double()
    query[..., 0] = 1.0

    def look(layer, first, second):
        content = torch.zeros(6, 4).double()
        content[1], content[4] = first, second
        tokens = torch.cat([content, torch.eye(6).double()], dim=-1)[None]
        return layer(query, tokens, tokens)[0, 0]

    one, two = sharp(1, [(1, 4)]), sharp(2, [(1,), (4,)])
    torch.testing.assert_close(look(one, a, b)[:4], (a + b) / 2, **EXACT)
    torch.testing.assert_close(look(one, a, b), look(one, b, a), **EXACT)
    torch.testing.assert_close(look(two, a, b)[:8], torch.cat([a, b]), **EXACT)
    torch.testing.assert_close(look(two, b, a)[:8], torch.cat([b, a]), **EXACT)


# Properties


@examples(30)
@given(h=st.integers(1, 4), d=st.integers(1, 4), n=st.integers(1, 6), m=st.integers(1, 6), seed=st.integers(0, 9999))
def test_order_of_keys_does_not_matter_and_queries_keep_theirs(h, d, n, m, seed):
    layer = make(d_model=h * d, h=h, seed=seed)
    query, key, value = inputs((2, n, h * d), (2, m, h * d), (2, m, h * d), seed=seed)
    mask = random_mask(2, 1, n, m, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randperm(m, generator=generator), torch.randperm(n, generator=generator)
    moved = layer(query[:, q], key[:, p], value[:, p], mask[:, :, q][..., p])
    torch.testing.assert_close(moved, layer(query, key, value, mask)[:, q], **EXACT)


# Bad input


@pytest.mark.parametrize(
    "options, message",
    [
        ({"d_model": 10, "h": 3}, "d_model=10 is not divisible by h=3: choose another h, or give both d_k and d_v"),
        ({"d_model": 10, "h": 3, "d_k": 4}, "d_model=10 is not divisible by h=3"),
        ({"d_model": 10, "h": 3, "d_v": 4}, "d_model=10 is not divisible by h=3"),
    ],
)
def test_bad_widths_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**options)


def call(shapes, mask=None):
    layer, sizes = MultiHeadAttention(24, 4), {"query": (2, 5, 24), "key": (2, 7, 24), "value": (2, 7, 24), **shapes}
    return layer(*(torch.zeros(sizes[name]) for name in ("query", "key", "value")), mask)


@pytest.mark.parametrize(
    "shapes, mask, name",
    [
        ({"query": (5, 24)}, None, "query"),
        ({"key": (2, 7, 23)}, None, "key"),
        ({"value": (2, 6, 24)}, None, "value"),
        ({"key": (1, 7, 24), "value": (1, 7, 24)}, None, "key"),  # no silent broadcasting of sentences
        ({}, torch.zeros(5, 7), "mask"),
        ({}, torch.ones(7, 5, dtype=torch.bool), "mask"),
        ({}, torch.ones(2, 7, dtype=torch.bool), "mask"),
        ({}, torch.ones(2, 5, 5, 7, dtype=torch.bool), "mask"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, mask, name):
    with pytest.raises(TypeCheckError, match=f"typechecking parameter '{name}'"):
        call(shapes, mask)


@pytest.mark.parametrize("shape", [(4, 5, 7), (1, 5, 7), (1, 1, 7)])
def test_a_mask_of_three_axes_is_refused_with_a_mend(shape):
    with pytest.raises(ValueError, match=rf"mask has shape \({', '.join(map(str, shape))}\): give mask.unsqueeze\(1\) for one matrix a "
                                         r"sentence, mask.unsqueeze\(0\) for one a head"):
        call({}, torch.ones(shape, dtype=torch.bool))
