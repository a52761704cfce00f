"""Eight faults, one at a time, in a model that learns `toy`, for page 27: about 12 minutes on 2
cores.

    python experiments/symptoms.py [OUT.json]

Loop and faults are the cells of the page with the tag `variant`. The losses are those that the
faulty code itself counts. A run is kept in OUT.json as soon as it is measured, and not made again.
"""

import hashlib
import math
import statistics
import sys
from itertools import islice
from pathlib import Path

import sacrebleu
import torch
from since_the_paper import page_code

from annotated.data.batches import as_arrays, epoch_batches, gather
from annotated.data.corpora import load_corpus
from annotated.files import CHECKOUT, write_json
from annotated.model.transformer import TransformerConfig
from annotated.results import describe_machine, provenance, read_json
from annotated.training.checkpoints import book_model
from annotated.training.loop import encode_pairs
from annotated.translation.search import translate

PAGE = CHECKOUT / "notebooks" / "27_symptoms.ipynb"
STEPS, EVERY, MAX_TOKENS, SENTENCES, EXAMPLES = 900, 25, 1024, 200, (3, 14)


def batches_of(pairs, steps):
    """Return the batches of a run, the same for every fault."""
    arrays = as_arrays(pairs)
    endless = (gather(arrays, indices) for epoch in range(steps)
               for indices in epoch_batches(arrays, MAX_TOKENS, (0, epoch)))
    return islice(endless, steps)


def run(recipe, train, pairs, tokenizer, test, steps):
    """Train with one fault; returns its loss curve, BLEU, and the outputs of all test sentences."""
    torch.manual_seed(0)
    model = recipe.build(TransformerConfig(len(tokenizer), N=2, d_model=128, d_ff=256, h=4)).train()
    losses = list(train(recipe, model, batches_of(pairs, steps)))
    means = [[step, statistics.fmean(losses[step - EVERY:step])]
             for step in range(EVERY, steps + 1, EVERY)]
    sources, references = (list(side) for side in zip(*test, strict=True))
    torch.manual_seed(0)  # one fault draws while it translates
    outputs = translate(sources, model.eval(), tokenizer, "en")
    bleu = sacrebleu.BLEU(trg_lang="de").corpus_score(outputs, [references]).score
    return {"curve": [[step, round(mean, 4) if math.isfinite(mean) else None]
                      for step, mean in means],
            "bleu": round(bleu, 2), "outputs": dict(zip(sources, outputs, strict=True))}


def main(out="results/symptoms.json", steps=STEPS, sentences=SENTENCES, examples=EXAMPLES):
    space = {"__name__": "symptoms"}
    code = page_code(PAGE)
    exec(compile(code, str(PAGE), "exec"), space)
    corpus, tokenizer = load_corpus("toy"), book_model().tokenizer
    pairs, test = encode_pairs(corpus.train, tokenizer), corpus.test[:sentences]
    metric = sacrebleu.BLEU(trg_lang="de")
    metric.corpus_score(["so"], [["so"]])  # it signs when it has scored
    facts = {"data": f"toy, BLEU on the first {sentences} sentences of test", "seed": 0,
             "training": f"{steps} updates of {MAX_TOKENS} tokens, N=2, d_model=128, seed 0",
             "metric": f"training loss as the faulty code counts it, mean of {EVERY} updates; "
                       f"greedy decoding; sacreBLEU {metric.get_signature()}",
             "machine": describe_machine(), "command": "python experiments/symptoms.py",
             "code": hashlib.sha256(code.encode()).hexdigest(), **provenance(),
             "examples": [list(test[i]) for i in examples], "faults": {}}
    before = read_json(out) if Path(out).is_file() else {}
    same = ("training", "data", "code", "machine", "revision")
    if all(before.get(name) == facts[name] for name in same):
        facts["faults"] = before["faults"]
    for name, recipe in space["FAULTS"].items():
        if name not in facts["faults"]:
            result = run(recipe, space["train"], pairs, tokenizer, test, steps)
            kept = {source for source, _ in facts["examples"]}
            result["outputs"] = {s: text for s, text in result["outputs"].items() if s in kept}
            facts["faults"][name] = result
            write_json(out, facts)
            print(f"{name}: loss {result['curve'][-1][1]}, BLEU {result['bleu']}", flush=True)
    return facts


if __name__ == "__main__":
    main(*sys.argv[1:2])
