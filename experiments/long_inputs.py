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
VARIANTS = {"train": ("plain", "prepared", "prepared, layers computed again"),
            "translate": ("plain", "prepared")}
SIZES = TransformerConfig(8000, N=4, d_model=128, d_ff=512, h=2)
TARGET_LENGTH = 32


def checkpoint_layers(model):
    """Keep only the input of each layer for the backward pass, and recompute the rest there."""
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def peak_memory():
    """Return the peak of this process's resident memory in bytes (Linux reports kB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_task(purpose, way, n, sizes):
    """Return a function that does one training step, or one translation, with a new model."""
    torch.manual_seed(0)
    model = Transformer(sizes).train(purpose == "train")
    ids = torch.randint(UNKNOWN + 1, sizes.vocab_size, (1, n))
    if way != "plain":
        prepare(model)
    if way.endswith("again"):
        checkpoint_layers(model)
    loss = (LabelSmoothingLoss if way == "plain" else ChunkedLoss)()
    tokens = iter([UNKNOWN] * (TARGET_LENGTH - 1))
    if purpose == "train":
        weight = model.embedding.weight
        return lambda: loss.of_hidden(model.hidden(ids, ids), weight, ids).backward()
    next_token = lambda logits: ids.new_full((1, 1), next(tokens, END))  # noqa: E731
    return lambda: generate(model, ids, next_token, extra=0)


def measure(purpose, way, n, sizes=SIZES):
    """Return {"bytes": memory beyond that of the model, "seconds": processor time} of one task."""
    tiny = TransformerConfig(40, N=1, d_model=16, d_ff=32, h=2)
    make_task(purpose, way, n=8, sizes=tiny)()  # warm-up
    task = make_task(purpose, way, n, sizes)
    held, start = peak_memory(), time.process_time()
    task()
    return {"bytes": peak_memory() - held, "seconds": round(time.process_time() - start, 3)}


def main(out="results/long_inputs.json"):
    rows = []
    for purpose, variants in VARIANTS.items():
        for way in variants:
            for n in LENGTHS:
                command = [sys.executable, __file__, purpose, way, str(n)]
                output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
                rows.append({"purpose": purpose, "way": way, "tokens": n, **json.loads(output)})
                print(rows[-1], flush=True)
    write_json(out, {
        "data": f"one sentence of random ids; a translation has {TARGET_LENGTH} tokens",
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
