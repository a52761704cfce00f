"""Operations fused in C, against PyTorch's own: the loss of many logits, and the end of a sub-layer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from annotated import fused
from annotated.fused import add_and_norm, losses_in_c

compiler = pytest.mark.skipif(fused.fused_library(32) is None, reason="no C compiler here")

# The loss

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
        losses = losses_in_c(logits, target, smoothing)
        size = 1 + exact.detach().abs().amax(dim=1)
        assert losses.dtype == torch.float32 and ((losses - expected).abs() <= 1e-6 * size * types**0.5).all()
        assert ((logits - slopes).abs() <= bound * slopes.abs() + 1e-6 * size[:, None]).all()


@compiler
def test_losses_in_c_do_not_depend_on_the_number_of_threads():
    logits, target, before, found = torch.randn(50, 999), torch.arange(50), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((slopes := logits.clone(), losses_in_c(slopes, target, 0.1)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found)) and not torch.equal(found[0][0], logits)


@compiler
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_makes_its_own_loss_and_gradient_so(odd):
    logits = torch.randn(3, 20)
    alone = logits.clone()
    expected = losses_in_c(alone, torch.arange(3), 0.1)
    logits[1, 5] = odd
    losses = losses_in_c(logits, torch.arange(3), 0.1)
    assert not losses[1].isfinite() and not logits[1].isfinite().any()
    assert torch.equal(losses[[0, 2]], expected[[0, 2]]) and torch.equal(logits[[0, 2]], alone[[0, 2]])


@compiler
@pytest.mark.parametrize("wrong", [-1, 20])
def test_a_target_that_is_no_type_is_an_error_and_changes_nothing(wrong):
    logits = torch.randn(3, 20)
    before = logits.clone()
    with pytest.raises(IndexError, match=f"target 2 is {wrong}: give an id from 0 to 19"):
        losses_in_c(logits, torch.tensor([0, 19, wrong]), 0.1)
    assert torch.equal(logits, before)


def test_what_c_cannot_sum_is_left_alone(monkeypatch):
    target = torch.arange(4)
    for logits in (torch.randn(4, 6).double(), torch.randn(6, 4).T, torch.empty(4, 6, device="meta")):
        assert losses_in_c(logits, target, 0.1) is None
    monkeypatch.setattr(fused, "fused_library", lambda bits: None)
    assert losses_in_c(torch.randn(4, 6), target, 0.1) is None


# The end of a sub-layer

def mixed(x):
    """The hash, in whole numbers of Python."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def mask_of(seed, shape, rate):
    """What the generator of PyTorch keeps with this seed, by the hash."""
    torch.manual_seed(seed)
    key = torch.empty((), dtype=torch.int64).random_().item()
    places = range(torch.Size(shape).numel())
    kept = [mixed(mixed((place + key) % 2**32) ^ key >> 32) >= round(rate * 2**32) for place in places]
    return torch.tensor(kept, dtype=torch.float64).view(shape)


def an_end(rows, d, dtype, seed):
    """(x, y, norm, a gradient from outside)."""
    draw = torch.Generator().manual_seed(seed)
    x, y, outer = torch.randn(3, rows, d, generator=draw)
    norm = nn.LayerNorm(d)
    norm.weight.data.normal_(generator=draw), norm.bias.data.normal_(generator=draw)
    return x.requires_grad_(), y.to(dtype).requires_grad_(), norm, outer


@compiler
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.integers(8, 130), st.sampled_from([0.0, 0.1, 0.7]), st.integers(0, 10**6))
def test_the_end_of_a_sub_layer_is_that_of_pytorch_with_all_gradients(rows, d, rate, seed):
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        x, y, norm, outer = an_end(rows, d, dtype, seed)
        exact = nn.LayerNorm(d, dtype=torch.float64)
        exact.load_state_dict(norm.state_dict())
        a, b = (one.detach().double().requires_grad_() for one in (x, y))
        expected = exact(a + b * mask_of(seed, (rows, d), rate) / (1 - rate))
        slopes = torch.autograd.grad(expected, (a, b, exact.weight, exact.bias), outer.double())
        torch.manual_seed(seed)
        out = add_and_norm(x, y, norm, rate)
        found = torch.autograd.grad(out, (x, y, norm.weight, norm.bias), outer)
        assert out.dtype == torch.float32 and (out - expected).norm() <= 1e-5 * expected.norm()
        assert [one.dtype for one in found] == [torch.float32, dtype, torch.float32, torch.float32]
        for ours, theirs, most in zip(found, slopes, (1e-5, bound, 1e-5, 1e-5), strict=True):
            assert ours.shape == theirs.shape and (ours - theirs).norm() <= most * theirs.norm()


