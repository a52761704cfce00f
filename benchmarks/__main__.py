"""Run the benchmarks: `make bench`, or `python -m benchmarks --only tiny`.

Prints tables, and writes JSON.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from annotated.files import write_json
from annotated.results import provenance

from . import report, summary, workloads
from .harness import LoadMonitor, Worker, WorkerFailed, ask_all, run_rounds, wait_until_idle
from .report import MAX_LOAD

# freed memory stays with the process, in huge pages
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
             "MALLOC_TOP_PAD_": str(1 << 26), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# variables that would choose the threads, or how they wait, in place of a setting
THREADING = ("OMP_", "GOMP_", "KMP_", "MKL_")
# where CTranslate2 is also called directly: task, size, batch
DIRECT_CELLS = {("greedy", "base", 32), ("beam", "base", 1), ("greedy", "tiny", 32),
                ("beam", "tiny", 1)}
HOPELESS = 0.6  # a setting that reaches less of the best one's rate is not tried again
BUILD, RUNS = Path("_build/bench"), Path("results/bench")
TIMEOUT = 600  # seconds of a timed run


def available_memory():
    """Return the bytes that new processes can take (Linux)."""
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


def resident_memory(worker):
    """Return the bytes that a worker holds (Linux)."""
    pages = Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def machine_info(options):
    """Return a description of the machine for the results."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.*)", text)
    flags = sorted(set(re.findall(r"\b(?:amx_\w+|avx512_bf16|avx512_vnni|avx2|avx512f)\b", text)))
    return {"processor": model[1] if model else platform.machine(), "flags": flags,
            "cores": os.cpu_count(), "threads": options.threads, "device": options.device, "system":
            platform.system(), "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}


def clean_environment():
    """Return the environment without variables that would choose the threads."""
    return {name: value for name, value in os.environ.items() if not name.startswith(THREADING)}


def checkout(revision):
    """Return a folder with the package of a revision and the present benchmarks."""
    command = ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"]  # a branch moves on
    revision = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    folder = (BUILD / "revisions" / revision).resolve()
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)  # of a start that was interrupted
        part.mkdir(parents=True)
        code = subprocess.run(["git", "archive", revision, "annotated"], capture_output=True,
                              check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(part)], input=code, check=True)
        (part / "benchmarks").symlink_to(Path(__file__).parent.resolve())
        part.rename(folder)
    return folder


def start_worker(system, device):
    """Start a worker process, with the same settings of the allocator for all systems.

    A system may be named with a revision, as "annotated@main".
    """
    environment = {**clean_environment(), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
                   **ALLOCATOR, "ANNOTATED_DATA": str((BUILD / "data").resolve())}
    name, _, revision = system.partition("@")
    folder = checkout(revision) if revision else Path.cwd()
    command = [sys.executable, "-m", "benchmarks.worker", name, device]
    return Worker(command, {**environment, "PYTHONPATH": str(folder)}, BUILD / "workers.log",
                  folder)


