"""The whole model: against PyTorch's nn.Transformer with copied weights (float64), and the promises it makes."""

import dataclasses
import math

import pytest
import torch
from helpers import examples, run_python
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from test_stacks import assert_close, copy_layer, gradients_of_layer, random_weights
from torch import nn
from torch.nn import functional as F

from annotated.model.positional import sinusoidal_encoding
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.label_smoothing import LabelSmoothingLoss

SOURCE = torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 7, 0, 0, 0], [9, 8, 7, 6, 0, 0]])  # pad 0
TARGET = torch.tensor([[1, 5, 6, 7, 8], [1, 5, 6, 0, 0], [1, 9, 0, 0, 0]])
ANSWERS = torch.tensor([[5, 6, 7, 8, 2], [5, 6, 2, 0, 0], [9, 2, 0, 0, 0]])
SMALL = dict(vocab_size=12, N=2, d_model=16, d_ff=24, h=4, dropout=0.0)
both_orders = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])


def small(**changes):
    return TransformerConfig(**{**SMALL, **changes})


@st.composite
def models(draw):
    """A random small model with random weights, float64, in training mode with dropout 0."""
    h = draw(st.integers(1, 3))
    narrow = draw(st.booleans())  # d_k and d_v of their own, d_model any number
    config = TransformerConfig(
        vocab_size=12,
        N=draw(st.integers(1, 2)),
        d_model=draw(st.integers(4, 11)) if narrow else h * draw(st.integers(3, 6)),
        d_ff=draw(st.integers(1, 20)),
        h=h,
        d_k=draw(st.integers(1, 5)) if narrow else None,
        d_v=draw(st.integers(1, 5)) if narrow else None,
        dropout=0.0,
        norm_first=draw(st.booleans()),
        positions=draw(st.sampled_from(["sinusoidal", "learned"])),
        max_length=16,
        pad_id=draw(st.sampled_from([0, 11])),
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    return random_weights(Transformer(config))


def sentences(config, batch, length):
    """Random real tokens: any id but the padding one."""
    low = 1 if config.pad_id == 0 else 0
    return torch.randint(low, low + config.vocab_size - 1, (batch, length))


# --- the same numbers as PyTorch ---------------------------------------------------------------------------------


def pytorch_model(config, ours):
    """nn.Transformer with the weights of `ours`, and only the norms that belong there."""
    options = dict(dropout=0.0, batch_first=True, norm_first=config.norm_first, dtype=torch.float64)
    sizes = (config.d_model, config.h, config.d_ff)
    norms = [None, None]
    if config.norm_first:
        norms = [nn.LayerNorm(config.d_model, dtype=torch.float64) for _ in range(2)]
        norms[0].load_state_dict(ours.encoder.norm.state_dict())
        norms[1].load_state_dict(ours.decoder.norm.state_dict())
    encoder_layer = nn.TransformerEncoderLayer(*sizes, **options)
    decoder_layer = nn.TransformerDecoderLayer(*sizes, **options)
    theirs = nn.Transformer(
        config.d_model, config.h, batch_first=True, dtype=torch.float64,
        custom_encoder=nn.TransformerEncoder(encoder_layer, config.N, norm=norms[0], enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(decoder_layer, config.N, norm=norms[1]),
    )
    pairs = [*zip(ours.encoder.layers, theirs.encoder.layers, strict=True),
             *zip(ours.decoder.layers, theirs.decoder.layers, strict=True)]
    for mine, other in pairs:
        copy_layer(mine, other)
    return theirs, pairs


def run_pytorch(theirs, E, config, source, target):
    def embed(ids):
        positions = sinusoidal_encoding(ids.size(1), config.d_model).double()
        return F.embedding(ids, E) * math.sqrt(config.d_model) + positions

    future = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)  # True = may not attend
    hidden = theirs(embed(source), embed(target), tgt_mask=future, src_key_padding_mask=source == 0,
                    tgt_key_padding_mask=target == 0, memory_key_padding_mask=source == 0)
    return hidden @ E.T


@both_orders
def test_c1_whole_model_equals_pytorchs(norm_first):
    config = small(norm_first=norm_first, N=3)
    ours = random_weights(Transformer(config))
    theirs, pairs = pytorch_model(config, ours)
    E = ours.embedding.weight.detach().clone().requires_grad_()
    real = TARGET != 0
    logits = ours(SOURCE, TARGET)[real]
    expected = run_pytorch(theirs, E, config, SOURCE, TARGET)[real]
    assert logits.shape == (10, 12) and logits.std() > 0.1
    assert_close(logits, expected, "logits")
    F.cross_entropy(logits, ANSWERS[real]).backward()
    F.cross_entropy(expected, ANSWERS[real]).backward()
    assert_close(ours.embedding.weight.grad, E.grad, "gradient of the shared matrix")
    for mine, other in pairs:
        mine, other = gradients_of_layer(mine), gradients_of_layer(other)
        assert mine.keys() == other.keys()
        for name in mine:
            assert_close(mine[name], other[name], name)
    if norm_first:
        for mine, other in ((ours.encoder.norm, theirs.encoder.norm), (ours.decoder.norm, theirs.decoder.norm)):
            assert_close(mine.weight.grad, other.weight.grad, "gain of a last norm")
            assert_close(mine.bias.grad, other.bias.grad, "offset of a last norm")


# --- nobody looks ahead, padding changes nothing ------------------------------------------------------------------


@examples(40)
@given(model=models(), n=st.integers(1, 6), m=st.integers(2, 7), data=st.data())
def test_c2_later_target_tokens_leave_earlier_outputs_unchanged(model, n, m, data):
    source, target = sentences(model.config, 2, n), sentences(model.config, 2, m)
    j = data.draw(st.integers(1, m - 1), label="first position that changes")
    other = target.clone()
    other[:, j:] = torch.randint(model.config.vocab_size, (2, m - j))  # padding among them
    with torch.no_grad():
        before, after = model(source, target), model(source, other)
    assert (after - before)[:, :j].abs().max() <= 1e-12


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@both_orders
def test_c2_each_token_reaches_exactly_the_outputs_it_may(norm_first, positions):
    torch.manual_seed(0)
    model = Transformer(small(norm_first=norm_first, positions=positions)).double()
    source, target = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        before = model(source, target)
        for j in range(4):
            other = target.clone()
            other[0, j] = 10
            change = (model(source, other) - before)[0].abs().amax(1)
            assert (change[:j] <= 1e-12).all() and (change[j:] > 1e-6).all(), j
        for j in range(5):
            other = source.clone()
            other[0, j] = 10
            assert ((model(other, target) - before)[0].abs().amax(1) > 1e-6).all(), j


@examples(40)
@given(model=models(), n=st.integers(1, 5), m=st.integers(1, 5), more=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_padding_changes_nothing_at_real_positions(model, n, m, more):
    config = model.config
    long_source, long_target = sentences(config, 3, n + more[0]), sentences(config, 3, m + more[1])
    source, target = long_source[1:2, :n].clone(), long_target[1:2, :m].clone()
    long_source[1, n:], long_target[1, m:] = config.pad_id, config.pad_id
    with torch.no_grad():
        alone = model(source, target)[0]
        together = model(long_source, long_target)[1, :m]
        memory = model.encode(long_source)[0][1, :n] - model.encode(source)[0][0]
    assert (together - alone).abs().max() <= 1e-12 and memory.abs().max() <= 1e-12


@both_orders
def test_one_pass_equals_word_by_word(norm_first):
    model = random_weights(Transformer(small(norm_first=norm_first)))
    with torch.no_grad():
        memory, mask = model.encode(SOURCE)
        at_once = model.decode(TARGET, memory, mask)
        steps = [model.decode(TARGET[:, : i + 1], memory, mask)[:, -1] for i in range(TARGET.size(1))]
        assert (at_once - torch.stack(steps, 1))[TARGET != 0].abs().max() <= 1e-12
        assert torch.equal(model(SOURCE, TARGET), at_once @ model.embedding.weight.T)


@both_orders
def test_a_source_of_padding_only_gives_no_nan(norm_first):
    model = random_weights(Transformer(small(norm_first=norm_first)))
    source = SOURCE.clone()
    source[1] = 0
    logits = model(source, TARGET)
    logits.square().mean().backward()
    assert logits.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())


# --- one matrix, gradients, chance -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"norm_first": True}, {"positions": "learned", "max_length": 6}, {"h": 3, "d_k": 5, "d_v": 7}]
)
def test_c12_every_parameter_receives_a_gradient(changes):
    torch.manual_seed(0)
    model = Transformer(small(**changes)).double()
    F.cross_entropy(model(SOURCE, TARGET).flatten(0, 1), ANSWERS.flatten(), ignore_index=0).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_deterministic_without_dropout_and_in_eval():
    rates = dict(dropout=0.3, attention_dropout=0.3, feed_forward_dropout=0.3)
    torch.manual_seed(0)
    off = Transformer(small()).double()
    assert torch.equal(off(SOURCE, TARGET), off(SOURCE, TARGET))
    for name in rates:
        model = Transformer(small(**{name: 0.3}))
        assert not torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET)), name
    model = Transformer(small(**rates)).double().eval()
    assert torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET))
    model.config, weights = small(), model.state_dict()
    off.load_state_dict(weights)
    off_train, off_eval = off(SOURCE, TARGET), off.eval()(SOURCE, TARGET)  # dropout off means off everywhere; the two modes
    assert torch.allclose(off_train, off_eval, rtol=0, atol=1e-12)  # run attention by different functions, equal to rounding
    assert torch.equal(off_eval, model(SOURCE, TARGET))


