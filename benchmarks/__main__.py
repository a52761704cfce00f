"""Run the benchmarks: `make bench`, or `python -m benchmarks --only tiny`.

Prints tables, writes JSON and pictures.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from . import over, report, work
from .protocol import Watch, Worker, WorkerFailed, rounds, settle
from .report import FOREIGN

# kept from step to step, and in large pages
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
             "MALLOC_TOP_PAD_": str(1 << 26), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# environment that would choose threads, or how they wait, in place of a setting
THREADING = ("OMP_", "GOMP_", "KMP_", "MKL_")
BY_HAND = {("greedy", "base", 32), ("beam", "base", 1), ("greedy", "tiny", 32), ("beam", "tiny", 1)}
FAR_BEHIND = 0.6  # of the best setting so far
BUILD, RUNS = Path("_build/bench"), Path("results/bench")


def available_memory():
    """Bytes that new processes could take (Linux)."""
    return int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024


def resident(worker):
    """Bytes that a worker holds (Linux)."""
    pages = Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def machine_facts(options):
    """The machine, in words."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.*)", text)
    flags = sorted(set(re.findall(r"\b(?:amx_\w+|avx512_bf16|avx512_vnni|avx2|avx512f)\b", text)))
    return {"processor": model[1] if model else platform.machine(), "flags": flags,
            "cores": os.cpu_count(), "threads": options.threads, "device": options.device, "system":
            platform.system(), "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}


def checkout(revision):
    """A folder with the package of a revision, to be measured as the present one is."""
    asked = ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"]  # a branch moves on
    revision = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    folder = (BUILD / "revisions" / revision).resolve()
    if not folder.is_dir():
        new = folder.with_suffix(".part")
        shutil.rmtree(new, ignore_errors=True)  # of a start that was interrupted
        new.mkdir(parents=True)
        code = subprocess.run(["git", "archive", revision, "annotated"], capture_output=True,
                              check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(new)], input=code, check=True)
        (new / "benchmarks").symlink_to(Path(__file__).parent.resolve())
        new.rename(folder)
    return folder


class Group:
    """The processes of the systems that some cells share.

    Those that cannot be made are remembered with the reason.
    """

    def __init__(self, cells, options, everyone):
        self.options, self.everyone, self.workers, self.crews = options, everyone, {}, {}
        self.failed, self.facts, self.peaks = {}, {}, {}
        keys = dict.fromkeys(self.key(cell, entrant) for cell in cells for entrant in cell.entrants)
        self.available, self.size = available_memory(), cells[0].size
        for key in keys:  # all at once, as starting is mostly reading
            self.workers[key] = self.build(key)
        for key in keys:
            self.attempt(key, lambda worker: worker.receive(300), self.facts)

    @staticmethod
    def key(cell, entrant):
        """Which process does an entrant's work: in decoding the weights' precision is part of
        it.
        """
        return entrant.system, None if cell.task == "train" else entrant.precision

    @staticmethod
    def start(system, options):
        """A worker, with the allocator's settings for all alike, and none for threads: those are
        set for each visit.
        """
        environment = {name: value
                       for name, value in os.environ.items() if not name.startswith(THREADING)}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **ALLOCATOR,
                        "ANNOTATED_DATA": str((BUILD / "data").resolve())}
        name, _, revision = system.partition("@")
        folder = checkout(revision) if revision else Path.cwd()
        command = [sys.executable, "-m", "benchmarks.worker", name, options.device]
        return Worker(command, {**environment, "PYTHONPATH": str(folder)}, BUILD / "workers.log",
                      folder)

    def build(self, key, number=0):
        """A new worker that makes a system's model."""
        worker = self.everyone[id(self), *key, number] = self.start(key[0], self.options)
        worker.send(do="build", size=self.size, precision=key[1])
        return worker

    def crew(self, key, count):
        """So many workers of a system.

        Those beside the first are started when a batch is shared for the first time.
        """
        crew = self.crews.setdefault(key, [self.workers[key]])
        new = [self.build(key, number) for number in range(len(crew), count)]
        for worker in new:
            worker.receive(300)
        crew += new
        return crew

    def together(self, key, count, first, request):
        """A visit by several workers of one thread, each with its share of the batch: from the
        first start to the last end.
        """
        crew = self.crew(key, count)
        shares = [len(share) for share in np.array_split(range(request["batch"]), count)]
        for asked in (True, False) if first else (False,):
            for worker, share in zip(crew, shares, strict=True):
                worker.send(do="visit", first=asked, setting=(1, 1), **request | {"batch": share})
            replies = [worker.receive(self.options.patience) for worker in crew]
        seconds = max(one["end"] for one in replies) - min(one["start"] for one in replies)
        return {"seconds": seconds, "tokens": sum(one["tokens"] for one in replies)}

    def attempt(self, key, action, keep=None):
        """What the action gives for the worker of `key`.

        None if that fails, and the reason is remembered.
        """
        try:
            result = action(self.workers[key])
        except WorkerFailed as error:
            self.failed[key] = str(error)
            print(f"    {key[0]} {key[1] or ''} failed: {error}", flush=True)
            return None
        if keep is not None:
            keep[key] = result
        return result

    def visit(self, key, first, request, setting):
        """One visit; memory is given back around it if the processes together would take too
        much.
        """
        worker, (count, _) = self.workers[key], setting
        if count > 1 and key[0] not in work.WITH_WORKERS:
            reply = self.attempt(key, lambda _: self.together(key, count, first, request))
            for one in self.crews[key]:
                if one.process.poll() is None:
                    settle(one.process.pid)
            return reply
        expected = max(self.peaks.get(key, 0),
                       max(self.peaks.values(), default=0) if key not in self.peaks else 0)
        held = sum(resident(other) for name, other in self.workers.items() if name != key
                   and other.process.poll() is None)
        # a GPU's memory is not looked at
        trim = self.options.device == "cuda" or held + expected > 0.75 * self.available
        reply = self.attempt(key, lambda worker: worker.ask(
            self.options.patience, do="visit", first=first, trim=trim, setting=setting, **request))
        if reply and reply.get("peak"):
            self.peaks[key] = max(self.peaks.get(key, 0), reply["peak"])
        if worker.process.poll() is None:
            settle(worker.process.pid)
        return reply

    def close(self):
        """End all processes."""
        for name in [name for name in self.everyone if name[0] == id(self)]:
            self.everyone.pop(name).close()


