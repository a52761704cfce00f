"""Multi-head attention against nn.MultiheadAttention, a loop over heads, and the paper's claims."""

from contextlib import suppress

import pytest
import torch
from helpers import EXACT, inputs, random_mask
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from annotated.model.attention import scaled_dot_product_attention
from annotated.model.multi_head import MultiHeadAttention, record_attention


def make(d_model=24, h=4, seed=0, **options):
    torch.manual_seed(seed)
    return MultiHeadAttention(d_model, h, **options).double()


def one_head_after_the_other(layer, query, key, value, mask):
    """The equation of section 3.2.2, from the rows of the matrices; mask (batch, h, q, k)."""
    matrices = (W.weight.chunk(layer.h) for W in (layer.W_Q, layer.W_K, layer.W_V))
    heads = []
    for i, (W_Q, W_K, W_V) in enumerate(zip(*matrices, strict=True)):
        Q, K, V = query @ W_Q.T, key @ W_K.T, value @ W_V.T
        exponentials = (Q @ K.mT / len(W_K) ** 0.5).exp() * mask[:, i]
        heads.append(exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300) @ V)
    return torch.cat(heads, dim=-1) @ layer.W_O.weight.T


# Against PyTorch's module


@pytest.mark.parametrize("use", ["encoder", "decoder", "cross"])
def test_output_gradients_and_weights_equal_pytorchs_module(use):
    layer, theirs = make(), nn.MultiheadAttention(24, 4, bias=False, batch_first=True).double()
    matrices = [layer.W_Q.weight, layer.W_K.weight, layer.W_V.weight]
    theirs.load_state_dict({"in_proj_weight": torch.cat(matrices),
                            "out_proj.weight": layer.W_O.weight})
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])  # sentence 1 is padded
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    n = 5 if use == "cross" else 7
    query, memory, direction = inputs((2, n, 24), (2, 7, 24), (2, n, 24))
    source = memory if use == "cross" else query
    mask = real[:, None, None] & causal if use == "decoder" else real[:, None, None]
    with record_attention(layer) as recorded:
        output = layer(query, source, source, mask)
    expected, weights = theirs(query, source, source, key_padding_mask=~real,  # True = may not
                               attn_mask=~causal if use == "decoder" else None,
                               average_attn_weights=False)
    torch.testing.assert_close((output, recorded[""]), (expected, weights), **EXACT)
    leaves = [query, memory] if use == "cross" else [query]
    *mine, W_Q, W_K, W_V = torch.autograd.grad(
        output, [*leaves, layer.W_O.weight, *matrices], direction)
    others = torch.autograd.grad(
        expected, [*leaves, theirs.out_proj.weight, theirs.in_proj_weight], direction)
    torch.testing.assert_close([*mine, torch.cat([W_Q, W_K, W_V])], [*others], **EXACT)


# Against the loop


@pytest.mark.parametrize("d_k, d_v", [(None, None), (3, 5), (None, 9), (7, None)])
@pytest.mark.parametrize("shape", [(1, 7), (2, 1, 1, 7), (1, 4, 5, 1)])
def test_masks_and_widths_agree_with_a_loop_over_heads_recorded_or_not(shape, d_k, d_v):
    layer = make(d_k=d_k, d_v=d_v, dropout=0.5).eval()
    assert layer.attention.dropout == 0.5
    assert (layer.W_Q.out_features, layer.W_V.out_features) == (4 * (d_k or 6), 4 * (d_v or 6))
    query, key, value = inputs((2, 5, 24), (2, 7, 24), (2, 7, 24))
    mask = random_mask(*shape)
    expected = one_head_after_the_other(layer, query, key, value, mask.expand(2, 4, 5, 7))
    torch.testing.assert_close(layer(query, key, value, mask), expected, **EXACT)
    with record_attention(layer):
        torch.testing.assert_close(layer(query, key, value, mask), expected, **EXACT)


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
    model, (x, memory) = Pair(), inputs((3, 5, 24), (3, 7, 24))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    silent = model(x, memory, causal)
    with record_attention(model) as weights:
        torch.testing.assert_close(model(x, memory, causal), silent, **EXACT)
    assert {path: tuple(w.shape) for path, w in weights.items()} == {
        "first.self_attention": (3, 4, 5, 5), "layers.0.cross_attention": (3, 2, 5, 7)}
    own = weights["first.self_attention"]
    assert (own[..., ~causal] == 0).all() and (own[..., causal] > 0).all()
    assert not own.requires_grad


