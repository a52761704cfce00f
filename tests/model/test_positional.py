"""Positions against closed forms in Python floats, and claims C14 to C18 (C17: the exact half)."""

import math

import pytest
import torch
from helpers import examples
from hypothesis import example, given
from hypothesis import strategies as st

from annotated.model import positional
from annotated.model.positional import PositionalEncoding, shift_matrix, sinusoidal_encoding
from annotated.model.stacks import Encoder


def element(pos, column, d_model):
    """One number of the encoding, in Python floats, straight from the printed formula."""
    angle = pos / 10_000 ** (2 * (column // 2) / d_model)
    return math.cos(angle) if column % 2 else math.sin(angle)


@examples(60)
@given(st.integers(1, 600), st.integers(0, 3_000), st.integers(0, 3_000), st.integers(0, 599))
@example(8, 199_000, 2, 0)
@example(1, 0, 0, 0)
def test_every_element_is_the_printed_formula_whatever_the_first_position(
        d_model, start, pos, column):
    table, column = sinusoidal_encoding(pos + 1, d_model, start), column % d_model
    assert table.shape == (pos + 1, d_model) and table.dtype == torch.float32
    expected = element(start + pos, column, d_model)
    # computed in double precision and rounded once: half an epsilon of fp32 is 2^-24
    assert table[pos, column].item() == pytest.approx(expected, abs=2**-24)


def test_a_learned_table_adds_its_rows_and_trains_only_those_it_used():
    torch.manual_seed(0)
    layer = positional.LearnedPositionalEmbedding(10, 4)
    x = torch.randn(3, 7, 4)
    out = layer(x)
    assert torch.equal(out, x + layer.table[:7])
    assert torch.equal(layer(x[:, :2], start=5), x[:, :2] + layer.table[5:7])
    out.sum().backward()
    assert (layer.table.grad[:7] == 3).all() and (layer.table.grad[7:] == 0).all()


def test_c14_wavelengths_are_geometric_from_two_pi_toward_ten_thousand_times_two_pi():
    d_model = 512
    table = sinusoidal_encoding(2, d_model).double()
    turn = torch.atan2(table[1, 0::2], table[1, 1::2])  # radians per position
    waves = 2 * math.pi / turn  # the smallest angle is a sine near 1e-4, right to 2^-24 of itself
    assert waves[0].item() == pytest.approx(2 * math.pi, rel=1e-6)
    assert waves[-1].item() == pytest.approx(2 * math.pi * 10_000 ** (510 / 512), rel=1e-4)
    ratio = torch.tensor(10_000 ** (2 / d_model)).double()
    assert torch.allclose(waves[1:] / waves[:-1], ratio, rtol=1e-4)


@examples(40)
@given(st.integers(-300, 300), st.integers(1, 40))
def test_c15_one_matrix_moves_every_position(k, half):
    table = sinusoidal_encoding(700, 2 * half).double()
    pos = torch.arange(max(0, -k), 700 - max(0, k))
    moved = table[pos] @ shift_matrix(k, 2 * half).T
    assert torch.allclose(moved, table[pos + k], rtol=0, atol=2e-7)  # entries off by 2^-25 each


@pytest.mark.parametrize("norm_first", [False, True])
def test_c16_without_positions_the_encoder_is_permutation_equivariant(norm_first):
    torch.manual_seed(0)
    encoder = Encoder(N=3, d_model=24, h=4, d_ff=48, norm_first=norm_first).double().eval()
    x, order = torch.randn(2, 11, 24, dtype=torch.float64), torch.randperm(11)
    assert not torch.equal(order, torch.arange(11))
    assert torch.allclose(encoder(x[:, order]), encoder(x)[:, order], rtol=0, atol=1e-12)
    add = PositionalEncoding(24)
    assert (encoder(add(x[:, order])) - encoder(add(x))[:, order]).abs().max() > 0.1


def test_c17_sinusoids_go_past_any_length_and_a_learned_table_does_not():
    far = PositionalEncoding(8)(torch.zeros(1, 3, 8), start=9_997)
    assert torch.equal(far[0], sinusoidal_encoding(10_000, 8)[9_997:])
    learned = positional.LearnedPositionalEmbedding(50, 8)
    assert learned(torch.zeros(1, 50, 8)).shape == (1, 50, 8)
    for x, start in ((torch.zeros(1, 51, 8), 0), (torch.zeros(1, 1, 8), 50)):
        message = "length 51 is past the table's max_length=50: shorten"
        with pytest.raises(ValueError, match=message):
            learned(x, start=start)


def test_c18_each_pair_turns_more_slowly_than_the_one_before():
    table = sinusoidal_encoding(1_000, 64).double()
    turn = torch.atan2(table[:, 0::2], table[:, 1::2]).diff(dim=0)
    turn = torch.remainder(turn, 2 * math.pi).mean(0)  # radians per position, averaged
    assert (turn.diff() < 0).all() and (turn > 0).all()