def request_of(cell, entrant, tokens):
    """What a worker is asked for an entrant of a cell."""
    common = {"precision": entrant.precision, "units": cell.units}
    if cell.task == "train":
        return {"kind": "train", "tokens": tokens, **common}
    return {"kind": "write", "beam": 4 if cell.task == "beam" else 1, "batch": cell.batch, **common}


def try_settings(cell, entrant, group, options):
    """{setting: tokens per second} of the best of a few visits each; empty if the system fails.

    The best, since a visit that something else disturbed must not decide. A setting that is far
    behind gets no second visit, nor need the only one have it.
    """
    key, request, tried = group.key(cell, entrant), request_of(cell, entrant, options.tokens), {}
    settings = work.settings(cell, options.threads, entrant.system)
    for setting in settings:
        rates, end = [], time.monotonic() + options.effort
        while len(rates) < min(2, len(settings)) or time.monotonic() < end and len(rates) < 7:
            reply = None if key in group.failed else group.visit(key, not rates, request, setting)
            if reply is None:
                return {}
            rates.append(reply["tokens"] / reply["seconds"])
            if rates[0] < FAR_BEHIND * max(tried.values(), default=0.0):
                break
        tried[setting] = max(rates)
    return tried


def run_cell(cell, group, watch, options):
    """Measure one cell, each system in the setting that it does best in.

    Its figures as a dictionary.
    """
    by_name, shares, firsts = {str(entrant): entrant for entrant in cell.entrants}, [], {}
    tried = {name: try_settings(cell, entrant, group, options) for name, entrant in by_name.items()}
    best = {name: max(found, key=found.get) for name, found in tried.items() if found}

    def visit(name):
        key = group.key(cell, by_name[name])
        if key in group.failed:
            return None
        reply = group.visit(key, name not in firsts,
                            request_of(cell, by_name[name], options.tokens), best[name])
        if reply:
            firsts.setdefault(name, reply)
        return reply

    def undisturbed():
        if watch.seconds < 1.5:
            return None
        shares.append((watch.seconds, watch.foreign()))
        watch.start()
        return options.busy_anyway or shares[-1][1] <= FOREIGN

    watch.start()
    most = 30 if options.against else 9  # two revisions of one program differ by little
    visits, lost = rounds(by_name, visit, undisturbed, cell.seconds * options.effort, most=most)
    entrants = []
    for name, entrant in by_name.items():
        key = group.key(cell, entrant)
        row = {"system": entrant.system, "precision": entrant.precision, "name": name}
        if key in group.failed:
            row["failed"] = group.failed[key]
        elif not visits[name]:
            row["failed"] = "the machine was busy with something else"
        else:
            row |= {"setting": best[name],
                    "tried": [[*setting, round(rate, 1)] for setting, rate in tried[name].items()],
                    "seconds": [round(one["seconds"], 6) for one in visits[name]],
                    "tokens": visits[name][0]["tokens"], "peak": firsts[name].get("peak"),
                    "waits": firsts[name].get("waits"), **group.facts[key]}
        entrants.append(row)
    # of the rounds that were kept
    shares = [(s, f) for s, f in shares if options.busy_anyway or f <= FOREIGN]
    total = sum(seconds for seconds, _ in shares)
    return {"name": cell.name, "task": cell.task, "size": cell.size, "batch": cell.batch,
            "units": cell.units, "lost_rounds": lost, "entrants": entrants,
            "foreign": {"mean": round(sum(s * f for s, f in shares) / total, 4) if total else None,
                        "worst": round(max((f for _, f in shares), default=0.0), 4)}}


