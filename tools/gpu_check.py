"""`make gpu-check`: ten minutes that say whether the GPUs here train and translate as they should, before a run costs money.

    python tools/gpu_check.py [--device cpu] [--parts versions steps …] [--out FOLDER]

Every part runs in a process of its own, so that one that dies takes no other with it. FOLDER gets report.json and report.txt, a page
to read or to send; the exit status is 1 if a part found a fault. With --device cpu a tiny model goes the same way as far as that goes.
"""

import argparse
import json
import math
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from annotated import fast
from annotated.checkpoints import book_model, load_checkpoint, run_checkpoints
from annotated.corpora import load_corpus
from annotated.decoding import translate
from annotated.distributed import check_device, process_group, ranks
from annotated.evaluation import training_flops
from annotated.files import provenance, write_json
from annotated.training import TrainingConfig, train
from annotated.transformer import TransformerConfig

PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # dense bfloat16, operations a second
USUAL = 0.10  # of the peak: what plain code reaches at width 512
LENGTH, TYPES, EVERY = 28, 200, 10  # mean length of the made-up sentences, types in them, updates a row of the log
TINY = TransformerConfig(TYPES + 4, N=1, d_model=32, d_ff=64, h=2)
SMALL = replace(TINY, N=3, d_model=256, d_ff=1024)
TIMES = {"versions": 60, "steps": 300, "compiled": 500, "resume": 240, "processes": 240, "decode": 120}  # seconds a part may take


def sizes(device):
    """(model, training) of the runs: the paper's base model with its batches on a GPU, a tiny one on processors; 50 updates."""
    numbers = TrainingConfig(steps=50, warmup=100, validate_every=EVERY, save_every=EVERY)
    if device == "cuda":
        return TransformerConfig.base(), replace(numbers, factor=0.1)
    return TINY, replace(numbers, max_tokens=1024, factor=1.0)


def made_up(pairs, seed=0):
    """Pairs of lists of ids, a sentence and its copy; some types are far more frequent than others, which is soon learned."""
    draw, weights = random.Random(seed), [1 / rank for rank in range(1, TYPES + 1)]
    rows = [draw.choices(range(4, TYPES + 4), weights, k=max(1, round(draw.gauss(LENGTH, 8)))) for _ in range(pairs)]
    return [(row, row) for row in rows]


def updates(device, folder=None, dropout=0.0, **changes):
    """Train on made-up pairs by the code of `annotated train`; what came out, speed without the first ten updates, memory."""
    config, numbers = sizes(torch.device(device).type)
    if folder is not None and config != TINY:  # checkpoints of the base model would fill the disk
        config, numbers = SMALL, replace(numbers, max_tokens=4096, factor=1.0)
    numbers, rows = replace(numbers, **changes), []
    enough = made_up(2 * numbers.max_tokens * numbers.steps // LENGTH if folder is None else numbers.max_tokens)
    torch.manual_seed(0)
    model = fast.transformer_to_train(replace(config, dropout=dropout)).to(device)
    begin = time.perf_counter()
    train(model, enough, enough[:64], numbers, False, folder, None, lambda row: rows.append((time.perf_counter(), row)),
          fast.ChunkedLoss)
    (first, start), (last, end) = rows[0], rows[-1]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.device(device).type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return {"losses": [row["valid_loss"] for _, row in rows], "seconds to the first row": round(first - begin, 1),
            "tokens a second": round((end["tokens"] - start["tokens"]) / max(last - first, 1e-9)), "memory": memory}


# What is measured, each part in its process

def versions(device, folder):
    """What there is: programs, driver, GPUs."""
    ask = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    told = subprocess.run(ask, capture_output=True, text=True) if shutil.which(ask[0]) else None
    there = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    found = {"Python": platform.python_version(), "PyTorch": torch.__version__, "built for CUDA": torch.version.cuda,
             "nvidia-smi": "not there" if told is None else (told.stdout or told.stderr).strip(),
             "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"), "cores": os.cpu_count(),
             "compiler": shutil.which("g++") or shutil.which("gcc"),
             "GPUs": [torch.cuda.get_device_name(i) for i in there],
             "memory": [torch.cuda.get_device_properties(i).total_memory for i in there],
             "bfloat16": bool(there) and torch.cuda.is_bf16_supported()}
    if there:
        found |= {"cuDNN": torch.backends.cudnn.version(), "NCCL": list(torch.cuda.nccl.version())}
    try:
        found["refused"] = check_device(device) and None
    except ValueError as error:
        found["refused"] = str(error)
    return found


