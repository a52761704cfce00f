"""The cost of making batches from five million pairs on disk, by `Batch.collate` and by `gather`.

    python experiments/gather.py results/data_path.json

The pairs are random ids with lengths as in European news. Measured are the processor milliseconds
for a batch of 25,000 tokens and for one of its eight shares, the processor seconds to the first and
to the last batch of an epoch, and the memory of an epoch.
"""

import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from annotated.data.batches import Batch, epoch_batches, gather, prefetch, real_tokens
from annotated.data.prepared import write_encoded
from annotated.files import write_json
from annotated.results import describe_machine, provenance

MAX_TOKENS, SHARES = 25_000, 8


def random_lengths(count, seed=0, chunk=10_000):
    """Yield `count` pairs of lengths, with a mean of about 29 tokens a side."""
    rng = np.random.default_rng(seed)
    while count > 0:
        source = np.clip(rng.lognormal(3.2, 0.55, min(count, chunk)).round(), 1, 200)
        target = np.clip((source * rng.lognormal(0.03, 0.18, len(source))).round(), 1, 200)
        yield from zip(source.astype(int).tolist(), target.astype(int).tolist(), strict=True)
        count -= len(source)


class RandomTokenizer:
    """A tokenizer that takes lengths in place of texts and returns random ids."""

    def __init__(self, size=37_000, seed=1):
        self.size, self.rng = size, np.random.default_rng(seed)
        self.ids = self.rng.integers(4, size, 1 << 20).tolist()

    def __len__(self):
        return self.size

    def encode_batch(self, texts, language=None):
        places = self.rng.integers(0, len(self.ids) - 200, len(texts)).tolist()
        cut = zip(places, texts, strict=True)
        return [self.ids[place : place + tokens] for place, tokens in cut]

    def digest(self):
        return "random"  # nothing reads the vocabulary of these pairs


def collate_share(pairs, indices, part=0, parts=1):
    """Return a share of a batch in the plain way: collate the whole, then select rows."""
    batch = Batch.collate([pairs[index] for index in indices])
    return Batch(*(side[part::parts] for side in (batch.source, batch.target_in, batch.target_out)))


def median_milliseconds(pairs, batches):
    """Return the median processor time of a batch by function and share, measured in turn; raises
    an AssertionError if the results differ.
    """
    times = {(name, parts): [] for parts in (1, SHARES) for name in ("collate", "gather")}
    for indices in batches:
        for parts in (1, SHARES):
            results = []
            for name, make in (("collate", collate_share), ("gather", gather)):
                start = time.process_time()
                results.append(make(pairs, indices, parts - 1, parts))
                times[name, parts].append(1000 * (time.process_time() - start))
            for side in ("source", "target_in", "target_out"):
                assert torch.equal(*(getattr(batch, side) for batch in results)), f"{side} differs"
    medians = {name: {} for name in ("collate", "gather")}
    for (name, parts), seconds in times.items():
        medians[name]["whole" if parts == 1 else f"one of {parts}"] = round(
            float(np.median(seconds)), 3)
    return medians


def seconds_to_batch(pairs, skip):
    """Return the processor time to the first batch after `skip` batches of an epoch."""
    start = time.process_time()
    with closing(epoch_batches(pairs, MAX_TOKENS, seed=(0, 0))) as batches:
        next(islice(batches, skip, None))
    return round(time.process_time() - start, 2)


def peak_memory():
    """Return the peak of this process's resident memory in bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(count, folder, timed=100):
    """Return all measurements for `count` pairs in a new folder."""
    facts = {"pairs": count, "max_tokens": MAX_TOKENS, "peak_after_imports": peak_memory()}
    pairs = write_encoded(random_lengths(count), RandomTokenizer(), folder)
    facts |= {"bytes_on_disk": sum(path.stat().st_size for path in folder.iterdir()),
              "peak_after_writing": peak_memory()}
    start, processor, number, tokens = time.perf_counter(), time.process_time(), 0, 0
    indices = epoch_batches(pairs, MAX_TOKENS, seed=(0, 0))
    make = partial(gather, pairs, multiple=8)
    for batch in prefetch(indices, make):
        number, tokens = number + 1, tokens + batch.tokens
    facts |= {"batches": number, "target_tokens": tokens, "peak_after_epoch": peak_memory(),
              "seconds_epoch": round(time.perf_counter() - start, 1),
              "processor_seconds_epoch": round(time.process_time() - processor, 1)}
    facts["processor_seconds_to_first_batch"] = seconds_to_batch(pairs, 0)
    facts["processor_seconds_to_last_batch"] = seconds_to_batch(pairs, number - 1)
    batches = list(islice(epoch_batches(pairs, MAX_TOKENS, seed=(0, 1)), timed))
    assert all(real_tokens(pairs, batch) == gather(pairs, batch).tokens for batch in batches)
    return facts | {"timed_batches": len(batches),
                    "milliseconds": median_milliseconds(pairs, batches)}


def main(out, count=5_000_000):
    with tempfile.TemporaryDirectory() as place:
        facts = measure(count, Path(place, "pairs"))
    write_json(out, {
        "data": f"{count:,} synthetic pairs, lengths as in European news, random ids",
        "metric": "milliseconds: median processor time of a batch; seconds_epoch: by the clock; "
                  "peak: resident memory (VmHWM), bytes",
        **facts, "command": "python experiments/gather.py results/data_path.json",
        "machine": describe_machine(),
        **provenance()})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