# --- options -----------------------------------------------------------------------------------------------------


def test_learned_positions_take_the_place_of_sinusoids():
    torch.manual_seed(0)
    model = Transformer(small(positions="learned", max_length=6)).double()
    names = [name for name, _ in model.named_parameters() if "positions" in name]
    assert names == ["source_positions.table", "target_positions.table"]
    assert not [name for name, _ in Transformer(small()).named_parameters() if "positions" in name]
    before = model(SOURCE, TARGET)
    with torch.no_grad():
        model.source_positions.table[5] += 1  # only the first source has six tokens
    change = (model(SOURCE, TARGET) - before).abs().amax((1, 2))
    assert change[0] > 1e-6 and change[1:].max() <= 1e-12


def test_another_padding_id():
    torch.manual_seed(0)
    model = Transformer(small(pad_id=11)).double()
    source, target = SOURCE.masked_fill(SOURCE == 0, 11), TARGET.masked_fill(TARGET == 0, 11)
    together, alone = model(source, target)[2, :2], model(source[2:, :4], target[2:, :2])[0]
    assert (together - alone).abs().max() <= 1e-12
    assert (model(SOURCE, TARGET)[2, :2] - alone).abs().max() > 1e-6  # here id 0 is a word like any other


# --- first weights -----------------------------------------------------------------------------------------------


