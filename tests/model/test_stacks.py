"""The layers and stacks of both sides, against PyTorch's own modules with copied weights."""

import pytest
import torch
from helpers import EXACT, examples, inputs
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
    """Random weights everywhere, in the norms too: nothing can hide behind a 1 or a 0."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module.double()


def shared(ours, theirs):
    """Each parameter of PyTorch's stack, and those of ours that it holds one above the other."""
    norms = [(ours.norm, theirs.norm)] if theirs.norm else []
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        attentions = [(mine.self_attention, other.self_attn)]
        if isinstance(mine, DecoderLayer):
            attentions.append((mine.cross_attention, other.multihead_attn))
        for a, b in attentions:
            yield b.in_proj_weight, [a.W_Q.weight, a.W_K.weight, a.W_V.weight]
            yield b.out_proj.weight, [a.W_O.weight]
        norms += [(mine.feed_forward.W_1, other.linear1), (mine.feed_forward.W_2, other.linear2)]
        norms += [(residual.norm, getattr(other, f"norm{i}"))
                  for i, residual in enumerate(mine.residual, 1)]
    for a, b in norms:
        yield b.weight, [a.weight]
        yield b.bias, [a.bias]


def pytorchs(ours, norm_first):
    """PyTorch's stack with the weights of ours; a last norm only where ours has one."""
    options = dict(dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    norm = nn.LayerNorm(D, dtype=torch.float64) if norm_first else None
    if isinstance(ours, Encoder):
        layer = nn.TransformerEncoderLayer(D, H, D_FF, **options)
        theirs = nn.TransformerEncoder(layer, len(ours.layers), norm, enable_nested_tensor=False)
    else:
        layer = nn.TransformerDecoderLayer(D, H, D_FF, **options)
        theirs = nn.TransformerDecoder(layer, len(ours.layers), norm)
    for parameter, stacked in shared(ours, theirs):  # its biases of attention begin as zeros
        parameter.data = torch.cat(stacked).detach()
    return theirs


def assert_same_gradients(ours, theirs):
    for parameter, stacked in shared(ours, theirs):
        gradient = torch.cat([own.grad for own in stacked])
        assert gradient.abs().max() > 1e-9
        torch.testing.assert_close(gradient, parameter.grad, **EXACT)


def compare(ours, theirs, real, arguments, run_ours, run_theirs):
    """Outputs at real positions, and the gradients of inputs and parameters, are equal."""
    results = []
    for run in (run_ours, run_theirs):
        leaves = [x.clone().requires_grad_() for x in arguments]
        out = run(*leaves)[real]
        (out * torch.linspace(-1, 2, out.numel()).double().view_as(out)).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for mine, other in zip(*results, strict=True):
        assert mine.abs().max() > 1e-6
        torch.testing.assert_close(mine, other, **EXACT)
    assert_same_gradients(ours, theirs)


@pytest.fixture
def x():
    return inputs((*SOURCE.shape, D), seed=1)[0].detach()


@both_orders
def test_c1_encoder_equals_pytorchs(norm_first, x):
    ours = random_weights(Encoder(3, D, H, D_FF, norm_first=norm_first))
    theirs = pytorchs(ours, norm_first)
    compare(ours, theirs, SOURCE != 0, [x], lambda x: ours(x, padding_mask(SOURCE)),
            lambda x: theirs(x, src_key_padding_mask=SOURCE == 0))


@both_orders
def test_c1_decoder_equals_pytorchs(norm_first, x):
    y = inputs((*TARGET.shape, D), seed=2)[0].detach()
    ours = random_weights(Decoder(3, D, H, D_FF, norm_first=norm_first))
    theirs, mask = pytorchs(ours, norm_first), causal_mask(5) & padding_mask(TARGET)
    compare(ours, theirs, TARGET != 0, [y, x], lambda y, x: ours(y, x, mask, padding_mask(SOURCE)),
            lambda y, x: theirs(y, x, tgt_mask=~causal_mask(5), tgt_key_padding_mask=TARGET == 0,
                                memory_key_padding_mask=SOURCE == 0))


@both_orders
def test_c1_residual_follows_its_formula(norm_first, x):
    residual = random_weights(ResidualConnection(D, norm_first=norm_first))

    def norm(x):  # biased variance, epsilon inside the root
        centred = x - x.mean(-1, keepdim=True)
        size = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return residual.norm.weight * centred / size + residual.norm.bias

    for size in (1, 1e-3):  # where it is small, epsilon decides
        z = size * x
        expected = z + torch.sin(3 * norm(z)) if norm_first else norm(z + torch.sin(3 * z))
        torch.testing.assert_close(residual(z, lambda z: torch.sin(3 * z)), expected, **EXACT)


@both_orders
def test_c1_gradient_at_the_top_of_a_fresh_stack(norm_first):
    def top(N):
        norms = []
        for seed in range(4):
            torch.manual_seed(seed)
            stack, classify = Encoder(N, 32, 4, 64, norm_first=norm_first), nn.Linear(32, 10)
            for p in (*stack.parameters(), classify.weight):
                if p.dim() == 2:
                    nn.init.xavier_uniform_(p)
            logits = classify(stack(torch.randn(16, 8, 32)))
            nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(10, (128,))).backward()
            norms.append(stack.layers[-1].feed_forward.W_2.weight.grad.norm().item())
        return sum(norms) / 4

    ratio = top(18) / top(6)
    assert 0.4 < ratio < 0.75 if norm_first else 0.75 < ratio < 1.4, ratio


@examples(20)
@given(batch=st.integers(2, 6), length=st.integers(1, 7), norm_first=st.booleans(),
       seed=st.integers(0, 99))
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
    else:  # the norm of a two-valued vector has two values, mean 0
        assert len(out.unique()) == 2 and abs(out.mean().item()) < 1e-5  # some dozens of roundings
    assert abs((out == out.min()).float().mean().item() - 0.25) < 0.04


@pytest.mark.parametrize("option", ["dropout", "attention_dropout", "feed_forward_dropout"])
@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
def test_each_dropout_reaches_its_place_alone(option, kind):
    layer = kind(D, H, D_FF, **{option: 0.5})
    attentions = [m.attention for name, m in layer.named_children() if name.endswith("attention")]
    rates = {"dropout": [residual.dropout.p for residual in layer.residual],
             "attention_dropout": [attention.dropout for attention in attentions],
             "feed_forward_dropout": [layer.feed_forward.dropout.p]}
    assert all((rate == 0.5) == (name == option) for name in rates for rate in rates[name])


def test_shapes_that_do_not_fit_are_refused():
    x = torch.randn(2, 5, D)
    with pytest.raises(TypeCheckError, match="memory"):
        Decoder(2, D, H, D_FF)(x, torch.randn(2, 6, 12))
    with pytest.raises(TypeCheckError, match="mask"):
        Encoder(2, D, H, D_FF)(x, torch.ones(5, 5))
