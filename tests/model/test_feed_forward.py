"""The feed-forward network against convolutions, and what its dropout falls on."""

import torch
from helpers import EXACT, inputs
from torch import nn

from annotated.model.feed_forward import PositionwiseFeedForward


def make(d_model=6, d_ff=16, seed=0, **options):
    torch.manual_seed(seed)
    return PositionwiseFeedForward(d_model, d_ff, **options).double()


def test_c10_equals_two_convolutions_of_kernel_size_1():
    layer, (x, direction) = make(), inputs((2, 5, 6), (2, 5, 6))
    first, second = nn.Conv1d(6, 16, 1).double(), nn.Conv1d(16, 6, 1).double()
    for convolution, linear in ((first, layer.W_1), (second, layer.W_2)):
        convolution.load_state_dict({"weight": linear.weight[:, :, None], "bias": linear.bias})
    output, convolved = layer(x), second(first(x.transpose(1, 2)).relu()).transpose(1, 2)
    torch.testing.assert_close(output, convolved, **EXACT)
    ours = torch.autograd.grad(output, (x, layer.W_1.weight, layer.W_2.weight), direction)
    theirs = torch.autograd.grad(convolved, (x, first.weight, second.weight), direction)
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other.view_as(gradient), **EXACT)


def test_c11_no_position_influences_another():
    layer, x = make(), inputs((1, 5, 6))[0]
    jacobian = torch.autograd.functional.jacobian(layer, x)[0, :, :, 0]  # (5, 6, 5, 6)
    reach = jacobian.abs().amax(dim=(1, 3))  # (output position, input position)
    assert (reach[~torch.eye(5, dtype=torch.bool)] == 0).all() and (reach.diagonal() > 0).all()


def test_dropout_falls_on_the_hidden_units_and_only_while_training():
    layer, (x,) = make(dropout=0.25), inputs((4, 6))
    for training in (True, False):
        torch.manual_seed(0)
        output = layer.train(training)(x)
        torch.manual_seed(0)
        hidden = nn.functional.dropout(layer.W_1(x).relu(), 0.25, training)
        assert torch.equal(output, layer.W_2(hidden))
