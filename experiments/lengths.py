"""Translate toy sentences longer than those of training, for page 05 (C17): 10 minutes.

    python experiments/lengths.py [OUT.json]

Sinusoidal and learned positions, three seeds each, trained on pairs of up to 9 tokens per side.
"""

import sys
from dataclasses import asdict, replace

from annotated.data.corpora import Corpus, load_corpus
from annotated.data.tokenizers import UNKNOWN, WordTokenizer
from annotated.fast.prepare import keep_memory
from annotated.files import write_json
from annotated.paper.table3 import DECODING, measure
from annotated.results import describe_machine, provenance
from annotated.training.loop import PRESETS, encode_pairs, train_on


def side_lengths(corpus):
    """Return {pair: tokens of its longer side} of a corpus, with punctuation."""
    tokenizer = WordTokenizer.fit(corpus.train, corpus.source_language, corpus.target_language)
    pairs = list(dict.fromkeys(pair for split in corpus.splits().values() for pair in split))
    ids = encode_pairs(pairs, tokenizer, corpus.source_language, corpus.target_language)
    return {pair: max(map(len, sides)) for pair, sides in zip(pairs, ids, strict=True)}


def length_buckets(corpus, longest, per_bucket=200):
    """Return a corpus of the short pairs only, and {length: held-out pairs}."""
    lengths, held_out = side_lengths(corpus), {}
    short = Corpus(f"{corpus.name} up to {longest} tokens", corpus.source_language,
                   corpus.target_language, *(
        [pair for pair in split if lengths[pair] <= longest]
        for split in (corpus.train, corpus.valid, corpus.test)))
    known = WordTokenizer.fit(short.train, corpus.source_language, corpus.target_language)
    for pair in [*short.test, *(pair for pair in lengths if lengths[pair] > longest)]:
        if not any(UNKNOWN in ids for ids in encode_pairs([pair], known, corpus.source_language,
                                                          corpus.target_language)[0]):
            held_out.setdefault(lengths[pair], []).append(pair)
    return short, {length: pairs[:per_bucket] for length, pairs in sorted(held_out.items())}


def measure_lengths(positions, seed, longest=9, max_length=64, steps=800, corpus=None):
    """Train on pairs of up to `longest` tokens; returns what was trained, and the scores of each
    greater length (C17).

    positions: "sinusoidal" or "learned", the latter with a table of `max_length` rows. Sizes as the
    book's model.
    """
    short, buckets = length_buckets(corpus or load_corpus("toy"), longest)
    tokenizer = WordTokenizer.fit(short.train, short.source_language, short.target_language)
    config = replace(PRESETS["toy"][0], vocab_size=len(tokenizer), positions=positions,
                     max_length=max_length)
    training = replace(PRESETS["toy"][1], steps=steps, seed=seed, validate_every=steps)
    model, _ = train_on(short, tokenizer, config, training, False)
    rows = []
    for length, pairs in buckets.items():
        measured = measure(model, tokenizer, replace(short, valid=pairs))
        rows.append({"length": length, "sentences": len(pairs),
                     **{k: measured[k] for k in ("bleu", "accuracy", "loss")}})
    return {"model": asdict(config), "training": asdict(training), "lengths": rows}


def main(out="results/lengths.json", longest=9, steps=800, seeds=3):
    keep_memory()
    runs = [{"positions": positions, "seed": seed,
             **measure_lengths(positions, seed, longest, steps=steps)}
            for seed in range(seeds) for positions in ("sinusoidal", "learned")]
    write_json(out, {
        "claim": "C17", "data": f"toy, all pairs of up to {longest} tokens per side in training, "
                                "longer ones held out",
        "longest": longest, "decoding": DECODING,
        "runs": runs, "machine": describe_machine(), "command": "python experiments/lengths.py",
        **provenance()})


if __name__ == "__main__":
    main(*sys.argv[1:])
