"""What it takes to make a batch, plainly and by `gather`, with five million pairs on the disk.

    python experiments/gather.py results/data_path.json

The pairs are made up: lengths as in European news, random ids. Measured are processor milliseconds
a batch of 25,000 tokens, whole and one share of eight; processor seconds to the first batch of an
epoch and to its last one alone; and the memory of an epoch.
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


def lengths(count, seed=0, chunk=10_000):
    """`count` pairs of numbers of tokens, some 29 a side."""
    draw = np.random.default_rng(seed)
    while count > 0:
        source = np.clip(draw.lognormal(3.2, 0.55, min(count, chunk)).round(), 1, 200)
        target = np.clip((source * draw.lognormal(0.03, 0.18, len(source))).round(), 1, 200)
        yield from zip(source.astype(int).tolist(), target.astype(int).tolist(), strict=True)
        count -= len(source)


class Noise:
    """A tokenizer for numbers of tokens in place of texts; its ids are random."""

    def __init__(self, size=37_000, seed=1):
        self.size, self.draw = size, np.random.default_rng(seed)
        self.ids = self.draw.integers(4, size, 1 << 20).tolist()

    def __len__(self):
        return self.size

    def encode_batch(self, texts, language=None):
        places = self.draw.integers(0, len(self.ids) - 200, len(texts)).tolist()
        cut = zip(places, texts, strict=True)
        return [self.ids[place : place + tokens] for place, tokens in cut]

    def as_dict(self):
        return {"size": self.size}


def collated(pairs, indices, part=0, parts=1):
    """A share of a batch as it is made plainly: all of it, and then every so many rows."""
    batch = Batch.collate([pairs[index] for index in indices])
    return Batch(*(side[part::parts] for side in (batch.source, batch.target_in, batch.target_out)))


def milliseconds(pairs, batches):
    """Median processor time of a batch by way and share, in turns; stops where the ways differ."""
    times = {(name, parts): [] for parts in (1, SHARES) for name in ("collate", "gather")}
    for indices in batches:
        for parts in (1, SHARES):
            results = []
            for name, make in (("collate", collated), ("gather", gather)):
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


def seconds_to_a_batch(pairs, skip):
    """Processor time to the first batch after so many of an epoch."""
    start = time.process_time()
    with closing(epoch_batches(pairs, MAX_TOKENS, seed=(0, 0))) as batches:
        next(islice(batches, skip, None))
    return round(time.process_time() - start, 2)


def peak():
    """Most memory that this process ever had resident, in bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(count, folder, timed=100):
    """All figures for `count` pairs in a new folder, as a dictionary."""
    facts = {"pairs": count, "max_tokens": MAX_TOKENS, "peak_after_imports": peak()}
    pairs = write_encoded(lengths(count), Noise(), folder)
    facts |= {"bytes_on_disk": sum(path.stat().st_size for path in folder.iterdir()),
              "peak_after_writing": peak()}
    start, processor, number, tokens = time.perf_counter(), time.process_time(), 0, 0
    indices = epoch_batches(pairs, MAX_TOKENS, seed=(0, 0))
    make = partial(gather, pairs, multiple=8)
    for batch in prefetch(indices, make):
        number, tokens = number + 1, tokens + batch.tokens
    facts |= {"batches": number, "target_tokens": tokens, "peak_after_epoch": peak(),
              "seconds_epoch": round(time.perf_counter() - start, 1),
              "processor_seconds_epoch": round(time.process_time() - processor, 1)}
    facts["processor_seconds_to_first_batch"] = seconds_to_a_batch(pairs, 0)
    facts["processor_seconds_to_last_batch"] = seconds_to_a_batch(pairs, number - 1)
    batches = list(islice(epoch_batches(pairs, MAX_TOKENS, seed=(0, 1)), timed))
    assert all(real_tokens(pairs, batch) == gather(pairs, batch).tokens for batch in batches)
    return facts | {"timed_batches": len(batches), "milliseconds": milliseconds(pairs, batches)}


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
