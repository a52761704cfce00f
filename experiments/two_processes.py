"""One process and two train the same model to the same score: half an hour on 2 cores.

    python experiments/two_processes.py [OUT.json [multi30k]]

The batches are the same, cut in two for two processes; dropout draws other numbers. So the scores
may differ as much as those of two seeds, and a second seed of each says how much that is. Runs of
the same code and numbers that OUT.json has are not made again.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from annotated.files import CHECKOUT, write_json
from annotated.results import describe_machine, provenance, read_json

OPTIONS = {  # toy takes minutes, multi30k about half an hour on 2 quiet cores
    "toy": {"preset": "toy", "N": 2, "d_model": 64, "d_ff": 192, "h": 4, "steps": 500,
            "max_tokens": 1024, "warmup": 150, "validate_every": 100},
    "multi30k": {"preset": "small", "N": 2, "d_model": 128, "d_ff": 256, "dropout": 0.1,
                 "vocab_size": 4000, "steps": 1200, "max_tokens": 2048, "warmup": 400,
                 "validate_every": 200},
}
RUNS = [(1, 0), (2, 0), (1, 1), (2, 1)]  # (processes, seed)


def run(processes, seed, data, options):
    """Train and score once; returns the scores, losses, tokens and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        words = [part for name, value in {**options, "seed": seed}.items()
                 for part in (f"--{name.replace('_', '-')}", str(value))]
        launcher = ["-m", "torch.distributed.run", "--standalone",
                    f"--nproc-per-node={processes}"] if processes > 1 else []
        train = [*launcher, "-m", "annotated", "train", data, "--out", f"{folder}/model", *words]
        score = ["-m", "annotated", "score", f"{folder}/model", data, "test", f"{folder}/scores"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for command in (train, score):
            subprocess.run([sys.executable, *command], check=True, env=environment, cwd=CHECKOUT,
                           stdout=subprocess.DEVNULL)
        facts = read_json(Path(folder, "scores", "test.json"))
    scores = {name: facts["entries"][name] for name in ("sacrebleu", "chrf")}
    return {"processes": processes, "seed": seed, "entries": scores,
            "losses": [row["valid_loss"] for row in facts["log"]],
            "tokens": facts["log"][-1]["tokens"], "seconds": facts["training_seconds"]["wall"],
            "metric": facts["entries"]["sacrebleu"]["signature"]}


def main(out="results/two_processes.json", data="toy", runs=RUNS, **changes):
    options = {**OPTIONS[data], **changes}
    facts = {"data": f"{data}, en to de, test", "options": options, "decoding": "greedy",
             "machine": describe_machine(), **provenance(),
             "command": f"python experiments/two_processes.py {out} {data}"}
    kept = json.loads(Path(out).read_text(encoding="utf-8")) if Path(out).exists() else {"runs": []}
    same = all(kept.get(name) == facts[name] for name in ("data", "options", "machine", "revision"))
    done = kept["runs"] if same else []
    for processes, seed in runs:
        if any((entry["processes"], entry["seed"]) == (processes, seed) for entry in done):
            continue
        done.append(run(processes, seed, data, options))
        write_json(out, {**facts, "runs": done})
        print(done[-1], flush=True)
    return done


if __name__ == "__main__":
    main(*sys.argv[1:])
