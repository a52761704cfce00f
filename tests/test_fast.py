"""Everything made for speed against the plain code: each part alone, whole models, what comes back when it is undone."""

import contextlib
import copy
import itertools
import json
import math
import os
import sys
from functools import partial

import pytest
import torch
from helpers import EXACT, examples, inputs, random_mask, roundoff, run_python
from hypothesis import example, given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from annotated import fast, files, native, products
from annotated.attention import DotProductAttention, masked_softmax
from annotated.batches import pad
from annotated.checkpoints import save_checkpoint
from annotated.corpora import load_corpus
from annotated.decoding import (
    IncrementalDecoder,
    KeyValueCache,
    beam_search,
    greedy_decode,
    likeliest,
    most_probable,
    stepwise,
    translate,
)
from annotated.embeddings import TokenEmbedding
from annotated.fast import (
    ChunkedLoss,
    JoinedAttention,
    KeptPositions,
    LeanDecoder,
    LeanEncoder,
    PackedEmbedding,
    PackedLinear,
    PreparedPart,
    QuickAttention,
    QuickLinear,
    QuickResidual,
    RoughLook,
    ShortNorm,
    SixteenBitDropout,
    StepDecoder,
    largest,
    lean_mask,
    lean_softmax,
    most_probable_of,
    only_causal,
    prepare,
    surely_all,
    undo,
)
from annotated.feed_forward import PositionwiseFeedForward
from annotated.masking import causal_mask
from annotated.multi_head import MultiHeadAttention, record_attention
from annotated.positional import PositionalEncoding, sinusoidal_encoding
from annotated.products import Int8Product, PackedProduct, add_and_norm, product
from annotated.regularization import LabelSmoothingLoss
from annotated.stacks import Decoder, Encoder, ResidualConnection
from annotated.tokens import BEGIN, END, PAD, WordTokenizer
from annotated.training import book_model
from annotated.transformer import Transformer, TransformerConfig

PAIRS = [("the dog sees a cat .", "der Hund sieht eine Katze ."), ("the cat sleeps .", "die Katze schläft .")]
WORDS = WordTokenizer.fit(PAIRS)
PURPOSES = [("train", "fp32"), ("translate", "fp32")]
ALL_PURPOSES = [*PURPOSES, ("translate", "bf16"), ("translate", "int8")]

# Errors of a whole model's logits, or of gradients in bfloat16, as a share of their norm: about twice the most that 60 random models
# of these tests' sizes had (5e-7, 0.018, 0.024; gradients 0.014). A bound from each of their many roundings would not be sharp.
MEASURED = {"fp32": 1e-6, "bf16": 0.035, "int8": 0.05, "gradients": 0.028}



def tiny(vocab_size=12, seed=0, **changes):
    """A random model in double precision, whose norms and biases do something too."""
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(vocab_size, **{"N": 2, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.4, **changes})).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


SOURCE = pad([[4, 5, 6, 7, END], [8, END], [9, 9, 10, END]])
TARGET = pad([[BEGIN, 5, 6], [BEGIN, 7, 8, 9, 10, 11], [BEGIN, 4, 4, 4]])
RIGHT = pad([[5, 6, END], [7, 8, 9, 10, 11, END], [4, 4, 4, END]])


def near(one, other, bound=1e-12):
    """Whether two tensors are the same but for `bound` of the larger one's largest entry (or of 1)."""
    return one.shape == other.shape and (one - other).abs().max() <= bound * max(1.0, other.abs().max())


def learn(model, criterion, **options):
    """The logits, the loss, and the gradients of all parameters, by name."""
    model.zero_grad()
    loss = criterion.of_hidden(model.hidden(SOURCE, TARGET), model.embedding.weight, RIGHT, **options)
    loss.backward()
    return model(SOURCE, TARGET).detach(), loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def kinds_of(model):
    """The class of every module, by path."""
    return {path: type(module) for path, module in model.named_modules()}


# Attention

def some_mask(kind, queries, keys, draw):
    """A mask of one of the kinds that a model makes, or a random one in which rows may see nothing."""
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    padding = torch.arange(keys) < torch.tensor([keys, max(1, keys - 2)])[:, None, None, None]
    return {"none": None, "causal": causal, "padding": padding, "both": causal & padding,
            "blind": torch.rand(2, 1, queries, keys, generator=draw) < 0.3}[kind]


@examples(80)
@given(st.sampled_from(["none", "causal", "padding", "both", "blind"]), st.booleans(),
       st.sampled_from([(1, 1), (1, 7), (5, 5), (4, 9), (3, 300)]), st.integers(0, 10**6))
def test_quick_attention_is_attention_with_its_gradients(mask, training, lengths, seed):
    draw, (queries, keys) = torch.Generator().manual_seed(seed), lengths
    shapes = (queries, 4), (keys, 4), (keys, 5)
    inputs = [torch.randn(2, 3, *shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    mask = some_mask(mask, queries, keys, draw)
    plain = DotProductAttention()
    found, expected = QuickAttention(plain).train(training)(*inputs, mask), plain.train(training)(*inputs, mask)
    assert found[1] is None and near(found[0], expected[0])
    outer = torch.randn(found[0].shape, generator=draw, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(out[0], inputs, outer) for out in (found, expected)), strict=True):
        assert near(one, other)


def test_quick_attention_drops_in_training_only():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 40, 8)
    layer = QuickAttention(DotProductAttention(0.5))
    assert near(layer.eval()(x, x, x)[0], DotProductAttention()(x, x, x)[0], 1e-5)
    for length in (40, 300):  # spelled out, and fused
        x = torch.randn(1, 2, length, 8)
        outputs = [layer.train()(x, x, x)[0] for _ in range(2)]
        assert not near(*outputs, 0.1)
    ones = torch.ones(1, 1, 200, 1)
    assert set((layer(ones, torch.zeros(1, 1, 200, 1), torch.eye(200)[None, None])[0] * 200).round().flatten().tolist()) == {0.0, 2.0}


@examples(40)
@given(st.sampled_from(["none", "causal", "padding", "both", "blind"]), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
       st.integers(0, 10**6))
def test_the_lean_softmax_is_the_masked_one_to_the_bit(mask, dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    scores = (5 * torch.randn(2, 2, 3, 6, generator=draw)).to(dtype)
    mask = some_mask(mask, 3, 6, draw)
    assert torch.equal(lean_softmax(scores, mask), masked_softmax(scores, mask))


# Masks, rounding, positions

@examples(100)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.floats(0, 1), st.booleans(), st.integers(0, 10**6))
def test_a_lean_mask_hides_the_same(rows, queries, keys, share, alike, seed):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(1 if alike else rows, 1, queries, keys, generator=draw) <= share
    mask = mask.expand(rows, -1, -1, -1)
    found = lean_mask(mask)
    assert (found is None) == bool(mask.all())
    if found is not None:
        assert torch.equal(found.expand_as(mask), mask) and len(found) == (1 if (mask == mask[:1]).all() else rows)
    flat = lean_mask(mask[0, 0])  # one matrix for all
    assert (flat is None) == bool(mask[0, 0].all()) and (flat is None or torch.equal(flat.expand(queries, keys), mask[0, 0]))


def test_nothing_is_assumed_of_masks_that_lie_elsewhere():
    assert lean_mask(None) is None and surely_all(torch.ones(2, dtype=torch.bool))
    there = torch.ones(2, 1, 1, 3, dtype=torch.bool, device="meta")
    assert not surely_all(there) and lean_mask(there) is there


def words_then_padding(mask):
    """Whether a mask is the causal one with the end of each sentence hidden, looked for among all lengths."""
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    ends = [torch.arange(len(causal)) < length for length in range(len(causal) + 1)]
    return all(any(torch.equal(one, causal & end) for end in ends) for one in mask.flatten(0, -3))


@examples(200)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(1, 4), st.lists(st.integers(0, 10**6), max_size=2))
def test_only_a_causal_mask_with_padding_behind_passes_as_causal_alone(lengths, m, changed):
    mask = causal_mask(m) & (torch.arange(m) < torch.tensor(lengths)[:, None, None, None])
    for place in changed:
        mask.view(-1)[place % mask.numel()] ^= True
    if words_then_padding(mask):
        assert torch.equal(only_causal(mask), causal_mask(m)) and only_causal(mask).causal_alone
        assert len(mask) > 1 or torch.equal(only_causal(mask[0, 0]), causal_mask(m)), "one matrix for all"
    else:
        with pytest.raises(RuntimeError, match="mask is not causal with padding behind: undo"):
            only_causal(mask)


@pytest.mark.parametrize("training", [False, True])
def test_the_causal_mask_alone_changes_no_word_and_no_gradient(training, monkeypatch):
    """What padding sees is another matter, and nobody asks. In training the formula is spelled out, as page 01 has it."""
    causals, own = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: causals.append(a[3] is None) or own(*a, **k))
    model, found = prepare(tiny(dropout=0.0), "train").train(training), []
    memory, memory_mask = model.encode(SOURCE)
    x, words = model.embedding(TARGET).detach().requires_grad_(), TARGET != PAD
    mask = causal_mask(TARGET.size(1)) & words[:, None, None]
    for given_mask in (mask, only_causal(mask)):
        hidden = model.decoder(x, memory, given_mask, memory_mask)[words]
        found.append((hidden, *gradients(hidden, x, *model.decoder.parameters())))
    assert all(near(one, other) for one, other in zip(*found, strict=True))
    assert not words.all() and causals == ([] if training else [False] * 2 + [False] * 4 + [True, False] * 2)


