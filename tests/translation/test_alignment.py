"""Links from attention, and alignment errors worked by hand."""

import pytest
import torch

from annotated.translation.alignment import alignment_error_rate, links_from_attention


def test_links_are_the_largest_weight_of_each_row():
    weights = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.5, 0.4, 0.1], [0.0, 0.0, 1.0]])
    assert links_from_attention(weights) == {(0, 0), (2, 1), (0, 2), (2, 3)}
    # of equal weights the first
    assert links_from_attention(weights, source_length=2) == {(0, 0), (1, 1), (0, 2), (0, 3)}
    assert links_from_attention(weights, source_length=2, target_length=2) == {(0, 0), (1, 1)}
    assert links_from_attention(weights, 3, 0) == set()


@pytest.mark.parametrize("weights, lengths, message", [
    (torch.ones(2, 3, 3), (), r"weights have shape \(2, 3, 3\): give \(target, source\)"),
    (torch.full((1, 2), torch.nan), (), "hold NaN"), (torch.ones(2, 0), (), "0 source and 2"),
    (torch.ones(2, 3), (4, 2), "4 source and 2"), (torch.ones(2, 3), (3, 3), "3 source and 3")])
@pytest.mark.usefixtures("unenforced")
def test_weights_that_will_not_do(weights, lengths, message):
    with pytest.raises(ValueError, match=message):
        links_from_attention(weights, *lengths)


def test_alignment_errors_worked_by_hand():
    gold = [{(0, 0), (1, 1)}, {(0, 1)}]
    assert alignment_error_rate(gold, gold) == 0
    assert alignment_error_rate([{(1, 0)}, {(1, 1)}], gold) == 1
    assert alignment_error_rate([set(), set()], gold) == 1
    # links 2 and 1, sure 2 and 1, right 1 and 1: 1 - (2 + 2) / (3 + 3)
    assert alignment_error_rate([{(0, 0), (0, 1)}, {(0, 1)}], gold) == pytest.approx(1 / 3)
    # one spurious link: 1 - (3 + 3) / (4 + 3)
    assert alignment_error_rate([{(0, 0), (1, 1), (2, 2)}, {(0, 1)}], gold) == pytest.approx(1 / 7)


def test_possible_links_do_no_harm_and_need_not_be_there():
    """Och & Ney (2003): sure links have to be there, possible ones may."""
    sure, possible = [{(0, 0), (1, 1)}], [{(2, 2), (2, 3)}]
    predicted = [{(0, 0), (2, 2), (3, 3)}]  # |A and S| = 1, |A and P| = 2
    # the sure links among the possible change nothing
    for more, rate in ((possible, 1 - 3 / 5), ([sure[0] | possible[0]], 1 - 3 / 5), (None, 3 / 5)):
        assert alignment_error_rate(predicted, sure, more) == pytest.approx(rate)
    assert alignment_error_rate([{(0, 0), (1, 1), (2, 2)}], sure, possible) == 0
    assert alignment_error_rate(sure, sure, possible) == 0


@pytest.mark.parametrize("predicted, gold, message", [
    ([{(0, 0)}], [{(0, 0)}, {(1, 1)}], r"different numbers of sentences \(1 predicted, 2 gold"),
    ([set()], [set()], "no link, neither predicted nor gold"), ([], [], "no link")])
def test_links_that_will_not_do(predicted, gold, message):
    with pytest.raises(ValueError, match=message):
        alignment_error_rate(predicted, gold)
