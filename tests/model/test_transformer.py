"""The whole model: against PyTorch's stacks with copied weights, and the promises it makes."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from helpers import EXACT, examples, run_python
from hypothesis import given
from hypothesis import strategies as st
from test_stacks import SOURCE, assert_same_gradients, both_orders, pytorchs, random_weights
from torch import nn
from torch.nn import functional as F

from annotated.model.positional import sinusoidal_encoding
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.label_smoothing import LabelSmoothingLoss

TARGET = torch.tensor([[1, 5, 6, 7, 8], [1, 5, 6, 0, 0], [1, 9, 0, 0, 0]])
ANSWERS = torch.tensor([[5, 6, 7, 8, 2], [5, 6, 2, 0, 0], [9, 2, 0, 0, 0]])
SMALL = dict(vocab_size=12, N=2, d_model=16, d_ff=24, h=4, dropout=0.0)


def small(**changes):
    return TransformerConfig(**{**SMALL, **changes})


models = st.builds(  # random weights, float64, in training mode with dropout 0
    lambda sizes, options: random_weights(Transformer(small(max_length=16, **sizes, **options))),
    st.sampled_from([{"d_model": 12, "h": 3}, {"d_model": 5, "h": 1}, {"d_model": 8, "h": 2},
                     {"d_model": 11, "h": 3, "d_k": 5, "d_v": 2}]),
    st.fixed_dictionaries({
        "N": st.integers(1, 2), "d_ff": st.integers(1, 20), "norm_first": st.booleans(),
        "positions": st.sampled_from(["sinusoidal", "learned"]),
        "pad_id": st.sampled_from([0, 11])}))


def sentences(config, batch, length):
    """Random real tokens: any id but the padding one."""
    low = 1 if config.pad_id == 0 else 0
    return torch.randint(low, low + config.vocab_size - 1, (batch, length))


# --- the same numbers as PyTorch ------------------------------------------------------------------


@both_orders
def test_c1_whole_model_equals_pytorchs(norm_first):
    ours = random_weights(Transformer(small(norm_first=norm_first, N=3)))
    encoder, decoder = (pytorchs(stack, norm_first) for stack in (ours.encoder, ours.decoder))
    E = ours.embedding.weight.detach().clone().requires_grad_()

    def embed(ids):
        return F.embedding(ids, E) * 4 + sinusoidal_encoding(ids.size(1), 16).double()

    future, padding = torch.ones(5, 5).triu(1).bool(), SOURCE == 0  # True = may not attend
    memory = encoder(embed(SOURCE), src_key_padding_mask=padding)
    hidden = decoder(embed(TARGET), memory, tgt_mask=future, tgt_key_padding_mask=TARGET == 0,
                     memory_key_padding_mask=padding)
    real = TARGET != 0
    logits, expected = ours(SOURCE, TARGET)[real], (hidden @ E.T)[real]
    assert logits.shape == (10, 12) and logits.std() > 0.1
    torch.testing.assert_close(logits, expected, **EXACT)
    F.cross_entropy(logits, ANSWERS[real]).backward()
    F.cross_entropy(expected, ANSWERS[real]).backward()
    torch.testing.assert_close(ours.embedding.weight.grad, E.grad, **EXACT)
    assert_same_gradients(ours.encoder, encoder)
    assert_same_gradients(ours.decoder, decoder)


# --- nobody looks ahead, padding changes nothing --------------------------------------------------


@examples(40)
@given(model=models, n=st.integers(1, 6), m=st.integers(2, 7), data=st.data())
def test_c2_later_target_tokens_leave_earlier_outputs_unchanged(model, n, m, data):
    source, target = sentences(model.config, 2, n), sentences(model.config, 2, m)
    j = data.draw(st.integers(1, m - 1), label="first position that changes")
    other = target.clone()
    other[:, j:] = torch.randint(model.config.vocab_size, (2, m - j))  # padding among them
    with torch.no_grad():
        before, after = model(source, target), model(source, other)
    assert (after - before)[:, :j].abs().max() <= 1e-12


@examples(40)
@given(model=models, n=st.integers(1, 5), m=st.integers(1, 5),
       more=st.tuples(st.integers(0, 4), st.integers(0, 4)))
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


# --- one matrix, gradients, chance ----------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, dict(norm_first=True, positions="learned", max_length=6)])
def test_c12_every_parameter_receives_a_gradient(changes):
    torch.manual_seed(0)
    model = Transformer(small(**changes)).double()
    logits = model(SOURCE, TARGET).flatten(0, 1)
    F.cross_entropy(logits, ANSWERS.flatten(), ignore_index=0).backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("option", ["dropout", "attention_dropout", "feed_forward_dropout"])
def test_each_dropout_reaches_its_places_alone_and_is_at_work_in_training_alone(option):
    model = Transformer(small(**{option: 0.3}))
    rates = {path: part.dropout if path.endswith(".attention") else part.p
             for path, part in model.named_modules()
             if path.endswith(".attention") or isinstance(part, nn.Dropout)}
    places = {"attention_dropout": "attention.attention", "feed_forward_dropout": "feed_forward."}
    kinds = {path: next((kind for kind, place in places.items() if place in path), "dropout")
             for path in rates}
    assert rates == {path: 0.3 * (kind == option) for path, kind in kinds.items()}
    assert Counter(kinds.values()) == {"dropout": 12, "attention_dropout": 6,
                                       "feed_forward_dropout": 4}
    assert not torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET))
    assert torch.equal(model.eval()(SOURCE, TARGET), model(SOURCE, TARGET))


# --- first weights --------------------------------------------------------------------------------


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


# --- counts ---------------------------------------------------------------------------------------


def count(config):
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def test_c28_base_and_big_have_the_parameters_of_the_formula():
    """The page adds up the formula's terms."""
    base, big = count(TransformerConfig.base()), count(TransformerConfig.big())
    assert base == 63_045_632 and big == 214_171_648
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


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, message", [
    ({"h": 3}, r"d_model=16 is not divisible by h=3: .*give d_k and d_v$"),
    ({"vocab_size": 0}, r"vocab_size=0 .*at least 1"), ({"N": 2.0}, r"N=2\.0 .*whole number"),
    ({"h": True}, r"h=True .*whole number"), ({"dropout": math.nan}, r"dropout=nan .*from 0 to"),
    ({"feed_forward_dropout": 1.5}, r"feed_forward_dropout=1\.5 .*from 0 to"),
    ({"norm_first": "post"}, r"norm_first='post' .*True \(pre-norm\) or False \(post-norm\)"),
    ({"positions": "rotary"}, r"positions='rotary' .*'sinusoidal' or 'learned'"),
    ({"pad_id": 12}, r"pad_id=12 .*vocab_size=12")])
