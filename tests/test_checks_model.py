"""Page 65: the checks of the model's parts, on the library, other right solutions, and mistakes."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from annotated.checks import fault

# Right solutions that look different


def softmax_by_hand(scores, mask=None):
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    weights = weights if mask is None else torch.where(mask, weights, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def attention_by_einsum(query, key, value, mask=None, dropout=0.0):
    scores = torch.einsum("...qd,...kd->...qk", query, key) * key.shape[-1] ** -0.5
    weights = scores if mask is None else scores.masked_fill(mask.logical_not(), -math.inf)
    weights = F.dropout(weights.softmax(-1).nan_to_num(), dropout)
    return torch.einsum("...qk,...kd->...qd", weights, value), weights


class HeadsByView(nn.Module):
    def __init__(self, d_model, h, d_k=None, d_v=None, dropout=0.0):
        super().__init__()
        if d_model % h and None in (d_k, d_v):
            raise ValueError("h does not divide d_model")
        self.h, self.d_k, self.d_v = h, d_k or d_model // h, d_v or d_model // h
        self.W_Q, self.W_K = (nn.Linear(d_model, h * self.d_k, bias=False) for _ in range(2))
        self.W_V = nn.Linear(d_model, h * self.d_v, bias=False)
        self.W_O = nn.Linear(h * self.d_v, d_model, bias=False)

    def forward(self, query, key, value, mask=None):
        return self.output(self.attend(*self.project(query, key, value), mask))

    def project(self, query, key, value):
        batch = query.size(0)
        return (self.W_Q(query).view(batch, -1, self.h, self.d_k).permute(0, 2, 1, 3),
                self.W_K(key).view(batch, -1, self.h, self.d_k).permute(0, 2, 1, 3),
                self.W_V(value).view(batch, -1, self.h, self.d_v).permute(0, 2, 1, 3))

    def attend(self, Q, K, V, mask=None):
        if mask is not None and mask.ndim == 3:
            raise ValueError("three axes")
        return F.scaled_dot_product_attention(Q, K, V, mask)

    def output(self, heads):
        return self.W_O(torch.cat([heads[:, i] for i in range(self.h)], dim=-1))


def sines_in_place(length, d_model, start=0):
    table = torch.zeros(length, d_model + d_model % 2, dtype=torch.float64)
    position = torch.arange(start, start + length, dtype=torch.float64).unsqueeze(1)
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64)
    divisor = torch.exp(pairs * (-math.log(10000.0) / d_model))
    table[:, 0::2], table[:, 1::2] = torch.sin(position * divisor), torch.cos(position * divisor)
    return table[:, :d_model].float()


def mask_by_comparison(length, device=None):
    place = torch.arange(length, device=device)
    return place[:, None] >= place


def padding_by_loop(ids, pad_id=0):
    return torch.tensor([[[[bool(i != pad_id) for i in row]]] for row in ids.tolist()])


@pytest.mark.parametrize("name, part", [
    ("masked_softmax", softmax_by_hand), ("scaled_dot_product_attention", attention_by_einsum),
    ("MultiHeadAttention", HeadsByView), ("sinusoidal_encoding", sines_in_place),
    ("causal_mask", mask_by_comparison), ("padding_mask", padding_by_loop)])  # fmt: skip
def test_another_right_solution_passes(name, part):
    assert fault(name, part) is None


def test_a_wrong_kind_of_result_is_named_and_not_a_crash():
    assert "give bools" in fault("causal_mask", lambda length, device=None: [[True]])
    assert "result is list" in fault("padding_mask", lambda ids, pad_id=0: [1])
    assert "it raises ZeroDivisionError" in fault("padding_mask", lambda ids, pad_id=0: 1 / 0)
    assert "derive it from nn.Module" in fault("TokenEmbedding", lambda size, d_model: d_model + 1)
