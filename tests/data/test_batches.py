"""Batches (5.1): what is padded and shifted, who shares a batch, how much of it is padding."""

import threading
import time
from contextlib import closing
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from helpers import examples, run_python
from hypothesis import example, given
from hypothesis import strategies as st

from annotated.data import batches as module
from annotated.data.batches import Batch, as_arrays, epoch_batches, gather, prefetch, token_batches
from annotated.data.tokenizers import BEGIN, END, PAD

ids = st.lists(st.integers(3, 70_000), max_size=9)
pairs_of_ids = st.lists(st.tuples(ids, ids), min_size=1, max_size=9)
length_pairs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=80)


@examples(60)
@given(pairs_of_ids)
def test_collate_against_brute_force(pairs):
    batch = Batch.collate(pairs)
    sources = [source + [END] for source, _ in pairs]
    outputs = [[*target, END] for _, target in pairs]
    n, m = max(map(len, sources)), max(map(len, outputs))
    assert batch.source.tolist() == [row + [PAD] * (n - len(row)) for row in sources]
    assert batch.target_out.tolist() == [row + [PAD] * (m - len(row)) for row in outputs]
    assert batch.target_in.tolist() == [([BEGIN, *row] + [PAD] * m)[:m] for row in outputs]
    assert batch.tokens == sum(map(len, outputs))
    assert {tensor.dtype for tensor in sides(batch)} == {torch.int64}


@pytest.mark.parametrize("pairs, message", [([], "empty batch: give at least one pair")] + [
    ([([5], [6]), ([5, special], [6])], f"pair 1 holds the special id {special}: give ids as `enc")
    for special in (PAD, BEGIN, END)])
def test_an_empty_batch_and_special_ids_inside_a_pair_are_refused(pairs, message):
    with pytest.raises(ValueError, match=message):
        Batch.collate(pairs)


@examples(100)
@given(length_pairs, st.integers(60, 600), st.sampled_from(["bucketed", "sorted", "random"]),
       st.integers(0, 99))
def test_every_pair_once_and_the_budget_kept(lengths, max_tokens, order, seed):
    batches = token_batches(lengths, max_tokens, order, seed)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    lengths = np.array(lengths)
    assert all(len(batch) and lengths[batch].max() * len(batch) <= max_tokens for batch in batches)
    again = token_batches(lengths.tolist(), max_tokens, order, seed)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


@examples(50)
@given(length_pairs, st.integers(60, 600))
def test_sorted_batches_rise_in_length_and_are_the_bucketed_ones(lengths, max_tokens):
    batches = token_batches(lengths, max_tokens, "sorted", seed=3)
    longer = np.array(lengths).max(axis=1)
    assert (np.diff(longer[np.concatenate(batches)]) >= 0).all()
    bucketed = token_batches(lengths, max_tokens, "bucketed", seed=3)
    assert sorted(batch.tolist() for batch in batches) == sorted(batch.tolist()
                                                                 for batch in bucketed)
    # full: the next pair would not have fitted
    for one, other in zip(batches, batches[1:], strict=False):
        assert longer[other[0]] * (len(one) + 1) > max_tokens


@pytest.mark.parametrize("order", ["bucketed", "random"])
def test_the_seed_alone_decides(order):
    lengths = np.random.default_rng(5).integers(3, 40, (500, 2))

    def cut(seed):
        return np.concatenate(token_batches(lengths, 256, order, seed)).tolist()

    first, before = cut(1), torch.get_rng_state()
    np.random.seed(99)
    assert cut(1) == first and cut(2) != first and cut((1, 1)) != first
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_lengths_meet_other_company_with_another_seed():
    lengths = [(7, 7)] * 200
    company = [{frozenset(batch.tolist()) for batch in token_batches(lengths, 70, seed=seed)}
               for seed in (0, 1)]
    assert not company[0] & company[1]


