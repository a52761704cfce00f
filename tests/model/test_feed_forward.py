"""The feed-forward network against plain loops, convolutions, PyTorch's encoder layer, and the paper's numbers."""

import pytest
import torch
from helpers import EXACT
from torch import nn

from annotated.model.feed_forward import PositionwiseFeedForward
from annotated.model.multi_head import MultiHeadAttention


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