def steps(device, folder):
    """50 updates in single precision and in bfloat16."""
    return {precision: updates(device, precision=precision) for precision in ("fp32", "bf16")}


def compiled(device, folder):
    """The same by torch.compile, which on processors takes longer than all the rest: there it is not tried."""
    kinds = ("fp32", "bf16") if device == "cuda" else ()
    return {f"{precision} compiled": updates(device, precision=precision, compile=True) for precision in kinds}


def resume(device, folder):
    """Two undisturbed runs, and one that is killed after its first checkpoint and started again: how far their weights lie apart."""
    def start(*names):
        return subprocess.Popen([sys.executable, __file__, "--work", "run", "--device", device, "--out", folder, "--names", *names],
                                stdout=subprocess.DEVNULL)

    def weights(name):
        newest = run_checkpoints(Path(folder, name))[-1]
        return newest.name, torch.cat([weight.flatten() for weight in load_checkpoint(newest).model.state_dict().values()])

    undisturbed = start("one", "two").wait()
    third = start("killed")
    while third.poll() is None and not run_checkpoints(Path(folder, "killed")):
        time.sleep(0.002)
    third.send_signal(signal.SIGKILL)
    killed, left = third.wait(), [path.name for path in run_checkpoints(Path(folder, "killed"))]
    again = start("killed").wait()
    ends = {name: weights(name) for name in ("one", "two", "killed")}
    apart = {name: (ends["one"][1] - ends[name][1]).abs().max().item() for name in ("two", "killed")}
    return {"exit statuses": [undisturbed, killed, again], "checkpoints when killed": left,
            "last checkpoints": [name for name, _ in ends.values()], "apart, both undisturbed": apart["two"],
            "apart, killed and resumed": apart["killed"]}


def run(device, folder, names):
    """Train once into a folder of checkpoints for each name."""
    for name in names:
        updates(device, Path(folder, name), dropout=0.1)


def processes(device, folder):
    """The same updates by one process and by one for each GPU, started by torchrun."""
    most, found = torch.cuda.device_count() if device == "cuda" else 2, {}
    for number in (1, most) if most > 1 else ():
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", __file__,
                   "--work", "together", "--device", device]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found[str(number)] = json.loads(told.stdout.splitlines()[-1])
    return found


def together(device, folder):
    """What each of the processes of torchrun does; rank 0 tells."""
    with process_group(device, timeout=120) as own:
        backend = torch.distributed.get_backend() if ranks()[1] > 1 else "none"
        found = updates(own, precision="bf16" if own.type == "cuda" else "fp32") | {"backend": backend}
        return found if ranks()[0] == 0 else None


def decode(device, folder):
    """The book's model translates 100 sentences on the device and, plainly, on the processor."""
    sentences, right = zip(*load_corpus("toy").test[:100], strict=True)
    saved, found, outputs = book_model(), {}, {}
    there = book_model().model.to(device) if device == "cuda" else fast.prepare(book_model().model, "translate", "fp32", 32)
    for beam in (1, 4):
        for place, model in (("here", saved.model), ("there", there)):
            begin = time.perf_counter()
            outputs[place] = translate(model, saved.tokenizer, sentences, beam=beam)
            seconds = time.perf_counter() - begin
        same, good = (sum(a == b for a, b in zip(outputs["there"], others, strict=True)) for others in (outputs["here"], right))
        words = sum(len(line.split()) for line in outputs["there"])
        found[f"beam {beam}"] = {"as on the processor": same, "as the reference": good, "words a second": round(words / seconds)}
    return found


PARTS = {part.__name__: part for part in (versions, steps, compiled, resume, processes, decode)}


