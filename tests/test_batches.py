"""Batches (section 5.1): what is padded, what is shifted, who shares a batch, and how much of it is padding."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated import batches as module
from annotated.batches import Batch, main, pad, padding_share, token_batches
from annotated.corpora import Corpus, load_corpus
from annotated.tokens import BEGIN, END, PAD

ids = st.lists(st.integers(3, 50), max_size=9)
pairs_of_ids = st.lists(st.tuples(ids, ids), min_size=1, max_size=8)
length_pairs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=80)


@settings(deadline=None, max_examples=60)
@given(pairs_of_ids)
def test_collate_against_brute_force(pairs):
    batch = Batch.collate(pairs)
    sources = [source + [END] for source, _ in pairs]
    inputs, outputs = [[BEGIN, *target, END] for _, target in pairs], [[*target, END] for _, target in pairs]
    n, m = max(map(len, sources)), max(map(len, outputs))
    assert batch.source.tolist() == [row + [PAD] * (n - len(row)) for row in sources]
    assert batch.target_out.tolist() == [row + [PAD] * (m - len(row)) for row in outputs]
    assert batch.target_in.tolist() == [(row + [PAD] * m)[:m] for row in inputs]
    assert batch.tokens == sum(map(len, outputs))
    for tensor in (batch.source, batch.target_in, batch.target_out):
        assert tensor.dtype == torch.int64
    real = batch.target_out != PAD  # wherever something is predicted, it is the input one place further
    assert torch.equal(batch.target_in[:, 1:][real[:, 1:]], batch.target_out[:, :-1][real[:, 1:]])


@settings(deadline=None, max_examples=30)
@given(pairs_of_ids)
def test_end_is_never_dropped(pairs):
    batch = Batch.collate(pairs)
    assert ((batch.source == END).sum(dim=1) == 1).all()
    assert ((batch.target_out == END).sum(dim=1) == 1).all()


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="empty batch: give at least one pair"):
        Batch.collate([])


@pytest.mark.parametrize("special", [PAD, BEGIN, END])
def test_special_ids_inside_a_pair_are_refused(special):
    with pytest.raises(ValueError, match=f"pair 1 holds the special id {special}: give ids as `encode`"):
        Batch.collate([([5], [6]), ([5, special], [6])])


def test_to_moves_all_three_tensors():
    moved = Batch.collate([([5], [6])]).to("meta")
    assert {moved.source.device.type, moved.target_in.device.type, moved.target_out.device.type} == {"meta"}


def test_pad_fills_up_on_the_right():
    assert pad([[7, 8, 9], [5], []]).tolist() == [[7, 8, 9], [5, 0, 0], [0, 0, 0]]
    assert pad([[]]).shape == (1, 0) and pad([[]]).dtype == torch.int64


@settings(deadline=None, max_examples=100)
@given(length_pairs, st.integers(60, 600), st.sampled_from(["bucketed", "sorted", "random"]), st.integers(0, 99))
def test_every_pair_once_and_the_budget_kept(lengths, max_tokens, order, seed):
    batches = token_batches(lengths, max_tokens, order, seed)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    lengths = np.array(lengths)
    assert all(len(batch) and lengths[batch].max() * len(batch) <= max_tokens for batch in batches)
    again = token_batches(lengths.tolist(), max_tokens, order, seed)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


@settings(deadline=None, max_examples=50)
@given(length_pairs, st.integers(60, 600))
def test_sorted_batches_rise_in_length_and_are_the_bucketed_ones(lengths, max_tokens):
    batches = token_batches(lengths, max_tokens, "sorted", seed=3)
    longer = np.array(lengths).max(axis=1)
    assert (np.diff(longer[np.concatenate(batches)]) >= 0).all()
    bucketed = token_batches(lengths, max_tokens, "bucketed", seed=3)
    assert sorted(batch.tolist() for batch in batches) == sorted(batch.tolist() for batch in bucketed)
    for one, other in zip(batches, batches[1:], strict=False):  # full: the next pair would not have fitted
        assert longer[other[0]] * (len(one) + 1) > max_tokens


@pytest.mark.parametrize("order", ["bucketed", "random"])
def test_the_seed_alone_decides(order):
    lengths = np.random.default_rng(5).integers(3, 40, (500, 2))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = np.concatenate(token_batches(lengths, 256, order, seed=1)).tolist()
    torch.manual_seed(99), np.random.seed(99)
    assert np.concatenate(token_batches(lengths, 256, order, seed=1)).tolist() == first
    assert np.concatenate(token_batches(lengths, 256, order, seed=2)).tolist() != first
    assert np.concatenate(token_batches(lengths, 256, order, seed=(1, 1))).tolist() != first
    torch.set_rng_state(before[0])
    token_batches(lengths, 256, order)
    assert torch.equal(torch.get_rng_state(), before[0])


def test_equal_lengths_meet_other_company_with_another_seed():
    lengths = [(7, 7)] * 200
    company = [{frozenset(batch.tolist()) for batch in token_batches(lengths, 70, seed=seed)} for seed in (0, 1)]
    assert not company[0] & company[1]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([(3, 4), (9, 30), (2, 25)], 20), "pair 1 has 30 tokens, more than max_tokens=20"),
        (([(3, 4)], 20, "shuffled"), "order='shuffled' is unknown: give 'bucketed'"),
        (([], 20), r"shape \(0,\): give \(pairs, 2\)"),
        (([3, 4], 20), r"shape \(2,\): give \(pairs, 2\)"),
        ((np.zeros((0, 2)), 20), r"shape \(0, 2\).*at least one pair"),
    ],
)
def test_bad_input(arguments, match):
    with pytest.raises(ValueError, match=match):
        token_batches(*arguments)


@settings(deadline=None, max_examples=40)
@given(pairs_of_ids, st.integers(10, 40))
def test_c22_padding_share_is_what_tensors_hold(pairs, max_tokens):
    lengths = [(len(source) + 1, len(target) + 1) for source, target in pairs]
    batches = token_batches(lengths, max_tokens)
    made = [Batch.collate([pairs[index] for index in batch]) for batch in batches]
    sides = [side for batch in made for side in (batch.source, batch.target_out)]
    counted = sum(int((side == PAD).sum()) for side in sides) / sum(side.numel() for side in sides)
    assert abs(padding_share(lengths, batches) - counted) < 1e-12


def test_c22_bucketing_leaves_at_most_five_percent_of_padding_on_toy():
    # words by white space: near enough to the tokens, and quick
    lengths = [(len(source.split()) + 2, len(target.split()) + 2) for source, target in load_corpus("toy").train]
    shares = {
        order: padding_share(lengths, token_batches(lengths, 4096, order)) for order in ("random", "sorted", "bucketed")
    }
    assert (
        shares["bucketed"] <= 0.05 and shares["bucketed"] == pytest.approx(shares["sorted"]) and shares["random"] > 0.3
    )


def test_c22_both_sides_fit_when_their_lengths_differ():
    # 20,000 pairs whose sides are alike but not equal: sorting by one side alone leaves over 6% of padding
    generator = np.random.default_rng(0)
    source = np.clip(generator.lognormal(2.6, 0.4, 20_000).round(), 4, 60).astype(int)
    lengths = np.stack([source, np.clip(source + generator.normal(0, 2.5, 20_000).round(), 3, 60).astype(int)], axis=1)
    assert padding_share(lengths, token_batches(lengths, 2048)) <= 0.035
    one_side = np.argsort(lengths[:, 1], kind="stable")
    assert padding_share(lengths, [one_side[i : i + 130] for i in range(0, 20_000, 130)]) > 0.06


def test_c22_the_command_writes_its_result(tmp_path, monkeypatch, capsys):
    pairs = [(f"word {'again ' * (k % 7)}", f"Wort {'noch einmal ' * (k % 7)}") for k in range(40)]
    monkeypatch.setattr(module, "load_corpus", lambda name: Corpus(name, "en", "de", pairs, [], [], []))
    arguments = ["mine", "--vocab-size", "300", "--max-tokens", "64", "--seed", "3"]
    main([*arguments, "--out", str(tmp_path / "padding.json")])
    result = json.loads((tmp_path / "padding.json").read_text())
    assert result["shares"]["64"]["bucketed"] < result["shares"]["64"]["random"] < result["fixed_length"] + 0.1
    assert result["data"] == "mine, train, 40 pairs, en-de" and result["seed"] == 3 and "--seed 3" in result["command"]
    main(arguments)
    assert json.loads(capsys.readouterr().out)["shares"] == result["shares"]
