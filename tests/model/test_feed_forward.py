"""The feed-forward network against convolutions, and what its dropout falls on."""

import pytest
import torch
from helpers import EXACT, inputs
from torch import nn

from annotated.model.feed_forward import PositionwiseFeedForward


def make(d_model=6, d_ff=16, seed=0, **options):
    torch.manual_seed(seed)
    return PositionwiseFeedForward(d_model, d_ff, **options).double()


def test_c10_equals_two_convolutions_of_kernel_size_1():
    layer, x = make(), inputs((2, 5, 6))[0]
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
    layer, x = make(), inputs((1, 5, 6))[0]
    jacobian = torch.autograd.functional.jacobian(layer, x)[0, :, :, 0]  # (5, 6, 5, 6)
    reach = jacobian.abs().amax(dim=(1, 3))  # (output position, input position)
    assert (reach[~torch.eye(5, dtype=torch.bool)] == 0).all() and (reach.diagonal() > 0).all()


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 4, 6), (0, 4, 6)])
def test_any_axes_in_front(shape):
    layer, x = make(), inputs(shape)[0]
    assert layer(x).shape == shape
    torch.testing.assert_close(layer(x).reshape(-1, 6), layer(x.reshape(-1, 6)), **EXACT)


def test_dropout_falls_on_the_hidden_units_and_only_while_training():
    layer = make(dropout=0.25)
    x = inputs((6,))[0].detach().expand(20_000, 6)
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
