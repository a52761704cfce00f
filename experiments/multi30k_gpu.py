"""Multi30k by the recipe of multi30k.sh on a GPU, killed on the way and resumed, then scored.

    python experiments/multi30k_gpu.py OUT [--seconds 80] [--device cpu]

It needs only the packages of training, neither those of the command line nor Moses tokens. The run
is killed after the first checkpoint. Training ends early if its share of the seconds is over, and
OUT/multi30k.json says so. With --device cpu a tiny model does the same. ANNOTATED_DATA names the
folder of the corpora.
"""

import argparse
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import sacrebleu

from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import fit_tokenizer
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.fast.prepare import prepare, prepared_transformer
from annotated.files import CHECKOUT, data_root, find_file, write_json
from annotated.model.transformer import TransformerConfig
from annotated.results import describe_machine, provenance, read_json, read_json_lines
from annotated.training.callbacks import INTERRUPTED
from annotated.training.checkpoints import load_checkpoint, run_checkpoints
from annotated.training.loop import PRESETS, train_on
from annotated.translation.search import translate

SCORING = 15  # seconds reserved for scoring
TINY = {"steps": 200, "save_every": 50, "validate_every": 50, "max_tokens": 256, "warmup": 50}


def recipe(device):
    """Return (sizes, training) of `annotated train multi30k --precision bf16`, with checkpoints."""
    config, training = PRESETS["small"]
    training = replace(training, precision="bf16", save_every=200)
    if device == "cpu":
        return TransformerConfig(1000, N=1, d_model=32, d_ff=64, h=2), replace(training, **TINY)
    return config, training


def corpus_for(device):
    """Return Multi30k, or a small part of it for a processor."""
    corpus = load_corpus("multi30k")
    return corpus if device == "cuda" else replace(
        corpus, train=corpus.train[:2000], valid=corpus.valid[:50], test=corpus.test[:20])


def train(device, folder):
    """Train into a run folder from its newest checkpoint."""
    config, training = recipe(device)
    corpus = corpus_for(device)
    tokenizer = fit_tokenizer("bpe", corpus, config.vocab_size)
    train_on(corpus, tokenizer, replace(config, vocab_size=len(tokenizer)), training, False, device,
             folder, None, prepared_transformer, ChunkedLoss)


def kill_and_resume(device, folder, end):
    """Train until the time `end` in two processes, of which the first is killed; returns their
    exit statuses.
    """
    def start():
        return subprocess.Popen([sys.executable, __file__, str(folder), "--device", device,
                                 "--train"])

    first = start()
    while first.poll() is None and not run_checkpoints(folder) and time.time() < end:
        time.sleep(0.01)
    first.kill()
    second = start()
    try:
        second.wait(max(0, end - time.time()))
    except subprocess.TimeoutExpired:
        second.send_signal(signal.SIGTERM)  # it saves a checkpoint
    return [first.wait(), second.wait()]


def score(device, folder):
    """Return the score of the newest checkpoint in a run folder on `test`, by greedy decoding."""
    newest = run_checkpoints(folder)[-1]
    saved = load_checkpoint(newest)
    sources, references = zip(*corpus_for(device).test, strict=True)
    model = prepare(saved.model).to(device)
    begin = time.time()
    texts = translate(sources, model, saved.tokenizer)
    bleu = sacrebleu.BLEU()
    return {"checkpoint": newest.name, "sentences": len(texts),
            "BLEU": bleu.corpus_score(texts, [references]).score,
            "signature": str(bleu.get_signature()),
            "seconds of translating": round(time.time() - begin, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=int, default=80)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.device, options.out)
    begin, corpus = time.time(), data_root() / "multi30k"
    if find_file(corpus, "train.en") is None:
        sys.exit(f"{corpus} lacks train.en.gz: Multi30k is not there; name the folder that holds "
                 "multi30k/ in ANNOTATED_DATA")
    run = options.out / "run"
    if run_checkpoints(run):
        sys.exit(f"{run} holds checkpoints already: give another folder")
    statuses = kill_and_resume(options.device, run, begin + options.seconds - SCORING)
    if not run_checkpoints(run):
        sys.exit(f"no checkpoint was written, exit statuses {statuses}")
    log, seconds = read_json_lines(run / "log.jsonl"), time.time() - begin
    known = read_json(CHECKOUT / "results" / "multi30k" / "test.json")
    whole = log[-1]["step"] == recipe(options.device)[1].steps
    facts = {"exit statuses": statuses, "trained to the end": whole, "log": log,
             "seconds of training": round(seconds, 1), **score(options.device, run),
             "on processors": {**known["entries"]["sacrebleu"],
                               "valid_loss": known["log"][-1]["valid_loss"]},
             "machine": describe_machine(options.device), **provenance()}
    write_json(options.out / "multi30k.json", facts)
    print(f"exit statuses {statuses}, {facts['checkpoint']}, validation loss "
          f"{log[-1]['valid_loss']:.3f}, BLEU {facts['BLEU']:.1f} on {facts['sentences']} "
          f"sentences, in {time.time() - begin:.0f} s"
          + ("" if whole else "; there was no time to train to the end"))
    return int(statuses not in ([-signal.SIGKILL, 0], [-signal.SIGKILL, INTERRUPTED]))


if __name__ == "__main__":
    sys.exit(main())
