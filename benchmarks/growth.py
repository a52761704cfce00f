"""How cost grows with work: `python -m benchmarks.growth` varies one thing at a time, ours beside
the quickest peer, and writes JSON.

For each value both systems start anew, each in a process of its own, and take turns. Training is
with JoeyNMT, decoding with CTranslate2, all in fp32. What is expected is counted: the operations
per token, and the numbers that have to be in memory at once.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import work
from .__main__ import BUILD, Group, machine_facts
from .protocol import Watch, WorkerFailed, settle
from .report import FOREIGN

OUT = Path("results/growth.json")
SIZE = replace(work.SIZES["tiny"], positions=4096)
SYSTEMS = {"train": ("annotated", "joeynmt"), "decode": ("annotated", "ctranslate2")}
COMMON = {"length": [16, 32, 64, 128, 256, 512, 1024, 2048], "batch": [],
          "vocabulary": [1000, 4000, 16_000, 64_000], "depth": [1, 2, 4, 8, 16],
          "width": [64, 128, 256, 512]}
AXES = {  # task: {what varies: its values}
    "train": COMMON | {"batch": [512, 1024, 2048, 4096, 8192, 16384]},
    "decode": COMMON | {"batch": [1, 4, 16, 64, 256], "beam": [1, 2, 4, 8, 16], "workers": [1, 2]},
}
VISITS, LEAST = 3, 0.3  # visits of each system; seconds that one takes at least


@dataclass(frozen=True)
class Point:
    """A task with one thing varied: everything else is as in the first lines."""

    task: str
    axis: str
    value: int
    size: work.Size = SIZE
    length: int = 32  # tokens of a sentence, on either side
    tokens: int = 4096  # of a training batch
    batch: int = 8  # sentences that are decoded at once
    beam: int = 1
    # processes, or what the peer has in their place; of one thread each if there are several
    workers: int = 1


def point(task, axis, value):
    """The `Point` of a value; one head has 32 numbers, and d_ff is twice d_model."""
    size = {"vocabulary": lambda: replace(SIZE, vocab_size=value),
            "depth": lambda: replace(SIZE, N=value), "width": lambda:
            replace(SIZE, d_model=value, d_ff=2 * value, h=value // 32)}.get(axis, lambda: SIZE)()
    changes = {"length": {"length": value},
               "batch": {"tokens" if task == "train" else "batch": value}, "beam": {"beam": value},
               "workers": {"workers": value, "batch": 32}}.get(axis, {})
    return Point(task, axis, value, size, **changes)


# -- what is expected ------------------------------------------------------------------------------


def operations(one):
    """Floating-point operations per token of the work."""
    if one.task == "train":
        return 3 * work.forward_flops(one.size, [[one.length, one.length]]) / one.length
    rates = {"fp32": 1.0, "bandwidth": 1.0}
    flops, *_ = work.decoding_floor(one.size, 1, one.beam, rates, "fp32", one.length, one.length)
    return flops / one.length


def numbers(one):
    """Numbers in memory at once, about: weights (with gradients and Adam's means) and what each
    position leaves behind.
    """
    size, weights = one.size, sum(one.size.weights)
    if one.task == "decode":
        rows, kept = one.batch * one.beam, 2 * size.d_model * size.N * one.length
        # kept keys and values, twice where rows move
        return weights + 2 * rows * kept + one.batch * kept + rows * size.vocab_size
    # encoder and decoder, what backward needs; the fused function keeps no scores
    layers = size.N * (24 * size.d_model + 4 * size.d_ff)
    # ours makes 128 MB of them at a time
    logits = min(one.tokens, (1 << 25) // size.vocab_size) * size.vocab_size
    return 4 * weights + one.tokens * layers + logits


# -- what is measured ------------------------------------------------------------------------------


def request_of(one, units):
    """What a worker is asked for a point."""
    common = {"do": "visit", "precision": "fp32", "units": units}
    if one.task == "train":
        return {**common, "kind": "train", "tokens": one.tokens, "length": one.length}
    return {**common, "kind": "write", "beam": one.beam, "batch": one.batch, "source": one.length,
            "written": one.length}


def setting(one, system, threads):
    """(workers, threads of each) that suit a system: as the runs of `make bench` found, if no axis
    says otherwise.
    """
    if one.axis == "workers":
        return one.workers, 1
    return (min(threads, one.batch), 1) if system == "ctranslate2" else (1, threads)


def measure(one, options, watch):
    """[a row for each system]: tokens per second, the median of its visits, and the peak of its
    memory.
    """
    alive, workers = {}, {}
    for system in SYSTEMS[one.task]:
        several = one.workers if system == "annotated" else 1
        alive[system] = [Group.start(system, options) for _ in range(several)]
    workers = [worker for crew in alive.values() for worker in crew]
    watch.workers = lambda: workers
    rows = []
    try:
        for crew in alive.values():
            for worker in crew:
                worker.ask(300, do="build", size=asdict(one.size),
                           precision=None if one.task == "train" else "fp32")
        seconds, tokens, peaks, units = ({system: [] for system in alive}, {}, {}, {})
        for turn in range(VISITS + 1):
            for system, crew in alive.items():
                split = ((1, setting(one, system, options.threads)[1]) if len(crew) > 1
                         else setting(one, system, options.threads))
                shared = one if len(crew) == 1 else replace(one, batch=one.batch // len(crew))
                for worker in crew:
                    worker.send(**request_of(shared, units.get(system, 1)), setting=split,
                                first=not turn)
                replies = [worker.receive(600) for worker in crew]
                took = max(reply["end"]
                           for reply in replies) - min(reply["start"] for reply in replies)
                for worker in crew:
                    settle(worker.process.pid)
                # how long it takes, and what it needs; the first turn counts for nothing else
                if not turn:
                    units[system] = max(1, round(LEAST / took))
                    peaks[system] = sum(reply["peak"] or 0 for reply in replies)
                    continue
                seconds[system].append(round(took, 5))
                tokens[system] = sum(reply["tokens"] for reply in replies)
        speeds = {system: tokens[system] / statistics.median(seconds[system]) for system in alive}
        rows = [{"system": system, "tokens_per_second": round(speeds[system], 1),
                 "seconds": seconds[system], "tokens": tokens[system], "peak": peaks[system]}
                for system in alive]
    except WorkerFailed as error:
        rows = [{"system": system, "failed": str(error)} for system in alive]
    finally:
        for worker in workers:
            worker.close(kill=True)
    return rows


def main(arguments=None):
    """Measure all points, and write the file after each.

    Those that are in it already are not measured again.
    """
    parser = argparse.ArgumentParser("python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="",
                        help="a task, or an axis of a task as in train/length")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    from annotated.results import provenance

    BUILD.mkdir(parents=True, exist_ok=True)
    metric = f"median of {VISITS} visits in turn, fp32; peak: bytes resident in a first visit"
    result = json.loads(options.out.read_text()) if options.out.exists() else {
        "command": "python -m benchmarks.growth", "machine": machine_facts(options), "seed": 0,
        "data": "random ids", "metric": metric, "size": asdict(SIZE), **provenance(), "points": []}
    done, watch = {(p["task"], p["axis"], p["value"]) for p in result["points"]}, Watch()
    for task, axes in AXES.items():
        for axis, values in axes.items():
            for value in values if f"{task}/{axis}".startswith(options.only) else ():
                if (task, axis, value) in done or axis == "workers" and value > options.threads:
                    continue
                one, start = point(task, axis, value), time.time()
                watch.start()
                rows, share = measure(one, options, watch), watch.foreign()
                result["points"].append({"task": task, "axis": axis, "value": value,
                                         "operations": operations(one), "numbers": numbers(one),
                                         "foreign": round(share, 3), **provenance(),
                                         "systems": rows})
                options.out.write_text(json.dumps(result, indent=1) + "\n")
                words = ", ".join(f"{row['system']} "
                                  f"{row.get('tokens_per_second', row.get('failed'))}"
                                  for row in rows)
                print(f"{task} {axis} {value}: {words}{' (disturbed)' * (share > FOREIGN)} "
                      f"[{time.time() - start:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
