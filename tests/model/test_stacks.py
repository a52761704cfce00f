"""The layers and stacks of both sides, against PyTorch's own modules with copied weights."""

import pytest
import torch
from helpers import EXACT, examples, inputs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from annotated.model.masking import padding_mask
from annotated.model.stacks import DecoderLayer, Encoder, ResidualConnection

D, H, D_FF = 16, 4, 24
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 7, 0, 0, 0], [9, 8, 7, 6, 0, 0]])  # pad 0
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


@pytest.fixture
def x():
    return inputs((*SOURCE.shape, D), seed=1)[0].detach()


@both_orders
def test_c1_encoder_equals_pytorchs(norm_first, x):
    """The decoder's turn comes in test_transformer.py, with the whole model."""
    ours = random_weights(Encoder(3, D, H, D_FF, norm_first=norm_first))
    theirs, real = pytorchs(ours, norm_first), SOURCE != 0
    output = ours(x, padding_mask(SOURCE))[real]
    expected = theirs(x, src_key_padding_mask=~real)[real]
    torch.testing.assert_close(output, expected, **EXACT)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_same_gradients(ours, theirs)


@both_orders
def test_c1_residual_follows_its_formula(norm_first, x):
    residual = random_weights(ResidualConnection(D, dropout=0.25, norm_first=norm_first))

    def sublayer(x):
        return torch.sin(3 * x)

    torch.manual_seed(0)
    output = residual(x, sublayer)
    torch.manual_seed(0)
    dropped = nn.functional.dropout(sublayer(residual.norm(x) if norm_first else x), 0.25)
    expected = x + dropped if norm_first else residual.norm(x + dropped)
    torch.testing.assert_close(output, expected, **EXACT)


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
