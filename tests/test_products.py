"""Products laid out once, and operations fused in C: each way against PyTorch's own, and the choice among them."""

import copy
from functools import partial

import pytest
import torch
from helpers import examples, product_error, roundoff
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from annotated import native, products
from annotated.products import (
    Int8Product,
    PackedProduct,
    TrainedProduct,
    add_and_norm,
    in_turns,
    losses_in_c,
    product,
    trains_faster,
    ways_to_multiply,
)

compiler = pytest.mark.skipif(native.library(32) is None, reason="no C compiler here")
PRECISIONS = ["fp32", "bf16", "int8"]


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(products, "_QUICKEST", {})


@pytest.mark.parametrize("dtype, precision", [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_packed_product_is_the_plain_one(dtype, precision, rows):
    torch.manual_seed(rows)
    layer, x = torch.nn.Linear(48, 37), torch.randn(rows, 2, 48)
    if not PackedProduct.works(x.to(dtype)):
        pytest.skip("this machine packs no such weights")
    with torch.no_grad():
        ours, expected = PackedProduct(layer.weight.to(dtype), layer.bias.to(dtype))(x), copy.deepcopy(layer).double()(x.double())
    assert ours.dtype == dtype and ((ours - expected).abs() <= product_error(x, layer.weight, layer.bias, precision)).all()


@pytest.mark.parametrize("engine", ["fbgemm", "onednn", "no such engine"])
def test_weights_of_8_bits_are_rounded_row_by_row(engine):
    torch.manual_seed(0)
    weight, bias = torch.randn(37, 48) * torch.logspace(-3, 3, 37).unsqueeze(1), torch.randn(37)
    layer, before = Int8Product(weight, bias, engine), torch.backends.quantized.engine
    assert (layer.packed is not None) == (engine in torch.backends.quantized.supported_engines)
    assert torch.backends.quantized.engine == before
    scale = weight.abs().amax(dim=1) / 127
    expected = ((weight / scale.unsqueeze(1)).round() * scale.unsqueeze(1)).T  # what an input of ones and zeros reads off
    # 0 and 1 have whole steps but for the roundings of fp32: of the step, the weight, the product, the bias, and its subtraction
    assert ((layer(torch.eye(48)) - bias - expected).abs() <= roundoff(torch.float32, 8) * (expected.abs() + bias.abs())).all()
    x = torch.randn(9, 3, 48)
    off = layer(x).double() - F.linear(x.double(), weight.double(), bias.double())
    assert (off.abs() <= product_error(x, weight, bias, "int8")).all(), "a small row is rounded as finely as a large one"


@examples(60)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 90), st.booleans(), st.sampled_from(PRECISIONS), st.integers(0, 99))
@example(16, 1, 69, False, "bf16", 49)  # three roundings in the same direction
def test_every_way_is_the_product(rows, wide, out, biased, precision, seed):
    draw = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(out, wide, generator=draw), torch.randn(2, rows, wide, generator=draw)
    bias = torch.randn(out, generator=draw) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    most = product_error(x, weight, bias, precision)
    low = torch.bfloat16 if precision == "bf16" else torch.float32
    given = weight.to(low), None if bias is None else bias.to(low)
    for name, way in ways_to_multiply(given[0], precision).items():
        found = way(*given)(x)
        assert found.shape == (2, rows, out) and ((found.double() - expected).abs() <= most).all(), name


