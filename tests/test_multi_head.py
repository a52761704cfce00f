"""Multi-head attention against nn.MultiheadAttention, a loop over heads, and the paper's claims."""

import contextlib
import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from annotated import multi_head
from annotated.multi_head import KeyValueCache, MultiHeadAttention, head_widths, record_attention

EXACT = {"rtol": 0, "atol": 1e-9}


def make(d_model=24, h=4, seed=0, **options):
    torch.manual_seed(seed)
    return MultiHeadAttention(d_model, h, **options).double()


def inputs(*shapes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def random_mask(*shape, seed=2):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.7


def one_head_after_the_other(layer, query, key, value, mask):
    """The equation of section 3.2.2 with indices, from the rows of the stored matrices; mask (batch, h, q, k)."""
    batch, heads = query.size(0), []
    for i in range(layer.h):
        k_rows = slice(i * layer.d_k, (i + 1) * layer.d_k)
        v_rows = slice(i * layer.d_v, (i + 1) * layer.d_v)
        Q, K = query @ layer.W_Q.weight[k_rows].T, key @ layer.W_K.weight[k_rows].T
        V = value @ layer.W_V.weight[v_rows].T
        outputs = []
        for n in range(batch):
            exponentials = (Q[n] @ K[n].T / layer.d_k**0.5).exp() * mask[n, i]
            weights = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
            outputs.append(weights @ V[n])
        heads.append(torch.stack(outputs))
    return torch.cat(heads, dim=-1) @ layer.W_O.weight.T


# Against PyTorch's module


def pytorchs(layer):
    """nn.MultiheadAttention with the same weights (it has one width for all heads and no other)."""
    theirs = nn.MultiheadAttention(layer.d_model, layer.h, bias=False, batch_first=True).double()
    stacked = torch.cat([layer.W_Q.weight, layer.W_K.weight, layer.W_V.weight])
    theirs.load_state_dict({"in_proj_weight": stacked, "out_proj.weight": layer.W_O.weight})
    return theirs


@pytest.mark.parametrize("use", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("recording", [False, True])
def test_output_gradients_and_weights_equal_pytorchs_module(use, recording):
    layer = make()
    theirs = pytorchs(layer)
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])  # sentence 1 is padded
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    queries = 5 if use == "cross" else 7
    query, memory, direction = inputs((2, queries, 24), (2, 7, 24), (2, queries, 24))
    results = []
    for ours in (True, False):
        q, m = query.detach().clone().requires_grad_(), memory.detach().clone().requires_grad_()
        source = m if use == "cross" else q
        if ours:
            mask = real[:, None, None] & causal if use == "decoder" else real[:, None, None]
            if recording:
                with record_attention(layer) as recorded:
                    output = layer(q, source, source, mask)
                weights = recorded[""]
            else:
                output, weights = layer(q, source, source, mask), None
        else:  # its masks say True = may not attend
            output, weights = theirs(
                q, source, source, key_padding_mask=~real, average_attn_weights=False,
                attn_mask=~causal if use == "decoder" else None,
            )
        (output * direction).sum().backward()
        results.append((output, weights, q.grad, m.grad))
    (output, weights, *gradients), (expected, expected_weights, *expected_gradients) = results
    torch.testing.assert_close(output, expected, **EXACT)
    if recording:
        torch.testing.assert_close(weights, expected_weights, **EXACT)
    for mine, other in zip(gradients, expected_gradients, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, **EXACT)
    stacked = torch.cat([W.weight.grad for W in (layer.W_Q, layer.W_K, layer.W_V)])
    torch.testing.assert_close(stacked, theirs.in_proj_weight.grad, **EXACT)
    torch.testing.assert_close(layer.W_O.weight.grad, theirs.out_proj.weight.grad, **EXACT)


# Against the loop