def parts(model):
    return [m.attention for m in model.modules() if isinstance(m, MultiHeadAttention)]


def test_nested_blocks_both_record_and_the_outer_goes_on_after_the_inner_and_its_errors():
    model, (x, memory) = Pair(), inputs((1, 5, 24), (1, 7, 24))
    own = parts(model)
    with record_attention(model) as outer:
        with suppress(ZeroDivisionError), record_attention(model.first) as inner:
            model(x, memory)
            raise ZeroDivisionError
        weights = outer["first.self_attention"]
        assert set(inner) == {"self_attention"} and len(outer) == 2
        assert torch.equal(inner["self_attention"], weights)
        model(3 * x, memory)
        assert not torch.equal(outer["first.self_attention"], weights), "the last call counts"
        assert torch.equal(inner["self_attention"], weights), "the inner block has ended"
    assert parts(model) == own


class Blind(nn.Module):
    """PyTorch's fused function, which does not show its weights."""

    def forward(self, Q, K, V, mask=None):
        return F.scaled_dot_product_attention(Q, K, V, mask), None


def test_a_part_that_makes_no_weights_is_refused_once_it_runs_and_only_then():
    model, (x, memory) = Pair(), inputs((1, 5, 24), (1, 7, 24))
    last = model.layers[0]["cross_attention"]
    last.attention = Blind()
    model(x, memory)
    for recorded, name in ((model, r"layers\.0\.cross_attention"), (last, "the layer")):
        with record_attention(recorded) as weights:
            with pytest.raises(ValueError, match=f"^{name}: Blind makes no weights: nothing to"):
                model(x, memory)
        assert "layers.0.cross_attention" not in weights and type(last.attention) is Blind


def test_record_attention_says_when_there_is_nothing_to_record():
    with pytest.raises(ValueError, match="model is a Linear without any MultiHeadAttention"):
        with record_attention(nn.Linear(2, 2)):
            pass


# C7: cost


@pytest.mark.parametrize("h", [1, 8, 64])
def test_c7_matrix_operations_do_not_depend_on_the_number_of_heads(h, n=20):
    layer, x = MultiHeadAttention(64, h), torch.randn(2, n, 64)
    with torch.no_grad(), record_attention(layer), FlopCounterMode(display=False) as counter:
        layer(x, x, x)
    assert counter.get_total_flops() == 2 * (8 * n * 64**2 + 4 * n**2 * 64)  # two sentences


# C8: what one head cannot do


def test_c8_one_head_averages_and_two_heads_keep_both():
    """Keys are the one-hot places of six tokens, of which two say something; W_Q picks places."""
    (a, b), place = inputs((4,), (4,)), torch.eye(6).double()

    def look(query, first, second):
        values = torch.zeros(6, 4).double()
        values[1], values[4] = first, second
        return scaled_dot_product_attention(1000 * query, place, values)[0]

    both = (place[1] + place[4])[None]
    for first, second in ((a, b), (b, a)):
        torch.testing.assert_close(look(both, first, second)[0], (a + b) / 2, **EXACT)
        heads = look(place[[1, 4]], first, second)
        torch.testing.assert_close(heads, torch.stack([first, second]), **EXACT)


# Bad input


@pytest.mark.parametrize("options", [{}, {"d_k": 4}, {"d_v": 4}])
def test_bad_widths_are_named(options):
    message = "d_model=10 is not divisible by h=3: choose another h, or give both d_k and d_v"
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(10, 3, **options)


def test_a_mask_of_three_axes_is_refused_with_a_mend():
    x, mask = torch.zeros(2, 5, 24), torch.ones(4, 5, 5, dtype=torch.bool)
    message = r"mask has shape \(4, 5, 5\): give mask.unsqueeze\(1\) for one matrix a sentence"
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(24, 4)(x, x, x, mask)
