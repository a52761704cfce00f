"""Kill a training run with SIGKILL, resume it each time, and compare its end with an undisturbed
run.

    python experiments/kill_loop.py --kills 20 --processes 2

Each kill happens at one of PLACES, in turn, and at an update, checkpoint and file drawn from a
seed. The process kills itself there, so that nothing depends on the speed of the machine; the run
folder must show the place afterwards. Weights, optimiser, random numbers and log must be equal to
the last bit. Of two processes one is killed, and the other has to end by itself within a minute.
Prints a report as JSON; the exit status is 1 if anything differs.
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
from collections import Counter, namedtuple
from pathlib import Path

import torch

from annotated.model.transformer import Transformer, TransformerConfig
from annotated.results import provenance
from annotated.training import checkpoints, loop
from annotated.training.checkpoints import MANIFEST, OPTIMIZER, run_checkpoints
from annotated.training.distributed import process_group
from annotated.training.loop import TrainingConfig, train

STEPS, SAVE_EVERY, KEEP_LAST = 150, 3, 3  # as in TrainingConfig
KILLS_PER_RUN = 20  # a run has no updates for more
FILES = 6  # of a checkpoint: configuration, facts, progress, weights, optimiser, last the manifest
SIZES = {"N": 1, "d_model": 32, "d_ff": 64, "h": 2, "dropout": 0.1}
BEFORE, BETWEEN, WRITING, NAMED = PLACES = (
    "before anything was saved since the kill before", "between two checkpoints",
    "while a checkpoint was written",
    "right after a checkpoint took its name")
# at which checkpoint since the start, and at which update after it, or file of it
Kill = namedtuple("Kill", "place rank saves extra")


def plan_kills(kills, processes, seed):
    """Return a list of kills whose places alternate; before the first at NAMED there are older
    checkpoints.
    """
    rng = random.Random(seed)
    places = [PLACES[number % len(PLACES)] for number in range(kills)]
    return [Kill(place,
                 rng.randrange(processes) if place in (BEFORE, BETWEEN) else 0,  # rank 0 writes
                 0 if place == BEFORE else rng.randrange(2, 4),
                 rng.randrange(1, 1 + (FILES if place == WRITING else SAVE_EVERY)))
            for place in places]


def schedule_kill(kill, folder):
    """Make this process send itself SIGKILL at the place of a kill."""
    calls, begun = Counter(), newest(folder)

    def kill_when(module, name, reached):
        """Replace a function of a module by one that kills the process once `reached()` is true."""
        original = getattr(module, name)

        def called(*arguments, **named):
            calls[name] += 1
            if reached():
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        setattr(module, name, called)

    def at_update():
        if calls["update_weights"] != kill.saves * SAVE_EVERY + kill.extra:
            return False
        if kill.place == BEFORE:
            return True
        for _ in range(30_000):  # the checkpoint before it is written beside the training
            kept = len([*folder.glob(f"step-*/{OPTIMIZER}")])
            if newest(folder) == begun + kill.saves * SAVE_EVERY and kept <= checkpoints.RESUMABLE:
                return True
            time.sleep(0.002)
        raise TimeoutError(f"update {begun + kill.saves * SAVE_EVERY} is not saved")

    def at_file():
        calls["files"] += 1
        return calls["write_checkpoint"] == kill.saves and calls["files"] == kill.extra

    if kill.place in (BEFORE, BETWEEN):
        return kill_when(loop, "update_weights", at_update)
    # count anew, do not die
    kill_when(checkpoints, "write_checkpoint", lambda: calls.update(files=-calls["files"]))
    if kill.place == WRITING:
        kill_when(checkpoints, "save_file", at_file)
        kill_when(checkpoints, "write_json", at_file)
    else:
        kill_when(checkpoints, "remove_old_checkpoints",
               lambda: calls["write_checkpoint"] == kill.saves)


def newest(folder):
    """Return the update of the newest checkpoint in a run folder; 0 if there is none."""
    return max((int(path.name[5:]) for path in run_checkpoints(folder)), default=0)


def train_process(folder, rank, processes, port):
    """Train to the end in one process, from the newest checkpoint in the folder."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                   "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
    rng = random.Random(0)
    pairs = [([rng.randrange(4, 16) for _ in range(rng.randrange(1, 9))],
              [rng.randrange(4, 16)]) for _ in range(90)]
    with process_group("cpu", timeout=10):
        torch.manual_seed(rank)  # the initial weights of rank 0 count
        model = Transformer(TransformerConfig(16, **SIZES))
        config = TrainingConfig(steps=STEPS, max_tokens=64, warmup=20, factor=0.3, accumulate=2,
                                validate_every=20, save_every=SAVE_EVERY, keep_last=KEEP_LAST)
        train(model, pairs, pairs[:9], config, show_progress=False, run_folder=folder)


