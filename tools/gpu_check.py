"""`make gpu-check`: ten minutes that show whether the GPUs here train as they should, before a run
costs money.

    python tools/gpu_check.py [--device cpu] [--parts versions steps=45 …] [--out FOLDER]

Every part runs in a process of its own, so that a crash ends no other part; a number after a part
is its time limit in seconds. FOLDER gets report.json after each part, and the exit status is 1 if a
part found a fault. With --device cpu a tiny model does the same as far as it can. On a new GPU
`gpu_first_run.sh` measures more.
"""

import argparse
import contextlib
import json
import math
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from annotated.fast import prepare
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.files import write_json
from annotated.model.transformer import TransformerConfig
from annotated.results import provenance
from annotated.training.callbacks import Callback
from annotated.training.checkpoints import load_checkpoint, run_checkpoints
from annotated.training.distributed import check_device, process_group, ranks
from annotated.training.loop import TrainingConfig, train
from annotated.translation.scores import training_flops
from benchmarks.worker import record_syncs

# dense bfloat16 operations a second
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
EXPECTED_MFU = 0.10  # what plain code reaches at width 512
# mean length of the random sentences, distinct tokens in them, updates per row of the log
LENGTH, VOCABULARY, LOG_EVERY = 28, 200, 10
TINY = TransformerConfig(VOCABULARY + 4, N=1, d_model=32, d_ff=64, h=2)
# {part: time limit in seconds}
TIME_LIMITS = {"versions": 60, "steps": 300, "compiled": 500, "resume": 240, "processes": 240}


