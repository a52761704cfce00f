"""Train the book's model on `toy` anew, time it, score it on `test` and `novel`, and write results/toy.json.

    python tools/toy.py           on a quiet machine: the seconds of training count
    python tools/toy.py --kept    score the model that is there already; the file says nothing about seconds then
"""

import argparse
import json
import tempfile
import time

from annotated.corpora import load_corpus
from annotated.decoding import translate
from annotated.evaluation import bleu_report, describe_machine, provenance
from annotated.training import book_model
from notebooks import ROOT


def scores(saved, pairs):
    """BLEU with its signature, and the share of sentences that are right word for word."""
    sources, references = zip(*pairs, strict=True)
    outputs = translate(saved.model, saved.tokenizer, list(sources))
    bleu = bleu_report(outputs, list(references))["sacrebleu"]
    right = sum(ours == theirs for ours, theirs in zip(outputs, references, strict=True))
    return {"sentences": len(pairs), "bleu": bleu.score, "low": bleu.low, "high": bleu.high, "signature": bleu.signature,
            "exact_match": right / len(pairs)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", action="store_true", help="score the model that is there already")
    options, corpus = parser.parse_args(), load_corpus("toy")
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        saved = book_model(None if options.kept else folder)
        seconds = None if options.kept else round(time.time() - start, 1)
    facts = {
        "data": f"toy, {saved.info['source_language']} to {saved.info['target_language']}; trained on {len(corpus.train):,} pairs",
        "command": "make toy" if not options.kept else "python tools/toy.py --kept",
        "seed": saved.info["training"]["seed"],
        "decoding": "greedy",
        "metric": "BLEU by sacreBLEU with a 95 % interval; exact match: the share of outputs that equal their reference",
        "scores": {part: scores(saved, getattr(corpus, part)) for part in ("test", "novel")},
        "parameters": sum(weight.numel() for weight in saved.model.parameters()),
        "training": saved.info["training"],
        "training_seconds": seconds,
        "machine": describe_machine(),
        **provenance("tools/toy.py", "annotated/training.py", "annotated/decoding.py", "annotated/evaluation.py"),
        "log": saved.info["log"],
    }
    (ROOT / "results" / "toy.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({name: fact for name, fact in facts.items() if name not in ("modules", "log", "training")}, indent=1))


if __name__ == "__main__":
    main()
