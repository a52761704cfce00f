"""Kill a training run with `kill -9` at random moments, go on each time, and compare its end with an undisturbed run.

    python tools/kill_loop.py --kills 20 --processes 2

Weights, optimiser, random numbers and log must be equal to the last bit. Of two processes one is killed; the other has
to end by itself within a minute. Prints what happened as JSON; the exit status is 1 if anything differs.
"""

import argparse
import json
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

from annotated.checkpoints import MANIFEST, run_checkpoints
from annotated.training import TrainingConfig, process_group, train
from annotated.transformer import Transformer, TransformerConfig

STEPS = 150
SIZES = {"N": 1, "d_model": 32, "d_ff": 64, "h": 2, "dropout": 0.1}


def work(folder, rank, processes, port):
    """What one process does: train to the end, from wherever the checkpoints in the folder say."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_PORT": str(port),
                   "MASTER_ADDR": "127.0.0.1"}
    draw = random.Random(0)
    pairs = [([draw.randrange(4, 16) for _ in range(draw.randrange(1, 9))], [draw.randrange(4, 16)]) for _ in range(90)]
    with process_group("cpu"):
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


def finish(ids, limit=60):
    """Wait for processes; True if all ended well. An error if one still runs after `limit` seconds."""
    statuses, deadline = {}, time.time() + limit
    while len(statuses) < len(ids):
        for process in ids:
            if process not in statuses:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    statuses[process] = status
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        begin = time.time()
        if not finish(start(Path(place, "undisturbed"), options.processes)):
            raise SystemExit(Path(place, "undisturbed.errors").read_text())
        duration, expected = time.time() - begin, end(Path(place, "undisturbed"))
        kills, writing, runs, equal = 0, 0, 0, True
        while kills < options.kills:
            folder, runs, done = Path(place, f"run{runs}"), runs + 1, False
            while not done:
                ids = start(folder, options.processes)
                if kills < options.kills:
                    time.sleep(draw.uniform(0, 1.6 * duration / options.kills if options.kills > 2 else duration / 2))
                    victim = draw.choice(ids)
                    running = os.waitid(os.P_PID, victim, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
                    if running:
                        os.kill(victim, signal.SIGKILL)
                        kills += 1
                done = finish(ids)
                writing += bool(list(folder.glob(".step-*"))) and not done
            equal = equal and end(folder) == expected
        report = {"processes": options.processes, "kills": kills, "of them while a checkpoint was written": writing,
                  "runs": runs, "steps": STEPS, "equal to the last bit": equal, "seed": options.seed,
                  "command": f"python tools/kill_loop.py --kills {options.kills} --processes {options.processes}",
                  "machine": f"{platform.machine()}, Python {platform.python_version()}, PyTorch {torch.__version__}"}
    print(json.dumps(report))
    sys.exit(not equal)


if __name__ == "__main__":
    main()
