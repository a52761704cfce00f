"""The fast parts that stand in for attention, positions and stacks, against the plain ones and PyTorch's own."""

import contextlib

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from annotated import fast
from annotated.attention import DotProductAttention, masked_softmax
from annotated.decoding import KeyValueCache
from annotated.masking import causal_mask
from annotated.multi_head import MultiHeadAttention, record_attention
from annotated.positional import PositionalEncoding, sinusoidal_encoding
from annotated.stacks import Decoder, Encoder
from annotated.transformer import Transformer, TransformerConfig

EXACT = {"rtol": 0, "atol": 1e-9}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def inputs(*shapes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def random_mask(*shape, seed=2):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.7


def prepared(layer, purpose, **options):
    """The fast layer in the place of a plain one."""
    return fast.prepare(nn.ModuleList([layer]), purpose, **options)[0]


def make(d_model=24, h=4, **options):
    torch.manual_seed(0)
    return MultiHeadAttention(d_model, h, **options).double()


def quick(dropout=0.0, training=False):
    return fast.QuickAttention(DotProductAttention(dropout)).train(training)


def gradients(output, *leaves):
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(output)
    return torch.autograd.grad((output * direction).sum(), leaves)


class Calls(TorchDispatchMode):
    """Counts the operations of a kind that run."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted, self.count = wanted, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += self.wanted(function, options or {})
        return function(*arguments, **(options or {}))


@pytest.fixture
def fused(monkeypatch):
    """PyTorch's fused function, still as it was, and a list that grows with each call from elsewhere."""
    own, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or own(*a, **k))
    return own, calls


# Asking whether a mask hides anything


def test_surely_all_is_never_wrong_and_asks_only_where_it_is_cheap():
    everything, something = torch.ones(3, 1, 4, dtype=torch.bool), torch.tensor([[True, True], [True, False]])
    assert fast.surely_all(everything) and fast.surely_all(everything[:0]) and not fast.surely_all(something)
    assert not fast.surely_all(everything.to("meta")), "not a processor: nobody knows"
    assert not torch.compile(lambda mask: fast.surely_all(mask), backend="eager")(everything), "compiled code must not look"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blind", [False, True], ids=["all rows see", "a row sees nothing"])
def test_lean_softmax_gives_a_forbidden_key_exactly_nothing_whatever_the_scores(dtype, blind):
    lowest = torch.finfo(dtype).min
    scores = torch.tensor([[1.0, 2.0, 3.0], [lowest, lowest, 0.0], [0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, False], [not blind, False, False]])
    weights = fast.lean_softmax(scores, mask)
    assert (weights[~mask] == 0).all() and (weights[2] == torch.tensor([float(not blind), 0.0, 0.0])).all()
    torch.testing.assert_close(weights[0, :2], scores[0, :2].softmax(-1), rtol=4 * torch.finfo(dtype).eps, atol=0)
    weights[0].square().sum().backward()
    assert scores.grad.isfinite().all() and (scores.grad[~mask] == 0).all() and (scores.grad[0, :2] != 0).all()


@pytest.mark.parametrize("blind", [False, True], ids=["all rows see", "a row sees nothing"])
def test_lean_softmax_is_the_plain_one_and_fills_once_where_that_will_do(blind):
    (scores,), mask = inputs((2, 3, 4, 5)), random_mask(2, 1, 4, 5)
    mask[..., 0] = True
    mask[1, 0, 2] = not blind
    with Calls(lambda function, _: function is torch.ops.aten.masked_fill.Scalar) as fillings:
        weights = fast.lean_softmax(scores, mask)
    assert fillings.count == (2 if blind else 1)
    expected = masked_softmax(scores, mask)
    torch.testing.assert_close(weights, expected, **EXACT)
    torch.testing.assert_close(gradients(weights, scores), gradients(expected, scores), **EXACT)
    assert torch.equal(fast.lean_softmax(scores), scores.softmax(-1))