def test_compiled_attention_asks_every_mask_whether_it_is_causal_alone(unenforced):
    layer, (q, k, v) = QuickAttention(DotProductAttention()).eval(), torch.randn(3, 1, 2, 5, 4)
    compiled = torch.compile(lambda mask: layer(q, k, v, mask)[0], backend="eager", fullgraph=True)
    for mask in (causal_mask(5) & False, only_causal(causal_mask(5)), causal_mask(5), only_causal(causal_mask(5))):
        assert near(compiled(mask), layer(q, k, v, mask)[0], 1e-6)


@pytest.mark.parametrize("norm_first", [False, True])
def test_lean_stacks_hand_on_what_hides_something_and_put_out_the_same(norm_first):
    torch.manual_seed(0)
    options, x, y = {"dropout": 0.0, "norm_first": norm_first}, torch.randn(2, 4, 16).double(), torch.randn(2, 3, 16).double()
    encoder, decoder = Encoder(2, 16, 2, 32, **options).double(), Decoder(2, 16, 2, 32, **options).double()
    lean, seen = (LeanEncoder(encoder), LeanDecoder(decoder)), []
    everything, nothing = torch.ones(2, 1, 1, 4, dtype=torch.bool), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()[:, None, None]
    causal = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    for mask in (everything, nothing):
        assert near(lean[0](x, mask), encoder(x, mask)) and near(lean[1](y, x, causal, mask), decoder(y, x, causal, mask))
        assert near(lean[0](x), encoder(x)) and near(lean[1](y, x), decoder(y, x))
    encoder.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    decoder.layers[0].register_forward_pre_hook(lambda _, given: seen.extend(given[2:]))
    lean[0](x, everything), lean[1](y, x, causal, everything), lean[0](x, nothing)
    assert seen[0] is None and seen[1].shape == (1, 1, 3, 3) and seen[2] is None and seen[3] is nothing


@examples(30)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), min_size=1, max_size=4),
       st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(1, 9))
def test_kept_positions_are_those_computed_anew(parts, dtype, d_model):
    plain = PositionalEncoding(d_model)
    kept = KeptPositions(plain)
    for start, length in parts:
        x = torch.randn(2, length, d_model).to(dtype)
        assert torch.equal(kept(x, start), plain(x, start)) and kept(x, start).dtype == dtype
    table = kept.table
    kept(x, start)
    assert kept.table is table, "made anew although it holds all"


# One product for queries, keys and values

def joined_parts(seed=0):
    torch.manual_seed(seed)
    plain, x = MultiHeadAttention(16, 2, d_k=3, d_v=5), torch.randn(2, 4, 16)  # no two widths alike
    return plain, x, torch.randn(2, 6, 16)


def test_a_joined_product_is_three():
    plain, x, other = joined_parts()
    joined = JoinedAttention(plain, partial(product, precision="fp32")).eval()
    for given_ in ((x, x, x), (x, other, other), (x, x.clone(), x)):
        for one, two in zip(joined.project(*given_), plain.project(*given_), strict=True):
            assert near(one, two, 1e-6)
    assert joined.joined is not None
    kept = joined.joined
    joined(x, x, x)
    assert joined.joined is kept, "joined once"
    with torch.no_grad():
        plain.W_K.weight.mul_(2)
    for one, two in zip(joined.train().project(x, x, x), plain.project(x, x, x), strict=True):
        assert torch.equal(one, two), "in training the weights are those of now"


def test_a_joined_product_in_training_has_the_gradients_of_three():
    plain, x, _ = joined_parts()
    parameters, grads = [layer.weight for layer in (plain.W_Q, plain.W_K, plain.W_V)], []
    x.requires_grad_()
    outer, calls = torch.randn(2, 4, 16), []
    plain.W_Q.register_forward_hook(lambda *_: calls.append(1))
    for layer in (JoinedAttention(plain).train(), plain):
        with torch.autocast("cpu", torch.bfloat16):
            grads.append(torch.autograd.grad(layer(x, x, x), [x, *parameters, plain.W_O.weight], outer))
    assert calls == [1], "the first way made no product of W_Q alone"
    for one, other in zip(*grads, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
    assert near(JoinedAttention(plain).train()(x, x, x), plain(x, x, x), 1e-6)
    assert calls == [1] * 3, "without autocast three products are made"


@pytest.mark.parametrize("outside", ["subclass", "bias"])
@pytest.mark.parametrize("purpose", ["train", "translate"])
def test_layers_from_outside_are_not_read_past(outside, purpose):
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny(dropout=0.0)
    for layer in (module for module in model.modules() if isinstance(module, MultiHeadAttention)):
        own = (Twice if outside == "subclass" else nn.Linear)(16, 16, bias=outside == "bias").double()
        layer.W_K = own
    with torch.autocast("cpu", torch.bfloat16, enabled=purpose == "train"), torch.no_grad():
        expected = model.train(purpose == "train")(SOURCE, TARGET)
        assert near(prepare(model, purpose)(SOURCE, TARGET), expected, 0.05 if purpose == "train" else 1e-12)


# The loss in chunks

def test_chunks_in_half_precision_are_summed_in_single_precision():
    torch.manual_seed(0)
    hidden, weight = torch.randn(4000, 8).bfloat16().requires_grad_(), torch.randn(50, 8).bfloat16()
    target = torch.randint(1, 50, (4000,))
    loss = ChunkedLoss(0.1, reduction="sum").of_hidden(hidden, weight, target, chunk=64)
    logits = (hidden @ weight.T).double()
    expected = F.cross_entropy(logits, target, label_smoothing=0.1, reduction="sum")
    assert loss.dtype == torch.float32 and abs(loss / expected - 1) < roundoff(torch.float32, 64 + 63)  # in a chunk, and over chunks


@examples(40)
@given(st.integers(1, 12), st.integers(2, 20), st.integers(1, 9), st.floats(0, 0.9), st.sampled_from(["mean", "sum"]),
       st.integers(0, 10**6))
def test_in_chunks_as_in_one_piece(tokens, vocab_size, chunk, smoothing, reduction, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_() for n in (2 * tokens, vocab_size))
    pad_id = seed % vocab_size
    target = torch.randint(0, vocab_size, (2, tokens), generator=generator)
    target[0, 0] = (pad_id + 1) % vocab_size
    criterion, both = ChunkedLoss(smoothing, pad_id, reduction), hidden.unflatten(0, (2, tokens))
    expected = F.cross_entropy(hidden @ weight.T, target.flatten(), label_smoothing=smoothing, ignore_index=pad_id,
                               reduction=reduction)
    got = criterion.of_hidden(both, weight, target, chunk=chunk)
    assert abs(got - expected) < 1e-9 * max(1, tokens)
    with torch.no_grad():
        assert abs(criterion.of_hidden(both, weight, target, chunk=chunk) - expected) < 1e-9 * max(1, tokens)
    for one, other in zip(*(torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (got, expected)), strict=True):
        assert (one - other).abs().max() < 1e-9


def test_chunks_hold_few_logits_and_agree_in_half_precision(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(fast, "trains_faster", lambda weight: False)
    monkeypatch.setattr(fast, "losses_in_c", lambda *arguments: None)  # C goes through a row at a time
    hidden, weight = torch.randn(2400, 8), torch.randn(30_000, 8, requires_grad=True)
    target, chunks, rows = torch.randint(1, 30_000, (2400,)), [], []
    product, softmax = torch.Tensor.__matmul__, torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: (chunks.append((len(x), y.size(1))), product(x, y))[1])
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *a, **k: (rows.append(len(x)), softmax(x, *a, **k))[1])
    grads = {}
    for enabled, expected in ((False, [800] * 3), (True, [1200] * 2)):  # 128 MB are 1,118 rows in fp32, twice as many in bf16
        chunks.clear(), rows.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = ChunkedLoss(0.1).of_hidden(hidden, weight, target)
        grads[enabled] = torch.autograd.grad(loss, weight)[0]
        assert [n for n, columns in chunks if columns == 30_000 and n != 8] == expected
        assert max(rows) * 30_000 <= 1 << 19 and sum(rows) == 2400
    assert grads[True].dtype == torch.float32
    assert 0 < (grads[True] - grads[False]).norm() / grads[False].norm() < MEASURED["gradients"]


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("largest", [0.0, 1e4, -1e4])
def test_chunks_are_exact_where_the_right_token_has_no_probability_left(largest, in_c, monkeypatch):
    if not in_c:
        monkeypatch.setattr(fast, "losses_in_c", lambda *arguments: None)
    torch.manual_seed(0)
    logits = torch.randn(1200, 50)
    target = torch.randint(1, 50, (1200,))
    logits[torch.arange(1200), target] -= 1000  # e^-1000 is no number of single precision
    logits += largest
    hidden, weight = logits.requires_grad_(), torch.eye(50)
    loss = ChunkedLoss(0.1, reduction="sum").of_hidden(hidden, weight, target, chunk=500)
    expected = F.cross_entropy(logits.double(), target, label_smoothing=0.1, reduction="sum")
    assert abs(loss - expected) < 1e-6 * expected  # 16 roundings: 11 for the halves of halves of 1,200 rows, 5 within a row
    assert torch.allclose(*(torch.autograd.grad(one, logits)[0] for one in (loss, expected)), atol=1e-6)  # of numbers up to 1, likewise