# What is a fault: sentences, none if all is well

def faults_of_versions(found, device):
    """A GPU is wanted and not there, or there is one that has no bfloat16."""
    if found["refused"]:
        yield f"{found['refused']}; PyTorch {found['PyTorch']} built for CUDA {found['built for CUDA']}, nvidia-smi: " \
            f"{found['nvidia-smi']}, CUDA_VISIBLE_DEVICES: {found['CUDA_VISIBLE_DEVICES']}"
    elif device == "cuda" and not found["bfloat16"]:
        yield "this GPU has no bfloat16: train with --precision fp32"


def share_of_peak(name, speed):
    """The share of its peak that a GPU reaches at so many tokens of the base model a second; None for a GPU that is not listed."""
    peak = next((peak for known, peak in PEAK.items() if known in name), None)
    config, numbers = sizes("cuda")
    flops = training_flops(config, numbers.max_tokens, numbers.max_tokens, 1, numbers.max_tokens / LENGTH) / numbers.max_tokens
    return None if peak is None else flops * speed / peak


def faults_of_steps(found, device, gpus=(), memory=(), plain=None):
    """Losses that do not fall, or differ between kinds; less than a third of the usual speed; a full memory."""
    for kind, facts in found.items():
        expected = (plain or found)["fp32"]["losses"][-1]
        losses = facts["losses"]
        if not all(map(math.isfinite, losses)) or losses[-1] > losses[0] - 0.3:
            yield f"{kind}: the loss does not fall, it goes from {losses[0]:.3f} to {losses[-1]:.3f}"
        elif abs(losses[-1] - expected) > 0.03 * expected:
            yield f"{kind}: the loss ends at {losses[-1]:.3f}, in fp32 at {expected:.3f}"
        share = share_of_peak(gpus[0], facts["tokens a second"]) if gpus and "bf16" in kind else None
        if share is not None and share < USUAL / 3:
            yield f"{kind}: {share:.1%} of the peak of {gpus[0]}; plain code reaches {USUAL:.0%}: is another process on it?"
        if memory and facts["memory"] > 0.9 * memory[0]:
            yield f"{kind}: {facts['memory'] / 1e9:.0f} of {memory[0] / 1e9:.0f} GB in use: train with a larger --accumulate"


def faults_of_resume(found, device):
    """A run that was killed ends otherwise than two undisturbed ones differ from each other."""
    if found["exit statuses"] != [0, -signal.SIGKILL, 0] or not found["checkpoints when killed"]:
        yield f"the runs did not go as planned: exit statuses {found['exit statuses']}, killed after {found['checkpoints when killed']}"
    if len(set(found["last checkpoints"])) > 1:
        yield f"the runs ended at {found['last checkpoints']}"
    if not found["apart, killed and resumed"] <= 10 * found["apart, both undisturbed"]:
        yield f"killed and resumed the weights lie {found['apart, killed and resumed']:.1e} from those of an undisturbed run, " \
            f"two undisturbed runs {found['apart, both undisturbed']:.1e} from each other"


def faults_of_processes(found, device):
    """Several processes reach another loss than one, or do not speak through NCCL."""
    if not found:
        return
    one, several = found["1"], found[max(found, key=int)]
    wanted = "nccl" if device == "cuda" else "gloo"
    if several["backend"] != wanted:
        yield f"the processes speak through {several['backend']}, not {wanted}"
    if not all(abs(a - b) <= 0.01 * a for a, b in zip(one["losses"], several["losses"], strict=True)):
        yield f"one process reaches the losses {one['losses']}, {max(found, key=int)} reach {several['losses']}"


def faults_of_decode(found, device):
    """Another output than on the processor in more than 2 of 100 sentences, or fewer than half of them right."""
    for beam, facts in found.items():
        if facts["as on the processor"] < 98:
            yield f"{beam}: {100 - facts['as on the processor']} of 100 sentences are others than on the processor"
        if facts["as the reference"] < 50:
            yield f"{beam}: {facts['as the reference']} of 100 sentences are right"