@pytest.mark.parametrize("precision, kinds", [("fp32", ["plain", "packed"]), ("bf16", ["plain", "packed"]), ("int8", ["fbgemm", "onednn"])])
def test_the_ways_are_those_of_the_machine(precision, kinds, monkeypatch):
    weight = torch.randn(8, 4, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    assert PackedProduct.works(weight.float()) == torch.backends.mkldnn.is_available()
    assert list(ways_to_multiply(torch.randn(8, 4, dtype=torch.float64), "fp32")) == ["plain"]
    assert list(ways_to_multiply(torch.randn(8, 4, device="meta"), "fp32")) == ["plain"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(PackedProduct, "works", lambda weight: True)
    monkeypatch.setattr(native, "library", lambda bits: "compiled")
    assert list(ways_to_multiply(weight, precision)) == [f"{precision}, C, 1 thread(s)", f"{precision}, C, 3 thread(s)", *kinds]
    monkeypatch.setattr(native, "library", lambda bits: None)
    assert list(ways_to_multiply(weight, precision)) == kinds
    monkeypatch.setattr(PackedProduct, "works", lambda weight: False)
    assert list(ways_to_multiply(weight, precision)) == [kind for kind in kinds if kind != "packed"]


def test_the_quickest_is_taken_and_measured_once_for_each_shape(monkeypatch):
    measured, quickest = [], "plain"

    def watch(ways):
        measured.append({name: way.args[0].shape for name, way in ways.items()})
        return {name: 1.0 + (name != quickest) for name in ways}

    monkeypatch.setattr(products, "in_turns", watch)
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    for again in range(2):
        found = product(weight + again, rows=3)
        assert torch.equal(found(x), F.linear(x, weight + again)), "the choice is kept, not the weights"
        assert len(measured) == 1 and set(measured[0]) == set(ways_to_multiply(weight, "fp32")) and set(measured[0].values()) == {(3, 4)}
    others = ({"rows": 4}, {"bias": torch.zeros(8), "rows": 3}, {"precision": "bf16", "rows": 3}, {"precision": "int8", "rows": 3})
    for count, other in enumerate(others, start=2):
        product(weight, **other)
        assert len(measured) == count
    product(torch.randn(4, 8), rows=3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    product(weight, rows=3)
    assert len(measured) == 2 + len(others) + 1
    for quickest in ways_to_multiply(weight, "int8"):
        products._QUICKEST.clear()
        kind = product(weight, precision="int8", rows=3)
        assert type(kind) is (native.NativeProduct if "C" in quickest else Int8Product)
        assert getattr(kind, "threads", None) == (int(quickest.split()[2]) if "C" in quickest else None)


def test_a_later_way_must_gain_a_tenth(monkeypatch):
    weight = torch.randn(8, 4)
    first, second = list(ways_to_multiply(weight, "int8"))[:2]
    for gain, taken in ((1.05, first), (1.2, second)):
        products._QUICKEST.clear()
        seconds = {first: gain, second: 1.0}
        monkeypatch.setattr(products, "in_turns", lambda ways, seconds=seconds: {name: seconds.get(name, 9.0) for name in ways})
        product(weight, precision="int8")
        assert list(products._QUICKEST.values()) == [taken]


def test_bf16_gives_bf16_or_what_it_is_given():
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    for way in ways_to_multiply(weight.bfloat16(), "bf16").values():
        assert way(weight.bfloat16())(x.bfloat16()).dtype == torch.bfloat16
        assert way(weight.bfloat16())(x).dtype in (torch.bfloat16, torch.float32)


def test_ways_take_turns_and_the_least_counts(monkeypatch):
    called, times = [], iter([3.0, 5.0, 2.0, 7.0, 9.0, 1.0])
    monkeypatch.setattr(products.timeit.Timer, "timeit", lambda self, number: (self.inner(iter([None]), lambda: 0.0), next(times))[1])
    assert in_turns({name: partial(called.append, name) for name in "ab"}, rounds=3) == {"a": 2.0, "b": 1.0}
    assert "".join(called) == "ababab"


# ---- products with gradients


@examples(60)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 70), st.integers(1, 90), st.booleans(), st.integers(0, 99))
def test_a_trained_product_has_the_gradients_of_the_plain_one(batch, wide, out, biased, seed):
    if not PackedProduct.works(torch.zeros(1)):
        pytest.skip("this machine has no such products")
    draw = torch.Generator().manual_seed(seed)
    x, weight, outer = (torch.randn(*shape, generator=draw).requires_grad_() for shape in ((*batch, wide), (out, wide), (*batch, out)))
    bias = torch.randn(out, generator=draw).requires_grad_() if biased else None
    inputs = [one for one in (x, weight, bias) if one is not None]
    found = TrainedProduct.apply(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    rows, sent = x.reshape(-1, wide), outer.reshape(-1, out)  # the gradients are products, too, and a sum over rows
    most = [product_error(x, weight, bias), product_error(outer, weight.T), product_error(sent.T, rows.T),
            roundoff(torch.float32, len(rows)) * sent.abs().sum(dim=0)]
    found, expected = ((end, *torch.autograd.grad(end, inputs, outer.to(end.dtype))) for end in (found, expected))
    assert all(((ours - theirs).abs() <= bound).all() for ours, theirs, bound in zip(found, expected, most, strict=False))


def test_a_gradient_that_is_one_number_everywhere_is_a_gradient():
    """`sum` sends back a view of one number, without a row in memory of its own."""
    if not PackedProduct.works(torch.zeros(1)):
        pytest.skip("this machine has no such products")
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    TrainedProduct.apply(x, weight, None).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 8))
    torch.testing.assert_close(weight.grad, x.sum(0).expand(5, 8))