@compiler
def test_the_end_of_a_sub_layer_does_not_depend_on_the_number_of_threads():
    x, y, norm, outer = an_end(333, 96, torch.bfloat16, 0)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            out = add_and_norm(x, y, norm, 0.1)
            found.append((out, *torch.autograd.grad(out, (x, y, norm.weight, norm.bias), outer)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@compiler
def test_dropout_by_a_hash_is_even_and_new_each_time():
    """Shares of rows, columns and neighbours, and two draws, against a binomial: five deviations."""
    rate, shape = 0.3, (1000, 1000)
    norm, zeros, draws = nn.LayerNorm(1000), torch.zeros(shape), []
    torch.manual_seed(0)
    for _ in "ab":
        y = torch.ones(shape, requires_grad=True)
        slope, = torch.autograd.grad(add_and_norm(zeros, y, norm, rate), y, torch.randn(shape))
        draws.append((slope == 0).double())
    for gone in draws:
        one = (rate * (1 - rate)) ** 0.5
        assert abs(gone.mean() - rate) < 5 * one / 1000
        assert all((gone.mean(dim=axis) - rate).abs().max() < 5 * one / 1000**0.5 for axis in (0, 1))
        assert all(abs(((gone - rate) * (gone.roll(1, axis) - rate)).mean()) < 5 * one**2 / 1000 for axis in (0, 1))
    assert abs(((draws[0] - rate) * (draws[1] - rate)).mean()) < 5 * rate * (1 - rate) / 1000


@compiler
@pytest.mark.parametrize("rate, draws", [(0.0, False), (0.1, True)])
def test_only_dropout_draws_from_the_generator(rate, draws):
    x, y, norm, _ = an_end(4, 16, torch.float32, 0)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    add_and_norm(x, y, norm, rate)
    assert torch.equal(before, torch.get_rng_state()) == (not draws)


@compiler
def test_tensors_that_do_not_lie_in_order_are_taken_in_their_order():
    x, y, norm, outer = an_end(16, 16, torch.float32, 0)
    turned = [one.detach().T.contiguous().T.requires_grad_() for one in (x, y)]
    for inputs in ((x, y), turned):
        out = add_and_norm(*inputs, norm, 0.0)
        found = torch.autograd.grad(out, inputs, outer.T.contiguous().T)
        expected = (out, *found) if inputs[0] is x else expected
    assert all(map(torch.equal, (out, *found), expected))


def test_what_c_cannot_end_is_left_alone(monkeypatch):
    x, y, norm, _ = an_end(4, 16, torch.float32, 0)

    class OwnNorm(nn.LayerNorm):
        """From outside."""

    wrong = [(x.double(), y, norm, 0.1), (x, y.half(), norm, 0.1), (x, y[:1], norm, 0.1), (x, y, norm, 1.0),
             (x.to("meta"), y.to("meta"), norm.to("meta"), 0.1), (x, y, OwnNorm(16), 0.1), (x, y, nn.LayerNorm((4, 16)), 0.1),
             (x, y, nn.LayerNorm(16, elementwise_affine=False), 0.1), (x, y, nn.LayerNorm(16, bias=False), 0.1),
             (x, y, nn.LayerNorm(16, dtype=torch.bfloat16), 0.1)]
    assert [add_and_norm(*each) for each in wrong] == [None] * len(wrong)
    monkeypatch.setattr(fused, "fused_library", lambda bits: None)
    assert add_and_norm(x, y, nn.LayerNorm(16), 0.1) is None