def test_first_weights_are_xavier_uniform_and_biases_0():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(500, norm_first=True))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 2 * (4 + 2) + 2 * (8 + 2)
    for linear in linears:
        bound = math.sqrt(6 / sum(linear.weight.shape))
        assert 0.98 * bound < linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert linear.bias is None or not linear.bias.any()
    assert model.embedding.weight.std().item() == pytest.approx(128**-0.5, rel=0.02)


def test_first_loss_is_near_that_of_guessing():
    torch.manual_seed(0)
    V = 1000
    model = Transformer(TransformerConfig.base(V, d_model=256, d_ff=512)).eval()
    target = torch.randint(4, V, (16, 17))
    with torch.no_grad():
        logits = model(torch.randint(4, V, (16, 16)), target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()).item()
    assert logits.std().item() == pytest.approx(1, abs=0.05)
    assert abs(loss - math.log(V) - 0.5) < 0.2  # normal logits of variance 1 cost half a nat more than even ones


# --- counts ------------------------------------------------------------------------------------------------------


def count(config):
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def formula(c):
    """Term by term from the shapes the paper prints."""
    d_k, d_v = c.d_k or c.d_model // c.h, c.d_v or c.d_model // c.h
    attention = c.d_model * c.h * d_k * 2 + c.d_model * c.h * d_v + c.h * d_v * c.d_model
    feed_forward = (c.d_model * c.d_ff + c.d_ff) + (c.d_ff * c.d_model + c.d_model)
    norm = c.d_model + c.d_model
    layers = c.N * (attention + feed_forward + 2 * norm) + c.N * (2 * attention + feed_forward + 3 * norm)
    positions = 2 * c.max_length * c.d_model if c.positions == "learned" else 0
    return c.vocab_size * c.d_model + layers + positions + (2 * norm if c.norm_first else 0)


def test_c28_base_and_big_have_the_parameters_of_the_formula():
    base, big = count(TransformerConfig.base()), count(TransformerConfig.big())
    assert base == formula(TransformerConfig.base()) == 63_045_632
    assert big == formula(TransformerConfig.big()) == 214_171_648
    assert 65e6 - base == pytest.approx(1.95e6, rel=0.01)  # the paper prints 65 M …
    assert big - 213e6 == pytest.approx(1.17e6, rel=0.01)  # … and 213 M


