"""annotated.model.masking against brute force and PyTorch's own masks, and claims C2 and C9 as far as masks go."""

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn

from annotated.model.attention import scaled_dot_product_attention
from annotated.model.masking import causal_mask, padding_mask
from annotated.model.multi_head import MultiHeadAttention


@st.composite
def batches(draw):
    """Ids (batch, length) with padding at the end of some sentences, and zeros inside others."""
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rows = st.lists(st.integers(0, 5), min_size=length, max_size=length)
    return torch.tensor(draw(st.lists(rows, min_size=batch, max_size=batch)))


@examples(40)
@given(batches())
def test_both_masks_together_equal_a_loop(ids):
    batch, length = ids.shape
    mask = causal_mask(length) & padding_mask(ids)
    assert mask.shape == (batch, 1, length, length)
    for b in range(batch):
        for q in range(length):
            for k in range(length):
                assert mask[b, 0, q, k].item() == (k <= q and ids[b, k].item() != 0)


@pytest.mark.parametrize("length", [0, 1, 2, 9, 64])
def test_causal_mask_is_pytorchs_turned_round(length):
    mask = causal_mask(length)
    assert mask.shape == (length, length) and mask.dtype == torch.bool
    assert torch.equal(mask, ~nn.Transformer.generate_square_subsequent_mask(length).bool())


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([1, 2, 0]),  # one sentence without a batch
        torch.zeros(2, 3, 4, dtype=torch.int64),
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[True, False]]),  # a mask in place of ids
    ],
)
def test_ids_of_another_shape_or_dtype_are_refused(ids):
    with pytest.raises(TypeCheckError, match="typechecking parameter 'ids'"):
        padding_mask(ids)


@pytest.mark.parametrize(
    "device",
    ["meta", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_device_is_kept(device):
    ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
    assert padding_mask(ids).device.type == device
    assert causal_mask(3, device=ids.device).device.type == device
    assert causal_mask(3).device.type == "cpu"


def layer_and_batch(length=8):
    torch.manual_seed(0)
    return MultiHeadAttention(16, 2).double(), torch.randn(2, length, 16, dtype=torch.float64)


def test_c2_changing_a_later_token_leaves_earlier_outputs_unchanged_exactly():
    attention, x = layer_and_batch()
    before = attention(x, x, x, causal_mask(8))
    for place in range(8):
        changed = x.clone()
        changed[:, place] = 1e3 * torch.randn(2, 16, dtype=torch.float64)
        after = attention(changed, changed, changed, causal_mask(8))
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_c9_rows_with_nothing_to_attend_to_give_no_nan(dtype):
    ids = torch.tensor([[0, 0, 1, 5], [0, 0, 0, 0]])  # padding on the left, and an empty sentence
    mask = causal_mask(4) & padding_mask(ids)
    x = torch.randn(2, 1, 4, 8, dtype=dtype)
    output, weights = scaled_dot_product_attention(x, x, x, mask)
    assert output.isfinite().all() and weights.isfinite().all()
    nothing = ~mask.any(-1)
    assert nothing.sum() == 6 and (output[nothing] == 0).all() and (weights[nothing] == 0).all()


def test_pytorchs_multihead_attention_wants_both_masks_turned_round():
    attention, x = layer_and_batch(5)
    ids = torch.tensor([[4, 5, 6, 7, 8], [4, 5, 6, 0, 0]])
    module = nn.MultiheadAttention(16, 2, bias=False, batch_first=True).double()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([attention.W_Q.weight, attention.W_K.weight, attention.W_V.weight]))
        module.out_proj.weight.copy_(attention.W_O.weight)
    theirs, _ = module(x, x, x, attn_mask=~causal_mask(5), key_padding_mask=~padding_mask(ids)[:, 0, 0])
    ours = attention(x, x, x, causal_mask(5) & padding_mask(ids))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-9)
