"""BLEU of the checkpoints of a run, for page 19; `newstest.sh` calls it.

    python experiments/curve.py RUN CORPUS SOURCE TARGET EVERY RESULT.json COMMAND

RUN: the checkpoints of `annotated train CORPUS --source SOURCE --target TARGET`, of which that of
every EVERYth update translates `valid` greedily. COMMAND is stored as the command of the result.
"""

import sys

import sacrebleu

from annotated.data.corpora import load_corpus
from annotated.fast.prepare import prepare
from annotated.files import write_json
from annotated.results import describe_machine, provenance
from annotated.training.checkpoints import load_checkpoint, run_checkpoints
from annotated.translation.search import translate


def bleu_curve(run, pairs, source, every):
    """Return [{"step", "bleu"}] of the checkpoints in a folder, oldest first, and the signature."""
    sentences, references = zip(*pairs, strict=True)
    metric, rows = sacrebleu.BLEU(), []
    for folder in run_checkpoints(run, scheduled=True):
        if (step := int(folder.name[5:])) % every == 0:
            saved = load_checkpoint(folder)
            outputs = translate(sentences, prepare(saved.model.eval()), saved.tokenizer, source)
            rows.append({"step": step, "bleu": metric.corpus_score(outputs, [references]).score})
            print(rows[-1], flush=True)
    if not rows:
        advice = "train with --save-every and --keep-last"
        raise ValueError(f"{run} holds no checkpoint of an update that {every} divides: {advice}")
    return rows, metric.get_signature().format(short=True)


def main(run, corpus, source, target, every, out, command):
    valid = load_corpus(corpus, None, source, target).valid
    rows, signature = bleu_curve(run, valid, source, int(every))
    data = f"valid of {corpus}, {source} to {target}, {len(valid):,} sentences, greedily"
    write_json(out, {"data": f"{data}, one checkpoint a row", "signature": signature,
                     "command": command, "rows": rows, "machine": describe_machine(),
                     **provenance()})


if __name__ == "__main__":
    if len(sys.argv) != 8:
        sys.exit(__doc__)
    main(*sys.argv[1:])