@pytest.mark.parametrize(("arguments", "match"), [
    (([(3, 4), (9, 30), (2, 25)], 20), "pair 1 has 30 tokens, more than max_tokens=20"),
    (([(3, 4)], 20, "shuffled"), "order='shuffled' is unknown: give 'bucketed'"),
    (([], 20), r"shape \(0,\): give \(pairs, 2\)"), (([3, 4], 20), r"shape \(2,\): give \(pairs"),
    ((np.zeros((0, 2)), 20), r"shape \(0, 2\).*at least one pair")])
def test_bad_input(arguments, match):
    with pytest.raises(ValueError, match=match):
        token_batches(*arguments)


@examples(40)
@given(pairs_of_ids, st.integers(10, 40))
def test_c22_padding_share_is_what_tensors_hold(pairs, max_tokens):
    lengths = [(len(source) + 1, len(target) + 1) for source, target in pairs]
    batches = token_batches(lengths, max_tokens)
    tensors = [Batch.collate([pairs[index] for index in batch]) for batch in batches]
    sides = [side for batch in tensors for side in (batch.source, batch.target_out)]
    counted = sum(int((side == PAD).sum()) for side in sides) / sum(side.numel() for side in sides)
    assert abs(module.padding_share(lengths, batches) - counted) < 1e-12


def sides(batch):
    return batch.source, batch.target_in, batch.target_out


def assert_same(one, other):
    for ours, theirs in zip(sides(one), sides(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)  # of one type, too


def part_of(batch, part, parts):
    """A part of a batch dealt out like cards; at least a pair of padding."""
    rows = [side[part::parts] for side in sides(batch)]
    return Batch(*rows) if len(rows[0]) else Batch(batch.source[:1], batch.target_in[:1],
                                                   PAD * batch.target_out[:1])


@pytest.mark.parametrize("device, at_once", [("cpu", False), ("mps", False), ("cuda:1", True)])
def test_a_batch_moves_as_a_whole_and_only_cuda_does_not_wait(monkeypatch, device, at_once):
    asked = []
    monkeypatch.setattr(torch.Tensor, "to",
                        lambda tensor, *given, **how: asked.append((given, how)) or tensor)
    Batch.collate([([5], [6])]).to(device)
    assert asked == [((device,), {"non_blocking": at_once})] * 3


@examples(150)
@given(pairs_of_ids, st.data(), st.integers(1, 9), st.integers(1, 9))
def test_parts_are_shares_of_the_batch_with_widths_rounded_up(pairs, data, multiple, parts):
    indices = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=12))
    whole, arrays = Batch.collate([pairs[index] for index in indices]), as_arrays(pairs)
    assert module.real_tokens(arrays, np.array(indices)) == whole.tokens
    for part in range(parts):
        wide = gather(arrays, np.array(indices), part, parts, multiple)
        plain = part_of(whole, part, parts)
        for ours, theirs in zip(sides(wide), sides(plain), strict=True):
            assert len(ours) == len(theirs)
            assert ours.shape[1] == -(-theirs.shape[1] // multiple) * multiple
        n, m = plain.source.shape[1], plain.target_out.shape[1]
        assert_same(Batch(wide.source[:, :n], wide.target_in[:, :m], wide.target_out[:, :m]), plain)
        # the longest sentence may now end in the input as well, where the loss skips it
        rest = wide.source[:, n:], wide.target_out[:, m:], wide.target_in[:, m + 1 :]
        assert not any(side.any() for side in rest)
        assert ((wide.target_in == END).sum(1) <= 1).all()


def threads():
    return {thread.ident for thread in threading.enumerate()}


def test_prefetch_is_map_in_a_thread_of_its_own():
    before, here = threads(), threading.get_ident()
    results = list(prefetch(range(50), lambda number: (number * number, threading.get_ident())))
    assert [square for square, _ in results] == [number * number for number in range(50)]
    makers = {thread for _, thread in results}
    assert len(makers) == 1 and here not in makers
    assert threads() <= before and list(prefetch([], abs)) == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_is_so_many_items_ahead_and_not_more(depth):
    drawn = []
    with closing(prefetch((drawn.append(n) or n for n in count()), lambda n: n, depth)) as numbers:
        for wanted in range(4):
            assert next(numbers) == wanted
            until = time.monotonic() + 5
            while len(drawn) < wanted + 1 + depth and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.01)  # for one more, if it were to come
            assert len(drawn) == wanted + 1 + depth
    assert next(prefetch([7], lambda n: n + 1, depth)) == 8