@pytest.mark.parametrize("d_k, d_v", [(None, None), (3, 5), (16, 2), (None, 9), (7, None)])
@pytest.mark.parametrize("recording", [False, True])
def test_widths_of_their_own_agree_with_a_loop_over_heads(d_k, d_v, recording):
    layer = make(d_k=d_k, d_v=d_v)
    assert (layer.d_k, layer.d_v) == (d_k or 6, d_v or 6)
    query, key, value = inputs((2, 5, 24), (2, 7, 24), (2, 7, 24))
    mask = random_mask(2, 4, 5, 7)
    mask[1, 2, 3] = False
    expected = one_head_after_the_other(layer, query, key, value, mask)
    if recording:
        with record_attention(layer):
            output = layer(query, key, value, mask)
    else:
        output = layer(query, key, value, mask)
    torch.testing.assert_close(output, expected, **EXACT)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (1, 1, 1, 7), (2, 1, 1, 7), (2, 1, 5, 7), (1, 4, 5, 1), (2, 4, 5, 7)])
def test_masks_broadcast_alike_on_both_paths(shape):
    layer = make()
    query, key = inputs((2, 5, 24), (2, 7, 24))
    mask = random_mask(*shape)
    expected = one_head_after_the_other(layer, query, key, key, mask.expand(2, 4, 5, 7))
    torch.testing.assert_close(layer(query, key, key, mask), expected, **EXACT)
    with record_attention(layer):
        torch.testing.assert_close(layer(query, key, key, mask), expected, **EXACT)


def test_splitting_puts_each_positions_numbers_into_its_own_row():
    layer = MultiHeadAttention(6, 3)
    x = torch.arange(24).view(1, 4, 6)
    split = layer.split(x)
    assert split.shape == (1, 3, 4, 2)
    for head in range(3):
        for position in range(4):
            assert split[0, head, position].tolist() == [6 * position + 2 * head, 6 * position + 2 * head + 1]


