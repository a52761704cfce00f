"""The feed-forward network against plain loops, convolutions, PyTorch's encoder layer, and the paper's numbers."""

import pytest
import torch
from helpers import EXACT, examples
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn

from annotated.feed_forward import PositionwiseFeedForward
from annotated.multi_head import MultiHeadAttention


def make(d_model=6, d_ff=16, seed=0, **options):
    torch.manual_seed(seed)
    return PositionwiseFeedForward(d_model, d_ff, **options).double()


def inputs(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def test_agrees_with_loops_over_python_numbers():
    layer, x = make(), inputs(2, 3, 6)
    W_1, b_1, W_2, b_2 = (p.tolist() for p in (layer.W_1.weight, layer.W_1.bias, layer.W_2.weight, layer.W_2.bias))
    expected = []
    for position in x.flatten(0, 1).tolist():
        hidden = [max(0.0, sum(w * n for w, n in zip(row, position, strict=True)) + b)
                  for row, b in zip(W_1, b_1, strict=True)]
        expected.append([sum(w * n for w, n in zip(row, hidden, strict=True)) + b
                         for row, b in zip(W_2, b_2, strict=True)])
    torch.testing.assert_close(layer(x).flatten(0, 1), torch.tensor(expected, dtype=torch.float64), **EXACT)


def test_agrees_with_the_feed_forward_half_of_pytorchs_encoder_layer():
    layer, x = make(), inputs(2, 3, 6)
    theirs = nn.TransformerEncoderLayer(6, 1, 16, dropout=0.0, batch_first=True).double()
    theirs.linear1.load_state_dict(layer.W_1.state_dict())
    theirs.linear2.load_state_dict(layer.W_2.state_dict())
    for norm in ("norm1", "norm2"):
        setattr(theirs, norm, nn.Identity())
    for parameter in theirs.self_attn.parameters():
        parameter.data.zero_()  # what is left is the residual sum x + feed_forward(x)
    other = x.detach().clone().requires_grad_()
    output, expected = x + layer(x), theirs(other)
    torch.testing.assert_close(output, expected, **EXACT)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, **EXACT)
    for mine, linear in ((layer.W_1, theirs.linear1), (layer.W_2, theirs.linear2)):
        torch.testing.assert_close(mine.weight.grad, linear.weight.grad, **EXACT)
        torch.testing.assert_close(mine.bias.grad, linear.bias.grad, **EXACT)


def test_absolute_value_built_by_hand():
    layer = PositionwiseFeedForward(3, 6)
    layer.load_state_dict({
        "W_1.weight": torch.cat([torch.eye(3), -torch.eye(3)]), "W_1.bias": torch.zeros(6),
        "W_2.weight": torch.cat([torch.eye(3), torch.eye(3)], dim=1), "W_2.bias": torch.full((3,), 2.0),
    })
    assert layer(torch.tensor([[1.5, -2.0, 0.0]])).tolist() == [[3.5, 4.0, 2.0]]


def test_c10_equals_two_convolutions_of_kernel_size_1():
    layer, x = make(), inputs(2, 5, 6)
    other = x.detach().clone().requires_grad_()
    first, second = nn.Conv1d(6, 16, 1).double(), nn.Conv1d(16, 6, 1).double()
    for convolution, linear in ((first, layer.W_1), (second, layer.W_2)):
        convolution.load_state_dict({"weight": linear.weight[:, :, None], "bias": linear.bias})
    output, convolved = layer(x), second(first(other.transpose(1, 2)).relu()).transpose(1, 2)
    torch.testing.assert_close(output, convolved, **EXACT)
    output.square().sum().backward()
    convolved.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, **EXACT)
    torch.testing.assert_close(layer.W_1.weight.grad, first.weight.grad[:, :, 0], **EXACT)
    torch.testing.assert_close(layer.W_2.weight.grad, second.weight.grad[:, :, 0], **EXACT)


@examples(30)
@given(batch=st.integers(1, 3), n=st.integers(1, 8), seed=st.integers(0, 9999))
def test_c11_permuting_positions_permutes_outputs(batch, n, seed):
    layer, x = make(seed=seed), inputs(batch, n, 6, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], **EXACT)


def test_c11_no_position_influences_another():
    layer, x = make(), inputs(1, 5, 6)
    jacobian = torch.autograd.functional.jacobian(layer, x)[0, :, :, 0]  # (5, 6, 5, 6)
    reach = jacobian.abs().amax(dim=(1, 3))  # (output position, input position)
    assert (reach[~torch.eye(5, dtype=torch.bool)] == 0).all() and (reach.diagonal() > 0).all()


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 4, 6), (0, 4, 6)])
def test_any_axes_in_front(shape):
    layer, x = make(), inputs(*shape)
    assert layer(x).shape == shape
    torch.testing.assert_close(layer(x).reshape(-1, 6), layer(x.reshape(-1, 6)), **EXACT)


def test_parameters_of_the_base_model():
    count = sum(p.numel() for p in PositionwiseFeedForward(512, 2048).parameters())
    assert count == 2 * 512 * 2048 + 2048 + 512 == 2_099_712
    attention = sum(p.numel() for p in MultiHeadAttention(512, 8).parameters())
    norms = 2 * sum(p.numel() for p in nn.LayerNorm(512).parameters())
    assert round(count / (count + attention + norms), 3) == 0.667  # two thirds of an encoder layer


def test_dropout_falls_on_the_hidden_units_and_only_while_training():
    layer = make(dropout=0.25)
    x = inputs(6).detach().expand(20_000, 6)
    still = layer.eval()(x)[0]
    torch.testing.assert_close(still, make()(x)[0], **EXACT)
    torch.manual_seed(0)
    kept = []
    layer.W_2.register_forward_pre_hook(lambda module, arguments: kept.append(arguments[0]))
    outputs = layer.train()(x)
    on = (layer.W_1(x[0]) > 0)
    zeroed = (kept[0][:, on] == 0).double().mean()
    assert abs(zeroed - 0.25) < 4 * (0.25 * 0.75 / (20_000 * on.sum())) ** 0.5
    assert ((outputs.mean(0) - still).abs() < 5 * outputs.std(0) / 20_000**0.5).all()
    assert (outputs == 0).sum() == 0  # the output itself is not dropped here


def test_no_axis_at_all_and_whole_numbers_are_refused():
    for x in (torch.zeros(()).double(), torch.zeros(2, 3, 6, dtype=torch.int64)):
        with pytest.raises(TypeCheckError, match="typechecking parameter 'x'"):
            make()(x)


def test_an_impossible_share_of_dropout_is_refused():
    with pytest.raises(ValueError, match="dropout"):
        PositionwiseFeedForward(6, 8, dropout=1.5)
