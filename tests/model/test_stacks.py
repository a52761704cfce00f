"""The layers and stacks of encoder and decoder, against PyTorch's own modules with copied weights (float64)."""

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn

from annotated.model.masking import causal_mask, padding_mask
from annotated.model.stacks import Decoder, DecoderLayer, Encoder, EncoderLayer, ResidualConnection

D, H, D_FF = 16, 4, 24
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 7, 0, 0, 0], [9, 8, 7, 6, 0, 0]])  # pad 0
TARGET = torch.tensor([[1, 5, 6, 7, 8], [1, 5, 6, 0, 0], [1, 9, 0, 0, 0]])
both_orders = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])


def random_weights(module):
    """Random weights everywhere, in gains and offsets of the norms too: nothing can hide behind a 1 or a 0."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module.double()


def copy_attention(ours, theirs):
    """Give PyTorch's attention our four matrices, and zeros for the biases that ours has not."""
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.W_Q.weight, ours.W_K.weight, ours.W_V.weight]))
        theirs.out_proj.weight.copy_(ours.W_O.weight)
        theirs.in_proj_bias.zero_()
        theirs.out_proj.bias.zero_()


def copy_layer(ours, theirs):
    copy_attention(ours.self_attention, theirs.self_attn)
    if isinstance(ours, DecoderLayer):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
    theirs.linear1.load_state_dict(ours.feed_forward.W_1.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.W_2.state_dict())
    for i, residual in enumerate(ours.residual):
        getattr(theirs, f"norm{i + 1}").load_state_dict(residual.norm.state_dict())


def gradients_of_layer(layer):
    """The gradients of a layer of ours or of PyTorch's, under one set of names."""
    found = {}
    if isinstance(layer, (EncoderLayer, DecoderLayer)):
        attentions = {"self": layer.self_attention, "cross": getattr(layer, "cross_attention", None)}
        for name, attention in attentions.items():
            if attention is not None:
                matrices = [attention.W_Q, attention.W_K, attention.W_V]
                found[name, "in"] = torch.cat([m.weight.grad for m in matrices])
                found[name, "out"] = attention.W_O.weight.grad
        linears, norms = (layer.feed_forward.W_1, layer.feed_forward.W_2), [r.norm for r in layer.residual]
    else:
        attentions = {"self": layer.self_attn, "cross": getattr(layer, "multihead_attn", None)}
        for name, attention in attentions.items():
            if attention is not None:
                found[name, "in"] = attention.in_proj_weight.grad
                found[name, "out"] = attention.out_proj.weight.grad
        linears = (layer.linear1, layer.linear2)
        norms = [getattr(layer, f"norm{i}") for i in (1, 2, 3) if hasattr(layer, f"norm{i}")]
    for kind, modules in (("linear", linears), ("norm", norms)):
        for i, module in enumerate(modules):
            found[kind, i, "weight"], found[kind, i, "bias"] = module.weight.grad, module.bias.grad
    return found


def assert_close(a, b, what):
    assert a.shape == b.shape, what
    assert (a - b).abs().max() <= 1e-9, (what, (a - b).abs().max())


def compare(ours, theirs, ids, run_ours, run_theirs, inputs):
    """Outputs on real positions, gradients of inputs and of every parameter must agree within 1e-9."""
    real = ids != 0
    layers = list(zip(getattr(ours, "layers", [ours]), getattr(theirs, "layers", [theirs]), strict=True))
    for mine, other in layers:
        copy_layer(mine, other)
    gradients = []
    generator = torch.Generator().manual_seed(5)
    weighting = torch.randn(*ids.shape, D, generator=generator, dtype=torch.float64)[real]
    outputs = []
    for run in (run_ours, run_theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves)[real]
        (out * weighting).sum().backward()
        outputs.append(out)
        gradients.append([x.grad for x in leaves])
    assert_close(outputs[0], outputs[1], "output")
    assert outputs[0].abs().max() > 0.1
    for mine, other in zip(*gradients, strict=True):
        assert mine.abs().max() > 1e-6
        assert_close(mine, other, "gradient of an input")
    for mine, other in layers:
        mine, other = gradients_of_layer(mine), gradients_of_layer(other)
        assert mine.keys() == other.keys()
        for name in mine:
            assert mine[name].abs().max() > 1e-9, name
            assert_close(mine[name], other[name], name)


