"""Shares of padding in the training set of a corpus, for page 13 (C22): a minute.

    python experiments/padding.py multi30k results/padding.json

The corpus is cut into batches of joint BPE tokens by budgets and orders.
"""

import sys

import numpy as np

from annotated.data.batches import padding_share, token_batches
from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import SubwordTokenizer
from annotated.files import write_json
from annotated.results import describe_machine, provenance


def measure(corpus, vocab_size=8000, budgets=(1024, 4096, 25_000), seed=0):
    """Shares of padding by budget and order, with how they were measured."""
    tokenizer = SubwordTokenizer.fit(corpus.train, vocab_size=vocab_size)
    sides = [tokenizer.encode_batch(list(side), None) for side in zip(*corpus.train, strict=True)]
    lengths = np.array([[len(ids) + 1 for ids in side] for side in sides]).T  # (pairs, 2)

    def share(budget, order):
        return round(padding_share(lengths, token_batches(lengths, budget, order, seed)), 4)

    shares = {str(budget): {order: share(budget, order)
                            for order in ("random", "sorted", "bucketed")} for budget in budgets}
    longest = lengths.max(axis=0)
    return {
        "claim": "C22", "data": f"{corpus.name}, train, {len(lengths)} pairs, "
                                f"{corpus.source_language}-{corpus.target_language}",
        "tokenizer": f"SubwordTokenizer, joint BPE, {len(tokenizer)} pieces", "seed": seed,
        "metric": "padding / all positions of source and target, end tokens counted; by max_tokens "
                  "and order",
        "mean_lengths": lengths.mean(axis=0).round(2).tolist(), "longest": longest.tolist(),
        "fixed_length": round(1 - float(lengths.sum() / longest.sum() / len(lengths)), 4),
        "shares": shares,
    }


def main(name, out):
    write_json(out, {**measure(load_corpus(name)), "machine": describe_machine(), **provenance(),
                     "command": f"python experiments/padding.py {name} {out}"})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