@pytest.mark.parametrize("onednn, faster", [(0.5, True), (0.94, True), (0.96, False), (2.0, False)])
def test_onednn_must_gain_a_twentieth(monkeypatch, onednn, faster):
    asked = []
    monkeypatch.setattr(products, "measured_once", lambda *facts: asked.append(facts) or {"plain": 1.0, "onednn": onednn})
    products._gains.cache_clear()
    try:
        assert [trains_faster(torch.zeros(256, 256)) for _ in "abc"] == [faster and PackedProduct.works(torch.zeros(1))] * 3
        assert len(asked) <= 1
    finally:
        products._gains.cache_clear()


def test_small_weights_and_those_of_other_types_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(products, "_gains", lambda threads: True)
    large = torch.zeros(256, 256)
    assert trains_faster(large) == PackedProduct.works(large)
    assert not any(map(trains_faster, (large[1:], large.double(), large.bfloat16(), large.to("meta"))))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_measurement_may_come_where_no_gradients_are_kept(monkeypatch, mode):
    """The loss asks inside a function of autograd, which runs without gradients."""
    if not PackedProduct.works(torch.zeros(1)):
        pytest.skip("this machine has no such products")
    monkeypatch.setattr(products, "measured_once", lambda stem, facts, measure: measure())
    products._gains.cache_clear()
    try:
        with mode():
            assert trains_faster(torch.zeros(256, 256)) in (True, False)
    finally:
        products._gains.cache_clear()


def test_the_ways_to_train_are_measured_in_turns():
    if not PackedProduct.works(torch.zeros(1)):
        pytest.skip("this machine has no such products")
    seconds = products._measure_training(width=16, rows=8)
    assert list(seconds) == ["plain", "onednn"] and min(seconds.values()) > 0


# The loss

