"""Two criteria of early stopping compared, for page 19, on runs that kept a checkpoint per epoch.

    split=valid experiments/multi30k_record.sh to-the-end --attention-gain 0.70710678 \\
        --patience 0 --keep-last 140
    python experiments/stops.py _build/multi30k_record/data multi30k RESULT.json \\
        _build/multi30k_record/to-the-end.seed?-checkpoints

For each run: the plain and the label-smoothed validation loss of every checkpoint; the checkpoint
at which each would have stopped it, after ten epochs without a lower loss; and there, and at the
end, BLEU on `valid` of the average of the last ten checkpoints. The second argument is the corpus
with the plain references. A run takes about ten minutes on one core.
"""

import sys

from sacremoses import MosesDetokenizer
from smoothed_stop import smoothed

from annotated.data.corpora import load_corpus
from annotated.fast.prepare import prepare
from annotated.files import write_json
from annotated.results import describe_machine, provenance
from annotated.training.checkpoints import average_checkpoints, load_checkpoint, run_checkpoints
from annotated.training.loop import encode_pairs, validation_loss
from annotated.translation.scores import bleu_report
from annotated.translation.search import translate

EPOCHS = 10  # without a lower loss end a run, and as many checkpoints make the mean


def losses(folders, pairs):
    """Return [{"step", "plain", "smoothed"}] of checkpoints: mean losses on pairs, nats per
    token.
    """
    rows, encoded = [], None
    for folder in folders:
        saved = load_checkpoint(folder)
        encoded = encoded or encode_pairs(pairs, saved.tokenizer, "en", "de")
        rows.append({"step": int(folder.name[5:]), "plain": validation_loss(saved.model, encoded),
                     "smoothed": validation_loss(saved.model, encoded, loss=smoothed)})
        print(rows[-1], flush=True)
    return rows


def stopping_point(values, patience=EPOCHS):
    """Return after how many losses a run stops: none of the last `patience` is a new minimum."""
    ends = (end for end in range(patience + 1, len(values))
            if min(values[end - patience:end]) >= min(values[:end - patience]))
    return next(ends, len(values))


def mean_scores(folders, pairs, plain):
    """Return BLEU as usual for Multi30k, of averaged checkpoints, beam 5; plain: the pairs as
    text.
    """
    saved = load_checkpoint(folders[-1])
    saved.model.load_state_dict(average_checkpoints(folders))
    model = prepare(saved.model.eval())
    sources = [source for source, _ in pairs]
    outputs = translate(sources, model, saved.tokenizer, "en", beam=5, alpha=1.4)
    join = MosesDetokenizer(lang="de").detokenize
    lines = [join(line.split(" ")) for line in outputs]
    report = bleu_report(lines, [target for _, target in plain], bootstrap=0)
    return report.entries["multi30k"]


def main(corpus, references, out, *runs):
    pairs, plain = (load_corpus(name, None, "en", "de").valid for name in (corpus, references))
    chosen = []
    for run in runs:
        folders = run_checkpoints(run, scheduled=True)
        rows = losses(folders, pairs)
        ends = {kind: stopping_point([row[kind] for row in rows]) for kind in ("plain", "smoothed")}
        ends["end"] = len(rows)
        scores = {end: mean_scores(folders[max(end - EPOCHS, 0):end], pairs, plain)
                  for end in sorted(set(ends.values()))}
        stopped = {kind: {"step": rows[end - 1]["step"], "bleu": scores[end].score}
                   for kind, end in ends.items()}
        chosen.append({"rows": rows, "stops": stopped})
        print(stopped, flush=True)
    data = f"multi30k val, {len(pairs):,} sentences in the form that is scored; seeds in order"
    write_json(out, {"data": data, "signature": scores[len(rows)].signature, "runs": chosen,
                     "command": "experiments/stops.py, the lines at its head",
                     "machine": describe_machine(), **provenance()})


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
