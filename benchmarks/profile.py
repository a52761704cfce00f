"""Where the seconds of a training step go: `python -m benchmarks.profile` has PyTorch's profiler
watch base in bf16, ours and JoeyNMT's.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

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


def main():
    """Five profiles of each system in turn, each of three steps."""
    from annotated.results import provenance

    options = SimpleNamespace(device="cpu", threads=os.cpu_count())
    BUILD.mkdir(parents=True, exist_ok=True)
    result = {"command": "python -m benchmarks.profile", "machine": machine_facts(options),
              "seed": 0, "data": "random ids, 2,048 target tokens a step, base, bf16",
              "metric": "seconds per step by kind of operation, self time, five profiles of "
              "three steps", **provenance(), "systems": {name: [] for name in SYSTEMS}}
    workers = {name: Group.start(name, options) for name in SYSTEMS}
    try:
        for worker in workers.values():
            worker.ask(300, do="build", size="base")
        for _ in range(5):
            for name, worker in workers.items():
                operations = worker.ask(600, do="profile", precision="bf16",
                                        setting=(1, options.threads))
                settle(worker.process.pid)
                result["systems"][name].append(by_kind(operations))
                print(name, result["systems"][name][-1], flush=True)
    finally:
        for worker in workers.values():
            worker.close(kill=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