def test_presets():
    base, big = TransformerConfig.base(), TransformerConfig.big(30_000, dropout=0.1)
    assert dataclasses.astuple(base)[:5] == (37_000, 6, 512, 2048, 8) and base.dropout == 0.1
    assert dataclasses.astuple(big)[:5] == (30_000, 6, 1024, 4096, 16) and big.dropout == 0.1
    assert TransformerConfig.big().dropout == 0.3 and TransformerConfig.big().vocab_size == 37_000
    assert TransformerConfig.base(100, h=4) == dataclasses.replace(base, vocab_size=100, h=4)
    assert base.attention_dropout == base.feed_forward_dropout == 0
    assert base.norm_first is False and base.positions == "sinusoidal"
    assert count(TransformerConfig.tiny(700)) < 1e6 and TransformerConfig.tiny(700, N=3).N == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.N = 7


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"h": 3}, r"d_model=16 is not divisible by h=3: .*give d_k and d_v$"),
        ({"vocab_size": 0}, r"vocab_size=0 .*at least 1"),
        ({"N": 0}, r"N=0 .*at least 1"),
        ({"N": 2.0}, r"N=2\.0 .*whole number"),
        ({"h": True}, r"h=True .*whole number"),
        ({"max_length": 0}, r"max_length=0 .*at least 1"),
        ({"dropout": 1.0}, r"dropout=1\.0 .*from 0 to below 1"),
        ({"dropout": float("nan")}, r"dropout=nan .*from 0 to"),
        ({"dropout": "0.1"}, r"dropout='0\.1' .*from 0 to"),
        ({"feed_forward_dropout": 1.5}, r"feed_forward_dropout=1\.5 .*from 0 to"),
        ({"norm_first": "post"}, r"norm_first='post' .*True \(pre-norm\) or False \(post-norm\)"),
        ({"positions": "rotary"}, r"positions='rotary' .*'sinusoidal' or 'learned'"),
        ({"pad_id": 12}, r"pad_id=12 .*vocab_size=12"),
    ],
)
def test_config_errors_name_argument_value_and_mend(changes, message, unenforced):
    with pytest.raises(ValueError, match="^" + message):
        small(**changes)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (SOURCE.float(), TARGET, r"source is of torch\.float32: .*torch\.int64"),
        (SOURCE, TARGET.int(), r"target is of torch\.int32: .*torch\.int64"),
        ([[5, 6]], TARGET, r"source is of list: .*torch\.int64"),
        (SOURCE[0], TARGET, r"source has shape \(6,\): .*\(batch, length\).*unsqueeze"),
        (SOURCE[:0], TARGET[:0], r"source has shape \(0, 6\): .*at least one token"),
        (SOURCE, TARGET[:, :0], r"target has shape \(3, 0\): .*at least one token"),
        (SOURCE[:2], TARGET, r"target holds 3 sentences, source 2"),
    ],
)
def test_input_errors_name_the_input(source, target, message, unenforced):
    with pytest.raises(ValueError, match="^" + message):
        Transformer(small())(source, target)


@pytest.mark.parametrize(("name", "memory"), [("memory", torch.zeros(3, 6, 8)), ("memory_mask", torch.zeros(3, 6, 16))])
def test_the_shapes_of_a_memory_are_enforced_in_tests(name, memory):
    model, mask = Transformer(small()), torch.ones(3, 1, 1, 6, dtype=torch.bool)
    given = {"memory": torch.zeros(3, 6, 16), "memory_mask": mask} | {name: memory}
    with pytest.raises(TypeCheckError, match=f"parameter '{name}'"):
        model.decode(TARGET, **given)


def test_ids_outside_the_vocabulary_are_named():
    for wrong in (12, -1):
        for place in (0, 1):
            pair = [SOURCE.clone(), TARGET.clone()]
            pair[place][0, 2] = wrong
            with pytest.raises(IndexError, match=rf"ids run from .*{wrong}.*vocab_size=12"):
                Transformer(small())(*pair)


def test_longer_than_the_learned_table():
    model = Transformer(small(positions="learned", max_length=5))
    with pytest.raises(ValueError, match=r"length 6 .*max_length=5"):
        model(SOURCE, TARGET)


# --- what it needs -----------------------------------------------------------------------------------------------

WATCH = """
import sys, torch
known, opened = set(sys.modules), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import annotated.model.transformer
new = {name.split(".")[0] for name in set(sys.modules) - known} - set(sys.stdlib_module_names)
print("new", sorted(new))
print("unwanted", sorted({"spacy", "torchtext", "altair", "matplotlib", "tokenizers", "pandas"} & set(sys.modules)))
print("opened", sorted(p for p in opened if not p.endswith((".py", ".pyc", "/METADATA", ".zip")) and ".pyc." not in p))
"""


def test_import_needs_torch_and_the_names_of_shapes_only_and_opens_no_file():
    assert run_python(WATCH, timeout=120).splitlines() == ["new ['annotated', 'jaxtyping', 'numpy']", "unwanted []", "opened []"]


def test_a_model_on_another_device_makes_nothing_on_the_processor_and_reads_no_number_back():
    """On "meta", which has no numbers, both are errors, as they are or cost a wait on a GPU."""
    model, ids = Transformer(small()).to("meta"), torch.zeros(2, 5, dtype=torch.long, device="meta")
    loss = LabelSmoothingLoss(0.1)(model(ids, ids[:, :-1]), ids[:, 1:])
    loss.backward()
    assert loss.device.type == "meta" and all(parameter.grad.device.type == "meta" for parameter in model.parameters())
