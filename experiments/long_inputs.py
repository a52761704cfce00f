"""Memory and time by the length of a sentence, for page 24: a few minutes on 1 core.

    python experiments/long_inputs.py [OUT.json]

Each row is a process of its own: one training step on one pair of n tokens per side, or one greedy
translation of n tokens into 32.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from annotated.data.tokenizers import END, UNKNOWN
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.fast.prepare import prepare
from annotated.files import write_json
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.results import describe_machine, provenance
from annotated.training.label_smoothing import LabelSmoothingLoss
from annotated.translation.search import generate

LENGTHS = (256, 512, 1024, 2048, 4096)
WAYS = {"train": ("plain", "prepared", "prepared, layers computed again"),
        "translate": ("plain", "prepared")}
SIZES = TransformerConfig(8000, N=4, d_model=128, d_ff=512, h=2)
WRITTEN = 32


def compute_again(model):
    """Let each layer keep its input only, and compute the rest again in the backward pass."""
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def peak():
    """Bytes that this process has held resident at its peak (Linux counts in kB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(purpose, way, n, sizes):
    """A function without arguments: one training step or one translation by a new model."""
    torch.manual_seed(0)
    model = Transformer(sizes).train(purpose == "train")
    ids = torch.randint(UNKNOWN + 1, sizes.vocab_size, (1, n))
    if way != "plain":
        prepare(model)
    if way.endswith("again"):
        compute_again(model)
    loss = (LabelSmoothingLoss if way == "plain" else ChunkedLoss)()
    tokens = iter([UNKNOWN] * (WRITTEN - 1))
    if purpose == "train":
        weight = model.embedding.weight
        return lambda: loss.of_hidden(model.hidden(ids, ids), weight, ids).backward()
    written = lambda logits: ids.new_full((1, 1), next(tokens, END))  # noqa: E731
    return lambda: generate(model, ids, written, extra=0)


def measure(purpose, way, n, sizes=SIZES):
    """{"bytes": beyond what the process held before, "seconds": …} of one step or translation."""
    tiny = TransformerConfig(40, N=1, d_model=16, d_ff=32, h=2)
    work(purpose, way, n=8, sizes=tiny)()  # loads what is loaded at the first call
    once = work(purpose, way, n, sizes)
    held, start = peak(), time.process_time()
    once()
    return {"bytes": peak() - held, "seconds": round(time.process_time() - start, 3)}


def main(out="results/long_inputs.json"):
    rows = []
    for purpose, ways in WAYS.items():
        for way in ways:
            for n in LENGTHS:
                command = [sys.executable, __file__, purpose, way, str(n)]
                output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
                rows.append({"purpose": purpose, "way": way, "tokens": n, **json.loads(output)})
                print(rows[-1], flush=True)
    write_json(out, {
        "data": f"one sentence of random ids; a translation has {WRITTEN} tokens",
        "model": asdict(SIZES), "precision": "fp32", "seed": 0,
        "metric": "bytes: most memory resident in the process, beyond what it held with the "
                  "model; seconds: one visit, processor time",
        "rows": rows, "machine": describe_machine(),
        "command": "python experiments/long_inputs.py",
        **provenance()})


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
    else:
        main(*sys.argv[1:])