# Both paths: one function


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_c9_a_row_with_nothing_to_attend_to_gives_zeros_on_both_paths(device, dtype):
    layer = make(d_model=64, h=4).to(device, dtype)
    mask = random_mask(3, 1, 6, 6).to(device)
    mask[0, 0, 2], mask[2] = False, False  # one query; a sentence that is nothing but padding
    results = []
    for recording in (False, True):
        x = inputs((3, 6, 64))[0].detach().to(device, dtype).requires_grad_()
        if recording:
            with record_attention(layer):
                output = layer(x, x, x, mask)
        else:
            output = layer(x, x, x, mask)
        output.square().sum().backward()
        assert (output[0, 2] == 0).all() and (output[2] == 0).all()
        assert output.isfinite().all() and x.grad.isfinite().all() and (x.grad[2] == 0).all()
        results.append((output, x.grad))
    tolerance = EXACT if dtype == torch.float64 else {"rtol": 0, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(results[0][0], results[1][0], **tolerance)


def test_gradient_by_finite_differences():
    layer = make(d_model=4, h=2)
    mask = random_mask(3, 3)
    assert torch.autograd.gradcheck(lambda q, k, v: layer(q, k, v, mask), inputs((1, 3, 4), (1, 3, 4), (1, 3, 4)))


def test_dropout_only_while_training_and_on_both_paths():
    layer = make(dropout=0.5)
    x = inputs((2, 6, 24))[0].detach()
    layer.eval()
    still = layer(x, x, x)
    torch.testing.assert_close(layer(x, x, x), still, rtol=0, atol=0)
    torch.testing.assert_close(still, one_head_after_the_other(layer, x, x, x, torch.ones(2, 4, 6, 6)), **EXACT)
    layer.train()
    torch.manual_seed(0)
    assert not torch.allclose(layer(x, x, x), still)
    with record_attention(layer) as weights:
        layer(x, x, x)
    zeros = (weights[""] == 0).double().mean()
    assert 0.3 < zeros < 0.7
    many = x[:1].expand(4000, 6, 24)
    outputs = layer(many, many, many)
    assert ((outputs.mean(0) - still[0]).abs() < 5 * outputs.std(0) / 4000**0.5).all()  # the mean is kept


def test_long_training_drops_weights_in_the_fused_function_too(monkeypatch):
    layer, n = make(dropout=0.25), 300  # on a processor the fused function trains from 257 keys up
    fused, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    Q, K = (x.detach() for x in inputs((1, 4, n, 6), (1, 4, n, 6)))
    each = torch.eye(n, dtype=torch.float64).expand(1, 4, n, n)  # with these values the outputs are the weights
    torch.manual_seed(0)
    dropped, whole = layer.train().attend(Q, K, each), layer.eval().attend(Q, K, each)
    assert len(calls) == 2 and (whole > 0).all()
    gone = dropped == 0
    assert abs(gone.double().mean() - 0.25) < 5 * (0.25 * 0.75 / gone.numel()) ** 0.5
    torch.testing.assert_close(dropped[~gone], whole[~gone] / 0.75, rtol=1e-9, atol=0)  # the others make up for it


# Recording


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleDict({"self_attention": make()})
        self.layers = nn.ModuleList([nn.ModuleDict({"cross_attention": make(h=2, seed=1)})])

    def forward(self, x, memory, mask=None):
        x = self.first["self_attention"](x, x, x, mask)
        return self.layers[0]["cross_attention"](x, memory, memory)


def test_recording_gives_path_shape_and_order_of_axes():
    model = Pair()
    x, memory = inputs((3, 5, 24), (3, 7, 24))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    silent = model(x, memory, causal)
    with record_attention(model) as weights:
        output = model(x, memory, causal)
    torch.testing.assert_close(output, silent, **EXACT)
    assert {path: tuple(w.shape) for path, w in weights.items()} == {
        "first.self_attention": (3, 4, 5, 5),
        "layers.0.cross_attention": (3, 2, 5, 7),
    }
    own = weights["first.self_attention"]
    torch.testing.assert_close(own.sum(-1), torch.ones(3, 4, 5).double(), **EXACT)  # sums run over keys, the last axis
    assert (own[..., ~causal] == 0).all() and (own[..., causal] > 0).all()
    assert not own.requires_grad


def test_recorded_weights_are_those_of_each_head_and_sentence():
    layer = make()
    query, key = inputs((2, 5, 24), (2, 7, 24))
    with record_attention(layer) as weights:
        layer(query, key, key)
    for n in range(2):
        for i in range(4):
            rows = slice(6 * i, 6 * i + 6)
            scores = (query[n] @ layer.W_Q.weight[rows].T) @ (key[n] @ layer.W_K.weight[rows].T).T / 6**0.5
            torch.testing.assert_close(weights[""][n, i], scores.softmax(-1).detach(), **EXACT)


def recorders(model):
    return [m.recorder for m in model.modules() if isinstance(m, MultiHeadAttention)]


def test_nothing_is_recorded_or_kept_outside_the_block():
    model = Pair()
    x, memory = inputs((1, 5, 24), (1, 7, 24))
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    with record_attention(model) as weights:
        pass
    model(x, memory)
    assert weights == {} and recorders(model) == [None, None]
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert not [name for name, value in vars(model.first["self_attention"]).items() if isinstance(value, torch.Tensor)]


def test_an_exception_inside_the_block_ends_the_recording():
    model = Pair()
    x, memory = inputs((1, 5, 24), (1, 7, 24))
    with pytest.raises(ZeroDivisionError), record_attention(model) as weights:
        raise ZeroDivisionError
    assert recorders(model) == [None, None]
    model(x, memory)
    assert weights == {}


def test_nested_blocks_both_record_and_the_outer_goes_on():
    model = Pair()
    x, memory = inputs((1, 5, 24), (1, 7, 24))
    with record_attention(model) as outer:
        with record_attention(model.first) as inner:
            model(x, memory)
        assert set(inner) == {"self_attention"} and len(outer) == 2
        assert torch.equal(inner["self_attention"], outer["first.self_attention"])
        first = outer["first.self_attention"]
        model(2 * x, memory)
        assert not torch.equal(outer["first.self_attention"], first), "the last call counts"
        assert torch.equal(inner["self_attention"], first), "the inner block has ended"
    assert recorders(model) == [None, None]


def test_only_the_recorded_path_forms_the_weights(monkeypatch):
    layer = make()
    x = inputs((1, 5, 24))[0]
    fused, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    layer.eval()(x, x, x)
    assert len(calls) == 1
    with record_attention(layer):
        layer(x, x, x)
    assert len(calls) == 1
    layer(x, x, x)
    assert len(calls) == 2


@pytest.mark.parametrize(("rows", "queries", "dtype", "d_k", "threads", "explicit"), [
    (32, 1, torch.bfloat16, 64, 2, True), (31, 1, torch.bfloat16, 64, 2, False), (32, 2, torch.bfloat16, 64, 2, False),
    (32, 1, torch.float32, 64, 2, False), (32, 1, torch.bfloat16, 32, 2, False), (32, 1, torch.bfloat16, 64, 1, False),
    (64, 1, torch.bfloat16, 40, 2, True), (64, 1, torch.bfloat16, 32, 2, False),
])
def test_a_step_for_many_rows_in_bf16_takes_a_path_of_its_own_and_gives_the_same(
    rows, queries, dtype, d_k, threads, explicit, monkeypatch
):
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layer = MultiHeadAttention(128, 2, d_k=d_k).to(dtype).eval()
    fused, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    Q, K, V = torch.randn(rows, 2, queries, d_k).to(dtype), *(torch.randn(rows, 2, 9, d_k).to(dtype) for _ in range(2))
    mask = torch.rand(rows, 1, 1, 9) < 0.7
    mask[0] = False  # a row with nothing to attend to
    for some in (None, mask):
        calls.clear()
        heads = layer.attend(Q, K, V, some)
        assert len(calls) == (0 if explicit else 1) and heads.dtype == dtype
        expected = fused(Q.double(), K.double(), V.double(), some)
        close = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
        assert torch.allclose(heads.double(), torch.zeros_like(expected).where(expected.isnan(), expected), rtol=0, atol=close)


def test_a_step_with_many_keys_stays_with_the_fused_function(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layer = MultiHeadAttention(128, 2).bfloat16().eval()
    once = []
    monkeypatch.setattr(multi_head, "attend_once", lambda *_: once.append(1))
    for keys in (128, 129):
        layer.attend(*(torch.randn(32, 2, n, 64).bfloat16() for n in (1, keys, keys)))
    assert once == [1]


def test_a_step_with_few_narrow_keys_stays_with_the_fused_function(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for d_k, keys, taken in ((32, 32, False), (32, 33, True), (33, 32, True), (33, 33, True)):
        query, key = torch.zeros(32, 4, 1, d_k).bfloat16(), torch.zeros(32, 4, keys, d_k).bfloat16()
        assert multi_head.is_step(query, key) == taken


@pytest.mark.parametrize("widths", [(None, None), (3, 5)])
def test_training_in_half_precision_projects_one_input_in_one_product(widths, monkeypatch):
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(24, 4, *widths), torch.randn(2, 5, 24)
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
def test_three_projections_in_one_are_the_same(widths):
    layer, x = MultiHeadAttention(24, 4, *widths).double(), torch.randn(2, 5, 24, dtype=torch.float64)
    other, before = torch.randn(2, 5, 24, dtype=torch.float64), layer(x, x, x)
    crossed = layer(x, other, other)
    layer.joined = torch.nn.Linear(24, sum(W.out_features for W in (layer.W_Q, layer.W_K, layer.W_V)), bias=False).double()
    with torch.no_grad():
        layer.joined.weight.copy_(torch.cat([layer.W_Q.weight, layer.W_K.weight, layer.W_V.weight]))
    torch.testing.assert_close(layer(x, x, x), before, **EXACT)
    torch.testing.assert_close(layer(x, other, other), crossed, **EXACT)
    torch.nn.init.zeros_(layer.joined.weight)
    assert (layer(x, x, x) == 0).all() and (layer(x, other, other) != 0).any(), "only one input has three in one"


def test_short_training_on_a_processor_takes_the_explicit_path_and_gives_the_same(monkeypatch):
    layer = make()
    fused, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    for length, kind, expected in ((5, torch.float64, 0), (257, torch.float64, 1), (1024, torch.bfloat16, 0), (1025, torch.bfloat16, 1)):
        x = inputs((2, length, 24))[0].to(kind)
        layer.to(kind)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        outputs, gradients = [], []
        for training in (True, False):  # without dropout the mode makes no other difference
            calls.clear()
            layer.train(training).zero_grad()
            outputs.append(layer(x, x, x, mask))
            outputs[-1].square().sum().backward()
            gradients.append([p.grad.clone() for p in layer.parameters()])
            assert len(calls) == (expected if training else 1)
        bound = 1e-9 if kind == torch.float64 else 2**-6  # 8 significant bits, and some sums
        assert torch.allclose(*outputs, rtol=0, atol=bound)
        for ours, other in zip(*gradients, strict=True):
            assert (ours - other).norm() <= bound * (1e-3 + other.norm())


def test_a_model_can_be_copied_pickled_and_saved():
    layer = make()
    x = inputs((1, 5, 24))[0]
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x, x, x), layer(x, x, x))
    assert set(layer.state_dict()) == {"W_Q.weight", "W_K.weight", "W_V.weight", "W_O.weight"}


def test_record_attention_says_when_there_is_nothing_to_record():
    with pytest.raises(ValueError, match="model is a Linear without any MultiHeadAttention"):
        with record_attention(nn.Linear(2, 2)):
            pass


# C7: cost


@pytest.mark.parametrize("h", [1, 2, 8, 64])
def test_c7_parameters_do_not_depend_on_the_number_of_heads(h):
    layer = MultiHeadAttention(512, h)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 512**2
    assert not [name for name, _ in layer.named_parameters() if "bias" in name]


@pytest.mark.parametrize("h", [1, 2, 8, 64])
@pytest.mark.parametrize("n", [3, 20])
def test_c7_matrix_operations_do_not_depend_on_the_number_of_heads(h, n):
    layer, x = MultiHeadAttention(64, h), torch.randn(2, n, 64)
    with torch.no_grad(), record_attention(layer), FlopCounterMode(display=False) as counter:
        layer(x, x, x)
    assert counter.get_total_flops() == 2 * (8 * n * 64**2 + 4 * n**2 * 64)  # two sentences


def test_c7_fixed_heads_are_the_taps_of_a_convolution():
    """Positions as extra components: each head's query picks its neighbour's one-hot, W_V and W_O hold the kernel."""
    n, d, h = 6, 3, 3
    width = d + n  # content, then position
    layer = MultiHeadAttention(width, h, d_k=n, d_v=d).double()
    kernel = inputs((d, d, h))[0].detach()  # (out, in, tap)
    for W in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O):
        W.weight.data.zero_()
    for i, offset in enumerate((-1, 0, 1)):
        shift = torch.eye(n, dtype=torch.float64).roll(offset, dims=1)  # row p: one-hot of position p + offset
        layer.W_Q.weight.data[i * n : (i + 1) * n, d:] = 1000 * shift.T
        layer.W_K.weight.data[i * n : (i + 1) * n, d:] = torch.eye(n)
        layer.W_V.weight.data[i * d : (i + 1) * d, :d] = torch.eye(d)
        layer.W_O.weight.data[:d, i * d : (i + 1) * d] = kernel[:, :, i]
    content = inputs((1, n, d), seed=3)[0].detach()
    x = torch.cat([content, torch.eye(n, dtype=torch.float64)[None]], dim=-1)
    circular = F.pad(content.transpose(1, 2), (1, 1), mode="circular")
    expected = F.conv1d(circular, kernel).transpose(1, 2)
    torch.testing.assert_close(layer(x, x, x)[..., :d], expected, **EXACT)


