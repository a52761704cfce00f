"""Claim C2 as far as masks go; the masks of whole models are compared in test_transformer.py."""

import torch

from annotated.model.masking import causal_mask, padding_mask
from annotated.model.multi_head import MultiHeadAttention


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


def test_padding_is_hidden_from_every_query_by_its_id_which_is_0_unless_told_otherwise():
    ids = torch.tensor([[4, 1, 0], [1, 0, 0]])
    for mask, pad_id in ((padding_mask(ids), 0), (padding_mask(ids, 1), 1)):
        assert mask.dtype == torch.bool and torch.equal(mask, (ids != pad_id)[:, None, None])
