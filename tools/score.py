"""Translate one split of a corpus and write the whole report of its scores into a folder.

    python tools/score.py MODEL CORPUS SPLIT RESULTS [--beam 5 --alpha 1.0] [--tokens --references CORPUS]

RESULTS/SPLIT.json gets the scores with their signatures and what the model is and was trained with, RESULTS/SPLIT.txt the translations.
--tokens: the model reads and writes Moses tokens; they are joined to plain text, and scored against the plain `--references`.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from annotated.checkpoints import load_checkpoint
from annotated.corpora import load_corpus
from annotated.decoding import translate
from annotated.evaluation import bleu_report
from annotated.files import describe_machine, provenance
from annotated.training import encode_pairs, keep_memory, validation_loss


def outputs_of(saved, sentences, options):
    """The model's translations, as plain text."""
    outputs = translate(saved.model, saved.tokenizer, sentences, saved.info["source_language"], beam=options.beam, alpha=options.alpha)
    if not options.tokens:
        return outputs
    from sacremoses import MosesDetokenizer

    detokenizer = MosesDetokenizer(lang=saved.info["target_language"])
    return [detokenizer.detokenize(line.split(" ")) for line in outputs]


def main(options):
    keep_memory()
    saved = load_checkpoint(options.model)
    languages = {f"{side}_language": saved.info[f"{side}_language"] for side in ("source", "target")}
    pairs = getattr(load_corpus(options.corpus, **languages), options.split)
    references = getattr(load_corpus(options.references, **languages), options.split) if options.references else pairs
    start = time.time()
    outputs = outputs_of(saved, [source for source, _ in pairs], options)
    seconds = time.time() - start
    loss = validation_loss(saved.model, encode_pairs(pairs, saved.tokenizer, *languages.values()))
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{options.split}.json"
    report = bleu_report(outputs, [target for _, target in references], languages["target_language"], loss, path=path)
    data = options.data or f"{options.corpus} {options.split}"
    facts = {
        "data": f"{data}, {languages['source_language']} to {languages['target_language']}, {len(pairs)} sentences",
        "command": options.command,
        "decoding": f"beam {options.beam}, alpha {options.alpha}" if options.beam > 1 else "greedy",
        **json.loads(path.read_text(encoding="utf-8")),
        "parameters": sum(p.numel() for p in saved.model.parameters()),
        "model": asdict(saved.model.config),
        "training": saved.info["training"],
        "averaged_checkpoints": saved.info.get("averaged", []),
        "training_seconds": saved.info["seconds"],
        "decoding_seconds": round(seconds, 1),
        "machine": describe_machine(),
        **provenance("tools/score.py", "tools/prepare.py", *(f"annotated/{name}.py" for name in ("training", "decoding", "evaluation"))),
        "log": saved.info["log"],
    }
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "corpus", "split", "results"):
        parser.add_argument(name)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--alpha", type=float, default=0.6)
    parser.add_argument("--tokens", action="store_true", help="the corpus holds Moses tokens")
    parser.add_argument("--references", metavar="CORPUS", help="corpus with the plain references, if not the same")
    parser.add_argument("--data", help="what the split is, in words (default: corpus and split)")
    parser.add_argument("--command", required=True, help="what a reader types to run all this")
    main(parser.parse_args())
