"""annotated.model.embeddings against PyTorch's own layers, and claims C12 and C13."""

import copy
import math

import pytest
import torch
from helpers import EXACT, examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from annotated.model.embeddings import TokenEmbedding
from annotated.model.positional import sinusoidal_encoding
from annotated.model.transformer import Transformer, TransformerConfig


def make(vocab_size=23, d_model=6, seed=0):
    torch.manual_seed(seed)
    return TokenEmbedding(vocab_size, d_model).double()


@examples(25)
@given(st.integers(1, 30), st.integers(1, 17), st.integers(1, 7), st.integers(0, 1000))
def test_values_and_gradients_equal_nn_embedding_and_nn_linear(vocab_size, d_model, length, seed):
    ours = make(vocab_size, d_model, seed)
    lookup = nn.Embedding.from_pretrained(ours.weight.detach().clone(), freeze=False)
    linear = nn.Linear(d_model, vocab_size, bias=False).double()
    linear.weight = lookup.weight
    ids = torch.randint(vocab_size, (3, length))
    upstream = torch.randn(3, length, vocab_size, dtype=torch.float64)
    x, x_torch = ours(ids), lookup(ids) * math.sqrt(d_model)
    logits, logits_torch = ours.logits(x.tanh()), linear(x_torch.tanh())
    torch.testing.assert_close((x, logits), (x_torch, logits_torch), **EXACT)
    (gradient,) = torch.autograd.grad(logits, ours.weight, upstream)
    (expected,) = torch.autograd.grad(logits_torch, lookup.weight, upstream)
    torch.testing.assert_close(gradient, expected, **EXACT)


@pytest.mark.parametrize("bad", [23, -1])
def test_id_out_of_range_says_which_and_what_is_allowed(bad):
    message = rf"ids run from .*{bad}.*vocab_size=23 allows 0 to 22: use the tokenizer"
    with pytest.raises(IndexError, match=message):
        make()(torch.tensor([[3, bad]]))


def test_c12_one_tensor_in_memory_for_source_target_and_output():
    torch.manual_seed(2)
    model = Transformer(TransformerConfig.tiny(50, d_model=32, d_ff=64, dropout=0.0))
    source, target = torch.randint(4, 50, (3, 6)), torch.randint(4, 50, (3, 7))

    def matrices(of):
        return {p.data_ptr() for p in of.parameters() if 50 in p.shape}

    assert matrices(model) == {model.embedding.weight.data_ptr()}
    assert sum(50 in t.shape for t in model.state_dict().values()) == 1
    copied = copy.deepcopy(model)
    assert len(matrices(copied)) == 1 and matrices(copied) != matrices(model)
    logits = model(source, target)
    model.embedding.weight.data[7] += 1
    assert not torch.allclose(logits[..., 7], model(source, target)[..., 7])
    assert torch.equal(logits, copied(source, target))


@pytest.mark.parametrize("d_model", [64, 1024])
def test_c13_the_scaled_embedding_is_root_two_times_as_long_as_the_position(d_model):
    torch.manual_seed(3)
    table = TokenEmbedding(1_000, d_model)
    position = sinusoidal_encoding(50, d_model).norm(dim=1)
    assert torch.allclose(position, torch.tensor(d_model / 2).sqrt(), rtol=1e-5)
    scaled = table(torch.arange(1_000)).norm(dim=1).mean() / position.mean()
    bare = table.weight.norm(dim=1).mean() / position.mean()
    assert scaled.item() == pytest.approx(math.sqrt(2), rel=0.02)
    assert bare.item() == pytest.approx(math.sqrt(2 / d_model), rel=0.02)