def test_the_sum_over_chunks_is_not_kept_in_half_precision():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1200, 8, requires_grad=True), torch.randn(900, 8, requires_grad=True)
    target = torch.randint(1, 900, (1200,))
    loss = ChunkedLoss(0.1, reduction="sum").of_hidden(hidden.bfloat16(), weight.bfloat16(), target, chunk=500)
    assert loss.dtype == torch.float32
    exact = F.cross_entropy(hidden @ weight.T, target, label_smoothing=0.1, reduction="sum")
    assert abs(loss - exact) < 1e-3 * exact  # over 60 seeds the most is 1.5e-4: roundings of rows cancel, those of the sum would not


def test_chunks_add_up_in_half_precision():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1200, 8, requires_grad=True), torch.randn(900, 8, requires_grad=True)
    target, grads = torch.randint(1, 900, (1200,)), []
    for chunk in (1199, 500):  # two chunks and three
        with torch.autocast("cpu", torch.bfloat16):
            loss = ChunkedLoss(0.1).of_hidden(hidden, weight, target, chunk=chunk)
        grads.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    exact = F.cross_entropy(hidden @ weight.T, target, label_smoothing=0.1)
    for one, other, right in zip(*grads, (exact, *torch.autograd.grad(exact, (hidden, weight))), strict=True):
        assert max((one - right).norm(), (other - right).norm()) < MEASURED["gradients"] * right.norm()


def test_one_chunk_is_the_plain_loss_bit_for_bit():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(3, 20, 8), torch.randn(50, 8), torch.randint(0, 50, (3, 20))
    criterion = ChunkedLoss(0.1, reduction="sum")
    assert criterion.of_hidden(hidden, weight, target) == LabelSmoothingLoss(0.1, reduction="sum")(hidden @ weight.T, target)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("graded", [True, False])
def test_on_a_gpu_padding_stays_in_and_counts_nothing(monkeypatch, reduction, graded):
    """Tensors of the processor that say they are on a GPU: there, to leave padding out would mean to wait for how much there is."""
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 50, 16), (97, 16)))
    target = torch.randint(0, 97, (6, 50)).index_fill(1, torch.arange(40, 50), PAD)
    plain = LabelSmoothingLoss(0.1, PAD, reduction=reduction).of_hidden(hidden, weight, target)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with torch.set_grad_enabled(graded):
        loss = ChunkedLoss(0.1, PAD, reduction=reduction).of_hidden(hidden, weight, target, chunk=64)
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-10, check_layout=False)
    if graded:
        for ours, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(plain, (hidden, weight)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("reduction, nothing", [("sum", 0.0), ("mean", math.nan)])
def test_chunks_of_padding_alone_are_as_the_plain_loss_has_them(reduction, nothing):
    hidden, weight, target = torch.randn(2, 9, 4, requires_grad=True), torch.randn(7, 4), torch.zeros(2, 9, dtype=torch.int64)
    found = ChunkedLoss(0.1, reduction=reduction).of_hidden(hidden, weight, target, chunk=3)
    plain = LabelSmoothingLoss(0.1, reduction=reduction).of_hidden(hidden, weight, target)
    assert repr(found.item()) == repr(plain.item()) == repr(nothing)
    if reduction == "sum":
        assert not torch.autograd.grad(found, hidden)[0].any()


def test_chunked_logits_are_the_plain_loss():
    torch.manual_seed(0)
    logits, target = torch.randn(3, 5, 9), torch.randint(0, 9, (3, 5))
    assert torch.equal(ChunkedLoss(0.2)(logits, target), LabelSmoothingLoss(0.2)(logits, target))


# Dropout from 16 bits

@examples(15)
@given(st.floats(0.01, 0.95), st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_sixteen_bit_dropout_is_dropout(p, seed, dtype):
    torch.manual_seed(seed)
    x = (torch.rand(300, 1001) + 0.5).to(dtype).requires_grad_()  # no multiple of four
    outer, rate = torch.randn_like(x), round(p * 65536) / 65536
    y = SixteenBitDropout(nn.Dropout(p))(x)
    gone = y == 0
    assert y.dtype == dtype and y.shape == x.shape
    assert abs(gone.double().mean().item() - rate) < 5 * math.sqrt(rate * (1 - rate) / x.numel())  # five standard errors
    scale = torch.tensor(65536 / (65536 - round(p * 65536)), dtype=torch.float64).to(dtype)
    assert torch.equal(y[~gone], (x * scale)[~gone])
    (slope,) = torch.autograd.grad(y, x, outer)
    assert torch.equal(slope, torch.where(gone, torch.zeros_like(outer), outer * scale))


def test_sixteen_bit_dropout_draws_independently():
    torch.manual_seed(0)
    gone = (SixteenBitDropout(nn.Dropout(0.3))(torch.ones(1000, 1000)) == 0).double() - 0.3
    for lag in (1, 2, 3, 4, 5, 8, 1000):  # neighbours share a 64-bit word; none may know of the other
        flat = gone.flatten()
        assert abs((flat[:-lag] * flat[lag:]).mean() / 0.21) < 0.005  # five standard errors
    again = SixteenBitDropout(nn.Dropout(0.3))(torch.ones(1000, 1000))
    assert abs(((again == 0).double() - 0.3).mul(gone).mean() / 0.21) < 0.005
    torch.manual_seed(0)
    assert torch.equal(gone, (SixteenBitDropout(nn.Dropout(0.3))(torch.ones(1000, 1000)) == 0).double() - 0.3)


def test_sixteen_bit_dropout_draws_64_bits_for_four_elements_and_no_more():
    """So the numbers drawn after it are what they have always been."""
    following = []
    for draw in (lambda: SixteenBitDropout(nn.Dropout(0.3))(torch.ones(1001, 1001)),
                 lambda: torch.empty(-(-1001 * 1001 // 4), dtype=torch.int64).random_(-(1 << 63), None)):
        torch.manual_seed(0)
        draw()
        following.append(torch.rand(5))
    assert torch.equal(*following)


@pytest.mark.parametrize(("p", "rows", "training"), [(0.3, 100, True), (0.0, 1000, True), (1.0, 1000, True), (0.3, 1000, False)])
def test_elsewhere_sixteen_bit_dropout_is_pytorchs(p, rows, training):
    x, outputs = torch.randn(rows, 1000), []
    for layer in (nn.Dropout(p), SixteenBitDropout(nn.Dropout(p))):
        torch.manual_seed(0)
        outputs.append(layer.train(training)(x))
    assert torch.equal(*outputs)


# The end of a sub-layer in C

def test_a_large_sub_layer_of_a_model_that_trains_ends_in_c(monkeypatch):
    calls = []
    monkeypatch.setattr(fast, "add_and_norm", lambda *given: calls.append(given) or add_and_norm(*given))
    torch.manual_seed(0)
    residual = ResidualConnection(64, dropout=0.1)
    quick, large, small = QuickResidual(residual), torch.randn(2, 1100, 64), torch.randn(1, 1024, 64)
    for x, used in ((large, True), (small, False)):
        calls.clear()
        assert quick(x, torch.tanh).shape == x.shape and bool(calls) == used
    torch.manual_seed(0)
    expected = residual(small, torch.tanh)
    torch.manual_seed(0)
    assert torch.equal(quick(small, torch.tanh), expected), "small ones keep their draws"
    calls.clear()
    for other in (QuickResidual(ResidualConnection(64, 0.1)).eval(), QuickResidual(ResidualConnection(64, 0.1, norm_first=True))):
        other(large, torch.tanh)
    residual.dropout.eval()  # by itself, in a model that trains
    assert torch.equal(quick(large, torch.tanh), residual.norm(large + large.tanh())) and not calls
    residual.dropout.train()
    residual.dropout.p = 0.0
    assert torch.allclose(quick(large, torch.tanh), residual(large, torch.tanh), atol=1e-5)
    monkeypatch.setattr(fast, "add_and_norm", lambda *_: None)
    assert torch.equal(quick(large, torch.tanh), residual(large, torch.tanh)), "without a compiler"


def test_a_step_that_ends_sub_layers_in_c_has_the_gradients_of_the_plain_one():
    torch.manual_seed(0)
    plain = Transformer(TransformerConfig(50, N=2, d_model=128, d_ff=64, h=2, dropout=0.0)).train()
    quick, ids = prepare(copy.deepcopy(plain), "train"), torch.randint(4, 50, (40, 32))
    assert sum(type(part) is QuickResidual for part in quick.modules()) == 2 * 2 + 2 * 3
    for model in (plain, quick):
        F.cross_entropy(model(ids, ids).flatten(0, 1), ids.flatten()).backward()
    for ours, theirs in zip(quick.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= roundoff(torch.float32, 40 * 32) * theirs.grad.norm() + 1e-7  # summed over positions


# Products by oneDNN

@pytest.fixture
def onednn(monkeypatch):
    """As if oneDNN had been faster, for small weights, too."""
    if not PackedProduct.works(torch.zeros(1)):
        pytest.skip("this machine has no such products")
    for module in (fast, products):
        monkeypatch.setattr(module, "trains_faster", lambda weight: weight.dtype == torch.float32)


def test_a_model_trains_by_onednn_as_by_pytorch(onednn):
    model = prepare(tiny(300).float().eval(), "train")
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    assert {type(layer) for layer in layers} == {QuickLinear} and len(layers) == 2 * (4 + 2) + 2 * (4 + 4 + 2)
    grads = []
    for _ in range(2):
        model.zero_grad()
        LabelSmoothingLoss(0.1)(model(SOURCE, TARGET), TARGET).backward()
        grads.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        undo(model)
    assert not any(type(part) is QuickLinear for part in model.modules()) and near(*grads, 1e-5)
    assert not torch.equal(*grads), "both were PyTorch's"


def test_other_precisions_and_compiled_code_are_left_to_pytorch(onednn, unenforced, monkeypatch):
    plain, x = nn.Linear(16, 8), torch.randn(3, 16)
    layer = QuickLinear(plain)
    monkeypatch.setattr(fast.TrainedProduct, "apply", lambda *_: 1 / 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain(x))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), plain(x))
    assert torch.equal(QuickLinear(copy.deepcopy(plain).double())(x.double()), plain.double()(x.double()))
    with pytest.raises(ZeroDivisionError):
        QuickLinear(nn.Linear(16, 8))(x)


@pytest.mark.parametrize("chunk", [4, 7, 40])
def test_chunks_by_onednn_are_the_plain_loss(onednn, chunk):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16, requires_grad=True) for n in (40, 30))
    target, both = torch.randint(0, 30, (40,)), []
    for kind, options in ((LabelSmoothingLoss, {}), (ChunkedLoss, {"chunk": chunk})):
        loss = kind(0.1, reduction="sum").of_hidden(hidden, weight, target, **options)
        both.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight))])
    for plain, ours in zip(*both, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)  # 40 positions of numbers up to 10, in fp32: 2e-5 at most
    assert both[1][2].is_contiguous(), "the optimiser would read it across"


