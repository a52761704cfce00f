"""`make gpu-check`: ten minutes that say whether the GPUs here train and translate as they should,
before a run costs money.

    python tools/gpu_check.py [--device cpu] [--parts versions steps=45 …] [--out FOLDER]

Every part runs in a process of its own, so that one that dies takes no other with it, and may take
as many seconds as stand behind it. FOLDER gets report.json after each part, to read or to send; the
exit status is 1 if a part found a fault. With --device cpu a tiny model goes the same way as far as
that goes. `gpu_first_run.sh` has this and the rest that a GPU that is new to the book should say.
"""

import argparse
import contextlib
import json
import math
import os
import platform
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

# dense bfloat16, operations a second
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
USUAL = 0.10  # of the peak: what plain code reaches at width 512
# mean length of the made-up sentences, entries in them, updates a row of the log
LENGTH, VOCABULARY, EVERY = 28, 200, 10
TINY = TransformerConfig(VOCABULARY + 4, N=1, d_model=32, d_ff=64, h=2)
# seconds a part may take
TIMES = {"versions": 60, "steps": 300, "compiled": 500, "resume": 240, "processes": 240}


def updates(device, folder=None, dropout=0.0, **changes):
    """Losses, speed, memory and waits of 50 updates of `annotated train` on sentences and copies.

    The base model with the paper's batches on a GPU, a tiny one on processors; a small one where
    checkpoints are kept. Waits: of the host for the GPU, in the usual step and in the worst one.
    """
    cuda = torch.device(device).type == "cuda"
    small = replace(TINY, N=3, d_model=256, d_ff=1024)
    config, tokens, factor = ((TINY, 1024, 1.0) if not cuda else (small, 4096, 1.0) if folder
                              else (TransformerConfig.base(), 25_000, 0.1))
    options = {"validate_every": EVERY, "save_every": EVERY, "max_tokens": tokens, **changes}
    training = TrainingConfig(steps=50, warmup=100, factor=factor, **options)
    count = tokens if folder else 2 * tokens * training.steps // LENGTH
    draw, rows, counts = random.Random(0), [], []
    weights = [1 / rank for rank in range(1, VOCABULARY + 1)]  # uneven, which is soon learned
    lengths = [max(1, round(draw.gauss(LENGTH, 8))) for _ in range(count)]
    sentences = (draw.choices(range(4, VOCABULARY + 4), weights, k=length) for length in lengths)
    pairs = [(ids, ids) for ids in sentences]
    torch.manual_seed(0)
    model = prepare.prepared_transformer(replace(config, dropout=dropout)).to(device)
    marks = Callback()
    with record_syncs(torch.device(device).type) as found:
        marks.on_step = lambda run: counts.append(len(found))
        train(model, pairs, pairs[:64], training, False, folder, None,
              lambda row: rows.append((time.perf_counter(), row)), ChunkedLoss, [marks])
    waits = [after - before for step, (before, after) in enumerate(pairwise(counts), start=2)
             if step % EVERY]  # a validation waits, too
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


# What is measured, each part in its process

