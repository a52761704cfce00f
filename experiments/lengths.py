"""Translate toy sentences longer than those of training, for page 05 (C17): 10 minutes.

    python experiments/lengths.py [OUT.json]

Sinusoidal and learned positions, three seeds each, trained on pairs of up to 9 tokens a side.
"""

import sys
from dataclasses import asdict, replace

from annotated.fast.prepare import keep_memory
from annotated.files import write_json
from annotated.paper.table3 import DECODING, measure_lengths
from annotated.results import describe_machine, provenance
from annotated.training.loop import PRESETS


def main(out="results/lengths.json", longest=9, steps=800, seeds=3):
    keep_memory()
    sizes, training = PRESETS["toy"]
    runs = [{"positions": positions, "seed": seed,
             "lengths": measure_lengths(positions, seed, longest, steps=steps)}
            for seed in range(seeds) for positions in ("sinusoidal", "learned")]
    write_json(out, {
        "claim": "C17", "data": f"toy, all pairs of up to {longest} tokens a side in training, "
                                "longer ones held out",
        "model": asdict(sizes), "training": asdict(replace(training, steps=steps)),
        "longest": longest, "decoding": DECODING,
        "runs": runs, "machine": describe_machine(), "command": "python experiments/lengths.py",
        **provenance()})


if __name__ == "__main__":
    main(*sys.argv[1:])
