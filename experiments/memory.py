"""The memory of encoding and batching a large corpus; each run is a process of its own.

    python experiments/memory.py [--pairs 5000000 1250000] [--out results/memory.json]

Prints (or writes) JSON, and fails if a run exceeds the limit or if four times as many pairs take
much more memory. The pairs are generated: words by Zipf's law, lengths as in European news.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

LIMIT = 1.5e9  # bytes
MAX_TOKENS = 25_000


def synthetic_pairs(count, seed=0, chunk=10_000):
    """Yield `count` pairs of texts of about 25 words a side, generated in chunks."""
    rng = np.random.default_rng(seed)
    syllables = [before + vowel + after for before in "bdfglmnprst" for vowel in "aeiou"
                 for after in ("", "n", "r", "st")]
    lengths = rng.choice(4, 60_000, p=[0.1, 0.4, 0.3, 0.2]) + 1
    lexicon = ["".join(rng.choice(syllables, size)) for size in lengths]
    share = (1 / np.arange(10, len(lexicon) + 10)).cumsum()
    while count > 0:
        source = np.clip(rng.lognormal(3.1, 0.55, min(count, chunk)), 2, 120).round().astype(int)
        target = source * rng.lognormal(0.0, 0.15, len(source))
        target = np.clip(target, 2, 120).round().astype(int)
        places = rng.random(source.sum() + target.sum()) * share[-1]
        words = np.searchsorted(share, places).tolist()
        place = 0
        for first, second in zip(source.tolist(), target.tolist(), strict=True):
            texts = [lexicon[word] for word in words[place : place + first + second]]
            place += first + second
            yield " ".join(texts[:first]), " ".join(texts[first:])
        count -= len(source)


def peak_memory():
    """Return the peak of this process's resident memory in bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(count, folder):
    """Encode `count` pairs and iterate over an epoch; returns the measurements."""
    from annotated.data.batches import epoch_batches, gather, prefetch
    from annotated.data.prepared import EncodedPairs, write_encoded
    from annotated.data.tokenizers import SubwordTokenizer

    facts = {"pairs": count, "peak_after_imports": peak_memory()}
    tokenizer = SubwordTokenizer.fit(islice(synthetic_pairs(count), 50_000), 37_000)
    facts["vocabulary"], start = len(tokenizer), time.time()
    write_encoded(synthetic_pairs(count), tokenizer, folder)
    facts |= {"seconds_encoding": round(time.time() - start), "peak_after_encoding": peak_memory()}
    start = time.time()
    pairs = EncodedPairs(folder)
    facts["milliseconds_to_open"] = round(1000 * (time.time() - start), 1)
    start, seen, tokens, padded = time.time(), np.zeros(count, bool), 0, 0
    batches = prefetch(epoch_batches(pairs, MAX_TOKENS, seed=(0, 0)),
                       lambda indices: (indices, gather(pairs, indices)))
    for number, (indices, batch) in enumerate(batches, start=1):
        if number == 1:
            facts["seconds_to_first_batch"] = round(time.time() - start, 2)
        tokens, padded = tokens + batch.tokens, padded + batch.target_out.numel()
        assert not seen[indices].any()
        seen[indices] = True
    assert seen.all(), "an epoch must hold every pair"
    facts |= {"bytes_on_disk": sum(path.stat().st_size for path in folder.iterdir()),
              "batches": number,
              "target_tokens": tokens, "padding_of_targets": round(1 - tokens / padded, 4),
              "seconds_epoch": round(time.time() - start), "peak_after_epoch": peak_memory()}
    return facts


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[5_000_000, 1_250_000])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--here", type=Path, metavar="FOLDER",
                        help="measure in this process, writing to the folder")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.pairs[0], options.here)))
        return
    from annotated.results import provenance  # here, so that what it imports is not measured

    pairs = " ".join(map(str, options.pairs))
    report = {"command": f"python experiments/memory.py --pairs {pairs}",
              "machine": f"{platform.machine()}, {platform.system()}, "
                         f"Python {platform.python_version()}",
              "metric": "peak resident memory (VmHWM), bytes", "limit": LIMIT,
              "max_tokens": MAX_TOKENS,
              **provenance(), "runs": []}
    for count in options.pairs:
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, __file__, "--pairs", str(count), "--here",
                       f"{place}/encoded"]
            threads = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=threads).stdout
        report["runs"].append(json.loads(output))
        if options.out:
            Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    if not options.out:
        print(json.dumps(report, indent=1))
    peaks = [run["peak_after_epoch"] for run in report["runs"]]
    if max(peaks) > LIMIT or len(set(options.pairs)) > 1 and max(peaks) - min(peaks) > 2e8:
        raise SystemExit(f"too much memory: {', '.join(f'{size / 1e6:,.0f} MB' for size in peaks)}")


if __name__ == "__main__":
    main()