@compiler
@examples(60)
@given(st.integers(1, 40), st.integers(1, 300), st.floats(0, 0.9), st.floats(0.01, 30), st.integers(0, 10**6))
def test_losses_in_c_are_those_of_pytorch(tokens, types, smoothing, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(types, (tokens,), generator=generator)
    rounding = roundoff(torch.float32, types + 20)  # a sum over types, and what is done to each before and after
    for dtype in (torch.float32, torch.bfloat16):
        logits = (spread * torch.randn(tokens, types, generator=generator)).to(dtype)
        exact = logits.double().requires_grad_()
        expected = F.cross_entropy(exact, target, reduction="none", label_smoothing=smoothing)
        slopes, = torch.autograd.grad(expected.sum(), exact)
        losses = losses_in_c(logits, target, smoothing)
        size = 1 + exact.detach().abs().amax(dim=1)
        assert losses.dtype == torch.float32 and ((losses - expected).abs() <= rounding * size).all()
        assert ((logits - slopes).abs() <= roundoff(dtype, 1) * slopes.abs() + rounding * size[:, None]).all()


@compiler
@pytest.mark.parametrize("k", range(8))
def test_gradients_in_bf16_that_lie_halfway_are_rounded_to_the_even_neighbour(k):
    logits, halfway = torch.zeros(1, 2, dtype=torch.bfloat16), 0.25 + (2 * k + 1) * 2**-10  # steps of bfloat16 there: 2^-9
    losses_in_c(logits, torch.tensor([0]), 1 - 2 * halfway)  # the gradients of two equal logits are ± (1 - smoothing) / 2
    assert torch.equal(logits, torch.tensor([[-halfway, halfway]]).bfloat16())


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
    monkeypatch.setattr(products, "fused_library", lambda bits: None)
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
@examples(60)
@given(st.integers(1, 70), st.integers(8, 130), st.sampled_from([0.0, 0.1, 0.7]), st.integers(0, 10**6))
def test_the_end_of_a_sub_layer_is_that_of_pytorch_with_all_gradients(rows, d, rate, seed):
    rounding = roundoff(torch.float32, 6 * d + rows + 20)  # six sums of a row in a chain, the gradients of gain and offset over rows
    for dtype in (torch.float32, torch.bfloat16):
        x, y, norm, outer = an_end(rows, d, dtype, seed)
        exact = nn.LayerNorm(d, dtype=torch.float64)
        exact.load_state_dict(norm.state_dict())
        a, b = (one.detach().double().requires_grad_() for one in (x, y))
        added = a + b * mask_of(seed, (rows, d), rate) / (1 - rate)
        expected = exact(added)
        slopes = torch.autograd.grad(expected, (a, b, exact.weight, exact.bias), outer.double())
        torch.manual_seed(seed)
        out = add_and_norm(x, y, norm, rate)
        found = torch.autograd.grad(out, (x, y, norm.weight, norm.bias), outer)
        assert [one.dtype for one in (out, *found)] == [torch.float32] * 2 + [dtype] + [torch.float32] * 2
        turn = (added.var(dim=1, keepdim=True, correction=0) + norm.eps).rsqrt().detach()
        normal, sent = added.abs().amax(dim=1, keepdim=True) * turn, outer.abs()  # of what is rounded before it is subtracted
        back = (1 + normal) ** 2 * (sent * norm.weight.abs()).amax(dim=1, keepdim=True) * turn
        sizes = (normal * norm.weight.abs() + norm.bias.abs(), back, back / (1 - rate), (sent * normal).sum(dim=0), sent.sum(dim=0))
        for ours, theirs, size in zip((out, *found), (expected, *slopes), sizes, strict=True):
            most = roundoff(ours.dtype, 1) * theirs.abs() + rounding * size
            assert ours.shape == theirs.shape and ((ours - theirs).abs() <= most).all()


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
    found = []
    for inputs in ((x, y), turned):
        out = add_and_norm(*inputs, norm, 0.0)
        found.append((out, *torch.autograd.grad(out, inputs, outer.T.contiguous().T)))
    assert all(map(torch.equal, *found))


def test_what_c_cannot_end_is_left_alone(monkeypatch):
    x, y, norm, _ = an_end(4, 16, torch.float32, 0)

    class OwnNorm(nn.LayerNorm):
        """From outside."""

    wrong = [(x.double(), y, norm, 0.1), (x, y.half(), norm, 0.1), (x, y[:1], norm, 0.1), (x, y, norm, 1.0),
             (x.to("meta"), y.to("meta"), norm.to("meta"), 0.1), (x, y, OwnNorm(16), 0.1), (x, y, nn.LayerNorm((4, 16)), 0.1),
             (x, y, nn.LayerNorm(16, elementwise_affine=False), 0.1), (x, y, nn.LayerNorm(16, bias=False), 0.1),
             (x, y, nn.LayerNorm(16, dtype=torch.bfloat16), 0.1)]
    assert [add_and_norm(*each) for each in wrong] == [None] * len(wrong)
    monkeypatch.setattr(products, "fused_library", lambda bits: None)
    assert add_and_norm(x, y, nn.LayerNorm(16), 0.1) is None