class WorkerPool:
    """The worker processes of the contenders in a group of cells.

    `failures` holds the reason for each that failed. `processes` is a list of all living workers,
    to which the pool adds its own.
    """

    def __init__(self, cells, options, processes):
        self.options, self.processes, self.size = options, processes, cells[0].size
        self.failures, self.model_info, self.peak_memory = {}, {}, {}
        self.available = available_memory()
        keys = dict.fromkeys(self.key(cell, contender)
                             for cell in cells for contender in cell.contenders)
        # all start at once, as starting is mostly reading
        self.replicas = {key: [self.start_replica(key)] for key in keys}
        for key, (worker,) in self.replicas.items():
            self.model_info[key] = self.catch_failure(key, lambda w=worker: w.receive(300))

    @staticmethod
    def key(cell, contender):
        """Return which process a contender uses: one per system in training, and one per system and
        precision in decoding, where weights are converted.
        """
        return contender.system, None if cell.task == "train" else contender.precision

    def start_replica(self, key):
        """Start a worker that builds the model of a system; the reply is not waited for."""
        worker = start_worker(key[0], self.options.device)
        self.processes.append(worker)
        worker.send(method="build", size=self.size, precision=key[1])
        return worker

    def replicate(self, key, count):
        """Return `count` workers of a system, of which all but one are started when needed."""
        replicas = self.replicas[key]
        new = [self.start_replica(key) for _ in range(count - len(replicas))]
        for worker in new:
            worker.receive(300)
        replicas += new
        return replicas[:count]

    def catch_failure(self, key, call):
        """Return `call()`, or None after recording why it failed."""
        try:
            return call()
        except WorkerFailed as error:
            self.failures[key] = str(error)
            print(f"    {key[0]} {key[1] or ''} failed: {error}", flush=True)
            return None

    def measure_replicas(self, key, count, warmup, request):
        """Time a batch that is divided among replicas of one thread each: from the first start to
        the last end.
        """
        shares = [len(share) for share in np.array_split(range(request["batch"]), count)]
        requests = [request | {"method": "measure", "setting": (1, 1), "batch": share}
                    for share in shares]
        workers = self.replicate(key, count)
        for first in (True, False) if warmup else (False,):
            replies, seconds = ask_all(workers, [one | {"warmup": first} for one in requests],
                                       TIMEOUT)
        return {"seconds": seconds, "tokens": sum(reply["tokens"] for reply in replies)}

    def measure(self, key, warmup, request, setting):
        """Time a request once.

        Freed memory is returned to the system around it if all processes together would need too
        much.
        """
        worker, (count, _) = self.replicas[key][0], setting
        if count > 1 and key[0].partition("@")[0] not in workloads.INTERNAL_WORKERS:
            reply = self.catch_failure(
                key, lambda: self.measure_replicas(key, count, warmup, request))
        else:
            expected = self.peak_memory.get(key, max(self.peak_memory.values(), default=0))
            held = sum(resident_memory(first) for other, (first, *_) in self.replicas.items()
                       if other != key and first.process.poll() is None)
            # the memory of a GPU is not examined
            trim = self.options.device == "cuda" or held + expected > 0.75 * self.available
            reply = self.catch_failure(key, lambda: worker.ask(
                TIMEOUT, method="measure", warmup=warmup, trim=trim, setting=setting, **request))
            if reply and reply.get("peak"):
                self.peak_memory[key] = max(self.peak_memory.get(key, 0), reply["peak"])
        for used in self.replicas[key]:
            if used.process.poll() is None:
                wait_until_idle(used.process.pid)
        return reply

    def close(self):
        """End all processes of the pool."""
        for worker in itertools.chain(*self.replicas.values()):
            self.processes.remove(worker)
            worker.close()


def measure_request(cell, contender, tokens):
    """Return the request that makes a worker do a cell's work once."""
    common = {"precision": contender.precision, "units": cell.units}
    if cell.task == "train":
        return {"task": "train", "tokens": tokens, **common}
    return {"task": "generate", "beam": 4 if cell.task == "beam" else 1, "batch": cell.batch,
            **common}


def tune(cell, contender, pool, options):
    """Return {setting: tokens per second}, the best of a few timed runs each; empty if the system
    fails.

    The best counts, so that a disturbed run decides nothing. A hopeless setting has one run, as has
    a setting without an alternative.
    """
    key, rates = pool.key(cell, contender), {}
    request = measure_request(cell, contender, options.tokens)
    settings = workloads.settings(cell, options.threads, contender.system)
    for setting in settings:
        runs, deadline = [], time.monotonic() + options.time_scale
        while (len(runs) < min(2, len(settings))
               or time.monotonic() < deadline and len(runs) < 7):
            reply = None if key in pool.failures else pool.measure(key, not runs, request, setting)
            if reply is None:
                return {}
            runs.append(reply["tokens"] / reply["seconds"])
            if runs[0] < HOPELESS * max(rates.values(), default=0.0):
                break
        rates[setting] = max(runs)
    return rates


