"""How cost grows with the work: one quantity varied at a time, for this library beside the fastest
peer.

    _build/bench/venv/bin/python -m benchmarks.growth

For each value both systems start anew in processes of their own and take turns: JoeyNMT in
training, CTranslate2 in decoding, all in fp32. The expected cost is counted: the operations per
token, and the numbers that have to be in memory at once.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from annotated.files import write_json
from annotated.results import provenance

from . import workloads
from .__main__ import BUILD, TIMEOUT, machine_info, start_worker
from .harness import LoadMonitor, WorkerFailed, ask_all, wait_until_idle
from .report import MAX_LOAD

OUT = Path("results/growth.json")
SIZE = replace(workloads.SIZES["tiny"], positions=4096)
SYSTEMS = {"train": ("annotated", "joeynmt"), "decode": ("annotated", "ctranslate2")}
COMMON = {"length": [16, 32, 64, 128, 256, 512, 1024, 2048], "batch": [],
          "vocabulary": [1000, 4000, 16_000, 64_000], "depth": [1, 2, 4, 8, 16],
          "width": [64, 128, 256, 512]}
AXES = {  # task: {quantity that varies: its values}
    "train": COMMON | {"batch": [512, 1024, 2048, 4096, 8192, 16384]},
    "decode": COMMON | {"batch": [1, 4, 16, 64, 256], "beam": [1, 2, 4, 8, 16], "workers": [1, 2]},
}
REPEATS, MIN_SECONDS = 3, 0.3  # timed runs of each system; the least that one takes


@dataclass(frozen=True)
class Point:
    """A task with one quantity varied; the others have these defaults."""

    task: str
    axis: str
    value: int
    size: workloads.Size = SIZE
    length: int = 32  # tokens of a sentence, source and target
    tokens: int = 4096  # of a training batch
    batch: int = 8  # sentences that are decoded together
    beam: int = 1
    # processes, or workers that the peer has within one; several have one thread each
    workers: int = 1


def make_point(task, axis, value):
    """Return the `Point` of a value; a head has 32 dimensions, and d_ff is twice d_model."""
    changes = {"length": {"length": value},
               "batch": {"tokens" if task == "train" else "batch": value}, "beam": {"beam": value},
               "workers": {"workers": value, "batch": 32},
               "vocabulary": {"size": replace(SIZE, vocab_size=value)},
               "depth": {"size": replace(SIZE, N=value)},
               "width": {"size": replace(SIZE, d_model=value, d_ff=2 * value, h=value // 32)}}
    return Point(task, axis, value, **changes[axis])


# -- expected cost ---------------------------------------------------------------------------------


def flops_per_token(point):
    """Return the floating-point operations per token."""
    if point.task == "train":
        return 3 * workloads.forward_flops(point.size, point.length, point.length) / point.length
    rates = {"fp32": 1.0, "bandwidth": 1.0}
    flops, *_ = workloads.decoding_cost(point.size, 1, point.beam, rates, "fp32", point.length,
                                        point.length)
    return flops / point.length


def numbers_in_memory(point):
    """Return about how many numbers are in memory at once: weights (with gradients and Adam's
    means), and what each position keeps.
    """
    size, weights = point.size, sum(point.size.weights)
    if point.task == "decode":
        hypotheses, cache = point.batch * point.beam, 2 * size.d_model * size.N * point.length
        # keys and values, twice where hypotheses are reordered
        return (weights + 2 * hypotheses * cache + point.batch * cache
                + hypotheses * size.vocab_size)
    # activations for the backward pass; the fused attention keeps no scores
    activations = size.N * (24 * size.d_model + 4 * size.d_ff)
    # we compute 128 MB of them at a time
    logits = min(point.tokens, (1 << 25) // size.vocab_size) * size.vocab_size
    return 4 * weights + point.tokens * activations + logits


# -- measurement -----------------------------------------------------------------------------------


def measure_request(point, system, threads):
    """Return the request that makes a worker do the work of a point once, or its share of it.

    Ours and JoeyNMT take all threads, CTranslate2 the setting that the runs of `make bench` found
    best.
    """
    setting = (1, threads)
    if point.axis == "workers":
        setting = (1 if system == "annotated" else point.workers, 1)
    elif system == "ctranslate2":
        setting = (min(threads, point.batch), 1)
    common = {"method": "measure", "precision": "fp32", "setting": setting}
    if point.task == "train":
        return {**common, "task": "train", "tokens": point.tokens, "length": point.length}
    share = point.batch // (point.workers if system == "annotated" else 1)
    return {**common, "task": "generate", "beam": point.beam, "batch": share,
            "source": point.length, "target": point.length}


def measure(point, options, monitor):
    """Return a row for each system: tokens per second, by the median of its timed runs, and the
    peak of its memory.
    """
    replicas = {system: [start_worker(system, "cpu")
                         for _ in range(point.workers if system == "annotated" else 1)]
                for system in SYSTEMS[point.task]}
    workers = sum(replicas.values(), [])
    monitor.workers = lambda: workers
    rows = {system: {"system": system, "seconds": []} for system in replicas}
    requests = {system: measure_request(point, system, options.threads) for system in replicas}
    try:
        for worker in workers:
            worker.ask(300, method="build", size=asdict(point.size),
                       precision=None if point.task == "train" else "fp32")
        for repeat in range(REPEATS + 2):
            for system, own in replicas.items():
                request, row = requests[system] | {"warmup": not repeat}, rows[system]
                replies, seconds = ask_all(own, [request] * len(own), TIMEOUT)
                for worker in own:
                    wait_until_idle(worker.process.pid)
                if repeat > 1:
                    row["seconds"].append(round(seconds, 5))
                    row["tokens"] = sum(reply["tokens"] for reply in replies)
                elif not repeat:  # how long it takes, and how much memory; the next makes the data
                    requests[system]["units"] = max(1, round(MIN_SECONDS / seconds))
                    row["peak"] = sum(reply["peak"] or 0 for reply in replies)
        for row in rows.values():
            row["tokens_per_second"] = round(row["tokens"] / statistics.median(row["seconds"]), 1)
        return list(rows.values())
    except WorkerFailed as error:
        return [{"system": system, "failed": str(error)} for system in replicas]
    finally:
        for worker in workers:
            worker.close(kill=True)


def main(arguments=None):
    """Measure all points that the file lacks, and write it after each."""
    parser = argparse.ArgumentParser("python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="",
                        help="a task, or an axis of a task as in train/length")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    BUILD.mkdir(parents=True, exist_ok=True)
    metric = f"median of {REPEATS} timed runs in turn, fp32; peak: bytes resident in a first run"
    result = json.loads(options.out.read_text()) if options.out.exists() else {
        "command": "python -m benchmarks.growth", "machine": machine_info(options), "seed": 0,
        "data": "random ids", "metric": metric, "size": asdict(SIZE), **provenance(), "points": []}
    here = machine_info(options)
    if any(result["machine"][name] != here[name] for name in here if name != "memory"):
        sys.exit(f"{options.out} is of another machine or number of threads: give another --out")
    # what failed, or was disturbed, is measured again
    result["points"] = [p for p in result["points"] if p["foreign"] <= MAX_LOAD
                        and not any("failed" in row for row in p["systems"])]
    measured = {(p["task"], p["axis"], p["value"]) for p in result["points"]}
    monitor = LoadMonitor()
    for key in ((task, axis, value) for task, axes in AXES.items()
                for axis, values in axes.items() for value in values):
        task, axis, value = key
        if (key in measured or not f"{task}/{axis}".startswith(options.only)
                or axis == "workers" and value > options.threads):
            continue
        point, start = make_point(*key), time.time()
        monitor.start()
        rows, load = measure(point, options, monitor), monitor.other_load()
        result["points"].append({"task": task, "axis": axis, "value": value,
                                 "operations": flops_per_token(point),
                                 "numbers": numbers_in_memory(point), "foreign": round(load, 3),
                                 **provenance(), "systems": rows})
        write_json(options.out, result)
        words = ", ".join(f"{row['system']} {row.get('tokens_per_second', row.get('failed'))}"
                          for row in rows)
        print(f"{task} {axis} {value}: {words}{' (disturbed)' * (load > MAX_LOAD)} "
              f"[{time.time() - start:.0f} s]", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
