"""Translate one split of a corpus greedily and write its score: python tools/score.py MODEL CORPUS SPLIT RESULTS"""

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import sacrebleu
import torch

from annotated.checkpoints import load_checkpoint
from annotated.corpora import load_corpus
from annotated.decoding import translate


def processor():
    """The processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(folder, name, split, results):
    saved = load_checkpoint(folder)
    corpus = load_corpus(name, source_language=saved.info["source_language"], target_language=saved.info["target_language"])
    pairs = getattr(corpus, split)
    start = time.time()
    outputs = translate(saved.model, saved.tokenizer, [source for source, _ in pairs], corpus.source_language)
    seconds = time.time() - start
    metric = sacrebleu.BLEU()
    score = metric.corpus_score(outputs, [[target for _, target in pairs]])
    report = {
        "data": f"{name} {split}, {corpus.source_language} to {corpus.target_language}, {len(pairs)} sentences",
        "command": "make multi30k" if name == "multi30k" else f"python tools/score.py MODEL {name} {split} RESULTS",
        "decoding": "greedy",
        "bleu": round(score.score, 2),
        "detail": str(score),
        "signature": str(metric.get_signature()),
        "parameters": sum(p.numel() for p in saved.model.parameters()),
        "model": asdict(saved.model.config),
        "training": saved.info["training"],
        "training_seconds": saved.info["seconds"],
        "decoding_seconds": round(seconds, 1),
        "machine": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "log": saved.info["log"],
    }
    results = Path(results)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{split}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(score, metric.get_signature(), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
