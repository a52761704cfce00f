"""Translations of one trained model in each precision, for page 24: a few minutes on 1 core.

    python experiments/precision.py FOLDER OUT.json MODEL

FOLDER holds the corpus as files of lines (_build/multi30k_record/data, once
experiments/multi30k_record.sh has run), MODEL is a saved model. Each engine translates the
validation split in each precision, greedily and with a beam of four: BLEU, and how many
translations are those of the plain model.
"""

import sys
import time

from annotated.data.corpora import load_corpus
from annotated.fast.engines import ENGINES, TOLERANCE, make_engine
from annotated.files import write_json
from annotated.results import describe_machine, provenance
from annotated.training.checkpoints import load_checkpoint
from annotated.translation.scores import bleu_report
from annotated.translation.search import translate


def engines(saved):
    """Yield (name with precision, engine) of those that compute the model, first without one."""
    yield "as trained", None
    for name in ENGINES:
        for precision in TOLERANCE:
            if (name, precision) not in (("torch", "fp32"), ("torch", "int8")):
                engine = make_engine(name, saved, precision)
                if (engine.name, engine.precision) == (name, precision):  # or PyTorch would do it
                    yield f"{precision}, {name}", engine


def measure(saved, pairs, beams=(1, 4)):
    """Return BLEU and the number of unchanged translations by beam and engine."""
    sources, references = map(list, zip(*pairs, strict=True))
    scores = {}
    for beam in beams:
        rows, plain = scores.setdefault(f"beam {beam}", {}), None
        for name, engine in engines(saved):
            start = time.process_time()
            outputs = translate(sources, saved.model, saved.tokenizer, beam=beam, max_tokens=1024,
                                engine=engine)
            seconds, plain = time.process_time() - start, plain or outputs
            score = bleu_report(outputs, references, bootstrap=0).entries["multi30k"]
            same = sum(map(str.__eq__, outputs, plain))
            rows[name] = {"bleu": round(score.score, 2), "as the plain model": same,
                         "seconds of processor time": round(seconds, 1)}
            print(f"beam {beam}, {name}: {rows[name]}", flush=True)
    return {"sentences": len(pairs), "metric": score.signature, "translations": scores}


def main(folder, out, model):
    saved = load_checkpoint(model)
    pairs = load_corpus(folder, source_language="en", target_language="de").valid
    config = saved.model.config
    write_json(out, {
        "what": "one trained model with its products in different precisions",
        "data": "Multi30k English to German, val, as scored",
        "model": f"{model}: {config.N} + {config.N} layers of width {config.d_model}",
        **measure(saved, pairs), "machine": describe_machine(),
        "command": f"python experiments/precision.py {folder} {out} {model}", **provenance()})


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
