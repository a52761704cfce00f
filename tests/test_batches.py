"""Batches (section 5.1): what is padded, what is shifted, who shares a batch, and how much of it is padding."""

import hashlib
import json
import os
import threading
import time
import tracemalloc
from contextlib import closing, nullcontext
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from helpers import examples, run_python
from hypothesis import example, given
from hypothesis import strategies as st

from annotated import batches as module
from annotated.batches import (
    Batch,
    EncodedPairs,
    PairArrays,
    ahead,
    all_cores,
    check_fit,
    count_batches,
    encoded,
    epoch_batches,
    gather,
    largest_batch,
    load_prepared,
    pad,
    padding_share,
    pair_lengths,
    prepare_corpus,
    real_tokens,
    token_batches,
    write_encoded,
)
from annotated.corpora import Corpus, PairStream, load_corpus
from annotated.tokens import BEGIN, END, PAD, SubwordTokenizer
from annotated.training import shard

ids = st.lists(st.integers(3, 50), max_size=9)
pairs_of_ids = st.lists(st.tuples(ids, ids), min_size=1, max_size=8)
length_pairs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=80)


@examples(60)
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


@examples(30)
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


@examples(100)
@given(length_pairs, st.integers(60, 600), st.sampled_from(["bucketed", "sorted", "random"]), st.integers(0, 99))
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


@examples(40)
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


# --- memory-mapped pairs --------------------------------------------------------------------------------------------

TEXTS = [(f"word{'y' * (n % 19)} {n}", f"Wort{'z' * (n % 13)} {n}") for n in range(200)]


class Letters:
    """A tokenizer that is easy to check: one id for each letter."""

    def __init__(self, size=300):
        self.size = size

    def __len__(self):
        return self.size

    def encode_batch(self, texts, language=None):
        assert language in ("en", "de")
        return [[3 + ord(letter) % (self.size - 3) for letter in text] for text in texts]

    def as_dict(self):
        return {"size": self.size}


def expected(texts, tokenizer):
    return [tuple(tokenizer.encode_batch(pair, "en")) for pair in texts]


@pytest.fixture
def folder(tmp_path):
    write_encoded(iter(TEXTS), Letters(), tmp_path / "pairs", chunk=7)
    return tmp_path / "pairs"


@pytest.mark.parametrize("chunk", [1, 7, 200, 10_000])
@pytest.mark.parametrize("size, dtype", [(300, "<u2"), (65_536, "<u2"), (65_537, "<i4"), (1_000_000, "<i4")])
def test_encoded_pairs_are_the_list_of_pairs(tmp_path, chunk, size, dtype):
    texts = [*TEXTS, ("", ""), ("", "x"), ("x", ""), ("🙂" * 9, "日本")]
    pairs, wanted = write_encoded(iter(texts), Letters(size), tmp_path / "p", chunk=chunk), expected(texts, Letters(size))
    assert pairs.manifest["dtype"] == dtype and len(pairs) == len(texts) and list(pairs) == wanted
    assert pairs[0] == wanted[0] and pairs[-1] == wanted[-1] and pairs[np.int64(5)] == wanted[5]
    assert pairs[3:9:2] == wanted[3:9:2] and type(pairs[0][0]) is list and type(pairs[0][0][0]) is int
    for wrong in (len(texts), -len(texts) - 1):
        with pytest.raises(IndexError):
            pairs[wrong]
    lengths = np.array([(len(source) + 1, len(target) + 1) for source, target in wanted])
    assert (pair_lengths(pairs) == lengths).all() and (pair_lengths(wanted) == lengths).all()
    assert pairs.longest == tuple(lengths.max(axis=0)) and pairs.manifest["languages"] == ["en", "de"]
    pairs.release()
    assert pairs[7] == wanted[7]


def test_lengths_are_known_without_reading_the_ids(folder):
    pairs = EncodedPairs(folder)
    pairs.ids = None
    assert pair_lengths(pairs).shape == (200, 2) and len(list(epoch_batches(pairs, 256, (0, 0)))) > 1
    assert pair_lengths([]).shape == (0, 2)