def judged(part, found, device, seen):
    """The faults of a part; seen: what the parts before it found."""
    if part not in ("steps", "compiled"):
        return list(globals()[f"faults_of_{part}"](found, device))
    there = seen.get("versions") or {}
    plain = (seen.get("steps") or found) if part == "compiled" and found else None
    if plain and "fp32" not in plain:  # the part before was not asked for, or died
        plain = {"fp32": found["fp32 compiled"]}
    return list(faults_of_steps(found, device, there.get("GPUs", ()), there.get("memory", ()), plain))


# The report

def lines_of(part, found, seen):
    """What was measured, in a few lines."""
    if part in ("steps", "compiled"):
        for kind, facts in found.items():
            share = share_of_peak(seen["GPUs"][0], facts["tokens a second"]) if seen.get("GPUs") else None
            hours = 100_000 * 25_000 / max(facts["tokens a second"], 1) / 3600  # the paper's base run
            yield f"{kind:14} loss {facts['losses'][0]:.3f} to {facts['losses'][-1]:.3f}   {facts['tokens a second']:>9,} tokens/s" \
                f"   {facts['memory'] / 1e9:5.1f} GB" + (f"   {share:.1%} of the peak, base in {hours:.1f} h" if share else "")
        if not found:
            yield "not tried on processors"
    elif part == "processes":
        for number, facts in found.items():
            yield f"{number} process(es)   {facts['backend']:5} loss {facts['losses'][-1]:.4f}   {facts['tokens a second']:>9,} tokens/s"
        if not found:
            yield "one GPU: nothing to compare"
    else:
        yield from (f"{name}: {fact}" for name, fact in found.items() if fact is not None)


def page(report):
    """The report as a page of text."""
    seen = report["parts"].get("versions", {}).get("found") or {}
    text = [f"gpu-check with --device {report['device']}, {report['when']}, revision {report['revision'][:7]}", ""]
    for part, facts in report["parts"].items():
        text.append(f"{part}: {'FAILED' if facts['faults'] else 'ok'}, {facts['seconds']} s")
        text += [f"  {line}" for line in lines_of(part, facts["found"], seen)] if facts["found"] is not None else []
        text += [f"  FAULT {fault}" for fault in facts["faults"]]
    failed = [part for part, facts in report["parts"].items() if facts["faults"]]
    return "\n".join([*text, "", f"FAILED: {', '.join(failed)}" if failed else "all parts are well", ""])


def measured(part, device):
    """(what a part found or None, why it found nothing) from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--work", part, "--device", device, "--out", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            out, errors = process.communicate(timeout=TIMES[part])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, f"no end after {TIMES[part]} seconds"
    if process.returncode:
        return None, f"exit status {process.returncode}: {(errors.strip().splitlines() or ['no word'])[-1]}"
    return json.loads(out.splitlines()[-1]), None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", default="_build/gpu_check")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # what one of the processes does
    parser.add_argument("--names", nargs="+", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        torch.set_num_threads(1)
        more = [options.names] if options.names else []
        found = {**PARTS, "run": run, "together": together}[options.work](options.device, options.out, *more)
        if found is not None:
            print(json.dumps(found))
        return
    report = {"device": options.device, "when": time.strftime("%Y-%m-%d %H:%M"), "parts": {},
              **provenance()}
    for part in options.parts:
        begin = time.time()
        found, wrong = measured(part, options.device)
        seen = {name: facts["found"] for name, facts in report["parts"].items()}
        faults = [wrong] if wrong else judged(part, found, options.device, seen)
        report["parts"][part] = {"found": found, "faults": faults, "seconds": round(time.time() - begin)}
        if part == "versions" and faults:
            break  # nothing else can work
    Path(options.out).mkdir(parents=True, exist_ok=True)
    write_json(Path(options.out, "report.json"), report)
    Path(options.out, "report.txt").write_text(page(report), encoding="utf-8")
    print(page(report) + f"\n{options.out}/report.json, {options.out}/report.txt")
    sys.exit(any(facts["faults"] for facts in report["parts"].values()))


if __name__ == "__main__":
    main()