# C8: what one head cannot do


def sharp(h, places):
    """A layer whose heads look sharply at positions; tokens are 4 numbers of content and 6 of position; W_O copies.

    places: for each head the positions among which it divides its attention evenly.
    """
    layer = MultiHeadAttention(10, h, d_k=6, d_v=4).double()
    for W in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O):
        W.weight.data.zero_()
    for i, wanted in enumerate(places):
        for place in wanted:
            layer.W_Q.weight.data[6 * i + place, 0] = 1000.0
        layer.W_K.weight.data[6 * i : 6 * i + 6, 4:] = torch.eye(6)
        layer.W_V.weight.data[4 * i : 4 * i + 4, :4] = torch.eye(4)
    layer.W_O.weight.data[: 4 * h] = torch.eye(4 * h)
    return layer


def test_c8_one_head_averages_and_two_heads_keep_both():
    a, b = inputs((4,), (4,))
    query = torch.zeros(1, 1, 10).double()
    query[..., 0] = 1.0

    def look(layer, first, second):
        content = torch.zeros(6, 4).double()
        content[1], content[4] = first, second
        tokens = torch.cat([content, torch.eye(6).double()], dim=-1)[None]
        return layer(query, tokens, tokens)[0, 0]

    one, two = sharp(1, [(1, 4)]), sharp(2, [(1,), (4,)])
    torch.testing.assert_close(look(one, a, b)[:4], (a + b) / 2, **EXACT)
    torch.testing.assert_close(look(one, a, b), look(one, b, a), **EXACT)
    torch.testing.assert_close(look(two, a, b)[:8], torch.cat([a, b]), **EXACT)
    torch.testing.assert_close(look(two, b, a)[:8], torch.cat([b, a]), **EXACT)


