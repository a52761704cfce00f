"""Kill a training run with `kill -9`, go on each time, and compare its end with an undisturbed run.

    python tools/kill_loop.py --kills 20 --processes 2

The kills fall in turn at a random moment, during the write of a checkpoint, and again before the run has saved anything
since the kill before. Weights, optimiser, random numbers and log must be equal to the last bit. Of two processes one is
killed; the other has to end by itself within a minute. Prints what happened as JSON; the exit status is 1 if anything differs.
"""

import argparse
import json
import math
import os
import platform
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from annotated.checkpoints import MANIFEST
from annotated.files import provenance
from annotated.runs import process_group, run_checkpoints
from annotated.training import TrainingConfig, train
from annotated.transformer import Transformer, TransformerConfig

STEPS = 150
SIZES = {"N": 1, "d_model": 32, "d_ff": 64, "h": 2, "dropout": 0.1}


def work(folder, rank, processes, port):
    """What one process does: train to the end, from wherever the checkpoints in the folder say."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_PORT": str(port),
                   "MASTER_ADDR": "127.0.0.1"}
    draw = random.Random(0)
    pairs = [([draw.randrange(4, 16) for _ in range(draw.randrange(1, 9))], [draw.randrange(4, 16)]) for _ in range(90)]
    with process_group("cpu", timeout=10):
        torch.manual_seed(rank)  # other first weights, which do not matter: those of rank 0 count
        model = Transformer(TransformerConfig(16, **SIZES))
        config = TrainingConfig(steps=STEPS, max_tokens=64, warmup=20, factor=0.3, validate_every=20, save_every=3,
                                keep_last=3, accumulate=2)
        train(model, pairs, pairs[:9], config, show_progress=False, run_folder=folder)


def start(folder, processes):
    """Start all processes of a run; returns their ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ids = []
    for rank in range(processes):
        ids.append(os.fork())
        if ids[-1] == 0:
            status = 1
            try:
                work(folder, rank, processes, port)
                status = 0
            except BaseException:
                with open(f"{folder}.errors", "a") as file:
                    traceback.print_exc(file=file)
            finally:
                os._exit(status)
    return ids


def running(process):
    """True until a process has ended."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def parts(folder):
    """The checkpoints in a run folder that are being written, or were when their process was killed."""
    return {path.name for path in folder.glob(".step-*.part-*") if not path.name.endswith("-old")}


def kill_at(process, seconds):
    """Kill a process after some seconds; False if it had ended by then."""
    time.sleep(seconds)
    alive = running(process)
    if alive:
        os.kill(process, signal.SIGKILL)
    return alive


def kill_while_writing(process, folder, draw):
    """Kill a process between the first and the last file of a checkpoint; False if it ended without an opportunity."""
    seen, saves, wanted = parts(folder), 0, draw.randrange(1, 6)  # not always the first one
    while running(process):
        new = parts(folder) - seen
        if not new:
            continue
        seen, saves = seen | new, saves + 1
        if saves >= wanted:
            time.sleep(draw.uniform(0, 0.004))
            os.kill(process, signal.SIGSTOP)  # is it still at it?
            os.waitid(os.P_PID, process, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if new & parts(folder):
                os.kill(process, signal.SIGKILL)
                return True
            os.kill(process, signal.SIGCONT)
    return False


def finish(ids, limit=60):
    """Wait for processes; True if all ended well. An error if one still runs `limit` seconds after the first ended."""
    statuses, deadline = {}, math.inf
    while len(statuses) < len(ids):
        for process in ids:
            if process not in statuses:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    statuses[process] = status
                    deadline = min(deadline, time.time() + limit)
        if time.time() > deadline:
            for process in ids:
                if process not in statuses:
                    os.kill(process, signal.SIGKILL)
            raise SystemExit(f"a process still runs {limit} s after the others ended")
        time.sleep(0.002)
    return not any(statuses.values())


def end(folder):
    """The digests of the last checkpoint: equal if weights, optimiser, random numbers and log are."""
    last = run_checkpoints(folder)[-1]
    assert last.name == f"step-{STEPS:08d}", f"the run ended at {last.name}"
    return json.loads((last / MANIFEST).read_text())["files"]


def disturb(ids, folder, kind, duration, draw):
    """Kill one of the processes of a run in the way of that kind; True if it was not over before."""
    if kind == "writing":
        return kill_while_writing(ids[0], folder, draw)  # rank 0 writes
    return kill_at(draw.choice(ids), draw.uniform(0, (0.05 if kind == "again" else 0.5) * duration))


def run_to_the_end(folder, options, kinds, counts, duration, draw):
    """Train in a folder, killed on the way as often as is still wanted, and count what happened."""
    newest, done = [None], False
    while not done:
        before = parts(folder)
        ids = start(folder, options.processes)
        if counts["kills"] < options.kills and disturb(ids, folder, kinds[counts["kills"] % len(kinds)], duration, draw):
            counts["kills"] += 1
            done = finish(ids)
            newest.append([path.name for path in run_checkpoints(folder)][-1:])
            counts["of them while a checkpoint was written"] += bool(parts(folder) - before)
            counts["of them before anything was saved since the kill before"] += newest[-1] == newest[-2]
        else:
            done = finish(ids)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, runs, equal = random.Random(options.seed), 0, True
    kinds = ("writing", "again", "moment")
    counts = {"kills": 0, "of them while a checkpoint was written": 0,
              "of them before anything was saved since the kill before": 0}
    with tempfile.TemporaryDirectory() as place:
        begin = time.time()
        if not finish(start(Path(place, "undisturbed"), options.processes)):
            raise SystemExit(Path(place, "undisturbed.errors").read_text())
        duration, expected = time.time() - begin, end(Path(place, "undisturbed"))
        while counts["kills"] < options.kills:
            folder, runs = Path(place, f"run{runs}"), runs + 1
            run_to_the_end(folder, options, kinds, counts, duration, draw)
            equal = equal and end(folder) == expected
        report = {"processes": options.processes, **counts, "runs": runs, "steps": STEPS, "equal to the last bit": equal,
                  "seed": options.seed,
                  "command": f"python tools/kill_loop.py --kills {options.kills} --processes {options.processes}",
                  "machine": f"{platform.machine()}, Python {platform.python_version()}, PyTorch {torch.__version__}",
                  **provenance("tools/kill_loop.py", "annotated/training.py")}
    print(json.dumps(report))
    sys.exit(not equal)


if __name__ == "__main__":
    main()