def by_hand(cell, entrant, options):
    """What CTranslate2 reaches in a cell when it is called without any of this: [[workers, threads,
    tokens per second], …].
    """
    settings = [f"{workers}x{threads}" for workers, threads in work.settings(cell, options.threads)]
    command = [sys.executable, "-m", "benchmarks.by_hand", cell.size, entrant["precision"],
               "4" if cell.task == "beam" else "1", str(cell.batch), *settings]
    environment = {name: value
                   for name, value in os.environ.items() if not name.startswith(THREADING)}
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True,
                                     check=True).stdout.splitlines()[-1])


def chosen_cells(options):
    """The cells of this run, in groups."""
    compiled = options.device == "cuda" if options.compile is None else options.compile
    cells = []
    for cell in work.cells(options.device, compiled):
        entrants = tuple(entrant for entrant in cell.entrants
                         if options.precision in (None, entrant.precision) and (
                             not options.systems
                             or entrant.system.split(",")[0] in options.systems))
        if entrants and re.search(options.only, cell.name):
            cells.append(replace(cell, entrants=entrants))
    if options.against:
        ours = [[entrant for entrant in cell.entrants if entrant.system.startswith("annotated")]
                for cell in cells]
        both = [(*each, *(replace(one, system=f"{one.system}@{options.against}") for one in each))
                for each in ours]
        cells = [replace(cell, entrants=entrants)
                 for cell, entrants in zip(cells, both, strict=True) if entrants]
    return [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell.group)]


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, help="JSON file (results/bench/NUMBER-MACHINE-REVISION.json; "
        "_build/bench/part.json for a partial run)")
    add("--busy-anyway", action="store_true",
        help="measure although the machine is busy; above 10 %% the run is marked")
    there = hasattr(os, "sched_getaffinity")
    add("--threads", type=int, help="the most that a system tries",
        default=len(os.sched_getaffinity(0)) if there else os.cpu_count())
    add("--only", default="", metavar="REGEX", help="cells whose name this matches")
    add("--systems", type=lambda text: text.split(","),
        help="of these systems only, with commas between them")
    add("--precision", choices=["fp32", "bf16", "int8"], help="in this precision only")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="training also by torch.compile, as on a GPU: minutes more for each system")
    add("--against", metavar="REVISION",
        help="race our own code here against that of a revision, and nothing else")
    add("--effort", type=float, default=1.0, help="times the usual number of seconds for each cell")
    add("--patience", type=float, default=600, help="seconds after which a visit is given up")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--tokens", type=int, default=work.TOKENS,
        help="target tokens of a training batch (25000 suits a GPU)")
    add("--report", type=Path, help="measure nothing: print the tables of this JSON file, and draw "
        "them; of a folder, what its runs found together")
    return parser.parse_args(arguments)