def test_dropout_is_exchanged_in_place_with_its_rate_mode_and_hooks():
    class Other(nn.Dropout):
        pass

    model = nn.Sequential(nn.Dropout(0.2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.4).eval()), Other(0.1))
    others, calls = [model[1], model[1][0], model[2]], []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    assert prepare(model, "train") is model and all(x is y for x, y in zip([model[1], model[1][0], model[2]], others, strict=True))
    assert [type(m) for m in (model[0], model[1][1], model[2])] == [SixteenBitDropout, SixteenBitDropout, Other]
    assert (model[0].p, model[1][1].p, model[0].training, model[1][1].training) == (0.2, 0.4, True, False)
    model(torch.ones(3, 2))
    assert calls == [1]


# Less to look at

@examples(80)
@given(st.integers(1, 4), st.integers(4, 400), st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6))
def test_the_largest_in_two_levels_are_those_of_topk(rows, types, k, block, seed):
    x = torch.rand(rows, types, generator=torch.Generator().manual_seed(seed)).log()
    x[:, seed % types] = -torch.inf
    x[0, -1 - seed % 3] = 1.0  # often in no whole block
    values, places = largest(x, k, block)
    assert torch.equal(values, x.topk(k).values) and torch.equal(x.gather(1, places), values)
    assert all(len(set(row)) == k for row in places.tolist())


def test_of_equals_the_first_is_taken_as_by_argmax():
    x = torch.randint(0, 3, (50, 200), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(largest(x, block=3)[1][:, 0], x.argmax(dim=1))


@examples(30)
@given(st.integers(1, 40), st.sampled_from([4, 500, 200_000]), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
       st.integers(1, 4), st.floats(0.1, 50), st.integers(0, 10**6))
def test_the_most_probable_are_those_of_the_softmax(rows, types, dtype, k, spread, seed):
    if rows * types > 1_000_000:
        rows = 5
    logits = (torch.randn(rows, types, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)
    kind, given_logits = torch.promote_types(dtype, torch.float32), logits.clone()
    log_p, ids = most_probable_of(logits, k)
    expected = logits.double() - logits.double().logsumexp(dim=1, keepdim=True)
    expected[:, [PAD, BEGIN]] = -torch.inf
    assert log_p.shape == ids.shape == (rows, k) and log_p.dtype == kind and torch.equal(logits, given_logits)
    at_once = logits.log_softmax(dim=1, dtype=kind)
    at_once[:, [PAD, BEGIN]] = -torch.inf
    assert torch.equal(log_p, at_once.topk(k).values) and torch.equal(log_p, at_once.gather(1, ids))
    if types < 1000 or kind == torch.float64:  # a sum of 200,000 exponentials in fp32 is rounded by more, by PyTorch as here
        assert torch.allclose(log_p.double(), expected.sort(dim=1, descending=True).values[:, :k], rtol=1e-6, atol=2e-5)
        assert torch.allclose(log_p.double(), expected.gather(1, ids), rtol=1e-6, atol=2e-5)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_the_largest_are_found_without_a_look_at_every_place(monkeypatch):
    seen, topk = [], torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, k: (seen.append(x.size(1)), topk(x, k))[1])
    largest(torch.randn(2, 37_000), 4)
    assert max(seen) < 2000


rough_products = pytest.mark.skipif(not PackedProduct.works(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no packed bf16 weights here")


@rough_products
@examples(150)
@given(st.integers(1, 9), st.integers(3, 700), st.integers(1, 80), st.sampled_from([0.0, 1e-5, 1e-3, 0.03, 1.0]), st.floats(0, 2),
       st.integers(0, 10**6))
@example(9, 300, 16, 1e-3, 0.0, 1)  # without room for rounding these are wrong
@example(9, 300, 64, 1e-3, 0.0, 3)
@example(9, 3000, 64, 1e-3, 0.0, 0)
def test_what_a_rough_look_is_sure_of_is_the_largest(rows, types, d_model, apart, uneven, seed):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, d_model, generator=draw) + apart * torch.randn(types, d_model, generator=draw)  # alike, or not at all
    weight = weight * (uneven * torch.randn(types, 1, generator=draw)).exp()
    hidden = torch.randn(rows, d_model, generator=draw)
    ids, sure = RoughLook(weight)(hidden)
    assert ids.shape == sure.shape == (rows, 1) and (ids > BEGIN)[sure].all()
    logits = hidden.double() @ weight.double().T
    found, best = logits.gather(1, ids), logits[:, END:].amax(dim=1, keepdim=True)
    rounding = 2**-22 * d_model * hidden.norm(dim=1, keepdim=True) * weight.norm(dim=1).max()  # what fp32 cannot tell apart
    assert (found >= best - rounding)[sure].all()
    if types > 20 and apart == 0 == uneven:
        assert not sure.any(), "all types are the same"


@rough_products
def test_a_rough_look_is_nearly_always_sure_of_random_logits():
    draw = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(5000, 64, generator=draw), torch.randn(400, 64, generator=draw)
    weight[END] = 40.0  # one long row widens the bound of its own logit only
    hidden[:, 0] = -100.0
    ids, sure = RoughLook(weight)(hidden)
    weight[[PAD, BEGIN]] = 0.0
    assert sure.float().mean() > 0.95 and torch.equal(ids[sure], (hidden @ weight.T).argmax(dim=1, keepdim=True)[sure])


@rough_products
@pytest.mark.parametrize("alike", [False, True])
def test_greedy_decoding_with_a_rough_look_writes_the_same(alike, monkeypatch):
    monkeypatch.setattr(RoughLook, "pays", lambda weight: True)
    monkeypatch.setattr(native, "library", lambda bits: None)  # the sums of a step in another order may turn such ties round
    model, seen = tiny(3000, d_model=64, d_ff=128, h=4).float(), []
    if alike:  # so near each other that bf16 cannot tell them apart
        with torch.no_grad():
            model.embedding.weight.copy_(model.embedding.weight[5] + 0.003 * model.embedding.weight)
    source = torch.randint(4, 3000, (9, 7), generator=torch.Generator().manual_seed(1))
    expected, look = greedy_decode(model, source, extra=12), prepare(model, "translate").embedding.rough
    model.embedding.rough = lambda hidden: (answer := look(hidden), seen.append(answer[1]))[0]
    assert greedy_decode(model, source, extra=12) == expected and {len(ids) for ids in expected} != {0}
    sure = torch.cat(seen).float().mean()
    assert len(seen) >= 19 and (sure < 0.5 if alike else sure > 0.9)


def test_the_rough_look_is_taken_where_it_pays(monkeypatch):
    large, small = torch.zeros(1 << 14, 256), torch.zeros(1 << 13, 256)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert RoughLook.pays(large) == PackedProduct.works(torch.zeros(1, 1, dtype=torch.bfloat16))
    assert not RoughLook.pays(small) and not RoughLook.pays(large.double()) and not RoughLook.pays(large.to("meta"))
    for known in ({"avx512_bf16": False}, {}):  # emulated, or not heard of
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known)
        assert not RoughLook.pays(large)
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in older versions of PyTorch
    assert not RoughLook.pays(large)
    model = tiny(3000).float()
    monkeypatch.setattr(RoughLook, "pays", lambda weight: False)
    assert prepare(model, "translate").embedding.rough is None
    monkeypatch.setattr(RoughLook, "pays", lambda weight: True)
    for precision in ("bf16", "int8"):
        assert prepare(model, "translate", precision).embedding.rough is None, "these are not to be more exact than they are"


# Layers of a model that only translates

@pytest.mark.parametrize("precision, bound", [("fp32", 1e-6), ("bf16", 0.01), ("int8", 0.03)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("packs", [True, False])
def test_a_product_takes_any_type_of_input_and_can_be_copied(precision, bound, dtype, packs, monkeypatch):
    if not packs:
        monkeypatch.setattr(PackedProduct, "works", lambda weight: False)
    torch.manual_seed(0)
    weight, bias, x = torch.randn(20, 48), torch.randn(20), torch.randn(5, 48).to(dtype)
    one, expected = product(weight, bias, precision), F.linear(x.double(), weight.double(), bias.double())
    bound = max(bound, 0.01 if dtype == torch.bfloat16 else 0)
    assert (one(x).double() - expected).norm() <= bound * expected.norm()
    assert torch.equal(copy.deepcopy(one)(x), one(x))


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-6), ("bf16", 0.01), ("int8", 0.03)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_plain_layer_to_the_bit_in_training(precision, bound, bias):
    torch.manual_seed(0)
    plain, x = nn.Linear(48, 37, bias=bias), torch.randn(3, 4, 48)
    packed = PackedLinear(plain, precision)
    assert packed.weight is plain.weight and packed.bias is plain.bias
    assert (packed.eval()(x).float() - plain(x)).norm() <= bound * plain(x).norm()
    assert (precision == "fp32") == near(packed(x).float(), plain(x), 1e-5)
    with torch.no_grad():
        plain.weight.mul_(3)
    assert torch.equal(packed.train()(x), plain(x)), "in training the weights are those of now"


def test_a_short_norm_is_the_norm_in_bfloat16():
    torch.manual_seed(0)
    plain, x = nn.LayerNorm(64, eps=0.5), 3 * torch.randn(20, 64) + 1
    with torch.no_grad():
        plain.weight.copy_(torch.randn(64)), plain.bias.copy_(torch.randn(64))
    short = ShortNorm(plain).eval()
    found = short(x.bfloat16())
    assert found.dtype == torch.bfloat16 and near(found.float(), plain(x.bfloat16().float()), 2 * 2**-8)
    assert torch.equal(short.train()(x), plain(x))


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-6), ("bf16", 0.01), ("int8", 0.03)])
def test_a_packed_embedding_is_the_embedding(precision, bound):
    torch.manual_seed(0)
    plain, ids, hidden = TokenEmbedding(300, 32), torch.randint(300, (3, 7)), torch.randn(9, 32)
    packed = PackedEmbedding(plain, precision).eval()
    assert near(packed(ids).float(), plain(ids), 2**-8 if precision == "bf16" else 0)
    assert (packed(ids).dtype == torch.bfloat16) == (precision == "bf16")
    logits = packed.logits(hidden).float()
    assert (logits - plain.logits(hidden)).norm() <= bound * plain.logits(hidden).norm()
    logits[:, [PAD, BEGIN]] = -math.inf
    assert torch.equal(likeliest(packed, hidden), logits.argmax(dim=1, keepdim=True))
    log_p, tokens = most_probable(packed, hidden, 4)
    expected = packed.logits(hidden).double().log_softmax(dim=1)
    expected[:, [PAD, BEGIN]] = -math.inf
    assert log_p.dtype == torch.float32
    assert near(log_p.double(), expected.topk(4).values, 1e-5) and near(log_p.double(), expected.gather(1, tokens), 1e-5)
    assert torch.equal(packed.train()(ids), plain(ids)) and torch.equal(packed.logits(hidden), plain.logits(hidden))


