"""The masks against brute force, and claim C2 as far as masks go."""

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

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


@pytest.mark.parametrize("ids", [torch.zeros(3).long(), torch.zeros(2, 3, 4).long(),
                                 torch.ones(1, 2) > 0])
def test_ids_of_another_shape_or_dtype_are_refused(ids):
    with pytest.raises(TypeCheckError, match="typechecking parameter 'ids'"):
        padding_mask(ids)


@pytest.mark.parametrize("device", ["meta"] + ["cuda"] * torch.cuda.is_available())
def test_device_is_kept(device):
    ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
    assert padding_mask(ids).device.type == device
    assert causal_mask(3, device=ids.device).device.type == device
    assert causal_mask(3).device.type == "cpu" and causal_mask(0).shape == (0, 0)


def test_c2_changing_a_later_token_leaves_earlier_outputs_unchanged_exactly():
    torch.manual_seed(0)
    attention, x = MultiHeadAttention(16, 2).double(), torch.randn(2, 8, 16, dtype=torch.float64)
    before = attention(x, x, x, causal_mask(8))
    for place in range(8):
        changed = x.clone()
        changed[:, place] = 1e3 * torch.randn(2, 16, dtype=torch.float64)
        after = attention(changed, changed, changed, causal_mask(8))
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).any(-1).all()
