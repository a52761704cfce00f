"""Compiled C: products against PyTorch's, and the same weights for other threads."""

import pytest
import torch
from helpers import product_error, roundoff
from torch.nn import functional as F

from annotated import native

compiler = pytest.mark.skipif(native.library(32) is None, reason="no C compiler here")


@compiler
@pytest.mark.parametrize("bits, precision", [(32, "fp32"), (16, "bf16"), (8, "int8")])
@pytest.mark.parametrize("rows, width, out", [(1, 1, 1), (4, 64, 32), (7, 70, 101), (33, 129, 31)])
def test_a_product_in_c_is_that_of_pytorch(bits, precision, rows, width, out):
    torch.manual_seed(0)
    weight, x = torch.randn(out, width), torch.randn(rows, width)
    found, expected = native.NativeProduct(weight, bits=bits, threads=2)(x), F.linear(x.double(), weight.double())
    assert found.shape == expected.shape and ((found - expected).abs() <= product_error(x, weight, precision=precision, roundings=2)).all()
    assert torch.equal(native.NativeProduct(weight, bits=bits)(x.view(1, rows, width))[0], found), "any leading axes, any threads"


@compiler
def test_16_bits_are_rounded_to_the_nearest_as_pytorch_does():
    x = torch.cat([torch.linspace(-3, 3, 96), 1 + torch.arange(32) / 256]).view(4, 32)  # ties among them
    assert torch.equal(native.NativeProduct(torch.eye(32), bits=16)(x), x.bfloat16().float())


@compiler
def test_extreme_inputs_stay_within_8_bits():
    weight = torch.eye(32)
    for x in (torch.zeros(2, 32), torch.full((1, 32), 3.0), torch.full((1, 32), -3.0), torch.linspace(-1e4, 1e4, 32)[None]):
        found = native.NativeProduct(weight, bits=8)(x)
        assert (found - x).abs().max() <= (x.max().clamp(min=0) - x.min().clamp(max=0)) / 255 * (1 + roundoff(torch.float32, 2 * 255))


@compiler
def test_no_number_of_8_bits_is_off_by_more_than_half_a_step():
    """Also the least of a row, whose zero is a whole number of steps away."""
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(0)) + torch.linspace(-2, 2, 500).unsqueeze(1)
    step = (x.amax(1, keepdim=True).clamp(min=0) - x.amin(1, keepdim=True).clamp(max=0)) / 255
    off = (native.NativeProduct(torch.eye(32), bits=8)(x) - x).abs() / step
    assert 0.49 < off.max() < 0.501


@compiler
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_a_row_or_an_output_that_is_not_finite_leaves_the_others_alone(bits, odd):
    torch.manual_seed(0)
    weight, x = torch.randn(40, 70), torch.randn(3, 70)
    expected = native.NativeProduct(weight, bits=bits)(x)
    x[1], weight[7] = odd, odd
    found = native.NativeProduct(weight, bits=bits)(x)
    others = [i for i in range(40) if i != 7]
    assert torch.equal(found[[0, 2]][:, others], expected[[0, 2]][:, others])


@compiler
def test_weights_are_laid_out_once_for_all_threads():
    one = native.NativeProduct(torch.randn(40, 70), bits=8)
    two = one.with_threads(2)
    assert (one.threads, two.threads) == (1, 2) and two.weight is one.weight and two.kept is one.kept
