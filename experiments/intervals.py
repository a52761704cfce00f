"""Confidence intervals of the rows of Multi30k and of their differences, for page 19.

    python experiments/intervals.py

The deviation between seeds ignores the choice of the test set: 1,000 other sentences would move all
seeds together. So the mean BLEU of a row over its seeds is bootstrapped (Koehn, 2004): sentences
are resampled with replacement, the same for all rows and seeds, and the 2.5 % and 97.5 % quantiles
of the means are the interval. Differences between the row "taught" and another use the same samples
(paired bootstrap). Writes results/multi30k_intervals.json.
"""

from pathlib import Path

import numpy as np
import sacrebleu

from annotated.data.corpora import load_corpus
from annotated.files import write_json
from annotated.results import provenance, read_json_lines
from annotated.translation.scores import multi30k_form

RESULTS = Path("results")
DRAWS, SEED, PUBLISHED = 10_000, 1, 41.02


def ngram_counts(lines, references):
    """Return the BLEU statistics of each sentence: lengths of hypothesis and reference, matching
    n-grams by order, and all n-grams by order.
    """
    metric = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True, effective_order=True)
    scores = [metric.sentence_score(line, [reference])
              for line, reference in zip(lines, references, strict=True)]
    return np.array([[score.sys_len, score.ref_len, *score.counts, *score.totals]
                     for score in scores], dtype=float)


def bleu(sums):
    """Return BLEU without smoothing from the sums of these statistics over a test set."""
    ours, theirs, right, total = sums[..., 0], sums[..., 1], sums[..., 2:6], sums[..., 6:]
    return 100 * np.exp(np.minimum(0, 1 - theirs / ours) + np.log(right / total).mean(axis=-1))


def interval(values):
    """Return the 2.5 % and the 97.5 % quantile."""
    return dict(zip(("low", "high"), np.quantile(values, (0.025, 0.975)).tolist(), strict=True))


def main():
    references = multi30k_form([target for _, target in load_corpus("multi30k").test])
    rng = np.random.default_rng(SEED)
    count = len(references)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=DRAWS)
    rows, samples = {}, {}
    record = read_json_lines(RESULTS / "multi30k_record.jsonl")
    runs = [run for run in record if run["split"] == "test"]
    for name in sorted({run["row"] for run in runs}):
        scores, means = [], 0
        own = [run for run in runs if run["row"] == name]
        for run in sorted(own, key=lambda run: run["training_seed"]):
            statistics = ngram_counts(multi30k_form(run["outputs"]), references)
            scores.append(bleu(statistics.sum(axis=0)).item())
            stored = run["entries"]["multi30k"]["score"]
            assert abs(scores[-1] - stored) < 1e-6, (name, run["training_seed"])
            means = means + bleu(weights @ statistics)
        samples[name] = means / len(scores)
        rows[name] = {"scores": scores, "mean": float(np.mean(scores)), **interval(samples[name])}
    taught = rows["taught"]["mean"]
    differences = {f"taught minus {other}": {"mean": taught - row["mean"],
                                             **interval(samples["taught"] - samples[other])}
                   for other, row in rows.items() if other != "taught" and len(row["scores"]) > 1}
    write_json(RESULTS / "multi30k_intervals.json", {
        "data": f"multi30k test, {count:,} sentences",
        "metric": "BLEU as Multi30k is scored, 95 % intervals",
        "command": "python experiments/intervals.py", "draws": DRAWS, "seed": SEED,
        "published": PUBLISHED, "rows": rows, "differences": differences,
        "share of draws with taught above published": float((samples["taught"] > PUBLISHED).mean()),
        **provenance()})


if __name__ == "__main__":
    main()
