"""Compiled C: products and losses against PyTorch's, and the same weights for other threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from annotated import native

compiler = pytest.mark.skipif(native.library(32) is None, reason="no C compiler here")


@compiler
@pytest.mark.parametrize("bits, bound", [(32, 1e-6), (16, 5e-3), (8, 2e-2)])
@pytest.mark.parametrize("rows, width, out", [(1, 1, 1), (4, 64, 32), (7, 70, 101), (33, 129, 31)])
def test_a_product_in_c_is_that_of_pytorch(bits, bound, rows, width, out):
    torch.manual_seed(0)
    weight, x = torch.randn(out, width), torch.randn(rows, width)
    found, expected = native.NativeProduct(weight, bits=bits, threads=2)(x), F.linear(x, weight)
    assert found.shape == expected.shape and (found - expected).norm() <= bound * expected.norm() + 1e-12
    assert torch.equal(native.NativeProduct(weight, bits=bits)(x.view(1, rows, width))[0], found), "any leading axes, any threads"


@compiler
def test_extreme_inputs_stay_within_8_bits():
    weight = torch.eye(32)
    for x in (torch.zeros(2, 32), torch.full((1, 32), 3.0), torch.full((1, 32), -3.0), torch.linspace(-1e4, 1e4, 32)[None]):
        found = native.NativeProduct(weight, bits=8)(x)
        assert (found - x).abs().max() <= (x.max().clamp(min=0) - x.min().clamp(max=0)) / 255 + 1e-6


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


@compiler
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 300), st.floats(0, 0.9), st.floats(0.01, 30), st.integers(0, 10**6))
def test_losses_in_c_are_those_of_pytorch(tokens, types, smoothing, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(types, (tokens,), generator=generator)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        logits = (spread * torch.randn(tokens, types, generator=generator)).to(dtype)
        exact = logits.double().requires_grad_()
        expected = F.cross_entropy(exact, target, reduction="none", label_smoothing=smoothing)
        slopes, = torch.autograd.grad(expected.sum(), exact)
        losses = native.losses_in_c(logits, target, smoothing)
        size = 1 + exact.detach().abs().amax(dim=1)
        assert losses.dtype == torch.float32 and ((losses - expected).abs() <= 1e-6 * size * types**0.5).all()
        assert ((logits - slopes).abs() <= bound * slopes.abs() + 1e-6 * size[:, None]).all()


@compiler
def test_losses_in_c_do_not_depend_on_the_number_of_threads():
    logits, target, before, found = torch.randn(50, 999), torch.arange(50), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((slopes := logits.clone(), native.losses_in_c(slopes, target, 0.1)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found)) and not torch.equal(found[0][0], logits)


@compiler
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_makes_its_own_loss_and_gradient_so(odd):
    logits = torch.randn(3, 20)
    alone = logits.clone()
    expected = native.losses_in_c(alone, torch.arange(3), 0.1)
    logits[1, 5] = odd
    losses = native.losses_in_c(logits, torch.arange(3), 0.1)
    assert not losses[1].isfinite() and not logits[1].isfinite().any()
    assert torch.equal(losses[[0, 2]], expected[[0, 2]]) and torch.equal(logits[[0, 2]], alone[[0, 2]])


@compiler
@pytest.mark.parametrize("wrong", [-1, 20])
def test_a_target_that_is_no_type_is_an_error_and_changes_nothing(wrong):
    logits = torch.randn(3, 20)
    before = logits.clone()
    with pytest.raises(IndexError, match=f"target 2 is {wrong}: give an id from 0 to 19"):
        native.losses_in_c(logits, torch.tensor([0, 19, wrong]), 0.1)
    assert torch.equal(logits, before)


def test_what_c_cannot_sum_is_left_alone(monkeypatch):
    target = torch.arange(4)
    for logits in (torch.randn(4, 6).double(), torch.randn(6, 4).T, torch.empty(4, 6, device="meta")):
        assert native.losses_in_c(logits, target, 0.1) is None
    monkeypatch.setattr(native, "library", lambda bits: None)
    assert native.losses_in_c(torch.randn(4, 6), target, 0.1) is None