# Whole models

whole = pytest.mark.parametrize("norm_first, positions", list(itertools.product((False, True), ("sinusoidal", "learned"))))


@whole
@pytest.mark.parametrize("purpose, precision", PURPOSES)
@pytest.mark.parametrize("training", [True, False])
def test_a_prepared_model_is_the_plain_one_with_its_gradients(norm_first, positions, purpose, precision, training):
    """In double precision, with padding on both sides; without gradients where there is nothing to learn."""
    model = tiny(dropout=0.0, norm_first=norm_first, positions=positions).train(training)
    expected = learn(model, LabelSmoothingLoss(0.1))
    prepare(model, purpose, precision)
    with torch.no_grad():
        assert near(model(SOURCE, TARGET), expected[0])
        hidden = model.hidden(SOURCE, TARGET)
        assert near(ChunkedLoss(0.1).of_hidden(hidden, model.embedding.weight, RIGHT, chunk=4), expected[1])
    if training or purpose == "train":
        logits, loss, grads = learn(model, ChunkedLoss(0.1), chunk=4)
        assert near(logits, expected[0]) and near(loss, expected[1]) and grads.keys() == expected[2].keys()
        assert all(near(grad, expected[2][name]) for name, grad in grads.items())
    with torch.no_grad():  # a batch without any padding goes other ways
        source, target = SOURCE[:1], TARGET[1:2]
        assert near(model(source, target), undo(model)(source, target))


@whole
def test_dropout_of_a_prepared_model_is_drawn_as_that_of_the_plain_one(norm_first, positions):
    """Tensors as small as these keep PyTorch's draws."""
    model = tiny(norm_first=norm_first, positions=positions, attention_dropout=0.2, feed_forward_dropout=0.3).train()
    results = []
    for purpose in (None, "train", "translate"):
        if purpose:
            prepare(model, purpose)
        torch.manual_seed(5)
        results.append(learn(model, LabelSmoothingLoss(0.1)))
    for logits, loss, grads in results[1:]:
        assert near(logits, results[0][0]) and near(loss, results[0][1])
        assert all(near(grad, results[0][2][name]) for name, grad in grads.items())


@whole
def test_in_half_precision_a_prepared_model_is_as_exact_as_the_plain_one(norm_first, positions):
    model = tiny(vocab_size=40, d_model=64, d_ff=128, h=4, dropout=0.0, norm_first=norm_first, positions=positions).float().train()
    exact, found = learn(copy.deepcopy(model).double(), LabelSmoothingLoss(0.1)), []
    for kind in (LabelSmoothingLoss, ChunkedLoss):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(learn(model, kind(0.1), **({"chunk": 4} if kind is ChunkedLoss else {})))
        prepare(model, "train")
    plain, ours = found

    def off(of):
        grads = [(of[2][name].double() - grad).norm() / grad.norm() for name, grad in exact[2].items() if grad.norm() > 1e-6]
        return torch.stack([(of[0].double() - exact[0]).norm() / exact[0].norm(), abs(of[1] - exact[1]) / exact[1], *grads])

    assert near(ours[0].float(), plain[0].float(), 4 * 2**-8) and ours[0].dtype == plain[0].dtype
    assert 0 < off(plain).mean() < 0.05, "nothing was rounded"
    assert off(ours).mean() < 1.3 * off(plain).mean() and off(ours).max() < 1.5 * off(plain).max() and off(ours)[1] < off(plain)[1] + 2**-9
    assert all(grad.dtype == torch.float32 for grad in ours[2].values())


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("precision, bound", [(kind, MEASURED[kind]) for kind in ("fp32", "bf16", "int8")])
def test_a_model_prepared_to_translate_is_the_same_model(precision, bound, norm_first):
    model = tiny(3000, d_model=64, d_ff=128, h=4, norm_first=norm_first).float()
    source = torch.randint(4, 3000, (3, 7))
    with torch.no_grad():
        expected, got = model(source, source), prepare(model, "translate", precision)(source, source).float()
    assert 0 <= (got - expected).norm() / expected.norm() < bound and not model.training
    assert (precision == "fp32") == torch.allclose(got, expected, atol=1e-4)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert [len(ids) > 0 for ids in greedy_decode(model, source)] == [True] * 3 and len(beam_search(model, source, 2)) == 3


@pytest.mark.parametrize("purpose, precision", ALL_PURPOSES)
def test_every_plain_part_is_replaced_by_the_part_for_the_purpose(purpose, precision):
    model = tiny()
    before = kinds_of(model)
    after = kinds_of(prepare(model, purpose, precision))
    both = {DotProductAttention: QuickAttention, Encoder: LeanEncoder, Decoder: LeanDecoder, PositionalEncoding: KeptPositions,
            MultiHeadAttention: JoinedAttention}
    only = {"train": {nn.Dropout: SixteenBitDropout, ResidualConnection: QuickResidual},
            "translate": {nn.Linear: PackedLinear, TokenEmbedding: PackedEmbedding, Decoder: StepDecoder}}[purpose]
    expected = both | only | ({nn.LayerNorm: ShortNorm} if precision == "bf16" else {})
    assert after == {path: expected.get(kind, kind) for path, kind in before.items()} and set(expected) <= set(before.values())


