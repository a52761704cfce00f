"""Kill a training run with `kill -9`, go on each time, and compare its end with an undisturbed run.

    python experiments/kill_loop.py --kills 20 --processes 2

Each kill has a place, in turn one of PLACES, and a plan drawn from a seed: at which update,
checkpoint and file. The process kills itself there, so nothing depends on how fast a machine is;
what lies in the run folder afterwards must show that place. Weights, optimiser, random numbers and
log must be equal to the last bit. Of two processes one is killed; the other has to end by itself
within a minute. Prints what happened as JSON; the exit status is 1 if anything differs.
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

STEPS, EACH, KEPT = 150, 3, 3  # updates of a run; between two checkpoints; checkpoints that stay
A_RUN = 20  # kills of one run, which has updates for no more
FILES = 5  # of a checkpoint: configuration, weights, optimiser, progress, and last the manifest
SIZES = {"N": 1, "d_model": 32, "d_ff": 64, "h": 2, "dropout": 0.1}
BEFORE, BETWEEN, WRITING, NAMED = PLACES = (
    "before anything was saved since the kill before", "between two checkpoints",
    "while a checkpoint was written",
    "right after a checkpoint took its name")
# at which checkpoint since the start, and at which update after it, or file of it
Kill = namedtuple("Kill", "place rank saves extra")


def plan(kills, processes, seed):
    """As many kills, their places in turn; by the first at NAMED there are old checkpoints."""
    draw = random.Random(seed)
    places = [PLACES[number % len(PLACES)] for number in range(kills)]
    return [Kill(place,
                 draw.randrange(processes) if place in (BEFORE, BETWEEN) else 0,  # rank 0 writes
                 0 if place == BEFORE else draw.randrange(2, 4),
                 draw.randrange(1, 1 + (FILES if place == WRITING else EACH)))
            for place in places]


def aim(kill, folder):
    """Make this process kill itself at the place of a kill, without a word to anybody."""
    calls, begun = Counter(), newest(folder)

    def die_at(module, name, reached):
        """Instead of the call of a module's function for which `reached` is true."""
        original = getattr(module, name)

        def called(*arguments, **named):
            calls[name] += 1
            if reached():
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        setattr(module, name, called)

    def at_update():
        if calls["update_weights"] != kill.saves * EACH + kill.extra:
            return False
        if kill.place == BEFORE:
            return True
        for _ in range(30_000):  # the checkpoint before it is written beside the training
            kept = len([*folder.glob(f"step-*/{OPTIMIZER}")])
            if newest(folder) == begun + kill.saves * EACH and kept <= checkpoints.RESUMABLE:
                return True
            time.sleep(0.002)
        raise TimeoutError(f"update {begun + kill.saves * EACH} is not saved")

    def at_file():
        calls["files"] += 1
        return calls["write_checkpoint"] == kill.saves and calls["files"] == kill.extra

    if kill.place in (BEFORE, BETWEEN):
        return die_at(loop, "update_weights", at_update)
    # count anew, do not die
    die_at(checkpoints, "write_checkpoint", lambda: calls.update(files=-calls["files"]))
    if kill.place == WRITING:
        die_at(checkpoints, "save_file", at_file)
        die_at(checkpoints, "write_json", at_file)
    else:
        die_at(checkpoints, "remove_old_checkpoints",
               lambda: calls["write_checkpoint"] == kill.saves)


def newest(folder):
    """The update of the newest checkpoint in a run folder; 0 if there is none."""
    return max((int(path.name[5:]) for path in run_checkpoints(folder)), default=0)


def work(folder, rank, processes, port):
    """What one process does: train to the end, from wherever the checkpoints in the folder say."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                   "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
    draw = random.Random(0)
    pairs = [([draw.randrange(4, 16) for _ in range(draw.randrange(1, 9))],
              [draw.randrange(4, 16)]) for _ in range(90)]
    with process_group("cpu", timeout=10):
        torch.manual_seed(rank)  # other first weights, which do not matter: those of rank 0 count
        model = Transformer(TransformerConfig(16, **SIZES))
        config = TrainingConfig(steps=STEPS, max_tokens=64, warmup=20, factor=0.3, accumulate=2,
                                validate_every=20, save_every=EACH, keep_last=KEPT)
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
                    aim(kill, folder)
                work(folder, rank, processes, port)
                status = 0
            except BaseException:
                with open(f"{folder}.errors", "a") as file:
                    traceback.print_exc(file=file)
            finally:
                os._exit(status)
    return ids


def parts(folder):
    """The checkpoints in a run folder that are, or were, being written."""
    return {path.name for path in folder.glob(".step-*.part-*") if not path.name.endswith("-old")}


def seen(folder, saved, begun):
    """At which place a run was killed, by its folder; saved, begun: newest checkpoint, `parts`."""
    if parts(folder) - begun:
        return WRITING
    if newest(folder) == saved:
        return BEFORE
    return NAMED if len(run_checkpoints(folder)) > KEPT else BETWEEN  # nothing was removed yet


def finish(ids, limit=60):
    """Wait for processes; their statuses. An error if one runs on `limit` seconds after another."""
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


def end(folder):
    """The digests of the last checkpoint: weights, optimiser, random numbers and log."""
    last = run_checkpoints(folder)[-1]
    assert last.name == f"step-{STEPS:08d}", f"the run ended at {last.name}"
    return json.loads((last / MANIFEST).read_text())["files"]


def run_to_the_end(folder, processes, kills=()):
    """Train in a folder, killed on the way as planned; what each kill left behind, for JSON."""
    done = []
    for kill in kills:
        saved, begun = newest(folder), parts(folder)
        if finish(start(folder, processes, kill))[kill.rank] != signal.SIGKILL:
            raise SystemExit(f"{kill} was not reached: {errors(folder)}")
        if (place := seen(folder, saved, begun)) != kill.place:
            raise SystemExit(f"{kill} shows in the folder as a kill {place}")
        done.append({"place": place, "process": kill.rank, "newest update saved": newest(folder)})
    if any(finish(start(folder, processes))):
        raise SystemExit(f"the run did not go on: {errors(folder)}")
    return done


def errors(folder):
    """What the processes of a run have said before they ended."""
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
    kills, done, equal = plan(options.kills, options.processes, options.seed), [], []
    with tempfile.TemporaryDirectory() as place:
        undisturbed = Path(place, "undisturbed")
        run_to_the_end(undisturbed, options.processes)
        for first in range(0, len(kills), A_RUN):
            folder = Path(place, f"run{first}")
            done += run_to_the_end(folder, options.processes, kills[first:first + A_RUN])
            equal.append(end(folder) == end(undisturbed))
        counts = Counter(kill["place"] for kill in done)
        report = {"processes": options.processes, "kills": len(done),
                  **{f"of them {place}": counts[place] for place in PLACES},
                  "runs": len(equal), "steps": STEPS, "equal to the last bit": all(equal),
                  "seed": options.seed, "each": done,
                  "command": f"python experiments/kill_loop.py --kills {options.kills} "
                             f"--processes {options.processes}",
                  "machine": f"{platform.machine()}, Python {platform.python_version()}, "
                             f"PyTorch {torch.__version__}",
                  **provenance()}
    print(json.dumps(report))
    sys.exit(not all(equal))


if __name__ == "__main__":
    main()