def run_cell(cell, pool, monitor, options):
    """Measure a cell, each contender in its best setting; returns the cell of the results."""
    contenders = {str(contender): contender for contender in cell.contenders}
    rates = {name: tune(cell, contender, pool, options) for name, contender in contenders.items()}
    best = {name: max(tuned, key=tuned.get) for name, tuned in rates.items() if tuned}
    first_replies, loads = {}, []  # loads: of other programs, in each interval

    def measure(name):
        key = pool.key(cell, contenders[name])
        if key in pool.failures:
            return None
        reply = pool.measure(key, name not in first_replies,
                             measure_request(cell, contenders[name], options.tokens), best[name])
        if reply:
            first_replies.setdefault(name, reply)
        return reply

    def was_quiet():
        if monitor.seconds < 1.5:
            return None
        loads.append(monitor.other_load())
        monitor.start()
        return options.allow_load or loads[-1] <= MAX_LOAD

    monitor.start()
    most = 30 if options.against else 9  # two revisions of one program differ by little
    runs, discarded = run_rounds(contenders, measure, was_quiet, cell.seconds * options.time_scale,
                                 max_rounds=most)
    rows = []
    for name, contender in contenders.items():
        key = pool.key(cell, contender)
        row = {"system": contender.system, "precision": contender.precision, "name": name}
        if key in pool.failures:
            row["failed"] = pool.failures[key]
        elif not runs[name]:
            row["failed"] = "the machine was busy with something else"
        else:
            row |= {"setting": best[name],
                    "tried": [[*setting, round(rate, 1)] for setting, rate in rates[name].items()],
                    "seconds": [round(run["seconds"], 6) for run in runs[name]],
                    "tokens": runs[name][0]["tokens"], "peak": first_replies[name].get("peak"),
                    "waits": first_replies[name].get("waits"), **pool.model_info[key]}
        rows.append(row)
    # of the rounds that were kept
    worst = max((load for load in loads if options.allow_load or load <= MAX_LOAD), default=0.0)
    return {"name": cell.name, "task": cell.task, "size": cell.size, "batch": cell.batch,
            "units": cell.units, "lost_rounds": discarded, "entrants": rows,
            "foreign": {"worst": round(worst, 4)}}


def measure_directly(cell, precision, options):
    """Return what CTranslate2 reaches in a cell without the harness: [[workers, threads, tokens per
    second], …].
    """
    settings = [f"{workers}x{threads}"
                for workers, threads in workloads.settings(cell, options.threads)]
    command = [sys.executable, "-m", "benchmarks.direct_ctranslate2", cell.size, precision,
               "4" if cell.task == "beam" else "1", str(cell.batch), *settings]
    return json.loads(subprocess.run(command, env=clean_environment(), capture_output=True,
                                     text=True, check=True).stdout.splitlines()[-1])


def select_cells(options):
    """Return the cells of this run with the contenders that the options leave, in groups."""
    compiled = options.device == "cuda" if options.compile is None else options.compile
    cells = []
    for cell in workloads.cells(options.device, compiled):
        contenders = [contender for contender in cell.contenders
                      if options.precision in (None, contender.precision)
                      and (not options.systems or contender.system.split(",")[0] in options.systems)
                      and (not options.against or contender.system.startswith("annotated"))]
        if options.against:
            contenders += [replace(contender, system=f"{contender.system}@{options.against}")
                           for contender in contenders]
        if contenders and re.search(options.only, cell.name):
            cells.append(replace(cell, contenders=tuple(contenders)))
    return [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell.group)]