@pytest.fixture
def x():
    return torch.randn(*SOURCE.shape, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def y():
    return torch.randn(*TARGET.shape, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def torch_layer(kind, norm_first):
    return kind(D, H, D_FF, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64)


@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer, Encoder, Decoder])
def test_the_norm_comes_after_the_sum_where_nobody_says_otherwise(kind):
    """A norm that comes last leaves mean 0 and variance 1 at every position; a stack needs no other on top.

    The mean within the rounding of a sum in float32, the variance within epsilon's share of it: 1e-5 of a variance above 0.01.
    """
    whole = kind(*(2, D, H, D_FF) if kind in (Encoder, Decoder) else (D, H, D_FF))
    assert not any(name.startswith("norm.") for name in whole.state_dict())
    for layer in getattr(whole, "layers", [whole]):
        z = layer(*[torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))] * (1 + (kind in (Decoder, DecoderLayer))))
        torch.testing.assert_close(z.mean(-1), torch.zeros(2, 5), atol=1e-5, rtol=0)
        torch.testing.assert_close(z.var(-1, unbiased=False), torch.ones(2, 5), atol=1e-3, rtol=0)


def last_norm(stack, norm_first):
    if not norm_first:
        return None
    norm = nn.LayerNorm(D, dtype=torch.float64)
    norm.load_state_dict(stack.norm.state_dict())
    return norm


@both_orders
def test_c1_encoder_equals_pytorchs(norm_first, x):
    ours = random_weights(Encoder(3, D, H, D_FF, norm_first=norm_first))
    theirs = nn.TransformerEncoder(torch_layer(nn.TransformerEncoderLayer, norm_first), 3,
                                   norm=last_norm(ours, norm_first), enable_nested_tensor=False)
    compare(ours, theirs, SOURCE, lambda x: ours(x, padding_mask(SOURCE)),
            lambda x: theirs(x, src_key_padding_mask=SOURCE == 0), [x])


@both_orders
def test_c1_decoder_equals_pytorchs(norm_first, x, y):
    ours = random_weights(Decoder(3, D, H, D_FF, norm_first=norm_first))
    theirs = nn.TransformerDecoder(torch_layer(nn.TransformerDecoderLayer, norm_first), 3,
                                   norm=last_norm(ours, norm_first))
    mask = causal_mask(5) & padding_mask(TARGET)
    compare(ours, theirs, TARGET, lambda y, x: ours(y, x, mask, padding_mask(SOURCE)),
            lambda y, x: theirs(y, x, tgt_mask=~causal_mask(5), tgt_key_padding_mask=TARGET == 0,
                                memory_key_padding_mask=SOURCE == 0), [y, x])


@both_orders
def test_c1_residual_follows_its_formula(norm_first, x):
    residual = random_weights(ResidualConnection(D, norm_first=norm_first))

    def norm(x):  # biased variance, epsilon inside the root
        centred = x - x.mean(-1, keepdim=True)
        size = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return residual.norm.weight * centred / size + residual.norm.bias

    expected = x + torch.sin(3 * norm(x)) if norm_first else norm(x + torch.sin(3 * x))
    assert_close(residual(x, lambda x: torch.sin(3 * x)), expected, "residual")
    tiny = 1e-3 * x  # here epsilon decides
    expected = tiny + torch.sin(3 * norm(tiny)) if norm_first else norm(tiny + torch.sin(3 * tiny))
    assert_close(residual(tiny, lambda x: torch.sin(3 * x)), expected, "residual of a small input")


@both_orders
def test_c1_gradient_at_the_top_of_a_fresh_stack(norm_first):
    def top(N):
        found = []
        for seed in range(4):
            torch.manual_seed(seed)
            stack, classify = Encoder(N, 32, 4, 64, norm_first=norm_first), nn.Linear(32, 10)
            for p in (*stack.parameters(), classify.weight):
                if p.dim() == 2:
                    nn.init.xavier_uniform_(p)
            logits = classify(stack(torch.randn(16, 8, 32)))
            nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(10, (128,))).backward()
            found.append(stack.layers[-1].feed_forward.W_2.weight.grad.norm().item())
        return sum(found) / 4

    ratio = top(18) / top(6)
    assert 0.4 < ratio < 0.75 if norm_first else 0.75 < ratio < 1.4, ratio