# Properties


@settings(deadline=None, max_examples=30)
@given(h=st.integers(1, 4), d=st.integers(1, 4), n=st.integers(1, 6), m=st.integers(1, 6), seed=st.integers(0, 9999))
def test_order_of_keys_does_not_matter_and_queries_keep_theirs(h, d, n, m, seed):
    layer = make(d_model=h * d, h=h, seed=seed)
    query, key, value = inputs((2, n, h * d), (2, m, h * d), (2, m, h * d), seed=seed)
    mask = random_mask(2, 1, n, m, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randperm(m, generator=generator), torch.randperm(n, generator=generator)
    moved = layer(query[:, q], key[:, p], value[:, p], mask[:, :, q][..., p])
    torch.testing.assert_close(moved, layer(query, key, value, mask)[:, q], **EXACT)


@settings(deadline=None, max_examples=30)
@given(h=st.integers(1, 4), n=st.integers(1, 6), m=st.integers(1, 6), seed=st.integers(0, 9999))
def test_recorded_rows_sum_to_1_and_obey_the_mask(h, n, m, seed):
    layer = make(d_model=4 * h, h=h, seed=seed)
    query, key = inputs((2, n, 4 * h), (2, m, 4 * h), seed=seed)
    mask = random_mask(2, 1, n, m, seed=seed)
    with record_attention(layer) as weights:
        layer(query, key, key, mask)
    torch.testing.assert_close(weights[""].sum(-1), mask.any(-1).double().expand(2, h, n), **EXACT)
    assert (weights[""][~mask.expand(2, h, n, m)] == 0).all()


# Bad input


@pytest.mark.parametrize(
    "options, message",
    [
        ({"d_model": 10, "h": 3}, "d_model=10 is not divisible by h=3: choose another h, or give both d_k and d_v"),
        ({"d_model": 10, "h": 3, "d_k": 4}, "d_model=10 is not divisible by h=3"),
        ({"d_model": 10, "h": 0}, "h=0: expected a whole number from 1 up"),
        ({"d_model": 10, "h": 2, "d_k": 0}, "d_k=0: expected a whole number from 1 up"),
        ({"d_model": -8, "h": 2}, "d_model=-8: expected"),
    ],
)
def test_bad_widths_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**options)