# Attention: which way it goes, and that all ways are one function


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [None, (5, 7), (1, 7), (1, 1, 1, 7), (2, 1, 1, 7), (2, 1, 5, 7), (1, 4, 5, 1), (2, 4, 5, 7)], ids=str)
def test_quick_attention_is_the_plain_one_with_any_mask(shape, training):
    leaves = inputs((2, 4, 5, 6), (2, 4, 7, 6), (2, 4, 7, 3))
    mask = None if shape is None else random_mask(*shape)
    output, weights = quick(training=training)(*leaves, mask)
    expected, _ = DotProductAttention()(*leaves, mask)
    assert weights is None
    torch.testing.assert_close(output, expected, **EXACT)
    torch.testing.assert_close(gradients(output, *leaves), gradients(expected, *leaves), **EXACT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_c9_a_row_with_nothing_to_attend_to_gives_zeros_in_the_quick_ways_too(device, dtype, training):
    layer = make(d_model=64, h=4).to(device, dtype)
    mask = random_mask(3, 1, 6, 6).to(device)
    mask[0, 0, 2], mask[2] = False, False  # one query; a sentence that is nothing but padding
    results = []
    for kind in (layer, prepared(layer, "train").train(training)):
        x = inputs((3, 6, 64))[0].detach().to(device, dtype).requires_grad_()
        output = kind(x, x, x, mask)
        output.square().sum().backward()
        assert (output[0, 2] == 0).all() and (output[2] == 0).all()
        assert output.isfinite().all() and x.grad.isfinite().all() and (x.grad[2] == 0).all()
        results.append(output)
    tolerance = EXACT if dtype == torch.float64 else {"rtol": 0, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(*results, **tolerance)


def test_long_training_drops_weights_in_the_fused_function_too(fused):
    n = 300  # on a processor the fused function trains from 257 keys up
    Q, K = (x.detach() for x in inputs((1, 4, n, 6), (1, 4, n, 6)))
    each = torch.eye(n, dtype=torch.float64).expand(1, 4, n, n)  # with these values the outputs are the weights
    torch.manual_seed(0)
    dropped, whole = (quick(0.25, training)(Q, K, each)[0] for training in (True, False))
    assert len(fused[1]) == 2 and (whole > 0).all()
    gone = dropped == 0
    assert abs(gone.double().mean() - 0.25) < 5 * (0.25 * 0.75 / gone.numel()) ** 0.5
    torch.testing.assert_close(dropped[~gone], whole[~gone] / 0.75, rtol=1e-9, atol=0)  # the others make up for it


def test_short_training_drops_weights_where_they_are_spelled_out(fused):
    Q, K = (x.detach().expand(50, 4, 40, 6) for x in inputs((1, 4, 40, 6), (1, 4, 40, 6)))
    each = torch.eye(40, dtype=torch.float64).expand(50, 4, 40, 40)
    torch.manual_seed(0)
    dropped, whole = (quick(0.25, training)(Q, K, each)[0] for training in (True, False))
    assert len(fused[1]) == 1
    gone = dropped == 0
    assert abs(gone.double().mean() - 0.25) < 5 * (0.25 * 0.75 / gone.numel()) ** 0.5
    torch.testing.assert_close(dropped[~gone], whole[~gone] / 0.75, rtol=1e-9, atol=0)


@pytest.mark.parametrize("purpose", ["train", "translate"])
def test_only_who_looks_on_has_weights_made(fused, purpose):
    layer, x = prepared(make(), purpose).eval(), inputs((1, 5, 24))[0]
    layer(x, x, x)
    assert len(fused[1]) == 1
    with record_attention(layer):
        layer(x, x, x)
    assert len(fused[1]) == 1
    layer(x, x, x)
    assert len(fused[1]) == 2


@pytest.mark.parametrize(("rows", "queries", "dtype", "d_k", "threads", "training", "explicit"), [
    (32, 1, torch.bfloat16, 64, 2, False, True), (31, 1, torch.bfloat16, 64, 2, False, False),
    (32, 2, torch.bfloat16, 64, 2, False, False), (32, 1, torch.float32, 64, 2, False, False),
    (32, 1, torch.bfloat16, 32, 2, False, False), (32, 1, torch.bfloat16, 64, 1, False, False),
    (64, 1, torch.bfloat16, 40, 2, False, True), (64, 1, torch.bfloat16, 32, 2, False, False),
])
def test_a_step_for_many_rows_in_bf16_takes_a_way_of_its_own_and_gives_the_same(
    rows, queries, dtype, d_k, threads, training, explicit, monkeypatch, fused
):
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    own, calls = fused
    Q, K, V = torch.randn(rows, 2, queries, d_k).to(dtype), *(torch.randn(rows, 2, 9, d_k).to(dtype) for _ in range(2))
    mask = torch.rand(rows, 1, 1, 9) < 0.7
    mask[0] = False  # a row with nothing to attend to
    for some in (None, mask):
        calls.clear()
        heads, weights = quick(training=training)(Q, K, V, some)
        assert len(calls) == (0 if explicit else 1) and heads.dtype == dtype and weights is None
        expected = own(Q.double(), K.double(), V.double(), some)
        close = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
        assert torch.allclose(heads.double(), torch.zeros_like(expected).where(expected.isnan(), expected), rtol=0, atol=close)


def test_attend_once_is_the_plain_function_for_one_query():
    Q, K, V = inputs((3, 2, 1, 6), (3, 2, 9, 6), (3, 2, 9, 4))
    mask = random_mask(3, 1, 1, 9)
    mask[0] = False
    for some in (None, mask):
        torch.testing.assert_close(fast.attend_once(Q, K, V, some), DotProductAttention()(Q, K, V, some)[0], **EXACT)


def test_a_step_with_many_keys_stays_with_the_fused_function(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    once = []
    monkeypatch.setattr(fast, "attend_once", lambda *_: once.append(1))
    for keys in (128, 129):
        quick()(*(torch.randn(32, 2, n, 64).bfloat16() for n in (1, keys, keys)))
    assert once == [1]
    quick(training=True)(*(torch.randn(32, 2, n, 64).bfloat16() for n in (1, 128, 128)))
    assert once == [1], "a step is part of translating"


def test_a_step_with_few_narrow_keys_stays_with_the_fused_function(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for d_k, keys, taken in ((32, 32, False), (32, 33, True), (33, 32, True), (33, 33, True)):
        query, key = torch.zeros(32, 4, 1, d_k).bfloat16(), torch.zeros(32, 4, keys, d_k).bfloat16()
        assert fast.is_step(query, key) == taken


def test_short_training_on_a_processor_takes_the_explicit_way_and_gives_the_same(fused):
    layer, calls = prepared(make(), "train"), fused[1]
    cases = (5, torch.float64, 0), (256, torch.float64, 0), (257, torch.float64, 1), (1024, torch.bfloat16, 0), (1025, torch.bfloat16, 1)
    for length, kind, expected in cases:
        x = inputs((2, length, 24))[0].to(kind)
        layer.to(kind)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        outputs, slopes = [], []
        for training in (True, False):  # without dropout the mode makes no other difference
            calls.clear()
            layer.train(training).zero_grad()
            outputs.append(layer(x, x, x, mask))
            outputs[-1].square().sum().backward()
            slopes.append([p.grad.clone() for p in layer.parameters()])
            assert len(calls) == (expected if training else 1)
        bound = 1e-9 if kind == torch.float64 else 2**-6  # 8 significant bits, and some sums
        assert torch.allclose(*outputs, rtol=0, atol=bound)
        for ours, other in zip(*slopes, strict=True):
            assert (ours - other).norm() <= bound * (1e-3 + other.norm())


@pytest.mark.parametrize("purpose", ["train", "translate"])
@pytest.mark.parametrize("training", [False, True])
def test_a_mask_that_does_not_fit_is_refused_whatever_the_way(purpose, training):
    layer, x = prepared(make(), purpose).train(training), inputs((2, 3, 24))[0].detach()
    with pytest.raises(TypeCheckError, match="typechecking parameter 'mask'"):
        layer.attend(*layer.project(x, x, x), torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has shape \(4, 3, 3\): give mask.unsqueeze\(1\)"):
        layer(x, x, x, torch.ones(4, 3, 3, dtype=torch.bool))


# One product for queries, keys and values


@pytest.mark.parametrize("widths", [(None, None), (3, 5)])
def test_training_in_half_precision_projects_one_input_in_one_product(widths, monkeypatch):
    torch.manual_seed(0)
    layer, x = prepared(MultiHeadAttention(24, 4, *widths), "train"), torch.randn(2, 5, 24)
    product, found, calls = F.linear, {}, []
    monkeypatch.setattr(F, "linear", lambda *a, **k: calls.append(1) or product(*a, **k))
    cases = {"one": (True, True, (x, x)), "three": (True, True, (x.clone(), x.clone())), "mixed": (True, True, (x, x.clone())),
             "fp32": (False, True, (x, x)), "eval": (True, False, (x, x))}
    for name, (low, training, others) in cases.items():
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            result = layer.train(training)(x, *others)
        found[name] = result.float(), *torch.autograd.grad(result.float().square().sum(), list(layer.parameters()))
        assert len(calls) == (2 if name == "one" else 4), name
    for one, three in zip(found["one"], found["three"], strict=True):
        assert (one - three).norm() < 0.01 * three.norm()
    for low, exact in zip(found["one"], found["fp32"], strict=True):
        assert (low - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("widths", [(None, None), (3, 5)])
def test_three_projections_in_one_that_is_kept_are_the_same(widths):
    torch.manual_seed(0)
    plain, products = MultiHeadAttention(24, 4, *widths).double(), []

    def product(weight):
        products.append(weight.shape)
        return lambda x: x @ weight.T

    layer = fast.JoinedAttention(plain, product).eval()
    x, other = torch.randn(2, 2, 5, 24, dtype=torch.float64)
    for three in ((x, x, x), (x, other, other), (x, x, other), (x, other, x), (other, other, other)):
        for ours, theirs in zip(layer.project(*three), plain.project(*three), strict=True):
            torch.testing.assert_close(ours, theirs, **EXACT)
        torch.testing.assert_close(layer(*three), plain(*three), **EXACT)
    assert products == [(sum(W.out_features for W in (plain.W_Q, plain.W_K, plain.W_V)), 24)], "made once, and kept"
    for W in (plain.W_Q, plain.W_K, plain.W_V):
        nn.init.zeros_(W.weight)
    assert layer(x, x, x).abs().sum() > 0, "kept for a model that only translates"
    assert (layer(x, other, other) == 0).all() and (layer.train()(x, x, x) == 0).all(), "neither for two inputs nor in training"


@pytest.mark.parametrize("d_k, d_v", [(None, None), (3, 5), (16, 2)])
@pytest.mark.parametrize("purpose", ["train", "translate"])
@pytest.mark.parametrize("training", [False, True])
def test_a_prepared_layer_is_the_plain_one_with_its_gradients(d_k, d_v, purpose, training):
    plain = make(d_k=d_k, d_v=d_v)
    layer = prepared(plain, purpose).train(training)
    query, key, value = inputs((2, 5, 24), (2, 7, 24), (2, 7, 24))
    mask = random_mask(2, 4, 5, 7)
    mask[1, 2, 3] = False
    for three, some in (((query, key, value), mask), ((query, query, query), causal_mask(5)), ((query, key, key), None)):
        leaves = [*dict.fromkeys(three)]
        output, expected = layer(*three, some), plain(*three, some)
        torch.testing.assert_close(output, expected, **EXACT)
        if training:
            torch.testing.assert_close(gradients(output, *leaves), gradients(expected, *leaves), **EXACT)
    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(a is b for a, b in zip(layer.parameters(), plain.parameters(), strict=True))


# Masks only where something is hidden, inputs rounded once


def test_lean_mask_is_the_same_mask_in_its_smallest_form():
    assert fast.lean_mask(None) is None and fast.lean_mask(torch.ones(3, 1, 2, 2, dtype=torch.bool)) is None
    alike, different = causal_mask(4).expand(3, 1, 4, 4), random_mask(3, 1, 4, 4)
    assert torch.equal(fast.lean_mask(alike), causal_mask(4)[None, None])
    assert torch.equal(fast.lean_mask(different), different)
    late = alike.clone()
    late[2, 0, 3, 0] = False
    assert torch.equal(fast.lean_mask(late), late)


@pytest.mark.parametrize("purpose", ["train", "translate"])
@pytest.mark.parametrize("hidden", [(False, False), (True, False), (False, True)])
def test_a_mask_is_handed_on_only_where_something_is_hidden(hidden, purpose):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(12, d_model=16, d_ff=32, h=2)).eval()
    source, target = torch.randint(1, 12, (2, 5)), torch.randint(1, 12, (2, 4))
    source[0, 4], target[1, 3] = 0 if hidden[0] else 5, 0 if hidden[1] else 5
    expected, seen = model(source, target), {}
    fast.prepare(model, purpose)
    for name, layer in (("encoder", model.encoder.layers[1]), ("decoder", model.decoder.layers[1])):
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given}))
    torch.testing.assert_close(model(source, target), expected, rtol=0, atol=1e-5)
    assert (seen["encoder"][1] is not None) == (seen["decoder"][3] is not None) == hidden[0]
    assert seen["decoder"][2].shape == ((2, 1, 4, 4) if hidden[1] else (1, 1, 4, 4))


def half_precision_casts(function, options):
    return function is torch.ops.aten._to_copy.default and options.get("dtype") == torch.bfloat16


@pytest.mark.parametrize("norm_first", [False, True])
def test_under_autocast_an_input_is_rounded_once_and_nothing_else_changes(norm_first, monkeypatch):
    torch.manual_seed(0)
    stacks = nn.ModuleList(kind(2, 16, 2, 32, norm_first=norm_first) for kind in (Encoder, Decoder))
    encoder, decoder = fast.prepare(stacks.eval(), "train")
    x, y, results = torch.randn(2, 5, 16), torch.randn(2, 4, 16), []
    for rounded in (fast.rounded, lambda x: x):
        monkeypatch.setattr(fast, "rounded", rounded)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Calls(half_precision_casts) as casts:
            results.append((decoder(y, encoder(x), causal_mask(4)), casts.count))
    assert torch.equal(results[0][0], results[1][0])
    saved = 2 * 2 + 2 * 2 + (2 * 2 - 1)  # two of three projections in each self-attention; one memory for two layers' four
    assert results[1][1] - results[0][1] == saved


def test_rounded_changes_nothing_but_float32_under_autocast():
    x = torch.randn(3)
    assert fast.rounded(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast.rounded(x), x.bfloat16()) and fast.rounded(x).dtype == torch.bfloat16
        for other in (x.double(), x.half(), torch.arange(3)):
            assert fast.rounded(other) is other


# Positions kept


class TestKeptPositions:
    def kept(self, d_model=6, dropout=0.0):
        return fast.KeptPositions(PositionalEncoding(d_model, dropout))

    def test_any_length_in_any_order(self):
        layer = self.kept()
        for length in (3, 700, 1, 2_000, 5):
            x = torch.randn(2, length, 6)
            assert torch.equal(layer(x), x + sinusoidal_encoding(length, 6))

    @pytest.mark.parametrize("start", [0, 1, 255, 256, 4_000])
    def test_start(self, start):
        x = torch.randn(2, 3, 6)
        assert torch.equal(self.kept()(x, start=start), x + sinusoidal_encoding(start + 3, 6)[start:])

    def test_the_table_grows_by_doubling_and_is_not_made_anew(self):
        layer, lengths = self.kept(), []
        for length in (1, 256, 257, 300, 512, 2_000, 5):
            layer(torch.zeros(1, length, 6))
            lengths.append((len(layer.table), layer.table.data_ptr()))
        assert [n for n, _ in lengths] == [256, 256, 512, 512, 512, 2_000, 2_000]
        assert len(set(lengths)) == 3

    def test_has_no_state_to_save_or_to_round(self):
        layer = self.kept()
        layer(torch.zeros(1, 9, 6))
        assert not list(layer.parameters()) and not list(layer.buffers()) and not layer.state_dict()
        layer.half()
        layer.float()
        assert torch.equal(layer(torch.zeros(1, 9, 6))[0], sinusoidal_encoding(9, 6))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_dtype_is_kept(self, dtype):
        assert self.kept()(torch.zeros(1, 4, 6, dtype=dtype)).dtype == dtype

    def test_device_is_kept_and_changes_between_calls(self):
        layer = self.kept()
        assert layer(torch.zeros(1, 4, 6, device="meta")).device.type == "meta"
        assert torch.equal(layer(torch.zeros(1, 4, 6))[0], sinusoidal_encoding(4, 6))  # and back on the CPU

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_on_a_gpu(self):
        layer = self.kept()
        for _ in range(2):
            out = layer(torch.zeros(1, 400, 6, device="cuda"))
            assert out.device.type == "cuda" and torch.equal(out[0].cpu(), sinusoidal_encoding(400, 6))

    def test_can_be_trained_after_a_first_call_without_gradients(self):
        layer = self.kept()
        with torch.inference_mode():
            layer(torch.zeros(1, 4, 6))
        x = torch.randn(1, 4, 6, requires_grad=True)
        layer(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(1, 4, 6))

    def test_dropout_falls_on_the_sum_and_only_while_training(self):
        torch.manual_seed(0)
        layer = self.kept(64, dropout=0.25)
        x = torch.full((4, 50, 64), 3.0)  # no sum is zero by itself
        out, expected = layer(x), x + sinusoidal_encoding(50, 64)
        kept = out != 0
        assert (~kept).float().mean().item() == pytest.approx(0.25, abs=0.02)
        assert torch.allclose(out[kept], expected[kept] / 0.75)
        assert torch.equal(layer.eval()(x), expected)


# Several queries a row of keys, as a beam asks them


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hypotheses_side_by_side_find_in_shared_keys_what_each_finds_alone(dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    plain = MultiHeadAttention(128, 2)
    memory, x, mask = torch.randn(16, 9, 128), torch.randn(64, 1, 128), random_mask(16, 1, 1, 9)
    expected = plain(x, *2 * [memory.repeat_interleave(4, dim=0)], mask.repeat_interleave(4, dim=0))
    layer = prepared(plain.to(dtype), "translate").eval()
    K, V = layer.keys_and_values(memory.to(dtype), memory.to(dtype))
    heads = layer.attend(layer.queries(x.to(dtype).view(16, 4, 128)), K, V, mask)
    close = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(layer.output(heads).reshape(64, 1, 128).float(), expected, rtol=0, atol=close)


# Keys and values kept from step to step


@pytest.mark.parametrize("purpose", [None, "translate"])
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("chunks", [[1, 1, 1, 1, 1, 1], [3, 1, 2], [6]])
def test_c26_steps_with_kept_keys_equal_one_pass_recorded_or_not(chunks, recording, purpose):
    plain, x, causal = make(d_k=3, d_v=5).eval(), inputs((2, 6, 24))[0].detach(), causal_mask(6)
    layer, own, outputs, start = prepared(plain, purpose).eval() if purpose else plain, KeyValueCache(9), [], 0
    with torch.no_grad():
        for new in chunks:
            part, mask = x[:, start : start + new], causal[start : start + new, : start + new]
            with record_attention(layer) if recording else contextlib.nullcontext({}) as weights:
                Q, K, V = layer.project(part, part, part)
                outputs.append(layer.output(layer.attend(Q, *own.extend(K, V), mask)))
            start += new
            assert own.length == start and (not recording or weights[""].shape == (2, 4, new, start))
        torch.testing.assert_close(torch.cat(outputs, dim=1), plain(x, x, x, causal), **EXACT)


def test_the_memory_of_a_cache_is_set_aside_beforehand_and_does_not_move():
    layer, x, places, own = make(), inputs((2, 5, 24))[0].detach(), set(), KeyValueCache(5)
    with torch.no_grad():
        for t in range(5):
            found = own.extend(*layer.keys_and_values(x[:, [t]], x[:, [t]]))
            places.add(tuple(kept.data_ptr() for kept in found))
            assert all(kept.shape == (2, 4, t + 1, 6) for kept in found)
        assert len(places) == 1, "moved"
        with pytest.raises(ValueError, match="room for 5 positions, not 6: give a larger capacity"):
            own.extend(*layer.keys_and_values(x[:, [0]], x[:, [0]]))


def test_a_cache_refuses_rows_that_it_does_not_hold():
    layer, x, own = make(), inputs((2, 3, 24))[0].detach(), KeyValueCache(4)
    with torch.no_grad():
        own.extend(*layer.keys_and_values(x, x))
        with pytest.raises(TypeCheckError, match="checking the return value"):  # one row would be written into both
            own.extend(*layer.keys_and_values(x[:1, :1], x[:1, :1]))