def start(folder, processes, kill=None):
    """Start all processes of a run, one of which will kill itself as planned; returns their ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ids = []
    for rank in range(processes):
        ids.append(os.fork())
        if ids[-1] == 0:
            status = 1
            try:
                if kill and kill.rank == rank:
                    schedule_kill(kill, folder)
                train_process(folder, rank, processes, port)
                status = 0
            except BaseException:
                with open(f"{folder}.errors", "a") as file:
                    traceback.print_exc(file=file)
            finally:
                os._exit(status)
    return ids


def partial_checkpoints(folder):
    """Return the names of incomplete checkpoints in a run folder."""
    return {path.name for path in folder.glob(".step-*.part-*") if not path.name.endswith("-old")}


def place_of_kill(folder, saved, begun):
    """Return the place at which a run was killed, by its folder.

    saved, begun: the newest checkpoint and the incomplete ones before the kill.
    """
    if partial_checkpoints(folder) - begun:
        return WRITING
    if newest(folder) == saved:
        return BEFORE
    return NAMED if len(run_checkpoints(folder)) > KEEP_LAST else BETWEEN  # nothing was removed yet


def wait_for(ids, limit=60):
    """Wait for processes; returns their statuses, or exits if one still runs `limit` seconds after
    another ended.
    """
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
    return [statuses[process] for process in ids]


def final_digests(folder):
    """Return the digests of the last checkpoint: weights, optimiser, random numbers and log."""
    last = run_checkpoints(folder)[-1]
    assert last.name == f"step-{STEPS:08d}", f"the run ended at {last.name}"
    return json.loads((last / MANIFEST).read_text())["files"]


def run_to_the_end(folder, processes, kills=()):
    """Train in a folder with kills as planned; returns a record of each kill."""
    done = []
    for kill in kills:
        saved, begun = newest(folder), partial_checkpoints(folder)
        if wait_for(start(folder, processes, kill))[kill.rank] != signal.SIGKILL:
            raise SystemExit(f"{kill} was not reached: {read_errors(folder)}")
        if (place := place_of_kill(folder, saved, begun)) != kill.place:
            raise SystemExit(f"{kill} shows in the folder as a kill {place}")
        done.append({"place": place, "process": kill.rank, "newest update saved": newest(folder)})
    if any(wait_for(start(folder, processes))):
        raise SystemExit(f"the run did not go on: {read_errors(folder)}")
    return done


def read_errors(folder):
    """Return the error messages of the processes of a run."""
    errors = Path(f"{folder}.errors")
    return errors.read_text() if errors.exists() else "no error was told"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kills, done, equal = plan_kills(options.kills, options.processes, options.seed), [], []
    with tempfile.TemporaryDirectory() as place:
        undisturbed = Path(place, "undisturbed")
        run_to_the_end(undisturbed, options.processes)
        for first in range(0, len(kills), KILLS_PER_RUN):
            folder = Path(place, f"run{first}")
            done += run_to_the_end(folder, options.processes, kills[first:first + KILLS_PER_RUN])
            equal.append(final_digests(folder) == final_digests(undisturbed))
        counts = Counter(kill["place"] for kill in done)
        report = {"processes": options.processes, "kills": len(done),
                  **{f"of them {place}": counts[place] for place in PLACES},
                  "runs": len(equal), "steps": STEPS, "equal to the last bit": all(equal),
                  "seed": options.seed, "each": done,
                  "command": f"python experiments/kill_loop.py --kills {options.kills} "
                             f"--processes {options.processes} --seed {options.seed}",
                  "machine": f"{platform.machine()}, Python {platform.python_version()}, "
                             f"PyTorch {torch.__version__}",
                  **provenance()}
    print(json.dumps(report))
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