@pytest.mark.parametrize("make, error, before_it", [
    (lambda n: 6 // n, ZeroDivisionError, [2, 3, 6]), (lambda n: n, OSError, [3, 2, 1, 0, 5])])
def test_errors_come_out_where_they_are_asked_for_and_end_the_thread(make, error, before_it):
    def items():
        yield from (3, 2, 1, 0, 5)
        raise OSError("the disk is gone")

    before, results = threads(), []
    with pytest.raises(error):
        for value in prefetch(items(), make):
            results.append(value)
    assert results == before_it and threads() <= before


def test_closing_ends_the_thread():
    before, finished = threads(), []
    batches = prefetch(count(), lambda number: time.sleep(0.1) or finished.append(number),
                       depth=100)
    next(batches)
    assert threads() - before
    batches.close()
    assert threads() <= before and list(batches) == []
    assert len(finished) < 50, "what waits is not made any more"


def test_a_program_that_forgets_to_close_ends_all_the_same():
    code = ("from annotated.data.batches import prefetch; a = prefetch(range(9), str); "
            "print(next(a)); raise SystemExit(0)")
    assert run_python(code) == "0\n"


def the_same(one, other):
    return [batch.tolist() for batch in one] == [batch.tolist() for batch in other]


def test_small_corpora_get_the_batches_of_token_batches():
    pairs = [([7] * (n % 19), [8] * (n % 13)) for n in range(200)]
    wanted = token_batches(as_arrays(pairs).lengths, 300, seed=(5, 3))
    assert the_same(epoch_batches(pairs, 300, (5, 3)), wanted)


@example([(2, 2)] * 10, 60, 4, 4, 0, 0)  # three blocks, the last of them short
@examples(30)
@given(length_pairs, st.integers(60, 600), st.integers(1, 30), st.integers(1, 9),
       st.integers(0, 99), st.integers(0, 9))
def test_an_epoch_of_pools_holds_every_pair_once_within_the_budget(lengths, max_tokens, pool,
                                                                   block, seed, epoch):
    pairs = [([7] * (n - 1), [7] * (m - 1)) for n, m in lengths]
    batches = list(epoch_batches(pairs, max_tokens, (seed, epoch), pool, block))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(pairs)))
    assert all(np.array(lengths)[batch].max() * len(batch) <= max_tokens for batch in batches)
    assert the_same(batches, epoch_batches(pairs, max_tokens, (seed, epoch), pool, block))


class Lengths(module.PairArrays):
    """Pairs of which only the lengths exist."""

    def __init__(self, lengths):
        super().__init__(None, None, lengths, lengths.max(axis=0).tolist())

    def __len__(self):
        return len(self.lengths)


def many(count, seed=0):
    draw = np.random.default_rng(seed)
    source = np.clip(draw.lognormal(3.2, 0.6, count).round(), 2, 200)
    target = np.clip((source * draw.lognormal(0.05, 0.18, count)).round(), 2, 200)
    return Lengths(np.stack([source, target], axis=1).astype("<i4"))


def test_pools_mix_the_corpus_and_hardly_add_padding():
    pairs = many(50_000)
    batches = list(epoch_batches(pairs, 4096, (0, 1), pool=10_000, block=250))
    assert module.padding_share(pairs.lengths, batches) < 0.1
    first = np.concatenate(batches)[:10_000]
    assert len(set((first // 250).tolist())) == 40 and first.min() < 10_000 and first.max() > 40_000
    assert (np.abs(np.diff(first)) > 250).mean() > 0.9  # neighbours come from different blocks
    lengths = pairs.lengths.max(axis=1)
    means = [lengths[batch].mean() for batch in batches[:40]]
    assert np.std(means) > 5  # batches in random order, not from short to long


def test_every_pool_has_an_order_of_its_own():
    # all alike: only the draws tell the pools apart; a pool is a block
    pairs, orders = Lengths(np.full((600, 2), 5, dtype="<i4")), [[] for _ in range(6)]
    for batch in epoch_batches(pairs, 25, (0, 0), pool=100, block=100):
        orders[batch[0] // 100].extend((batch % 100).tolist())
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len(set(map(tuple, orders))) == 6


def test_every_epoch_has_another_order():
    sets = [{frozenset(batch.tolist()) for batch in
             epoch_batches(many(5000), 2000, seed, pool=1000, block=50) if len(batch) > 9}
            for seed in ((0, 0), (0, 1), (1, 0))]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]


def test_the_first_batch_of_a_large_corpus_needs_one_pool_only(monkeypatch):
    sizes, released, real = [], [], token_batches
    monkeypatch.setattr(module, "token_batches", lambda lengths, *given, **more:
                        sizes.append(len(lengths)) or real(lengths, *given, **more))
    monkeypatch.setattr(module.PairArrays, "release", lambda self: released.append(len(sizes)))
    stream = epoch_batches(many(30_000), 4096, (0, 0), pool=5_000, block=100)
    assert len(list(islice(stream, 3))) == 3 and sizes == [5_000]
    assert sum(map(len, stream)) > 20_000 and sizes == [5_000] * 6
    assert released == [1, 2, 3, 4, 5, 6]


def test_within_a_length_the_difference_of_the_sides_rises_and_falls_by_turns():
    lengths = np.array([(source, target) for target in (4, 5, 6, 7)
                        for source in range(1, target + 1)])
    walk = lengths[np.concatenate(token_batches(lengths, 1000, order="sorted"))]
    for target in (4, 5, 6, 7):
        sources = walk[walk[:, 1] == target, 0].tolist()
        assert sources == sorted(sources, reverse=target % 2 == 0)


@pytest.mark.parametrize("max_tokens, d_model", [(40, 16), (64, 16), (97, 1), (97, 512), (500, 16)])
def test_no_batch_takes_more_than_the_largest(max_tokens, d_model):
    draw = np.random.default_rng(max_tokens)
    pairs = [([4] * n, [5] * m) for n, m in draw.integers(0, 40, (60, 2)).tolist()]
    longer = as_arrays(pairs).lengths.max(axis=1)

    def cost(rows, longest):
        return rows * longest * (d_model + longest)

    rows, longest = module.largest_batch(pairs, max_tokens, d_model)
    cut = chain.from_iterable(token_batches(as_arrays(pairs).lengths, max_tokens, order, seed)
                              for order in ("bucketed", "random") for seed in range(20))
    assert max(cost(len(batch), longer[batch].max()) for batch in cut) <= cost(rows, longest)
    assert longest in longer and (longer <= longest).sum() >= rows, "no such batch"
    assert rows * longest <= max_tokens


def test_the_longest_pair_counts_wherever_it_stands():
    long, short = ([4] * 9, [5]), ([4], [5])
    for pairs in ([long, short], [short, long]):
        assert module.largest_batch(pairs, 10, 8) == (1, 10)


def test_every_pair_of_every_split_has_to_fit():
    short, long = [([4] * 3, [5]), ([4], [5] * 8)], [([4], [5]), ([4] * 12, [5] * 2)]
    module.check_fit(9, train=short, valid=short)
    for pairs in (long, as_arrays(long)):
        with pytest.raises(ValueError, match=r"valid: pair 1 has 13 tokens .* max_tokens=9: raise"):
            module.check_fit(9, train=short, valid=pairs)
        module.check_fit(13, train=pairs)
    with pytest.raises(ValueError, match="train is empty: give at least one pair"):
        module.check_fit(9, train=[], valid=short)
