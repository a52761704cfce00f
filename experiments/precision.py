"""Translations of one trained model in each precision, for page 24: a few minutes on 1 core.

    python experiments/precision.py FOLDER OUT.json CHECKPOINT…

FOLDER holds the corpus as files of lines (_build/multi30k_record/data, once experiments/multi30k_record.sh has run), the mean of the
checkpoints is the model. Each precision translates the validation split by page 18's step and by the step in C, greedily and with a beam
of four: BLEU, and how many translations are those of the plain model.
"""

import sys
import time
from pathlib import Path

from annotated.checkpoints import average_checkpoints, load_checkpoint
from annotated.corpora import load_corpus
from annotated.decoding import translate
from annotated.evaluation import bleu_report
from annotated.fast import prepare, undo
from annotated.files import describe_machine, provenance, write_json
from annotated.native import one_call_ways

PRECISIONS = "fp32", "bf16", "int8"


def each_way(model, rows):
    """Make a model translate in each way in turn, as trained first, for so many rows; yields the way in words."""
    undo(model)
    yield "as trained"
    for precision in PRECISIONS:
        decoder = prepare(model, "translate", precision, rows).decoder
        steps = {"page 18's step": None, **{name.split(", ", 1)[1]: step for name, step in one_call_ways(model, precision).items()}}
        for name, decoder.native in steps.items():
            yield f"{precision}, {name}"


def measure(model, tokenizer, pairs, beams=(1, 4)):
    """BLEU and equal translations by beam and way."""
    sources, references = map(list, zip(*pairs, strict=True))
    found = {}
    for beam in beams:
        rows, plain = found.setdefault(f"beam {beam}", {}), None
        for way in each_way(model, 32 * beam):
            start, outputs = time.process_time(), translate(model, tokenizer, sources, beam=beam, max_tokens=1024)
            seconds, plain = time.process_time() - start, plain or outputs
            score = bleu_report(outputs, references, bootstrap=0).entries["multi30k"]
            rows[way] = {"bleu": round(score.score, 2), "as the plain model": sum(map(str.__eq__, outputs, plain)),
                         "seconds of processor time": round(seconds, 1)}
            print(f"beam {beam}, {way}: {rows[way]}", flush=True)
    return {"sentences": len(pairs), "metric": score.signature, "translations": found}


def main(folder, out, *checkpoints):
    saved = load_checkpoint(checkpoints[-1])
    saved.model.load_state_dict(average_checkpoints(checkpoints))
    pairs = load_corpus(folder, source_language="en", target_language="de").valid
    config = saved.model.config
    write_json(out, {
        "what": "one trained model with its products in different precisions", "data": "Multi30k English to German, val, as scored",
        "model": f"{config.N} + {config.N} layers of width {config.d_model}, mean of {len(checkpoints)} checkpoints, "
                 f"{Path(checkpoints[0]).name} to {Path(checkpoints[-1]).name}",
        **measure(saved.model, saved.tokenizer, pairs), "machine": describe_machine(), "command": "python experiments/precision.py",
        **provenance()})


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