@examples(20)
@given(batch=st.integers(2, 6), length=st.integers(1, 7), norm_first=st.booleans(), seed=st.integers(0, 99))
def test_c3_an_example_does_not_depend_on_its_batch(batch, length, norm_first, seed):
    torch.manual_seed(seed)
    x = torch.randn(batch, length, D, dtype=torch.float64)
    x[1:] *= 10
    encoder = random_weights(Encoder(2, D, H, D_FF, norm_first=norm_first))  # in training mode
    assert (encoder(x)[:1] - encoder(x[:1])).abs().max() <= 1e-12
    residual = encoder.layers[0].residual[0]
    assert (residual(x, torch.sin)[:1, :1] - residual(x[:1, :1], torch.sin)).abs().max() <= 1e-12


@both_orders
def test_dropout_is_on_the_sublayers_output_before_the_sum(norm_first):
    torch.manual_seed(0)
    residual = ResidualConnection(4000, dropout=0.25, norm_first=norm_first)
    out = residual(torch.zeros(1, 4000), torch.ones_like)
    if norm_first:
        assert sorted(out.unique().tolist()) == pytest.approx([0, 1 / 0.75])
        assert abs((out == 0).float().mean().item() - 0.25) < 0.04
    else:  # the norm of a two-valued vector has two values, mean 0
        assert len(out.unique()) == 2 and abs((out == out.min()).float().mean().item() - 0.25) < 0.04
        assert abs(out.mean().item()) < 1e-5  # float32, summed in blocks: some dozens of roundings of numbers near 1
    residual.eval()
    expected = torch.ones(1, 4000) if norm_first else torch.zeros(1, 4000)
    assert torch.equal(residual(torch.zeros(1, 4000), torch.ones_like), expected)


@pytest.mark.parametrize("option", ["dropout", "attention_dropout", "feed_forward_dropout"])
@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
def test_each_dropout_reaches_its_place_and_is_off_when_0(option, kind):
    torch.manual_seed(0)
    arguments = (torch.randn(2, 5, D),) * (1 if kind is EncoderLayer else 2)
    layer = kind(D, H, D_FF, **{option: 0.5})
    assert not torch.equal(layer(*arguments), layer(*arguments))
    layer.eval()
    assert torch.equal(layer(*arguments), layer(*arguments))
    layer = kind(D, H, D_FF)  # training, all rates 0
    assert torch.equal(layer(*arguments), layer(*arguments))
    attentions = [layer.self_attention] if kind is EncoderLayer else [layer.self_attention, layer.cross_attention]
    assert all(layer.attention.dropout == 0 for layer in attentions)
    layer = kind(D, H, D_FF, **{option: 0.5})
    attentions = [m for name, m in layer.named_children() if name.endswith("attention")]
    rates = {
        "dropout": [r.dropout.p for r in layer.residual],
        "attention_dropout": [one.attention.dropout for one in attentions],
        "feed_forward_dropout": [layer.feed_forward.dropout.p],
    }
    assert all((rate == 0.5) == (name == option) for name, found in rates.items() for rate in found)


def test_wrong_widths_are_named():
    with pytest.raises(ValueError, match=r"d_model=16 is not divisible by h=3: .*d_k"):
        Encoder(2, D, 3, D_FF)
    with pytest.raises(RuntimeError, match="10x12 and 16x16"):
        Encoder(2, D, H, D_FF)(torch.randn(2, 5, 12))
    with pytest.raises(TypeCheckError, match="memory"):
        Decoder(2, D, H, D_FF)(torch.randn(2, 5, D), torch.randn(2, 6, 12))
    with pytest.raises(TypeCheckError, match="mask"):
        Encoder(2, D, H, D_FF)(torch.randn(2, 5, D), torch.ones(5, 5))