def place(results, options, folder=RUNS):
    """The file that a run goes to: a whole one among those kept, named by its number, its machine
    and its revision.
    """
    if (options.only or options.systems or options.precision or options.against
            or options.effort < 1):
        return BUILD / "part.json"
    words = f"{report.machine_name(results['machine'])} {(results['revision'] or 'unknown')[:7]}"
    number = 1 + max((int(path.name.split("-")[0]) for path in folder.glob("[0-9]*-*.json")),
                     default=0)
    return folder / f"{number:02d}-{re.sub('[^a-z0-9]+', '-', words.lower())}.json"


def race(options, results, watch, workers, start):
    """Measure all cells, and put their figures into `results`.

    `workers` holds the processes that are there.
    """
    from annotated.files import write_json

    measure, so_far = workers["rates"], options.out or BUILD / "so_far.json"
    so_far.parent.mkdir(parents=True, exist_ok=True)
    for cells in chosen_cells(options):
        results["rates"].append(measure.ask(do="rates", threads=options.threads))
        settle(measure.process.pid)
        print(f"[{time.time() - start:.0f} s] {', '.join(cells[0].group)}: starting the systems",
              flush=True)
        group = Group(cells, options, workers)
        for cell in cells:
            group.peaks = {}
            found = run_cell(cell, group, watch, options)
            results["cells"].append(found)
            print(f"[{time.time() - start:.0f} s]", report.one_line(found), flush=True)
            peer = report.best_of(found, ["ctranslate2"])
            if peer and (cell.task, cell.size, cell.batch) in BY_HAND:
                found["by_hand"] = by_hand(cell, peer, options)
            write_json(so_far, results)  # for --report, if the run comes to no end
        group.close()


def main(arguments=None):
    """Measure, or report what was measured; exit status 3 for a busy machine."""
    options = parse(arguments)
    # an end by way of `finally`: the workers end, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.report and options.report.is_dir():
        runs = over.stored(options.report)
        print(over.tables(runs))
        over.draw(runs).savefig(BUILD / "bench_over.png", dpi=130)
        return 0
    if options.report:
        results = json.loads(options.report.read_text())
        print(report.tables(results))
        report.draw(results, BUILD)
        return 0
    watch, start, workers = Watch(), time.time(), {}
    time.sleep(3)
    idle = watch.foreign()
    if idle > FOREIGN and not options.busy_anyway:
        print(f"This machine is busy with something else ({idle:.0%} of it): figures "
              "would mean nothing. Wait, or give --busy-anyway and get a report that says so.",
              file=sys.stderr)
        return 3
    (BUILD / "workers.log").unlink(missing_ok=True)
    watch.workers = lambda: list(workers.values())
    results = {"command": " ".join(["python -m benchmarks",
                                    *(sys.argv[1:] if arguments is None else arguments)]),
               "machine": machine_facts(options), "busy_anyway": options.busy_anyway,
               "metric": "seconds of wall clock a visit, all visits; tokens are "
               "real target tokens (training), written tokens of the best hypothesis "
               "(decoding); peak: bytes resident; waits: of the host for a GPU, in a step (three "
               "of ours and two of a peer's are this harness's) or a batch; setting: workers and "
               "threads of each, the quickest of those tried, each with the tokens per second of a "
               "few visits",
               "data": f"random ids; {options.tokens} target tokens a batch; decoding "
               f" {work.WRITTEN} tokens from {work.SOURCE}", "seed": 0, "rates": [], "cells": []}
    from annotated.results import provenance

    results |= provenance()
    workers["rates"] = Group.start("annotated", options)
    try:
        race(options, results, watch, workers, start)
    finally:
        for worker in workers.values():
            worker.close(kill=True)
    results["seconds"] = round(time.time() - start)
    worst = max((cell["foreign"]["worst"] for cell in results["cells"]), default=0.0)
    results |= {"load": {"before": round(idle, 4), "worst": worst},
                "disturbed": max(idle, worst) > FOREIGN}
    out = options.out or place(results, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    text = report.tables(results)
    (BUILD / "tables.md").write_text(text + "\n")
    print("\n" + text)
    drawn = report.draw(results, BUILD) if find_spec("matplotlib") else ["none without matplotlib"]
    print(f"\n{out}, and pictures: {', '.join(map(str, drawn))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