def train_steps(device, folder=None, dropout=0.0, **options):
    """Return losses, speed, memory and waits of 50 updates of `train` that learn to copy.

    On a GPU the model is base with the paper's batches, or a small one if `folder` keeps its
    checkpoints; on processors it is tiny. Waits: synchronisations of the host with the GPU per
    step, median and maximum.
    """
    cuda = torch.device(device).type == "cuda"
    small = replace(TINY, N=3, d_model=256, d_ff=1024)
    config, tokens, factor = ((TINY, 1024, 1.0) if not cuda else (small, 4096, 1.0) if folder
                              else (TransformerConfig.base(), 25_000, 0.1))
    training = TrainingConfig(steps=50, warmup=100, factor=factor, **{
        "validate_every": LOG_EVERY, "save_every": LOG_EVERY, "max_tokens": tokens, **options})
    rng, rows, counts = random.Random(0), [], []
    weights = [1 / rank for rank in range(1, VOCABULARY + 1)]  # unequal, which is learned soon
    sentences = (rng.choices(range(4, VOCABULARY + 4), weights, k=rng.randint(12, 2 * LENGTH - 12))
                 for _ in range(tokens if folder else 2 * tokens * training.steps // LENGTH))
    pairs = [(ids, ids) for ids in sentences]
    torch.manual_seed(0)
    model = prepare.prepared_transformer(replace(config, dropout=dropout)).to(device)
    callback = Callback()
    with record_syncs(torch.device(device).type) as syncs:
        callback.on_step = lambda run: counts.append(len(syncs))
        train(model, pairs, pairs[:64], training, False, folder, None,
              lambda row: rows.append((time.perf_counter(), row)), ChunkedLoss, [callback])
    waits = [after - before for step, (before, after) in enumerate(pairwise(counts), start=2)
             if step % LOG_EVERY]  # validation waits, too
    (first, start), (last, end) = rows[0], rows[-1]
    speed = (end["tokens"] - start["tokens"]) / max(last - first, 1e-9)
    memory = (torch.cuda.max_memory_allocated(device) if cuda
              else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    return {"losses": [row["valid_loss"] for _, row in rows], "memory": memory,
            "tokens per second": round(speed), "waits": [statistics.median_low(waits), max(waits)],
            "share of peak": cuda and share_of_peak(torch.cuda.get_device_name(device),
                                                    speed / ranks()[1], training.precision)}


# -- parts: what each process measures -------------------------------------------------------------


def versions(device, folder):
    """Return versions and GPUs, and why the device cannot be used, if so."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    facts = {"Python": sys.version.split()[0], "PyTorch": torch.__version__,
             "built for CUDA": torch.version.cuda,
             "GPUs": [torch.cuda.get_device_name(i) for i in gpus],
             "memory": [torch.cuda.get_device_properties(i).total_memory for i in gpus],
             "bfloat16": bool(gpus) and torch.cuda.is_bf16_supported(), "refused": None}
    try:
        check_device(device)
    except ValueError as error:
        facts["refused"] = str(error)
    return facts


def steps(device, folder, compile=False):
    """Train in single precision and in bfloat16."""
    return {precision + " compiled" * compile: train_steps(device, precision=precision,
                                                           compile=compile)
            for precision in ("fp32", "bf16")}


def compiled(device, folder):
    """Train with torch.compile, on GPUs only: on processors it takes longer than all the rest."""
    return steps(device, folder, compile=True) if device == "cuda" else {}


def resume(device, folder):
    """Return how far the weights of two runs are apart, and those of a run that is killed and
    resumed.
    """
    def start(name):
        return subprocess.Popen([sys.executable, __file__, "--task", "checkpointed", "--device",
                                 device, "--out", f"{folder}/{name}"])

    statuses = [process.wait() for process in [start(name) for name in ("one", "two")]]
    killed = start("killed")
    while killed.poll() is None and not run_checkpoints(Path(folder, "killed")):
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    statuses += [killed.wait(), start("killed").wait()]
    last = {name: run_checkpoints(Path(folder, name))[-1] for name in ("one", "two", "killed")}
    weights = {name: torch.nn.utils.parameters_to_vector(load_checkpoint(path).model.parameters())
               for name, path in last.items()}
    apart = {name: (weights["one"] - weights[name]).abs().max().item() for name in weights}
    return {"exit statuses": statuses, "last checkpoints": [path.name for path in last.values()],
            "apart, both undisturbed": apart["two"], "apart, killed and resumed": apart["killed"]}


def checkpointed(device, folder):
    """Train once into a folder of checkpoints, for `resume`."""
    train_steps(device, Path(folder), dropout=0.1)


def processes(device, folder):
    """Return the results of one process, and of one for each GPU, started by torchrun."""
    most, facts = torch.cuda.device_count() if device == "cuda" else 2, {}
    for number in (1, most) if most > 1 else ():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={number}", __file__, "--task", "rank", "--device", device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        facts[str(number)] = json.loads(done.stdout.splitlines()[-1])
    return facts or {"not tested": "there is one GPU"}


def rank(device, folder):
    """Train as one process of torchrun; rank 0 returns the results."""
    with process_group(device, timeout=120) as own:
        backend = torch.distributed.get_backend() if ranks()[1] > 1 else "none"
        facts = train_steps(own, precision="bf16" if own.type == "cuda" else "fp32")
        return facts | {"backend": backend} if ranks()[0] == 0 else None


# -- faults ----------------------------------------------------------------------------------------


def share_of_peak(gpu, speed, precision="bf16"):
    """Return the share of its peak that a GPU reaches at `speed` tokens of the base model a second.

    None for a GPU that is not listed. TF32, which fp32 means there, has half the peak of bf16.
    """
    peak = next((peak for known, peak in PEAK_FLOPS.items() if known in gpu), None)
    tokens = TrainingConfig().max_tokens
    flops = training_flops(TransformerConfig.base(), tokens, tokens, 1, tokens / LENGTH) / tokens
    return None if peak is None else flops * speed / (peak if precision == "bf16" else peak / 2)


def faults(part, facts, device, earlier):
    """Yield what is wrong with the facts of a part; earlier: the facts of the parts before it."""
    if part == "versions":
        if facts["refused"]:
            yield (f"{facts['refused']}; PyTorch {facts['PyTorch']} is built for CUDA "
                   f"{facts['built for CUDA']}")
        elif device == "cuda" and not facts["bfloat16"]:
            yield "this GPU has no bfloat16: train with --precision fp32"
    if part in ("steps", "compiled"):
        memory = earlier.get("versions", {}).get("memory")
        single = {**facts, **(earlier.get("steps") or {})}.get("fp32")
        for kind, run in facts.items():
            losses, used, (typical, _) = run["losses"], run["memory"], run["waits"]
            first, last, expected = losses[0], losses[-1], single and single["losses"][-1]
            if not all(map(math.isfinite, losses)) or last > first - 0.3:
                yield f"{kind}: the loss does not fall, it goes from {first:.3f} to {last:.3f}"
            elif single and abs(last - expected) > 0.03 * expected:
                yield f"{kind}: the loss ends at {last:.3f}, in fp32 at {expected:.3f}"
            share = run["share of peak"]
            if "bf16" in kind and share and share < EXPECTED_MFU / 3:
                yield (f"{kind}: {share:.1%} of the GPU's peak; plain code reaches "
                       f"{EXPECTED_MFU:.0%}: is another process on it?")
            if typical:
                yield f"{kind}: the host waits for the GPU {typical} times in each step"
            if memory and used > 0.9 * memory[0]:
                yield (f"{kind}: {used / 1e9:.0f} of {memory[0] / 1e9:.0f} GB in use: train with a "
                       "larger --accumulate")
    if part == "resume":
        statuses, ends = facts["exit statuses"], facts["last checkpoints"]
        noise, apart = facts["apart, both undisturbed"], facts["apart, killed and resumed"]
        if statuses != [0, 0, -signal.SIGKILL, 0] or len(set(ends)) > 1:
            yield f"the runs did not go as planned: exit statuses {statuses}, they ended at {ends}"
        if not apart <= 10 * noise:
            yield (f"killed and resumed the weights lie {apart:.1e} from those of an undisturbed "
                   f"run, two undisturbed runs {noise:.1e} from each other")
    if part == "processes" and "1" in facts:
        alone, together = facts["1"], facts[most := max(facts, key=int)]
        losses = alone["losses"], together["losses"]
        backend = "nccl" if device == "cuda" else "gloo"
        if together["backend"] != backend:
            yield f"the processes speak through {together['backend']}, not {backend}"
        if not all(abs(a - b) <= 0.01 * a for a, b in zip(*losses, strict=True)):
            yield f"one process reaches the losses {losses[0]}, {most} reach {losses[1]}"


def run_part(part, device, seconds):
    """Run a part in a process of its own; returns (its facts or None, why there are none)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--task", part, "--device", device, "--out", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, start_new_session=True)
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, f"no end after {seconds} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        last_line = (errors.strip().splitlines() or ["no message"])[-1]
        return None, f"exit status {process.returncode}: {last_line}"
    return json.loads(out.splitlines()[-1]), None


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", default=[*TIME_LIMITS], help=", ".join(TIME_LIMITS))
    parser.add_argument("--out", default="_build/gpu_check")
    parser.add_argument("--task", help=argparse.SUPPRESS)  # the function that a process runs
    options = parser.parse_args()
    if options.task:
        torch.set_num_threads(1)
        if (facts := globals()[options.task](options.device, options.out)) is not None:
            print(json.dumps(facts))
        return
    limits = dict(text.partition("=")[::2] for text in options.parts)
    if unknown := limits.keys() - TIME_LIMITS.keys():
        parser.error(f"--parts {', '.join(unknown)}: give some of {', '.join(TIME_LIMITS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that runs, too
    report, earlier = {"device": options.device, **provenance(), "parts": {}}, {}
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for part, seconds in limits.items():
        begin = time.time()
        earlier[part], crash = run_part(part, options.device, int(seconds or TIME_LIMITS[part]))
        found = [crash] if crash else list(faults(part, earlier[part], options.device, earlier))
        report["parts"][part] = {"facts": earlier[part], "faults": found,
                                 "seconds": round(time.time() - begin)}
        write_json(Path(options.out, "report.json"), report)
        print(f"{part}: {'FAILED' if found else 'ok'}", *found, json.dumps(earlier[part]),
              sep="\n  ", flush=True)
        if part == "versions" and found:
            break  # nothing else can work
    failed = [part for part, outcome in report["parts"].items() if outcome["faults"]]
    print(f"{options.out}/report.json: "
          + (f"FAILED: {', '.join(failed)}" if failed else "all parts are well"))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