def test_widths_given_need_no_divisibility():
    assert head_widths(10, 3, d_k=4, d_v=5) == (4, 5)
    layer = MultiHeadAttention(10, 3, d_k=4, d_v=5)
    assert layer(*[torch.zeros(2, 6, 10)] * 3).shape == (2, 6, 10)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize(
    "shapes, mask, message",
    [
        ({"query": (5, 24)}, None, r"query has shape \(5, 24\): expected \(batch, length, d_model=24\)"),
        ({"key": (2, 7, 23)}, None, r"key has shape \(2, 7, 23\): expected \(batch, length, d_model=24\)"),
        ({"value": (2, 6, 24)}, None, "key holds 7 positions and value 6"),
        ({"key": (3, 7, 24), "value": (3, 7, 24)}, None, "must be equal"),
        ({}, torch.zeros(5, 7), "mask has dtype torch.float32: expected torch.bool"),
        ({}, torch.ones(7, 5, dtype=torch.bool), r"mask has shape \(7, 5\).*= \(2, 4, 5, 7\)"),
        ({}, torch.ones(2, 7, dtype=torch.bool), r"mask has shape \(2, 7\).*= \(2, 4, 5, 7\)"),
        ({}, torch.ones(4, 5, 7, dtype=torch.bool), r"mask has shape \(4, 5, 7\): give mask.unsqueeze\(1\)"),
    ],
)
def test_bad_input_is_named_on_both_paths(shapes, mask, message, recording):
    layer = MultiHeadAttention(24, 4).eval()  # short training takes the explicit path anyway
    sizes = {"query": (2, 5, 24), "key": (2, 7, 24), "value": (2, 7, 24), **shapes}
    tensors = [torch.zeros(sizes[name]) for name in ("query", "key", "value")]
    with pytest.raises(ValueError, match=message):
        if recording:
            with record_attention(layer):
                layer(*tensors, mask)
        else:
            layer(*tensors, mask)


