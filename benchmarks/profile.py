"""Where the seconds of a training step go: PyTorch's profiler on base in bf16, of this library and
of JoeyNMT.

    _build/bench/venv/bin/python -m benchmarks.profile

`make _build/bench/ready` makes that environment. On a GPU, with its kernels, too: --device cuda
--tokens 25000 --systems annotated --profiles 1 --out FILE.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from annotated.files import write_json
from annotated.results import provenance

from . import workloads
from .__main__ import BUILD, TIMEOUT, machine_info, start_worker
from .harness import wait_until_idle

CATEGORIES = {  # category: its operations
    "matrix products": ("mm", "addmm", "bmm", "baddbmm"),
    "random numbers": ("bernoulli_", "random_", "ge", "native_dropout", "native_dropout_backward"),
    "copies and casts": ("copy_", "cat", "clone", "contiguous"),
    "softmax and loss": ("_softmax", "_log_softmax", "_softmax_backward_data",
                         "_log_softmax_backward_data", "gather", "amax", "log", "scatter_add_",
                         "nll_loss_forward", "nll_loss_backward", "masked_fill_", "masked_fill"),
    "norms": ("native_layer_norm", "native_layer_norm_backward"),
    "optimiser": ("_fused_adam_", "linalg_vector_norm", "_foreach_norm"),
}


def by_category(operations):
    """Return {category: seconds} of {operation: seconds}; all others are "the rest"."""
    categories = {f"aten::{name}": category
                  for category, names in CATEGORIES.items() for name in names}
    seconds = dict.fromkeys([*CATEGORIES, "the rest"], 0.0)
    for name, value in operations.items():
        seconds[categories.get(name, "the rest")] += value
    return {category: round(value, 4) for category, value in seconds.items()}


def print_kernels(profile):
    """Print the slowest kernels, and how often a step attends and calls the driver."""
    for name, seconds in sorted(profile["kernels"].items(), key=lambda row: -row[1])[:20]:
        print(f"  {1e3 * seconds:9.3f} ms  {name[:100]}")
    for name, count in profile["calls"].items():
        print(f"  {count:9.1f} x   {name}")
    busy = sum(profile["kernels"].values())
    print(f"  {1e3 * profile['seconds']:9.3f} ms a step, {1e3 * busy:.3f} in kernels", flush=True)


def main():
    """Profile the systems in turn, three steps each time."""
    parser = argparse.ArgumentParser("python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", default="base", choices=[*workloads.SIZES])
    parser.add_argument("--tokens", type=int, default=workloads.BATCH_TOKENS)
    parser.add_argument("--systems", nargs="+", default=("annotated", "joeynmt"))
    parser.add_argument("--profiles", type=int, default=5, help="of each system")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default="results/profile.json")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    result = {"command": shlex.join(["python", "-m", "benchmarks.profile", *sys.argv[1:]]),
              "machine": machine_info(options), "seed": 0,
              "data": f"random ids, {options.tokens:,} target tokens a step, {options.size}, bf16",
              "metric": "seconds per step by kind of operation of the host, self time, of all "
              "profiles of three steps; of the last one the seconds of wall clock, of a GPU's "
              "kernels, and calls per step", **provenance(),
              "systems": {name: [] for name in options.systems}, "last": {}}
    workers = {name: start_worker(name, options.device) for name in options.systems}
    try:
        for worker in workers.values():
            worker.ask(300, method="build", size=options.size)
        for _ in range(options.profiles):
            for name, worker in workers.items():
                profile = worker.ask(TIMEOUT, method="profile", precision="bf16",
                                     tokens=options.tokens, setting=(1, options.threads))
                wait_until_idle(worker.process.pid)
                result["systems"][name].append(by_category(profile.pop("operations")))
                result["last"][name] = profile
                print(name, result["systems"][name][-1])
                print_kernels(profile)
    finally:
        for worker in workers.values():
            worker.close(kill=True)
    write_json(options.out, result)


if __name__ == "__main__":
    main()