def versions(device, folder):
    """What there is: programs, GPUs."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    facts = {"Python": platform.python_version(), "PyTorch": torch.__version__,
             "built for CUDA": torch.version.cuda, "cores": os.cpu_count(),
             "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
             "GPUs": [torch.cuda.get_device_name(i) for i in gpus],
             "memory": [torch.cuda.get_device_properties(i).total_memory for i in gpus],
             "bfloat16": bool(gpus) and torch.cuda.is_bf16_supported(), "refused": None}
    try:
        check_device(device)
    except ValueError as error:
        facts["refused"] = str(error)
    return facts


def steps(device, folder):
    """50 updates in single precision and in bfloat16."""
    return {precision: updates(device, precision=precision) for precision in ("fp32", "bf16")}


def compiled(device, folder):
    """The same by torch.compile, on GPUs alone: on processors it takes longer than all the rest."""
    kinds = ("fp32", "bf16") if device == "cuda" else ()
    return {f"{precision} compiled": updates(device, precision=precision, compile=True)
            for precision in kinds}


def resume(device, folder):
    """How far apart the weights of two runs end, and those of one that is killed and resumed."""
    def start(name):
        return subprocess.Popen([sys.executable, __file__, "--work", "run", "--device", device,
                                 "--out", f"{folder}/{name}"])

    def weights(name):
        newest = run_checkpoints(Path(folder, name))[-1]
        state = load_checkpoint(newest).model.state_dict()
        return newest.name, torch.cat([weight.flatten() for weight in state.values()])

    undisturbed = [process.wait() for process in [start(name) for name in ("one", "two")]]
    third = start("killed")
    while third.poll() is None and not run_checkpoints(Path(folder, "killed")):
        time.sleep(0.002)
    third.send_signal(signal.SIGKILL)
    statuses = [*undisturbed, third.wait(), start("killed").wait()]
    ends = {name: weights(name) for name in ("one", "two", "killed")}
    apart = {name: (ends["one"][1] - ends[name][1]).abs().max().item()
             for name in ("two", "killed")}
    return {"exit statuses": statuses, "last checkpoints": [name for name, _ in ends.values()],
            "apart, both undisturbed": apart["two"], "apart, killed and resumed": apart["killed"]}


def run(device, folder):
    """Train once into a folder of checkpoints."""
    updates(device, Path(folder), dropout=0.1)


def processes(device, folder):
    """The same updates by one process and by one for each GPU, started by torchrun."""
    most, facts = torch.cuda.device_count() if device == "cuda" else 2, {}
    for number in (1, most) if most > 1 else ():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={number}", __file__, "--work", "together", "--device", device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        facts[str(number)] = json.loads(done.stdout.splitlines()[-1])
    return facts


def together(device, folder):
    """What each of the processes of torchrun does; rank 0 answers."""
    with process_group(device, timeout=120) as own:
        backend = torch.distributed.get_backend() if ranks()[1] > 1 else "none"
        facts = updates(own, precision="bf16" if own.type == "cuda" else "fp32")
        return facts | {"backend": backend} if ranks()[0] == 0 else None


def share_of_peak(gpu, speed, precision="bf16"):
    """The share of its peak that a GPU reaches at so many tokens of the base model a second.

    None for a GPU that is not listed. TF32, which fp32 is there, has half the peak of bf16.
    """
    peak = next((peak for known, peak in PEAK.items() if known in gpu), None)
    tokens = TrainingConfig().max_tokens
    flops = training_flops(TransformerConfig.base(), tokens, tokens, 1, tokens / LENGTH) / tokens
    return None if peak is None else flops * speed / (peak if precision == "bf16" else peak / 2)


def faults(part, facts, device, seen):
    """What is wrong with the facts of a part, sentences; seen: the facts of the parts before it."""
    if part == "versions":
        if facts["refused"]:
            yield (f"{facts['refused']}; PyTorch {facts['PyTorch']} is built for CUDA "
                   f"{facts['built for CUDA']}")
        elif device == "cuda" and not facts["bfloat16"]:
            yield "this GPU has no bfloat16: train with --precision fp32"
    if part in ("steps", "compiled"):
        memory = seen.get("versions", {}).get("memory")
        single = {**facts, **(seen.get("steps") or {})}.get("fp32")
        for kind, run in facts.items():
            losses, used = run["losses"], run["memory"]
            first, last, expected = losses[0], losses[-1], single and single["losses"][-1]
            if not all(map(math.isfinite, losses)) or last > first - 0.3:
                yield f"{kind}: the loss does not fall, it goes from {first:.3f} to {last:.3f}"
            elif single and abs(last - expected) > 0.03 * expected:
                yield f"{kind}: the loss ends at {last:.3f}, in fp32 at {expected:.3f}"
            share, (usual, _) = run["share of peak"], run["waits"]
            if "bf16" in kind and share and share < USUAL / 3:
                yield (f"{kind}: {share:.1%} of the GPU's peak; plain code reaches {USUAL:.0%}: is "
                       "another process on it?")
            if usual:
                yield f"{kind}: the host waits for the GPU {usual} times in each step"
            if memory and used > 0.9 * memory[0]:
                yield (f"{kind}: {used / 1e9:.0f} of {memory[0] / 1e9:.0f} GB in use: train with a "
                       "larger --accumulate")
    if part == "resume":
        statuses, ends = facts["exit statuses"], facts["last checkpoints"]
        usual, apart = facts["apart, both undisturbed"], facts["apart, killed and resumed"]
        if statuses != [0, 0, -signal.SIGKILL, 0] or len(set(ends)) > 1:
            yield f"the runs did not go as planned: exit statuses {statuses}, they ended at {ends}"
        if not apart <= 10 * usual:
            yield (f"killed and resumed the weights lie {apart:.1e} from those of an undisturbed "
                   f"run, two undisturbed runs {usual:.1e} from each other")
    if part == "processes" and facts:
        alone, together = facts["1"], facts[most := max(facts, key=int)]
        losses = alone["losses"], together["losses"]
        backend = "nccl" if device == "cuda" else "gloo"
        if together["backend"] != backend:
            yield f"the processes speak through {together['backend']}, not {backend}"
        if not all(abs(a - b) <= 0.01 * a for a, b in zip(*losses, strict=True)):
            yield f"one process reaches the losses {losses[0]}, {most} reach {losses[1]}"


def measured(part, device, seconds):
    """(facts of a part or None, why there are none) from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--work", part, "--device", device, "--out", folder]
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
    parser.add_argument("--parts", nargs="+", default=[*TIMES], help=", ".join(TIMES))
    parser.add_argument("--out", default="_build/gpu_check")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # what one of the processes does
    options = parser.parse_args()
    if unknown := {text.partition("=")[0] for text in options.parts} - TIMES.keys():
        parser.error(f"--parts {', '.join(unknown)}: give some of {', '.join(TIMES)}")
    if options.work:
        torch.set_num_threads(1)
        if (facts := globals()[options.work](options.device, options.out)) is not None:
            print(json.dumps(facts))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part that works ends, too
    report, seen = {"device": options.device, "when": time.strftime("%Y-%m-%d %H:%M"),
                    **provenance(), "parts": {}}, {}
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for part, _, seconds in (text.partition("=") for text in options.parts):
        begin = time.time()
        seen[part], died = measured(part, options.device, int(seconds or TIMES[part]))
        wrong = [died] if died else list(faults(part, seen[part], options.device, seen))
        report["parts"][part] = {"facts": seen[part], "faults": wrong,
                                 "seconds": round(time.time() - begin)}
        write_json(Path(options.out, "report.json"), report)
        print(f"{part}: {'FAILED' if wrong else 'ok'}", *wrong, json.dumps(seen[part]), sep="\n  ",
              flush=True)
        if part == "versions" and wrong:
            break  # nothing else can work
    failed = [part for part, outcome in report["parts"].items() if outcome["faults"]]
    print(f"{options.out}/report.json: "
          + (f"FAILED: {', '.join(failed)}" if failed else "all parts are well"))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
