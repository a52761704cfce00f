"""Train the book's model on `toy` anew, time it, keep it, score it, write results/toy.json.

    python experiments/toy.py           on a quiet machine: the seconds of training count
"""

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import WordTokenizer
from annotated.files import CHECKOUT, write_json
from annotated.results import describe_machine, provenance, read_json
from annotated.training.checkpoints import book_model, save_checkpoint
from annotated.training.loop import PRESETS, train_on
from annotated.translation.scores import bleu_report
from annotated.translation.search import translate


def train_book_model(folder, show_progress=True):
    """Train the book's model on `toy`, and save it in half precision as the new `folder`."""
    corpus = load_corpus("toy")
    sizes, training = PRESETS["toy"]
    tokenizer = WordTokenizer.fit(corpus.train)
    config = replace(sizes, vocab_size=len(tokenizer))
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    try:
        model, log = train_on(corpus, tokenizer, config, training, show_progress)
    finally:
        torch.set_num_threads(threads)
    save_checkpoint(folder, model.half(), tokenizer, corpus="toy", source_language="en",
                    target_language="de", training=asdict(training), log=log)


def scores(saved, pairs):
    """Return BLEU with its signature, and the share of exact matches."""
    sources, references = zip(*pairs, strict=True)
    outputs = translate(list(sources), saved.model, saved.tokenizer)
    bleu = bleu_report(outputs, list(references))["sacrebleu"]
    right = sum(ours == theirs for ours, theirs in zip(outputs, references, strict=True))
    return {"sentences": len(pairs), "bleu": bleu.score, "low": bleu.low, "high": bleu.high,
            "signature": bleu.signature, "exact_match": right / len(pairs)}


def main():
    corpus, place = load_corpus("toy"), CHECKOUT / "annotated" / "book_model"
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        train_book_model(Path(folder) / "book")
        seconds = round(time.time() - start, 1)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(Path(folder) / "book", place, copy_function=shutil.copyfile)
    saved = book_model()
    facts = {
        "data": f"toy, {saved.info['source_language']} to {saved.info['target_language']}; "
                f"trained on {len(corpus.train):,} pairs",
        "command": "python experiments/toy.py",
        "seed": saved.info["training"]["seed"],
        "weights": "float16",
        "decoding": "greedy",
        "metric": "BLEU by sacreBLEU with a 95 % interval; exact match: the share of outputs that "
                  "equal their reference",
        "scores": {part: scores(saved, getattr(corpus, part)) for part in ("test", "novel")},
        "parameters": sum(weight.numel() for weight in saved.model.parameters()),
        "training": saved.info["training"],
        "training_seconds": seconds,
        "machine": describe_machine(),
        "training_threads": min(2, os.cpu_count() or 1),
        **provenance(),
        "log": saved.info["log"],
    }
    path = CHECKOUT / "results" / "toy.json"
    write_json(path, facts | {"other_trainings": read_json(path).get("other_trainings", [])})
    long = ("log", "training")
    shown = {name: fact for name, fact in facts.items() if name not in long}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