# Keys and values kept from step to step


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("chunks", [[1, 1, 1, 1, 1, 1], [3, 1, 2], [6]])
def test_c26_steps_with_a_cache_equal_one_pass(chunks, recording):
    layer, (x, memory) = make(d_k=3, d_v=5).eval(), inputs((2, 6, 24), (2, 7, 24))
    causal, padding = torch.ones(6, 6).tril() > 0, random_mask(2, 1, 1, 7)
    own, cross = KeyValueCache(9), KeyValueCache()
    outputs, cross_outputs, start = [], [], 0
    with torch.no_grad():
        expected, expected_cross = layer(x, x, x, causal), layer(x, memory, memory, padding)
        for new in chunks:
            part, mask = x[:, start : start + new], causal[start : start + new, : start + new]
            with record_attention(layer) if recording else contextlib.nullcontext({}) as weights:
                outputs.append(layer(part, part, part, mask, own))
                start += new
                assert not recording or weights[""].shape == (2, 4, new, start)
                cross_outputs.append(layer(part, memory, memory, padding, cross))
            assert own.length == start
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, **EXACT)
    torch.testing.assert_close(torch.cat(cross_outputs, dim=1), expected_cross, **EXACT)


def test_a_cache_projects_every_position_once_in_memory_set_aside_beforehand():
    layer, (x, memory), projected, places = make(), inputs((2, 5, 24), (2, 7, 24)), [], set()
    own, cross = KeyValueCache(5), KeyValueCache()
    for W in (layer.W_K, layer.W_V):
        W.register_forward_hook(lambda _, __, out: projected.append(out.size(1)))
    with torch.no_grad():
        for t in range(5):
            layer(x[:, [t]], x[:, [t]], x[:, [t]], cache=own)
            places.add((own.K.data_ptr(), own.V.data_ptr()))
            assert own.K.shape == own.V.shape == (2, 4, 5, 6)
        assert projected == [1] * 10 and len(places) == 1, "moved"
        for t in range(5):
            layer(x[:, [t]], memory, memory, cache=cross)
        assert projected == [1] * 10 + [7, 7] and cross.complete and not own.complete


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=3))
def test_selected_rows_go_on_as_if_they_had_been_there_all_along(selections):
    layer, x = make(8, 2), inputs((4, len(selections) + 2, 8))[0].detach()
    own = KeyValueCache(len(selections) + 2)
    causal = torch.ones(2, 2).tril() > 0
    with torch.no_grad():
        layer(x[:, :2], x[:, :2], x[:, :2], causal, own)
        for t, numbers in enumerate(selections, 2):
            rows = torch.tensor([number % len(x) for number in numbers])  # fewer, more, repeated, in any order
            own.select(rows)
            x = x[rows]
            stepwise = layer(x[:, [t]], x[:, [t]], x[:, [t]], cache=own)
            seen = x[:, : t + 1]
            torch.testing.assert_close(stepwise, layer(x[:, [t]], seen, seen), **EXACT)


def test_rows_can_be_selected_before_there_are_any():
    cache = KeyValueCache(4)
    cache.select(torch.tensor([1, 0]))
    assert cache.K is None and cache.length == 0


@pytest.mark.parametrize("training", [False, True])
def test_a_mask_that_does_not_fit_is_named_by_every_kernel(training):
    layer, x = make().train(training), inputs((2, 3, 24))[0].detach()
    with pytest.raises(ValueError, match=r"mask has shape \(5, 5\): expected one that broadcasts to"):
        layer(x, x, x, torch.ones(5, 5, dtype=torch.bool))


def test_a_cache_refuses_what_does_not_fit():
    layer, x, own = make(), inputs((2, 3, 24))[0].detach(), KeyValueCache(4)
    with torch.no_grad():
        layer(x, x, x, cache=own)
        with pytest.raises(ValueError, match="room for 4 positions, not 6: give a larger capacity"):
            layer(x, x, x, cache=own)
        with pytest.raises(ValueError, match="1 new rows for a cache of 2: call select"):
            layer(x[:1, :1], x[:1, :1], x[:1, :1], cache=own)
    assert own.length == 3, "a refused step left its mark"
