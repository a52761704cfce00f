"""Claim C2 as far as masks go; the masks of whole models are compared in test_transformer.py."""

import torch

from annotated.model.masking import causal_mask, padding_mask


def test_c2_a_query_may_attend_to_itself_and_to_what_is_before_it():
    mask = causal_mask(7)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[key <= query for key in range(7)] for query in range(7)]


def test_padding_is_hidden_from_every_query_by_its_id_which_is_0_unless_told_otherwise():
    ids = torch.tensor([[4, 1, 0], [1, 0, 0]])
    for mask, pad_id in ((padding_mask(ids), 0), (padding_mask(ids, 1), 1)):
        assert mask.dtype == torch.bool and torch.equal(mask, (ids != pad_id)[:, None, None])