def parse_args(arguments):
    """Parse the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="JSON file (results/bench/NUMBER-MACHINE-REVISION.json; "
        "_build/bench/part.json for a partial run)")
    add("--allow-load", action="store_true",
        help="measure although the machine is busy; above 10 %% the run is marked")
    has_affinity = hasattr(os, "sched_getaffinity")
    add("--threads", type=int, help="the most that a system tries",
        default=len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count())
    add("--only", default="", metavar="REGEX", help="the cells whose name matches")
    add("--systems", type=lambda text: text.split(","),
        help="only these systems, separated by commas")
    add("--precision", choices=["fp32", "bf16", "int8"], help="only this precision")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="train with torch.compile, too, as on a GPU: minutes more for each system")
    add("--against", metavar="REVISION",
        help="compare only this library, as it is here and at a revision")
    add("--time-scale", type=float, default=1.0, help="factor of the seconds spent on each cell")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--tokens", type=int, default=workloads.BATCH_TOKENS,
        help="target tokens of a training batch (25000 suits a GPU)")
    add("--report", type=Path, help="measure nothing: print the tables of this JSON file, or the "
        "summary of all runs in this folder")
    return parser.parse_args(arguments)


def output_path(results, options, folder=RUNS):
    """Return the file that a run goes to: a complete run on processors, of the default work, to the
    stored ones, named by its number, machine and revision.
    """
    default = parse_args([])
    whole = all(getattr(options, name) == getattr(default, name) for name in (
        "only", "systems", "precision", "against", "device", "threads", "tokens", "compile"))
    if not whole or options.time_scale < 1:
        return BUILD / "part.json"
    words = f"{report.machine_name(results['machine'])} {(results['revision'] or 'unknown')[:7]}"
    number = 1 + max((int(path.name.split("-")[0]) for path in folder.glob("[0-9]*-*.json")),
                     default=0)
    return folder / f"{number:02d}-{re.sub('[^a-z0-9]+', '-', words.lower())}.json"


def measure_cells(options, results, monitor, processes, start):
    """Measure all cells into `results`; the first of `processes` measures the machine's rates."""
    unfinished = options.out or BUILD / "unfinished.json"
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    for cells in select_cells(options):
        results["rates"].append(processes[0].ask(method="rates", threads=options.threads))
        wait_until_idle(processes[0].process.pid)
        print(f"[{time.time() - start:.0f} s] {', '.join(cells[0].group)}: starting the systems",
              flush=True)
        pool = WorkerPool(cells, options, processes)
        for cell in cells:
            pool.peak_memory = {}
            result = run_cell(cell, pool, monitor, options)
            results["cells"].append(result)
            print(f"[{time.time() - start:.0f} s]", report.progress_line(result), flush=True)
            peer = report.fastest(result, ["ctranslate2"])
            direct = options.device == "cpu" and (cell.task, cell.size, cell.batch) in DIRECT_CELLS
            if peer and direct:
                result["by_hand"] = measure_directly(cell, peer["precision"], options)
            write_json(unfinished, results)  # for --report, if the run is interrupted
        pool.close()


def main(arguments=None):
    """Measure, or report stored runs; the exit status is 3 on a busy machine."""
    options = parse_args(arguments)
    # so that `finally` ends the workers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.report:
        print(summary.to_markdown(summary.load_runs(options.report)) if options.report.is_dir()
              else report.to_markdown(json.loads(options.report.read_text())))
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    monitor, start = LoadMonitor(), time.time()
    time.sleep(3)
    load = monitor.other_load()
    if load > MAX_LOAD and not options.allow_load:
        print(f"This machine is busy with something else ({load:.0%} of it): figures "
              "would mean nothing. Wait, or give --allow-load and get a report that says so.",
              file=sys.stderr)
        return 3
    (BUILD / "workers.log").unlink(missing_ok=True)
    results = {"command": shlex.join(["python", "-m", "benchmarks",
                                      *(sys.argv[1:] if arguments is None else arguments)]),
               "machine": machine_info(options),
               "metric": "seconds of wall clock of each timed run; tokens are "
               "real target tokens (training), generated tokens of the best hypothesis "
               "(decoding); peak: bytes resident; waits: synchronisations of the host with a GPU, "
               "per step (three of ours and two of a peer's are the harness's) or batch; setting: "
               "workers and threads of each, the fastest of those tried, each with the tokens per "
               "second of a few runs",
               "data": f"random ids; {options.tokens} target tokens a batch; decoding "
               f"{workloads.TARGET_LENGTH} tokens from {workloads.SOURCE_LENGTH}", "seed": 0,
               "rates": [], "cells": [], **provenance()}
    processes = [start_worker("annotated", options.device)]
    monitor.workers = lambda: processes
    try:
        measure_cells(options, results, monitor, processes, start)
    finally:
        for worker in processes:
            worker.close(kill=True)
    results["seconds"] = round(time.time() - start)
    worst = max((cell["foreign"]["worst"] for cell in results["cells"]), default=0.0)
    results |= {"load": {"before": round(load, 4), "worst": worst},
                "disturbed": max(load, worst) > MAX_LOAD}
    out = options.out or output_path(results, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, results)
    print("\n" + report.to_markdown(results))
    print(f"\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