@pytest.mark.parametrize("purpose, precision", ALL_PURPOSES)
def test_parameters_keep_their_names_their_order_and_themselves(purpose, precision):
    model = tiny()
    before, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    for _ in range(2):
        after = dict(prepare(model, purpose, precision).named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
        assert list(model.state_dict()) == list(values) and all(torch.equal(values[name], x) for name, x in model.state_dict().items())
    other = tiny(seed=1)
    other.load_state_dict(model.state_dict())
    prepared = prepare(tiny(seed=2), purpose, precision)
    prepared.load_state_dict(other.state_dict())
    with torch.no_grad():
        expected = undo(model)(SOURCE, TARGET)
        assert torch.equal(other(SOURCE, TARGET), expected) and torch.equal(undo(prepared)(SOURCE, TARGET), expected)


def test_an_optimiser_made_before_goes_on():
    criterion, weights = LabelSmoothingLoss(0.1), []
    for order in ((None,) * 5, (None, "train", "translate", "undo", "train")):
        model = tiny(dropout=0.0).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for what in order:
            if what:
                undo(model) if what == "undo" else prepare(model, what)
            learn(model, criterion)
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert near(*weights, 1e-9) and not near(weights[0], torch.cat([p.detach().flatten() for p in tiny().parameters()]), 1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_model_prepared_to_translate_learns_as_the_plain_one(precision):
    weights = []
    for prepared in (False, True):
        model = tiny(dropout=0.1, attention_dropout=0.1)
        if prepared:
            greedy_decode(prepare(model, "translate", precision), SOURCE, extra=2)
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        for _ in range(3):
            learn(model, LabelSmoothingLoss(0.1))
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert near(*weights, 1e-9)
    with torch.no_grad():
        plain, again = undo(model).eval()(SOURCE, TARGET), prepare(model, "translate", precision)(SOURCE, TARGET)
    assert (again - plain).norm() < {"fp32": 1e-12, "bf16": 0.03, "int8": 0.05}[precision] * plain.norm(), "laid out anew"


# What is undone

@whole
def test_undo_gives_back_the_first_model(norm_first, positions):
    model, calls = tiny(norm_first=norm_first, positions=positions), []
    model.encoder.layers[0].train()  # modes of many kinds
    model.decoder.layers[1].residual[0].dropout.train()
    model.decoder.layers[0].residual[1].register_forward_hook(lambda *_: calls.append("before"))
    modules, modes = dict(model.named_modules()), {path: module.training for path, module in model.named_modules()}
    kinds, state = kinds_of(model), copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    expected = model(SOURCE, TARGET)
    for purpose, precision in [*ALL_PURPOSES, *ALL_PURPOSES[::-1]]:
        prepare(model, purpose, precision)
    assert any(isinstance(module, PreparedPart) for module in model.modules())
    assert {path: module.training for path, module in model.named_modules()} == modes
    model(SOURCE, TARGET)
    assert undo(model) is model and undo(model) is model
    assert kinds_of(model) == kinds and all(module is modules[path] for path, module in model.named_modules())
    assert {path: module.training for path, module in model.named_modules()} == modes
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    torch.manual_seed(0)
    assert torch.equal(model(SOURCE, TARGET), expected) and calls == ["before"] * 3


@pytest.mark.parametrize("purpose, precision", ALL_PURPOSES)
@pytest.mark.parametrize("after", ["undo", "train", "translate"])
def test_what_has_changed_meanwhile_outlasts_the_prepared_parts(purpose, precision, after):
    model, calls = prepare(tiny().train(), purpose, precision), []
    model.eval()
    model.encoder.layers[0].residual[1].dropout.train()
    layer = model.decoder.layers[0].self_attention
    layer.attention = own = DotProductAttention(0.25)
    layer.W_Q = mine = type("Mine", (nn.Linear,), {})(16, 16, bias=False).double()
    model.decoder.layers[1].residual[0].dropout.p = 0.125
    model.decoder.register_forward_hook(lambda *_: calls.append("forward"))
    model.encoder.layers[1].self_attention.register_full_backward_hook(lambda *_: calls.append("backward"))
    undo(model) if after == "undo" else prepare(model, after)
    training = {path for path, module in model.named_modules() if module.training}
    layer = "decoder.layers.0.self_attention"
    assert training == {"encoder.layers.0.residual.1.dropout", f"{layer}.attention", f"{layer}.W_Q"}
    layer = model.decoder.layers[0].self_attention
    assert layer.W_Q is mine and getattr(layer.attention, "plain", layer.attention) is own
    assert model.decoder.layers[1].residual[0].dropout.p == 0.125
    undo(model)
    assert not any(isinstance(module, PreparedPart) for module in model.modules())
    model(SOURCE, TARGET).sum().backward()
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("purpose, precision", ALL_PURPOSES)
def test_prepared_models_can_be_copied(purpose, precision):
    model = prepare(tiny(300).float(), purpose, precision)
    model(SOURCE, TARGET)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(SOURCE, TARGET), model(SOURCE, TARGET)) and kinds_of(copied) == kinds_of(model)
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
        assert torch.equal(undo(copied)(SOURCE, TARGET), undo(model)(SOURCE, TARGET)) and kinds_of(copied) == kinds_of(model)
        copied.embedding.weight.zero_()
        assert model(SOURCE, TARGET).any()


def test_only_parts_of_exactly_these_kinds_are_replaced():
    model = tiny(dropout=0.0).float()

    def own(part):
        """The same part as one of a class from outside."""
        part.__class__ = type(f"My{type(part).__name__}", (type(part),), {})
        return part

    first, last = model.encoder.layers[0], model.decoder.layers[1]
    mine = [own(part) for part in (model.source_positions, model.decoder, first.self_attention.attention, last.cross_attention,
                                   last.residual[2], last.residual[0].norm, first.residual[0].dropout)]
    with torch.no_grad():
        expected = model(SOURCE, TARGET)
        for purpose, precision in (("translate", "bf16"), *PURPOSES, ("translate", "int8")):
            if precision != "bf16" and len(mine) == 7:  # products from outside would have to take bfloat16
                mine += [own(undo(model).embedding), own(first.feed_forward.W_1)]
            found = prepare(model, purpose, precision)(SOURCE, TARGET)
            assert all(part in set(model.modules()) for part in mine) and isinstance(model.encoder, LeanEncoder)
            assert (found - expected).norm() < MEASURED[precision] * expected.norm()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_models_of_any_type_translate_in_fewer_bits(precision, dtype):
    model = tiny(300, dropout=0.0).to(dtype)
    expected = copy.deepcopy(model).double()(SOURCE, TARGET)
    found = prepare(model, "translate", precision)(SOURCE, TARGET).double()
    assert (found - expected).norm() < MEASURED[precision] * expected.norm()
    assert len(greedy_decode(model, SOURCE, extra=3)) == len(beam_search(model, SOURCE, 3, extra=3)) == 3


def test_unknown_words_are_refused_and_change_nothing():
    model = prepare(tiny(), "train")
    before = list(model.modules())
    with pytest.raises(ValueError, match="purpose='fly' is unknown: give 'train' or 'translate'"):
        prepare(model, "fly")
    with pytest.raises(ValueError, match="precision='fp8' is unknown: give 'fp32' or 'bf16' or 'int8'"):
        prepare(model, "translate", "fp8")
    assert list(model.modules()) == before
    with pytest.raises(ValueError, match="'int8' is for the CPU, the model is on meta: give 'bf16'"):
        prepare(copy.deepcopy(model).to("meta"), "translate", "int8")


# The book's model, and the command line

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_book_s_model_translates_alike_when_prepared(dtype):
    saved = book_model()
    model, sentences = copy.deepcopy(saved.model).to(dtype), [source for source, _ in load_corpus("toy").test[:100]]
    expected = [translate(model, saved.tokenizer, sentences, beam=beam) for beam in (1, 4)]
    for purpose in ("translate", "train"):  # what has just been trained may be asked too
        prepare(model, purpose)
        assert [translate(model, saved.tokenizer, sentences, beam=beam) for beam in (1, 4)] == expected
    assert len(set(expected[0])) > 90


@pytest.mark.parametrize("purpose, precision, bound", [("train", "fp32", 1e-5), ("translate", "fp32", 1e-5), ("translate", "bf16", 0.03),
                                                       ("translate", "int8", 0.05)])
def test_the_book_s_model_has_the_same_logits_when_prepared(purpose, precision, bound):
    saved = book_model()
    model, pairs = copy.deepcopy(saved.model), load_corpus("toy").test[:20]
    source = pad([[*saved.tokenizer.encode(text, "en"), END] for text, _ in pairs])
    target = pad([[BEGIN, *saved.tokenizer.encode(text, "de")] for _, text in pairs])
    with torch.no_grad():
        expected, found = model(source, target), prepare(model, purpose, precision)(source, target).float()
    real = target != PAD
    assert (found - expected)[real].norm() < bound * expected[real].norm()
    assert (found.argmax(dim=-1) == expected.argmax(dim=-1))[real].float().mean() >= (0.99 if precision != "fp32" else 1)


TEXTS = ["the dog sees a cat .", "", "a cat .", "the cat sleeps .", "   ", "a a a a a a a a a", "cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "saved"
    save_checkpoint(folder, tiny(len(WORDS), seed=2, N=1).float(), WORDS, source_language="en")
    return str(folder)


# What makes each part quick: which way is taken, how often something is asked, filled, rounded or made



DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


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


def test_surely_all_is_never_wrong_and_asks_only_where_it_is_cheap(unenforced):
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
    # four products follow each other, what goes in and what comes out is rounded: eight times half an eps of numbers up to 4
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
        bound = 1e-9 if kind == torch.float64 else 2**-6  # four roundings of bfloat16 in a row, 2^-8 each
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
        assert (one - three).norm() < roundoff(torch.bfloat16, 3) * three.norm()  # over 60 seeds the most is one rounding
    for low, exact in zip(found["one"], found["fp32"], strict=True):
        assert (low - exact).norm() < MEASURED["gradients"] * exact.norm()


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


def half_precision_casts(function, options):
    return function is torch.ops.aten._to_copy.default and options.get("dtype") == torch.bfloat16


@pytest.mark.parametrize("norm_first", [False, True])
def test_under_autocast_memory_and_weights_are_rounded_once_and_nothing_else_changes(norm_first, monkeypatch):
    torch.manual_seed(0)
    stacks = nn.ModuleList(kind(2, 16, 2, 32, norm_first=norm_first) for kind in (Encoder, Decoder))
    encoder, decoder = fast.prepare(stacks.train(), "train")
    x, y, results = torch.randn(2, 5, 16), torch.randn(2, 4, 16), []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for rounded in (fast.rounded, lambda x: x):
        monkeypatch.setattr(fast, "rounded", rounded)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Calls(half_precision_casts) as casts:
            results.append((decoder(y, encoder(x), causal_mask(4)), casts.count))
    assert torch.equal(results[0][0], results[1][0])
    # one memory for two layers' four products; a layer's products and offsets, of which Q, K and V were one already
    saved = (2 * 2 - 1) + 2 * (6 - 1) + 2 * (10 - 1)
    assert results[1][1] - results[0][1] == saved


@pytest.mark.parametrize("norm_first", [False, True])
def test_weights_rounded_at_once_as_on_a_gpu_are_what_autocast_rounds_one_by_one(norm_first, monkeypatch):
    results = []
    for gpu in (True, False):
        monkeypatch.setattr(torch.Tensor, "is_cuda", gpu)
        model = prepare(tiny(40, d_model=64, d_ff=128, h=4, norm_first=norm_first).float().train(), "train")
        before = dict(model.named_parameters())
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(learn(model, LabelSmoothingLoss(0.1)))
        assert all(p is before[name] and p.grad.dtype == torch.float32 for name, p in model.named_parameters())
    (logits, loss, _), (expected, other, _) = results
    words = TARGET != PAD  # on a GPU padding sees padding, which no loss counts
    assert torch.equal(logits[words], expected[words]) and torch.equal(loss, other)
    assert all(torch.equal(grad, results[1][2][name]) for name, grad in results[0][2].items())


def test_only_plain_products_under_autocast_get_rounded_weights(monkeypatch):
    class Outside(nn.Linear):
        """A product that may do anything with its weight."""

    model, seen = prepare(tiny().float(), "train"), []
    first, second = (layer.feed_forward for layer in model.encoder.layers)
    first.W_1 = Outside(16, 32)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for part in (first.W_1, first.W_2, second.W_1, model.encoder.layers[0].residual[0].norm):
        part.register_forward_pre_hook(lambda part, _: seen.append(part.weight.dtype))
    for low in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            model.encoder(torch.randn(2, 3, 16))
    full, half = torch.float32, torch.bfloat16
    assert seen == [full] * 4 + [full, full, half, half], "norm, what is from outside, what is plain"


def test_rounded_changes_nothing_but_float32_under_autocast():
    x = torch.randn(3)
    assert fast.rounded(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast.rounded(x), x.bfloat16()) and fast.rounded(x).dtype == torch.bfloat16
        for other in (x.double(), x.half(), torch.arange(3)):
            assert fast.rounded(other) is other


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
    close = 1e-5 if dtype == torch.float32 else 0.03  # over 60 seeds the most is 2.1e-7 and 0.0043
    torch.testing.assert_close(layer.output(heads).reshape(64, 1, 128).float(), expected, rtol=0, atol=close)


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


# Memory that is kept

@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted on Linux")
def test_kept_memory_is_not_mapped_again_and_is_given_back_on_request():
    program = """
import resource, torch
from annotated.fast import give_memory_back, keep_memory
torch.set_num_threads(1)
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(20_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
plain, could, first, later, full = faults(4), keep_memory(), faults(1), faults(4), resident()
print(plain, could, later, full - resident(), give_memory_back(), full - resident())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "LD_PRELOAD", "GLIBC"))}
    plain, could, later, before, could_give, after = run_python(program, env=environment).split()
    if could != "True":
        pytest.skip("the C library here has no mallopt")
    assert int(plain) > 4 * 19_000 and int(later) < 8 * 19_000 * 0.3, "four times 80 MB in pages of 4 kB"
    assert could_give == "True" and int(before) < 1e6 and int(after) > 60e6


@pytest.mark.skipif(not os.path.isdir("/sys/kernel/mm/transparent_hugepage"), reason="needs a Linux that can make large pages")
def test_kept_memory_lies_where_large_pages_are_asked_for_also_after_it_was_given_back_and_costs_nothing_before():
    program = """
import re, resource, torch
from annotated.fast import give_memory_back, keep_memory
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def asked_for(tensor):
    inside = False
    for line in open("/proc/self/smaps"):
        span = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= tensor.data_ptr() + tensor.nbytes // 2 < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
plain, before = asked_for(torch.ones(20_000_000)), resident()
could, cost = keep_memory(), resident() - before
first = asked_for(torch.ones(20_000_000))
give_memory_back()
print(plain, could, cost, first, asked_for(torch.ones(20_000_000)), asked_for(torch.ones(200_000_000)))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "LD_PRELOAD", "GLIBC"))}
    plain, could, cost, *asked = run_python(program, env=environment).split()
    if could != "True":
        pytest.skip("the C library here has no mallopt")
    assert plain == "False" and asked == ["True"] * 3 and int(cost) < 4e6