def test_the_digest_stands_for_the_contents(tmp_path):
    made = [write_encoded(texts, Letters(size), tmp_path / str(number)) for number, (texts, size) in
            enumerate([(TEXTS, 300), (TEXTS, 300), (TEXTS[::-1], 300), (TEXTS, 301), (TEXTS[:-1], 300)])]
    digests = [pairs.digest for pairs in made]
    assert digests[0] == digests[1] and len(set(digests)) == 4
    assert digests[0] == hashlib.sha256((tmp_path / "0" / "manifest.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("file", ["ids.bin", "offsets.bin", "lengths.bin"])
@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "flipped"])
def test_a_damaged_folder_is_refused_by_the_name_of_the_file(folder, file, damage):
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / file).write_bytes({"truncated": data[:-8], "longer": data + b"xx", "flipped": data}.get(damage, b""))
    if damage == "missing":
        (folder / file).unlink()
    message = {"truncated": "bytes, expected", "longer": "bytes, expected", "missing": "is missing",
               "flipped": "has other contents"}[damage]
    with pytest.raises(ValueError, match=f"{file} .*{message}.*: encode the corpus anew"):
        EncodedPairs(folder, check=True)
    if damage == "flipped":  # only who reads it all can see that
        assert len(EncodedPairs(folder)) == 200
    else:
        with pytest.raises(ValueError, match=message):
            EncodedPairs(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pairs": 3}'])
def test_a_damaged_manifest_is_named(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        EncodedPairs(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="no encoded pairs"):
        EncodedPairs(folder)


def test_a_manifest_of_other_numbers_is_refused(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    for change in ({"pairs": 199}, {"dtype": "<f8"}, {"longest": 3}):
        (folder / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(ValueError, match="manifest.json is damaged"):
            EncodedPairs(folder)


def test_pairs_are_written_whole_or_not_at_all(tmp_path):
    def breaks():
        yield from TEXTS
        raise RuntimeError("the line went dead")

    with pytest.raises(RuntimeError):
        write_encoded(breaks(), Letters(), tmp_path / "p", chunk=20)
    with pytest.raises(ValueError, match=r"no pairs to encode into .*p \(0 were longer"):
        write_encoded([], Letters(), tmp_path / "p")
    with pytest.raises(ValueError, match=r"200 were longer than max_length=3"):
        write_encoded(TEXTS, Letters(), tmp_path / "p", max_length=3)
    assert list(tmp_path.iterdir()) == []
    write_encoded(TEXTS, Letters(), tmp_path / "p")
    with pytest.raises(FileExistsError, match="exists already"):
        write_encoded(TEXTS, Letters(), tmp_path / "p")


def test_pairs_that_are_too_long_are_left_out_and_counted(tmp_path):
    wanted = [pair for pair in expected(TEXTS, Letters()) if max(map(len, pair)) + 1 <= 20]
    pairs = write_encoded(TEXTS, Letters(), tmp_path / "p", max_length=20, chunk=11)
    assert list(pairs) == wanted and pairs.manifest["dropped"] == 200 - len(wanted) > 0 and max(pairs.longest) <= 20


def test_writing_takes_the_memory_of_a_chunk(tmp_path):
    many = ((f"word {n} " * 9, f"Wort {n} " * 9) for n in range(4000))
    tracemalloc.start()
    pairs = write_encoded(many, Letters(), tmp_path / "p", chunk=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pairs.manifest["files"]["ids.bin"]["bytes"] > 1e6 and peak < 0.7e6


# --- arrays of pairs, gathered and made ahead -----------------------------------------------------------------------


def sides(batch):
    return batch.source, batch.target_in, batch.target_out


def assert_same(one, other):
    for name, ours, theirs in zip(("source", "target_in", "target_out"), sides(one), sides(other), strict=True):
        assert ours.dtype == theirs.dtype == torch.int64 and ours.shape == theirs.shape, name
        assert torch.equal(ours, theirs), name


large_ids = st.lists(st.integers(3, 70_000), max_size=7)
several_pairs = st.lists(st.tuples(large_ids, large_ids), min_size=1, max_size=9)


@examples(150)
@given(several_pairs, st.data())
def test_gather_is_a_share_of_what_collate_makes(pairs, data):
    indices = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=12))
    parts = data.draw(st.integers(1, 15))
    part = data.draw(st.integers(0, parts - 1))
    whole, arrays = Batch.collate([pairs[index] for index in indices]), encoded(pairs)
    assert_same(gather(arrays, np.array(indices), part, parts), shard(whole, part, parts))
    assert real_tokens(arrays, np.array(indices)) == whole.tokens


@examples(80)
@given(several_pairs, st.integers(1, 9), st.integers(1, 9))
def test_widths_are_rounded_up_and_the_rest_is_padding(pairs, multiple, parts):
    whole, indices = Batch.collate(pairs), np.arange(len(pairs))
    for part in range(parts):
        made, plain = gather(encoded(pairs), indices, part, parts, multiple), shard(whole, part, parts)
        for ours, theirs in zip(sides(made), sides(plain), strict=True):
            assert len(ours) == len(theirs) and ours.shape[1] == -(-theirs.shape[1] // multiple) * multiple
        n, m = plain.source.shape[1], plain.target_out.shape[1]
        assert_same(Batch(made.source[:, :n], made.target_in[:, :m], made.target_out[:, :m]), plain)
        # the longest sentence may now end in the input as well, where the loss skips it
        assert not made.source[:, n:].any() and not made.target_out[:, m:].any() and not made.target_in[:, m + 1 :].any()
        assert ((made.target_in == END).sum(1) <= 1).all()


def test_folders_and_lists_gather_the_same(folder):
    pairs, indices = EncodedPairs(folder), np.array([7, 199, 0, 0, 42])
    assert encoded(pairs) is pairs
    arrays = encoded(list(pairs))
    assert encoded(arrays) is arrays and list(arrays) == list(pairs) and arrays.longest == pairs.longest
    assert (arrays.lengths == pairs.lengths).all() and (arrays.offsets == pairs.offsets).all() and (arrays.ids == pairs.ids).all()
    assert_same(gather(pairs, indices), gather(arrays, indices))
    arrays.release(), pairs.release()
    assert_same(gather(pairs, indices), Batch.collate([pairs[index] for index in indices]))
    gather(pairs, indices).source.fill_(9)  # a copy: neither the arrays nor the files change
    assert pairs[7] == arrays[7] and max(arrays.ids) < 300


def test_pairs_without_a_word_are_gathered(tmp_path):
    for pairs in (encoded([([], []), ([], [])]), write_encoded([("", ""), ("", "")], Letters(), tmp_path / "empty")):
        assert_same(gather(pairs, np.array([1, 0])), Batch.collate([([], []), ([], [])]))
        assert real_tokens(pairs, np.array([1, 0])) == 2
    assert len(encoded([])) == 0 and encoded([]).longest == (0, 0) and encoded([]).lengths.shape == (0, 2)


def test_ids_above_two_bytes_stay_whole(tmp_path):
    pairs = write_encoded([("\U0001f642", "ab")], Letters(1_000_000), tmp_path / "p")
    assert pairs.ids.dtype == "<i4" and gather(pairs, np.array([0])).source.tolist() == [[3 + 0x1F642, END]]


@examples(80)
@given(st.lists(st.tuples(*[st.lists(st.integers(-1, 9), max_size=4)] * 2), min_size=1, max_size=6))
def test_special_ids_are_refused_once_with_the_words_of_collate(pairs):
    try:
        Batch.collate(pairs)
    except ValueError as error:
        with pytest.raises(ValueError) as raised:
            encoded(pairs)
        assert str(raised.value) == str(error)
    else:
        assert list(encoded(pairs)) == pairs


def test_a_tokenizer_with_special_ids_is_refused_when_its_pairs_are_written(tmp_path):
    class Ends(Letters):
        def encode_batch(self, texts, language=None):
            return [[*ids, END] for ids in super().encode_batch(texts, language)]

    with pytest.raises(ValueError, match="pair 0 holds the special id 2: give ids as `encode`"):
        write_encoded(TEXTS, Ends(), tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def threads():
    return {thread.ident for thread in threading.enumerate()}


def test_ahead_is_map_in_a_thread_of_its_own():
    before, here, seen = threads(), threading.get_ident(), []

    def items():
        for number in range(50):
            seen.append(threading.get_ident())
            yield number

    made = list(ahead(items(), lambda number: (number * number, threading.get_ident())))
    assert [square for square, _ in made] == [number * number for number in range(50)]
    makers = {thread for _, thread in made}
    assert len(makers) == 1 and here not in makers and set(seen) == makers
    assert threads() <= before and list(ahead([], abs)) == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_ahead_is_so_many_items_ahead_and_not_more(depth):
    drawn = []
    with closing(ahead((drawn.append(n) or n for n in count()), lambda n: n, depth)) as numbers:
        for wanted in range(4):
            assert next(numbers) == wanted
            until = time.monotonic() + 5
            while len(drawn) < wanted + 1 + depth and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.01)  # for one more, if it were to come
            assert len(drawn) == wanted + 1 + depth
    assert next(ahead([7], lambda n: n + 1, depth)) == 8


def test_errors_come_out_where_they_are_asked_for_and_end_the_thread():
    def items():
        yield from (3, 2, 1, 0, 5)
        raise OSError("the disk is gone")

    before, made = threads(), []
    with pytest.raises(ZeroDivisionError):
        for value in ahead(items(), lambda n: 6 // n):
            made.append(value)
    assert made == [2, 3, 6] and threads() <= before
    made.clear()
    with pytest.raises(OSError, match="the disk is gone"):
        for value in ahead(items(), lambda n: n):
            made.append(value)
    assert made == [3, 2, 1, 0, 5] and threads() <= before


def test_closing_ends_the_thread():
    before, batches = threads(), ahead(count(), lambda number: number)
    assert next(batches) == 0 and threads() - before
    batches.close()
    assert threads() <= before and list(batches) == []
    made = []
    batches = ahead(count(), lambda number: time.sleep(0.02) or made.append(number), depth=100)
    next(batches), batches.close()
    assert len(made) < 50 and threads() <= before, "what waits is not made any more"
    with pytest.raises(KeyError):  # what goes wrong in the loop's body ends it as well
        with closing(ahead(count(), lambda number: number)) as batches:
            for number in batches:
                {}[number]
    assert threads() <= before


def test_a_program_that_forgets_to_close_ends_all_the_same():
    code = "from itertools import count; from annotated.batches import ahead; a = ahead(count(), str); print(next(a)); raise SystemExit(0)"
    assert run_python(code) == "0\n"



# --- epochs ---------------------------------------------------------------------------------------------------------


def the_same(one, other):
    return [batch.tolist() for batch in one] == [batch.tolist() for batch in other]


def test_small_corpora_get_the_batches_of_token_batches(folder):
    pairs = EncodedPairs(folder)
    for seed in ((0, 0), (0, 1), (5, 3)):
        wanted = token_batches(pair_lengths(list(pairs)), 300, seed=seed)
        assert the_same(epoch_batches(pairs, 300, seed), wanted) and the_same(epoch_batches(list(pairs), 300, seed), wanted)


@example([(2, 2)] * 10, 60, 4, 4, 0, 0)  # three blocks, the last of them short
@examples(30)
@given(length_pairs, st.integers(60, 600), st.integers(1, 30), st.integers(1, 9), st.integers(0, 99), st.integers(0, 9))
def test_an_epoch_of_pools_holds_every_pair_once_within_the_budget(lengths, max_tokens, pool, block, seed, epoch):
    pairs = [([7] * (n - 1), [7] * (m - 1)) for n, m in lengths]
    batches = list(epoch_batches(pairs, max_tokens, (seed, epoch), pool, block))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(pairs)))
    assert all(np.array(lengths)[batch].max() * len(batch) <= max_tokens for batch in batches)
    assert the_same(batches, epoch_batches(pairs, max_tokens, (seed, epoch), pool, block))


class Lengths(PairArrays):
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
    assert padding_share(pairs.lengths, batches) < 0.1
    first = np.concatenate(batches)[:10_000]
    assert len(set((first // 250).tolist())) == 40 and first.min() < 10_000 and first.max() > 40_000
    assert (np.abs(np.diff(first)) > 250).mean() > 0.9  # neighbours come from different blocks
    lengths = pairs.lengths.max(axis=1)
    means = [lengths[batch].mean() for batch in batches[:40]]
    assert np.std(means) > 5  # batches in random order, not from short to long


def test_every_pool_has_an_order_of_its_own():
    pairs = Lengths(np.full((600, 2), 5, dtype="<i4"))  # all alike: only the draws tell the pools apart
    orders = []
    for batch in epoch_batches(pairs, 25, (0, 0), pool=100, block=100):  # a pool is a block
        if batch[0] // 100 not in [number for number, _ in orders]:
            orders.append((batch[0] // 100, []))
        assert (batch // 100 == orders[-1][0]).all()
        orders[-1][1].extend((batch % 100).tolist())
    assert len(orders) == 6 and all(sorted(order) == list(range(100)) for _, order in orders)
    assert len({tuple(order) for _, order in orders}) == 6


def test_every_epoch_has_another_order_and_the_seed_alone_decides():
    pairs, take = many(5000), {}
    state = np.random.get_state()[1].tolist()
    for seed in ((0, 0), (0, 1), (1, 0)):
        take[seed] = [batch.tolist() for batch in epoch_batches(pairs, 2000, seed, pool=1000, block=50)]
        np.random.seed(3)
        assert take[seed] == [batch.tolist() for batch in epoch_batches(pairs, 2000, seed, pool=1000, block=50)]
        np.random.set_state(("MT19937", state, 624, 0, 0.0))
    sets = [{frozenset(batch) for batch in batches if len(batch) > 9} for batches in take.values()]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]


def test_the_first_batch_of_a_large_corpus_needs_one_pool_only(monkeypatch):
    sizes, real = [], token_batches
    monkeypatch.setattr(module, "token_batches", lambda lengths, *a, **b: sizes.append(len(lengths)) or real(lengths, *a, **b))
    released = []
    monkeypatch.setattr(PairArrays, "release", lambda self: released.append(len(sizes)))
    stream = epoch_batches(many(30_000), 4096, (0, 0), pool=5_000, block=100)
    assert len(list(islice(stream, 3))) == 3 and sizes == [5_000]
    assert sum(map(len, stream)) > 20_000 and sizes == [5_000] * 6 and released == [1, 2, 3, 4, 5, 6]


@examples(100)
@given(length_pairs, st.integers(60, 300))
def test_batches_are_counted_without_cutting_them(lengths, max_tokens):
    assert count_batches(np.array(lengths), max_tokens) == len(token_batches(lengths, max_tokens))


@pytest.mark.parametrize("pool", [1 << 20, 700, 64])
def test_an_epoch_goes_on_after_any_batch(pool):
    pairs = many(2000)
    whole = [batch.tolist() for batch in epoch_batches(pairs, 999, (4, 2), pool, block=32)]
    for skip in (*range(0, len(whole), 7), len(whole) - 1, len(whole), len(whole) + 3):
        assert [batch.tolist() for batch in epoch_batches(pairs, 999, (4, 2), pool, 32, skip)] == whole[skip:]


def test_pools_that_are_skipped_are_not_cut(monkeypatch):
    pairs, cut, real = many(30_000), [], token_batches
    number = len(list(epoch_batches(pairs, 4096, (0, 0), pool=5_000, block=100)))
    monkeypatch.setattr(module, "token_batches", lambda lengths, *a, **b: cut.append(len(lengths)) or real(lengths, *a, **b))
    assert len(list(epoch_batches(pairs, 4096, (0, 0), 5_000, 100, skip=number - 2))) == 2 and cut == [5_000]


def test_a_pair_that_is_too_long_is_named_by_its_place_in_the_corpus():
    pairs = many(5000)
    pairs.lengths[4321, 1], pairs.longest = 999, (200, 999)
    with pytest.raises(ValueError, match="pair 4321 has 999 tokens, more than max_tokens=500"):
        next(epoch_batches(pairs, 500, (0, 0), pool=1000, block=100))
    plain = [([7] * 5, [7] * 5)] * 50 + [([7] * 5, [7] * 99)]
    with pytest.raises(ValueError, match="pair 50 has 100 tokens, more than max_tokens=60"):
        next(epoch_batches(plain, 60, (0, 0), pool=10, block=2))
    with pytest.raises(ValueError, match="at least one pair"):
        next(epoch_batches([], 60, (0, 0)))


# --- prepared corpora -----------------------------------------------------------------------------------------------

NOISE = [("", "leer"), ("kaputt\ufffd", "broken"), ("a b c d e", "f"), ("same", "same")]


@pytest.fixture
def corpus(monkeypatch):
    made = Corpus("mine", "en", "de", PairStream((lambda: TEXTS, lambda: NOISE)), [*TEXTS[:5], ("", "leer")], [])
    monkeypatch.setattr(module, "load_corpus", lambda name, root=None, source=None, target=None: made)
    return made


def test_a_corpus_is_prepared_once(corpus, tmp_path, monkeypatch):
    made = prepare_corpus("mine", tmp_path / "p", 300)
    assert (made.name, made.source_language, made.target_language, len(made.tokenizer)) == ("mine", "en", "de", 300)
    for pairs, texts in ((made.train, TEXTS), (made.valid, corpus.valid)):  # validation is not cleaned
        assert [tuple(map(made.tokenizer.decode, pair)) for pair in pairs] == texts
    assert made.facts["cleaning"] == {"kept": 200, "empty": 1, "broken": 1, "ratio": 1, "copied": 1, "overlong in tokens": 0}
    assert made.tokenizer.as_dict() == SubwordTokenizer.fit(TEXTS, 300).as_dict()
    monkeypatch.setattr(module, "load_corpus", None)  # from here on nothing is read again
    for again in (prepare_corpus("mine", tmp_path / "p", 300), load_prepared(tmp_path / "p", check=True)):
        assert again.train.digest == made.train.digest and list(again.valid) == list(made.valid)
        assert again.tokenizer.as_dict() == made.tokenizer.as_dict() and again.facts == made.facts
    for change, message in (({"vocab_size": 310}, "vocab_size 300, not 310"), ({"seed": 1}, "seed 0, not 1"),
                            ({"name": "other"}, "corpus 'mine', not 'other'"), ({"normalise": True}, "normalise False, not True"),
                            ({"target_language": "fr"}, r"languages \['en', 'de'\], not \['en', 'fr'\]")):
        with pytest.raises(ValueError, match=f"was prepared with {message}: give another folder"):
            prepare_corpus(**{"name": "mine", "folder": tmp_path / "p", "vocab_size": 300} | change)


def test_preparing_takes_all_cores_and_gives_the_variable_back(corpus, tmp_path, monkeypatch):
    seen, real = [], SubwordTokenizer.encode_batch
    monkeypatch.setattr(SubwordTokenizer, "encode_batch",
                        lambda *given: seen.append(os.environ["TOKENIZERS_PARALLELISM"]) or real(*given))
    for name, before in (("false", "false"), ("true", "true"), ("unset", None)):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if before is not None:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        prepare_corpus("mine", tmp_path / name, 300)
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before
    assert set(seen) == {"true"}
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with pytest.raises(KeyError), all_cores():
        raise KeyError
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_all_cores_prepare_what_one_prepares(corpus, tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    lexicon = ["".join(draw.choice(list("abdeinorst"), size)) for size in draw.integers(1, 9, 2000)]
    corpus.train = [tuple(" ".join(draw.choice(lexicon, size)) for size in draw.integers(1, 20, 2)) for _ in range(12_000)]
    made = prepare_corpus("mine", tmp_path / "all", 3000)
    monkeypatch.setattr(module, "all_cores", nullcontext)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    one = prepare_corpus("mine", tmp_path / "one", 3000)
    assert (made.train.digest, made.facts) == (one.train.digest, one.facts) and made.train.manifest["dropped"] == 0
    # and the bytes are those of a plain loop
    kept = [pair for pair in corpus.train if max(len(text.split()) for text in pair) <= 3 * min(len(text.split()) for text in pair)
            and pair[0] != pair[1]]
    rows = [[made.tokenizer.encode(text) for text in pair] for pair in kept]
    sizes = [len(source) + len(target) for source, target in rows]
    wanted = {"ids.bin": np.array([index for row in rows for ids in row for index in ids], "<u2"),
              "offsets.bin": np.array([0, *np.cumsum(sizes)[:-1]], "<i8"),
              "lengths.bin": np.array([[len(source) + 1, len(target) + 1] for source, target in rows], "<i4")}
    for name, array in wanted.items():
        assert (tmp_path / "all" / "train" / name).read_bytes() == array.tobytes(), name


def test_a_folder_written_by_hand_is_read(tmp_path):
    """The files as they have always been: folders stay of use when the code goes on."""
    data = {"ids.bin": np.array([5, 6, 7, 8, 9], "<u2"), "offsets.bin": np.array([0, 3], "<i8"),
            "lengths.bin": np.array([[2, 3], [3, 1]], "<i4")}
    for name, array in data.items():
        (tmp_path / name).write_bytes(array.tobytes())
    files = {name: {"bytes": array.nbytes, "sha256": hashlib.sha256(array.tobytes()).hexdigest()} for name, array in data.items()}
    manifest = {"pairs": 2, "tokens": 5, "longest": [3, 3], "dtype": "<u2", "dropped": 0, "languages": ["en", "de"],
                "vocabulary": "0" * 64, "files": files}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    pairs = EncodedPairs(tmp_path, check=True)
    assert list(pairs) == [([5], [6, 7]), ([8, 9], [])] and pairs.longest == (3, 3)


def test_progress_is_told_in_pairs_and_bytes(corpus, tmp_path, capsys):
    told = []
    pairs = write_encoded(TEXTS, Letters(), tmp_path / "p", max_length=20, chunk=30, report=lambda *row: told.append(row))
    assert [read for read, _ in told] == [30, 60, 90, 120, 150, 180, 200]
    assert told[-1][1] == sum(file["bytes"] for file in pairs.manifest["files"].values()) and sorted(told) == told
    prepare_corpus("mine", tmp_path / "quiet", 300)
    assert capsys.readouterr().err == ""
    prepare_corpus("mine", tmp_path / "told", 300, show_progress=True)
    said = capsys.readouterr().err
    assert "1 of 2, vocabulary: 204 pairs" in said and "2 of 2, encoding: 100%" in said and "200/200" in said
    size = sum(file["bytes"] for file in load_prepared(tmp_path / "told").train.manifest["files"].values())
    assert f"{size / 1000:.2f}kB of about {size / 1000:.2f}kB]" in said


def test_what_the_disk_will_take_is_told_from_the_first_chunks(capsys):
    with module.tqdm(desc="encoding", total=1000) as bar:
        module._report(bar, 200, 50_000)
        assert (bar.n, bar.postfix) == (200, "50.0kB of about 250kB")
        module._report(bar, 300, 90_000)
        assert (bar.n, bar.postfix) == (300, "90.0kB of about 300kB")


def test_the_vocabulary_may_be_learnt_from_a_share(corpus, tmp_path):
    whole, some, again = (prepare_corpus("mine", tmp_path / str(n), 290, share=share, seed=4).tokenizer.as_dict()
                          for n, share in enumerate((1.0, 0.1, 0.1)))
    assert some == again and some != whole


def test_punctuation_is_made_plain_on_request_in_training_and_validation(corpus, tmp_path):
    corpus.train, corpus.valid = [*TEXTS, ("“x” – y’s", "„x“ – y")], [("“y” – x’s", "„y“ – x")]
    plain = [[*TEXTS, ('"x" - y\'s', '"x" - y')], [('"y" - x\'s', '"y" - x')]]
    made, as_it_is = (prepare_corpus("mine", tmp_path / str(wish), 300, normalise=wish) for wish in (True, False))
    assert made.tokenizer.as_dict() == SubwordTokenizer.fit(plain[0], 300).as_dict()
    assert [[tuple(map(made.tokenizer.decode, pair)) for pair in pairs] for pairs in (made.train, made.valid)] == plain
    assert "„" in as_it_is.tokenizer.decode(as_it_is.train[len(TEXTS)][1]) and made.facts["normalise"]


def test_copies_are_cut_anew_and_say_the_same(corpus, tmp_path):
    plain, made, again, other = (prepare_corpus("mine", tmp_path / name, 400, copies=copies, seed=seed) for name, copies, seed in
                                 (("plain", 0, 0), ("made", 3, 0), ("again", 3, 0), ("other", 3, 1)))
    assert [tuple(map(made.tokenizer.decode, pair)) for pair in made.train] == TEXTS * 3
    assert made.train.digest == again.train.digest != other.train.digest
    assert made.valid.digest == plain.valid.digest and made.tokenizer.as_dict() == plain.tokenizer.as_dict()
    assert made.facts["cleaning"] == plain.facts["cleaning"] | {"kept": 600} and made.facts["copies"] == 3
    first, second, third = (list(made.train)[start : start + 200] for start in (0, 200, 400))
    assert first != second != third != first
    with pytest.raises(ValueError, match="copies 3, not 0: give another folder"):
        prepare_corpus("mine", tmp_path / "made", 400)


@pytest.mark.parametrize("wrong", [{"copies": -1}, {"copies": 1001}, {"copies": 2, "model": "wordpiece"}])
def test_copies_that_cannot_be_made_are_named_before_anything_is_read(wrong, tmp_path):
    with pytest.raises(ValueError, match=f"copies={wrong['copies']} is invalid: give 0 to 1000, for 'bpe' alone"):
        prepare_corpus("nothing", tmp_path / "p", 600, **wrong)
    assert not list(tmp_path.iterdir())


def test_a_folder_prepared_before_there_was_normalising_is_found_again(corpus, tmp_path):
    prepare_corpus("mine", tmp_path / "p", 300)
    facts = json.loads((tmp_path / "p" / "prepared.json").read_text(encoding="utf-8"))
    del facts["normalise"], facts["copies"]
    (tmp_path / "p" / "prepared.json").write_text(json.dumps(facts), encoding="utf-8")
    assert len(prepare_corpus("mine", tmp_path / "p", 300).train) == 200
    with pytest.raises(ValueError, match="normalise False, not True"):
        prepare_corpus("mine", tmp_path / "p", 300, normalise=True)


def test_what_cleaning_drops_teaches_the_vocabulary_nothing(corpus, tmp_path):
    copied = [("zyxxyz", "zyxxyz")] * 500  # by far the most frequent word
    corpus.train = PairStream((lambda: copied, lambda: TEXTS))
    made = prepare_corpus("mine", tmp_path / "p", 300)
    assert made.facts["cleaning"]["copied"] == 500 and len(made.train) == 200
    assert made.tokenizer.as_dict() == SubwordTokenizer.fit(TEXTS, 300).as_dict()
    assert len(made.tokenizer.encode("zyxxyz")) == 7, "one id a letter, and one for the space"


def test_long_sentences_are_left_out_of_training(corpus, tmp_path):
    longer = pair_lengths(prepare_corpus("mine", tmp_path / "all", 300).train).max(axis=1)
    limit = 4
    made = prepare_corpus("mine", tmp_path / "p", 300, max_length=limit)
    assert len(made.train) == (longer <= limit).sum() < 200 and max(made.train.longest) <= limit and len(made.valid) == 6
    assert made.facts["cleaning"]["kept"] == len(made.train)
    assert sum(made.facts["cleaning"].values()) == 204


def test_a_preparation_that_fails_leaves_nothing(corpus, tmp_path):
    corpus.train = PairStream((lambda: iter(TEXTS), lambda: (_ for _ in ()).throw(RuntimeError)))
    with pytest.raises(RuntimeError):
        prepare_corpus("mine", tmp_path / "p", 300)
    corpus.train, corpus.valid = TEXTS, []
    with pytest.raises(ValueError, match="no pairs to encode"):
        prepare_corpus("mine", tmp_path / "p", 300)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    with pytest.raises(FileNotFoundError, match="holds no prepared corpus"):
        load_prepared(tmp_path / "p")


@pytest.mark.parametrize("part", ["tokenizer", "train", "valid", "prepared.json"])
def test_parts_of_two_preparations_do_not_go_together(corpus, tmp_path, part):
    prepare_corpus("mine", tmp_path / "one", 300)
    corpus.train, corpus.valid = TEXTS[::-1], TEXTS[7:9]
    prepare_corpus("mine", tmp_path / "two", 290)
    name = part + ".json" * (part == "tokenizer")
    (tmp_path / "one" / name).rename(tmp_path / "gone")
    (tmp_path / "two" / name).rename(tmp_path / "one" / name)
    with pytest.raises(ValueError, match="is not the one that prepared.json names"):
        load_prepared(tmp_path / "one")
    (tmp_path / "one" / "prepared.json").write_text("{")
    with pytest.raises(ValueError, match="prepared.json is damaged"):
        load_prepared(tmp_path / "one")


def test_a_prepared_corpus_is_read_byte_by_byte_on_request(corpus, tmp_path):
    prepare_corpus("mine", tmp_path / "p", 300)
    ids = tmp_path / "p" / "train" / "ids.bin"
    ids.write_bytes(ids.read_bytes()[:-1] + bytes([ids.read_bytes()[-1] ^ 1]))
    assert len(load_prepared(tmp_path / "p").train) == 200
    with pytest.raises(ValueError, match="ids.bin has other contents than it should"):
        load_prepared(tmp_path / "p", check=True)


def test_overlong_pairs_teach_the_vocabulary_nothing(corpus, tmp_path):
    corpus.train = PairStream((lambda: [("zyxxyz " * 30, "zyxxyz " * 29)] * 50, lambda: TEXTS))
    made = prepare_corpus("mine", tmp_path / "p", 300, max_length=20)
    assert made.facts["cleaning"]["overlong"] == 50 and len(made.tokenizer.encode("zyxxyz")) == 7


def test_languages_are_handed_on(corpus, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "load_corpus", lambda *given: asked.append(given) or corpus)
    prepare_corpus("mine", tmp_path / "p", 300, root=tmp_path, source_language="en", target_language="de")
    assert asked == [("mine", tmp_path, "en", "de")]


def test_another_process_reads_the_same(folder):
    code = f"from annotated.batches import *; p = EncodedPairs({str(folder)!r}); print(p.digest, p[42], len(list(p)))"
    pairs = EncodedPairs(folder)
    assert run_python(code) == f"{pairs.digest} {pairs[42]} 200\n"


def test_within_a_length_the_difference_of_the_sides_rises_and_falls_by_turns():
    lengths = np.array([(source, target) for target in (4, 5, 6, 7) for source in range(1, target + 1)])
    walk = lengths[np.concatenate(token_batches(lengths, 1000, order="sorted"))]
    for target in (4, 5, 6, 7):
        sources = walk[walk[:, 1] == target, 0].tolist()
        assert sources == sorted(sources, reverse=target % 2 == 0)


@pytest.mark.parametrize("max_tokens, d_model", [(40, 16), (64, 16), (97, 1), (97, 512), (500, 16)])
def test_no_batch_takes_more_than_the_largest(max_tokens, d_model):
    draw = np.random.default_rng(max_tokens)
    pairs = [([4] * n, [5] * m) for n, m in draw.integers(0, 40, (60, 2)).tolist()]
    longer = pair_lengths(pairs).max(axis=1)

    def cost(rows, longest):
        return rows * longest * (d_model + longest)

    rows, longest = largest_batch(pairs, max_tokens, d_model)
    cut = chain.from_iterable(token_batches(pair_lengths(pairs), max_tokens, order, seed)
                              for order in ("bucketed", "random") for seed in range(20))
    assert max(cost(len(batch), longer[batch].max()) for batch in cut) <= cost(rows, longest)
    assert longest in longer and (longer <= longest).sum() >= rows and rows * longest <= max_tokens, "no such batch"


def test_the_longest_pair_counts_wherever_it_stands():
    long, short = ([4] * 9, [5]), ([4], [5])
    assert largest_batch([long, short], 10, 8) == largest_batch([short, long], 10, 8) == (1, 10)


def test_every_pair_of_every_split_has_to_fit(tmp_path):
    short, long = [([4] * 3, [5]), ([4], [5] * 8)], [([4], [5]), ([4] * 12, [5] * 2)]
    check_fit(9, train=short, valid=short)
    empty = write_encoded([("", ""), ("", "")], Letters(), tmp_path / "empty")
    assert list(empty) == [([], []), ([], [])] and empty.ids.shape == (0,)
    with pytest.raises(ValueError, match=r"valid: pair 1 has 13 tokens with its end token, more than max_tokens=9: raise"):
        check_fit(9, train=short, valid=long)
    with pytest.raises(ValueError, match="train is empty: give at least one pair"):
        check_fit(9, train=[], valid=short)
    encoded = write_encoded([("a", "b"), ("c" * 12, "de")], Letters(), tmp_path / "long")
    check_fit(13, train=encoded)
    with pytest.raises(ValueError, match="train: pair 1 has 13 tokens"):
        check_fit(12, train=encoded)


def test_a_folder_prepared_the_other_way_round_is_refused(tmp_path, monkeypatch):
    back = [pair[::-1] for pair in TEXTS]
    monkeypatch.setattr(module, "load_corpus", lambda *_: Corpus("toy", "de", "en", back, back[:5], []))
    prepare_corpus("toy", tmp_path / "p", 300, source_language="de")
    assert prepare_corpus("toy", tmp_path / "p", 300, source_language="de").source_language == "de"
    with pytest.raises(ValueError, match=r"languages \['de', 'en'\], not \['en', 'de'\]"):
        prepare_corpus("toy", tmp_path / "p", 300)


def test_a_folder_of_something_else_is_not_prepared(corpus, tmp_path):
    (tmp_path / "p").mkdir()
    with pytest.raises(ValueError, match="holds no prepared corpus: give another folder"):
        prepare_corpus("mine", tmp_path / "p", 300)
