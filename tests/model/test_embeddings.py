"""annotated.model.embeddings against PyTorch's own layers, and claims C12 and C13."""

import copy
import math

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn
from torch.nn import functional as F

from annotated.model.embeddings import TokenEmbedding
from annotated.model.positional import sinusoidal_encoding
from annotated.model.transformer import Transformer, TransformerConfig


def make(vocab_size=23, d_model=6, seed=0):
    torch.manual_seed(seed)
    return TokenEmbedding(vocab_size, d_model).double()


@examples(25)
@given(st.integers(1, 30), st.integers(1, 17), st.integers(1, 4), st.integers(1, 7), st.integers(0, 1000))
def test_values_and_gradients_equal_nn_embedding_and_nn_linear(vocab_size, d_model, batch, length, seed):
    ours = make(vocab_size, d_model, seed)
    lookup = nn.Embedding.from_pretrained(ours.weight.detach().clone(), freeze=False)
    linear = nn.Linear(d_model, vocab_size, bias=False).double()
    linear.weight = lookup.weight
    ids = torch.randint(vocab_size, (batch, length))
    upstream = torch.randn(batch, length, vocab_size, dtype=torch.float64)

    x, x_torch = ours(ids), lookup(ids) * math.sqrt(d_model)
    assert x.shape == (batch, length, d_model)
    assert torch.allclose(x, x_torch, rtol=0, atol=1e-9)
    logits, logits_torch = ours.logits(x.tanh()), linear(x_torch.tanh())
    assert torch.allclose(logits, logits_torch, rtol=0, atol=1e-9)
    (logits * upstream).sum().backward()
    (logits_torch * upstream).sum().backward()
    assert torch.allclose(ours.weight.grad, lookup.weight.grad, rtol=0, atol=1e-9)


def test_initial_rows_have_length_one_and_scaled_rows_unit_variance():
    torch.manual_seed(1)
    ours = TokenEmbedding(4_000, 256)
    assert ours.weight.norm(dim=1).mean().item() == pytest.approx(1, abs=0.01)
    assert ours(torch.arange(4_000)).std().item() == pytest.approx(1, abs=0.01)
    hidden = F.layer_norm(torch.randn(300, 256), (256,))
    assert ours.logits(hidden).std().item() == pytest.approx(1, abs=0.05)  # the first softmax is close to even


@pytest.mark.parametrize("bad", [23, -1, 1_000_000])
def test_id_out_of_range_says_which_and_what_is_allowed(bad):
    with pytest.raises(IndexError, match=rf"ids run from .*{bad}.*vocab_size=23 allows 0 to 22: use the tokenizer"):
        make()(torch.tensor([[3, bad]]))


@pytest.mark.parametrize("ids", [torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]])])
def test_ids_of_another_dtype_are_refused(ids):
    with pytest.raises(TypeCheckError, match="typechecking parameter 'ids'"):
        make()(ids)


def tiny_model():
    torch.manual_seed(2)
    model = Transformer(TransformerConfig.tiny(50, d_model=32, d_ff=64, dropout=0.0)).double()
    return model, torch.randint(4, 50, (3, 6)), torch.randint(4, 50, (3, 7))


def loss_of(model, source_use, target_use, output_use, source, target):
    model.embedding = source_use
    encoded = model.encode(source)
    model.embedding = target_use
    hidden = model.decode(target[:, :-1], *encoded)
    return F.cross_entropy(output_use.logits(hidden).flatten(0, 1), target[:, 1:].flatten())


def test_c12_one_tensor_in_memory_for_source_target_and_output():
    model, source, target = tiny_model()

    def matrices(of):
        return {p.data_ptr() for p in of.parameters() if 50 in p.shape}

    assert matrices(model) == {model.embedding.weight.data_ptr()}
    assert sum(50 in t.shape for t in model.state_dict().values()) == 1
    copied = copy.deepcopy(model)
    assert len(matrices(copied)) == 1 and matrices(copied) != matrices(model)
    logits = model(source, target)
    with torch.no_grad():
        model.embedding.weight[7] += 1  # one change is seen in all three places
    changed = model(source, target)
    assert not torch.allclose(logits[..., 7], changed[..., 7])
    assert torch.equal(logits, copied(source, target))


def test_c12_the_shared_gradient_is_the_sum_of_three():
    model, source, target = tiny_model()
    tied = model.embedding
    F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten()).backward()
    shared = tied.weight.grad.clone()
    uses = [copy.deepcopy(tied) for _ in range(3)]
    for use in uses:
        use.weight.grad = None
    loss_of(model, *uses, source, target).backward()
    assert all(use.weight.grad.norm() > 1e-3 for use in uses)
    assert torch.allclose(shared, sum(use.weight.grad for use in uses), rtol=0, atol=1e-12)


@pytest.mark.parametrize("d_model", [64, 128, 256, 512, 1024])
def test_c13_the_scaled_embedding_is_root_two_times_as_long_as_the_position(d_model):
    torch.manual_seed(3)
    table = TokenEmbedding(1_000, d_model)
    position = sinusoidal_encoding(50, d_model).norm(dim=1)
    assert torch.allclose(position, torch.full((50,), math.sqrt(d_model / 2)), rtol=1e-5)  # a sum in float32
    scaled = table(torch.arange(1_000)).norm(dim=1).mean() / position.mean()
    bare = table.weight.norm(dim=1).mean() / position.mean()
    assert scaled.item() == pytest.approx(math.sqrt(2), rel=0.02)
    assert bare.item() == pytest.approx(math.sqrt(2 / d_model), rel=0.02)


def test_c13_tokens_shine_through_their_positions():
    torch.manual_seed(4)
    table = TokenEmbedding(1_000, 512)
    ids = torch.randint(1_000, (20, 40))
    position = sinusoidal_encoding(40, 512)
    found = (table.logits(table(ids) + position).argmax(-1) == ids).float().mean()
    drowned = (table.logits(table.weight[ids] + position).argmax(-1) == ids).float().mean()
    assert found == 1 and drowned < 0.2