def test_without_such_a_c_library_memory_is_left_alone(monkeypatch):
    monkeypatch.setattr(fast, "c_library", lambda name: None)
    assert (fast.keep_memory(), fast.give_memory_back()) == (False, False)


# Products

def test_every_packed_part_asks_for_the_product_of_the_rows_that_are_prepared_for(monkeypatch):
    """The rows choose the way, and with it how sums are rounded; an encoder's are the words of all sentences."""
    asked = []
    monkeypatch.setattr(fast, "product", lambda weight, bias=None, precision="fp32", rows=32:
                        asked.append(rows) or products.product(weight, bias, precision, rows))
    prepare(tiny().float(), "translate", rows=5)
    assert set(asked) == {5, 32 * 5}


# Steps in one call

native_steps = pytest.mark.skipif(native.library(32) is None, reason="no C compiler here")
BITS = {"fp32": 32, "bf16": 16, "int8": 8}


def in_one_call(model, precision, threads=1):
    """The prepared model, whose steps are computed in C whatever is quickest."""
    prepare(model, "translate", precision)
    model.decoder.native = native.NativeDecoder(model.decoder, BITS[precision], threads)
    model.embedding.product = native.NativeProduct(model.embedding.weight, bits=BITS[precision], threads=threads)
    return model


def rounded_alike(model, precision):
    """The plain model, whose products round weights and inputs as the C code does: what it is compared with."""
    def weights(weight):
        if precision == "bf16":
            return weight.bfloat16().float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / scale).round() * scale

    def inputs(x):
        if precision == "bf16":
            return x.bfloat16().float()
        low, high = x.amin(dim=-1, keepdim=True).clamp(max=0), x.amax(dim=-1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255
        return ((x / scale).round() + (-low / scale).round()).clamp(0, 255).sub((-low / scale).round()) * scale

    class Rounded(nn.Linear):
        def forward(self, x):
            return F.linear(inputs(x), weights(self.weight), self.bias)

    for layer in model.decoder.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Rounded
    model.embedding.logits = lambda x: inputs(x) @ weights(model.embedding.weight).T
    return model


@native_steps
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("norm_first, positions", list(itertools.product((False, True), ("sinusoidal", "learned"))))
@pytest.mark.parametrize("threads", [1, 2])
def test_steps_in_one_call_are_the_plain_steps_of_rows_that_come_and_go(precision, norm_first, positions, threads):
    plain = tiny(300, d_model=48, d_ff=101, h=3, d_k=10, d_v=13, norm_first=norm_first, positions=positions, max_length=9).float()
    source = torch.randint(4, 300, (5, 7))
    source[0, 4:], source[2, 1:] = PAD, PAD
    ours = in_one_call(copy.deepcopy(plain), precision, threads)
    if precision != "fp32":
        rounded_alike(plain, precision)
    with torch.no_grad():
        memory = plain.encode(source) if precision == "fp32" else ours.encode(source)
        plain.encode = lambda _: (memory[0].float(), memory[1])
        if precision != "fp32":  # the keys of the memory are made by PyTorch's products
            for mine, other in zip(plain.decoder.layers, ours.decoder.layers, strict=True):
                mine.cross_attention.keys_and_values = lambda *x, of=other.cross_attention: tuple(
                    y.float() for y in of.keys_and_values(memory[0], memory[0]))
        steps = stepwise(plain.decoder, plain, source, 9), stepwise(ours.decoder, ours, source, 9)
        assert [type(one) for one in steps] == [IncrementalDecoder, native.NativeSteps]
        rows = 5
        for chosen, left in (([0, 0, 1, 1, 4, 4], [0, 1, 4]), ([1, 0, 5, 4], [0, 2]), ([3] * 6, [1]), ([0], [0]), (None, None)):
            for _ in range(2 if chosen else 1):
                tokens = torch.randint(4, 300, (rows, 1))
                expected, found = (one.step(tokens) for one in steps)
                bound = {"fp32": 1e-5, "bf16": 2e-2, "int8": 2e-2}[precision]  # a sum in another order may be rounded the other way
                assert near(found, expected, bound)
            if chosen:
                for one in steps:
                    one.select(torch.tensor(chosen), torch.tensor(left))
                rows = len(chosen)
    with pytest.raises(ValueError, match=r"tokens of shape \(2, 1\) for 1 rows: give one a row, and call select when rows come or go"):
        steps[1].step(tokens.repeat(2, 1))
    with pytest.raises(ValueError, match="there is room for 9 positions, not 10: give a larger capacity"):
        steps[1].step(tokens)


@native_steps
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_book_s_model_writes_in_one_call_what_it_writes_in_plain_steps(precision):
    saved, sentences = book_model(), [source for source, _ in load_corpus("toy").test[:200]]
    plain, ours = copy.deepcopy(saved.model), in_one_call(copy.deepcopy(saved.model), precision)
    if precision != "fp32":
        rounded_alike(plain, precision)
    for beam in (1, 4):
        expected, found = (translate(model, saved.tokenizer, sentences, beam=beam) for model in (plain, ours))
        same = sum(one == other for one, other in zip(expected, found, strict=True))
        assert same == 200 if precision == "fp32" else same >= 198, "the encoder's own rounding may turn a near tie"


@native_steps
@pytest.mark.parametrize("change", ["attention", "hook", "type", "recorded", "linear"])
def test_what_is_from_outside_is_not_passed_by_in_one_call(change):
    model, source = in_one_call(tiny(300).float(), "fp32"), SOURCE
    assert isinstance(stepwise(model.decoder, model, source, 5), native.NativeSteps)
    layer, around = model.decoder.layers[1], contextlib.nullcontext()
    if change == "attention":
        layer.self_attention.attention = DotProductAttention()
    elif change == "hook":
        layer.feed_forward.register_forward_hook(lambda *_: None)
    elif change == "type":
        model.double()
    elif change == "linear":
        layer.feed_forward.W_1 = nn.Linear(16, 32)
    elif change == "recorded":
        around = record_attention(model)
    with around, torch.no_grad():
        assert type(stepwise(model.decoder, model, source, 5)) is IncrementalDecoder
    assert type(stepwise(undo(model).decoder, model, source, 5)) is IncrementalDecoder


@native_steps
@pytest.mark.parametrize("change", ["biases", "fewer heads", "wide", "norm", "no offset", "one norm first", "more layers", "wider logits"])
def test_a_decoder_that_is_not_as_configured_is_left_to_page_18_s_step(change):
    model = tiny(300).float()
    layer = model.decoder.layers[1]
    if change == "biases":
        layer.self_attention.W_Q = nn.Linear(16, 16)
    elif change == "fewer heads":  # of the same width in all
        layer.cross_attention = MultiHeadAttention(16, 1)
    elif change == "wide":
        layer.feed_forward = PositionwiseFeedForward(16, 500)
    elif change == "norm":
        model.decoder.norm = nn.LayerNorm(16)
    elif change == "no offset":
        layer.residual[2].norm = nn.LayerNorm(16, bias=False)
    elif change == "one norm first":
        layer.residual[1].norm_first = True
    elif change == "more layers":
        model.decoder.layers.append(copy.deepcopy(layer))
    elif change == "wider logits":
        model.embedding = TokenEmbedding(301, 16)
    expected = greedy_decode(model, SOURCE, extra=5)
    prepare(model, "translate")
    assert (native.one_call_ways(model, "fp32") == {}) == (change != "more layers")
    if change == "more layers":
        in_one_call(model, "fp32")
    assert greedy_decode(model, SOURCE, extra=5) == expected


@native_steps
def test_a_beam_that_allows_only_some_tokens_finds_the_same_in_one_call():
    plain = tiny(300).float()
    ours, ways = in_one_call(copy.deepcopy(plain), "fp32"), torch.rand(4, 300) < 0.1
    ways[:, END] = True

    def allowed(rows, ids):
        return ways[ids.size(2) % 4].expand(ids.size(0) * ids.size(1), -1)

    expected, found = (beam_search(model, SOURCE, beam=3, extra=5, n_best=3, allowed=allowed) for model in (plain, ours))
    assert [[ids for ids, _ in one] for one in found] == [[ids for ids, _ in one] for one in expected]


@native_steps
def test_no_more_threads_are_used_than_pytorch_has(monkeypatch):
    model = in_one_call(tiny(300).float(), "fp32", threads=2)
    for has, used in ((1, 1), (2, 2), (3, 2)):
        monkeypatch.setattr(torch, "get_num_threads", lambda has=has: has)
        with torch.no_grad():
            assert stepwise(model.decoder, model, SOURCE, 5).state.threads == used


@native_steps
def test_what_the_c_code_could_not_read_is_refused():
    model = in_one_call(tiny(300).float(), "fp32")
    with torch.no_grad():
        steps = stepwise(model.decoder, model, SOURCE, 5)
    rows = len(SOURCE)
    for wrong in (300, -1, 2**40):
        tokens = torch.full((rows, 1), 5)
        tokens[1] = wrong
        with pytest.raises(ValueError, match=f"row 1 has the token {wrong}: give an id from 0 to 299"):
            steps.step(tokens)
    step = native.NativeSteps.step
    step = getattr(step, "__wrapped__", step)  # as it is without the checks of shapes
    with pytest.raises(ValueError, match="give one a row"):
        step(steps, torch.full((rows, 2), 5))
    assert steps.length == 0 and steps.step(torch.full((rows, 1), 5, dtype=torch.int32)).isfinite().all(), "any kind of whole numbers"
    for wrong in (torch.zeros(2, 15), torch.zeros(2, 16, device="meta")):
        with pytest.raises(ValueError, match="prepare the model again where it is"):
            model.embedding.product(wrong)


@native_steps
def test_the_quickest_way_is_taken(monkeypatch):
    model = prepare(tiny(300).float(), "translate", rows=2)
    assert set(model.decoder.seconds) == {"fp32, page 18", *(f"fp32, C, {n} thread(s)" for n in {1, torch.get_num_threads()})}
    assert model.decoder.chosen == min(model.decoder.seconds, key=model.decoder.seconds.get)
    assert (model.decoder.native is None) == (model.decoder.chosen == "fp32, page 18")
    for times, chosen in (([9.0, 1.0, 5.0], "fp32, C, 1 thread(s)"), ([1.0, 9.0, 9.0], "fp32, page 18")):
        quick = itertools.cycle(times[: 1 + len({1, torch.get_num_threads()})])  # the ways take turns
        monkeypatch.setattr(products.timeit.Timer, "timeit", lambda *_, quick=quick: next(quick))
        assert prepare(model, "translate", rows=2).decoder.chosen == chosen


def test_the_quickest_precision_is_measured_once(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_made_here", lambda: tmp_path)
    times, asked = {"fp32": 3.0, "bf16": 2.0, "int8": 4.0}, []

    def choose(model, precision, rows):
        asked.append(precision)
        model.decoder.seconds = {"": times[precision]}

    monkeypatch.setattr(fast, "choose", choose)
    model = tiny(300).float()
    for rows, known in ((2, False), (2, True), (3, False)):
        asked.clear()
        assert isinstance(prepare(model, "translate", "auto", rows).decoder.layers[0].residual[0].norm, ShortNorm), "bf16"
        assert asked == ["bf16"] if known else asked == ["fp32", "bf16", "int8", "bf16"]
    prepare(model, "train", "auto")  # where no precision is asked for, none is measured
    assert asked[-1] == "bf16" and isinstance(model.decoder, fast.LeanDecoder)
    kept = sorted(json.loads(path.read_text())["rows"] for path in tmp_path.iterdir())
    assert kept == [2, 3]
    times["int8"] = 1.0
    other = tiny(301).float()
    W_1 = prepare(other, "translate", "auto", 2).decoder.layers[0].feed_forward.W_1.product
    assert type(W_1) is Int8Product or W_1.bits == 8
    monkeypatch.setattr(native, "library", lambda bits: None)
    asked.clear()
    prepare(other, "translate", "auto", 2)
    assert len(asked) == 4, "measured anew where there is no compiler"


@pytest.mark.parametrize(("scores", "chosen"), [
    ({"fp32": 40, "bf16": 39.9, "int8": 39.71}, "int8"), ({"fp32": 40, "bf16": 39.9, "int8": 39.6}, "bf16"),
    ({"fp32": 40, "bf16": 38.0, "int8": 39.6}, "fp32"), ({"fp32": 40, "bf16": 41.0, "int8": 40.5}, "int8")])
def test_the_quickest_precision_that_loses_little_is_taken(monkeypatch, tmp_path, scores, chosen):
    monkeypatch.setattr(files, "_made_here", lambda: tmp_path)
    times, now = {"fp32": 3.0, "bf16": 2.0, "int8": 1.0}, []

    def choose(model, precision, rows):
        now[:] = [precision]
        model.decoder.seconds = {"": times[precision]}

    monkeypatch.setattr(fast, "choose", choose)
    prepare(tiny(300).float(), "translate", "auto", 2, lambda model: scores[now[0]])
    assert now == [chosen]
    times["fp32"] = 0.5  # where that is the quickest nothing is scored
    prepare(tiny(301).float(), "translate", "auto", 2, lambda model: pytest.fail("scored"))
    assert now == ["fp32"]


def test_without_a_compiler_page_18_s_step_is_taken(monkeypatch):
    monkeypatch.setattr(native, "library", lambda bits: None)
    decoder = prepare(tiny(300).float(), "translate").decoder
    assert decoder.native is None and decoder.chosen == "fp32, page 18"


def test_a_foreign_model_with_a_decoder_of_ours_is_prepared_too():
    class Foreign(nn.Module):
        def __init__(self, decoder):
            super().__init__()
            self.decoder = decoder

    model = prepare(Foreign(tiny(300).float().decoder), "translate")
    assert type(model.decoder) is StepDecoder and model.decoder.native is None


def test_a_large_sub_layer_keeps_a_dropout_from_outside_and_hooks():
    residual, calls = ResidualConnection(64, 0.1), []
    quick, large = fast.QuickResidual(residual), torch.randn(2, 1100, 64)
    handle = quick.norm.register_forward_hook(lambda *_: calls.append(1))
    quick(large, torch.tanh)
    assert calls == [1]
    handle.remove()
    quick.dropout = nn.Identity()
    assert torch.equal(quick(large, torch.tanh), residual.norm(large + large.tanh()))


@pytest.mark.parametrize("name", ["W_Q", "W_K", "W_V"])
def test_hooks_on_projections_run_in_a_model_that_translates(name):
    model, calls = tiny(300).float(), []
    getattr(model.decoder.layers[0].self_attention, name).register_forward_hook(lambda *_: calls.append(1))
    greedy_decode(prepare(model, "translate"), SOURCE, extra=2)
    assert calls