def test_config_errors_name_argument_value_and_mend(changes, message, unenforced):
    with pytest.raises(ValueError, match="^" + message):
        small(**changes)


@pytest.mark.parametrize("source, target, message", [
    (SOURCE.float(), TARGET, r"source is of torch\.float32: .*torch\.int64"),
    ([[5, 6]], TARGET, r"source is of list: .*torch\.int64"),
    (SOURCE[0], TARGET, r"source has shape \(6,\): .*\(batch, length\).*unsqueeze"),
    (SOURCE[:0], TARGET[:0], r"source has shape \(0, 6\): .*at least one token"),
    (SOURCE, TARGET[:, :0], r"target has shape \(3, 0\): .*at least one token"),
    (SOURCE[:2], TARGET, r"target holds 3 sentences, source 2")])
def test_input_errors_name_the_input(source, target, message, unenforced):
    with pytest.raises(ValueError, match="^" + message):
        Transformer(small())(source, target)


# --- what it needs --------------------------------------------------------------------------------

WATCH = """
import sys, torch
known, opened = set(sys.modules), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import annotated.model.transformer
new = {name.split(".")[0] for name in set(sys.modules) - known} - set(sys.stdlib_module_names)
known = (".py", ".pyc", "annotated/__init__.pyi", "/METADATA", ".zip")
print(sorted(new), [p for p in opened if not p.endswith(known) and ".pyc." not in p])
"""


def test_import_needs_torch_and_the_names_of_shapes_only_and_opens_no_file():
    assert run_python(WATCH, timeout=1800) == "['annotated', 'jaxtyping', 'numpy'] []\n"


def test_a_model_on_another_device_makes_nothing_on_the_processor_and_reads_no_number_back():
    """On "meta", which has no numbers, both are errors, as they are or cost a wait on a GPU."""
    model, ids = Transformer(small()).to("meta"), torch.zeros(2, 5, dtype=torch.long, device="meta")
    loss = LabelSmoothingLoss(0.1)(model(ids, ids[:, :-1]), ids[:, 1:])
    loss.backward()
    assert loss.device.type == "meta"
    assert all(parameter.grad.device.type == "meta" for parameter in model.parameters())
