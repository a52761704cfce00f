"""The loader: each pair once an epoch, the same batches on all ranks, none repeated after it."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice

import pytest
from small_runs import PAIRS, QUICK

from annotated.data.tokenizers import END
from annotated.training import loader
from annotated.training.loader import BatchLoader


def take(number, config=QUICK, pairs=PAIRS, position=(0, 0)):
    """The first batches of a loader, after a position."""
    with closing(iter(BatchLoader(pairs, config, position=position))) as batches:
        return list(islice(batches, number))


def content(batches):
    """The pairs of batches, padding and special tokens removed."""
    pairs = chain.from_iterable(zip(batch.source.tolist(), batch.target_out.tolist(), strict=True)
                                for batch in batches)
    return [tuple(tuple(i for i in row if i > END) for row in pair) for pair in pairs]


def test_every_epoch_holds_every_pair_once_in_another_order():
    pairs = [([4 + i] * (i % 5 + 1), [4 + i] * (i % 3 + 1)) for i in range(12)]
    batches, orders = take(25, replace(QUICK, max_tokens=12, seed=3), pairs), {}
    for batch in batches:
        (part,) = batch.micro_batches
        assert max(part.source.numel(), part.target_out.numel()) <= 12
        assert batch.tokens == part.tokens
        orders.setdefault(batch.position[0], []).extend(content([part]))
    whole = [orders[epoch] for epoch in list(orders)[:-1]]  # the last was cut off
    assert len(whole) > 2 and len({tuple(order) for order in whole}) == len(whole)
    assert all(Counter(order) == Counter((tuple(x), tuple(y)) for x, y in pairs) for order in whole)


@pytest.mark.parametrize("world, accumulate", [(1, 2), (1, 7), (2, 1), (3, 2)])
def test_ranks_and_micro_batches_share_each_batch(monkeypatch, world, accumulate):
    for batch in take(9):
        ranks = []
        for rank in range(world):
            monkeypatch.setattr(loader, "ranks", lambda rank=rank: (rank, world))
            own = BatchLoader(PAIRS, replace(QUICK, accumulate=accumulate))
            ours = own.load((batch.position, batch.indices))
            assert ours.tokens == batch.tokens and len(ours.micro_batches) == accumulate
            ranks += ours.micro_batches
        real = [part for part in ranks if part.tokens]
        assert Counter(content(real)) == Counter(content(batch.micro_batches))
        rows = [len(part.source) for part in real]
        assert max(rows) - min(rows) <= 1 and all(len(part.source) for part in ranks)
        assert {part.source.shape[1] for part in ranks} == {batch.micro_batches[0].source.shape[1]}


@pytest.mark.parametrize("stop", [1, 3, 4, 9])
def test_going_on_repeats_and_misses_nothing(stop):
    whole = [(batch.position, batch.indices.tolist()) for batch in take(14)]
    later = take(5, position=whole[stop - 1][0])
    assert [(batch.position, batch.indices.tolist()) for batch in later] == whole[stop:][:5]
