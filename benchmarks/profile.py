"""Where the seconds of a training step go: `python -m benchmarks.profile` has PyTorch's profiler
watch base in bf16, ours and JoeyNMT's. On a GPU: --device cuda --tokens 25000 --systems annotated
--profiles 1 --out FILE; it then has the kernels too.
"""

import argparse
import os
import sys
from pathlib import Path

from . import work
from .__main__ import BUILD, Group, machine_facts
from .protocol import settle

OUT = Path("results/profile.json")
SYSTEMS = ("annotated", "joeynmt")
KINDS = {  # of work: the operations that do it
    "matrix products": ("mm", "addmm", "bmm", "baddbmm"),
    "random numbers": ("bernoulli_", "random_", "ge", "native_dropout", "native_dropout_backward"),
    "copies and casts": ("copy_", "cat", "clone", "contiguous"),
    "softmax and loss": ("_softmax", "_log_softmax", "_softmax_backward_data",
                         "_log_softmax_backward_data", "gather", "amax", "log", "scatter_add_",
                         "nll_loss_forward", "nll_loss_backward", "masked_fill_", "masked_fill"),
    "norms": ("native_layer_norm", "native_layer_norm_backward"),
    "optimiser": ("_fused_adam_", "linalg_vector_norm", "_foreach_norm"),
}


def by_kind(operations):
    """{kind: seconds} of {operation: seconds}; what belongs to none is the rest."""
    kind_of = {f"aten::{name}": kind for kind, names in KINDS.items() for name in names}
    seconds = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for name, value in operations.items():
        seconds[kind_of.get(name, "the rest")] += value
    return {kind: round(value, 4) for kind, value in seconds.items()}


def parse():
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", default="base", choices=[*work.SIZES])
    parser.add_argument("--tokens", type=int, default=work.TOKENS)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--profiles", type=int, default=5, help="of each system")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def show(found):
    """The kernels that take longest, and how often a step attends and calls the driver."""
    for name, seconds in sorted(found["kernels"].items(), key=lambda row: -row[1])[:20]:
        print(f"  {1e3 * seconds:9.3f} ms  {name[:100]}")
    for name, count in found["calls"].items():
        print(f"  {count:9.1f} x   {name}")
    busy = sum(found["kernels"].values())
    print(f"  {1e3 * found['seconds']:9.3f} ms a step, {1e3 * busy:.3f} in kernels", flush=True)


def main():
    """Profiles of each system in turn, each of three steps."""
    from annotated.files import write_json
    from annotated.results import provenance

    options = parse()
    BUILD.mkdir(parents=True, exist_ok=True)
    result = {"command": " ".join(["python -m benchmarks.profile", *sys.argv[1:]]),
              "machine": machine_facts(options), "seed": 0,
              "data": f"random ids, {options.tokens:,} target tokens a step, {options.size}, bf16",
              "metric": "seconds per step by kind of operation of the host, self time, of all "
              "profiles of three steps; of the last one the seconds on the clock, of a GPU's "
              "kernels, and calls a step", **provenance(),
              "systems": {name: [] for name in options.systems}, "last": {}}
    workers = {name: Group.start(name, options) for name in options.systems}
    try:
        for worker in workers.values():
            worker.ask(300, do="build", size=options.size)
        for _ in range(options.profiles):
            for name, worker in workers.items():
                found = worker.ask(600, do="profile", precision="bf16", tokens=options.tokens,
                                   setting=(1, options.threads))
                settle(worker.process.pid)
                result["systems"][name].append(by_kind(found.pop("operations")))
                result["last"][name] = found
                print(name, result["systems"][name][-1])
                show(found)
    finally:
        for worker in workers.values():
            worker.close(kill=True)
    write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
