"""One change since 2017 at a time on `toy`, for page 26: about 15 minutes on 1 core.

    python experiments/since_the_paper.py [OUT.json]

The changes are the cells of the page with the tag `variant`. Every run is kept in OUT.json as soon
as it is measured; runs of the same code and numbers are not made again.
"""

import hashlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import sacrebleu
import torch
from lengths import length_buckets

from annotated.data.batches import as_arrays, pad, token_batches
from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import END, WordTokenizer
from annotated.fast.prepare import keep_memory
from annotated.files import CHECKOUT, write_json
from annotated.model.transformer import TransformerConfig
from annotated.results import describe_machine, provenance
from annotated.training.loop import TrainingConfig, encode_pairs, train_on, validation_loss
from annotated.translation.search import greedy_decode

PAGE = CHECKOUT / "notebooks" / "26_since_the_paper.ipynb"
SIZES = TransformerConfig(1, N=2, d_model=64, d_ff=192, h=4)
TRAINING = TrainingConfig(steps=300, max_tokens=1024, warmup=120, factor=0.5, validate_every=300)
LONGEST, SENTENCES, SEEDS = 9, 150, (0, 1, 2)


def page_code(page=PAGE):
    """The code of the page's cells with the tag `variant`."""
    cells = json.loads(Path(page).read_text(encoding="utf-8"))["cells"]
    tagged = [cell for cell in cells if "variant" in cell["metadata"].get("tags", [])]
    return "\n\n".join("".join(cell["source"]) for cell in tagged)


def task(longest=LONGEST, sentences=SENTENCES):
    """(corpus of short pairs, its tokenizer, {"short": …, "long": …}: as many pairs held out)."""
    short, buckets = length_buckets(load_corpus("toy"), longest)
    sides = [[pairs for length, pairs in buckets.items() if (length > longest) == beyond]
             for beyond in (False, True)]
    held_out = {}
    for name, lengths in zip(("short", "long"), sides, strict=True):  # of each length as many
        in_turns = [pairs[k] for k in range(max(map(len, lengths))) for pairs in lengths
                    if k < len(pairs)]
        held_out[name] = in_turns[:sentences]
    short = replace(short, valid=held_out["short"])
    return short, WordTokenizer.fit(short.train, "en", "de"), held_out


def score(model, tokenizer, pairs, write):
    """Loss without smoothing and BLEU of greedy output on pairs of strings."""
    ids, outputs = encode_pairs(pairs, tokenizer), [""] * len(pairs)
    for rows in token_batches(as_arrays(ids).lengths, 2048, order="sorted"):
        written = write(model, pad([[*ids[i][0], END] for i in rows]), extra=5)
        for i, tokens in zip(rows, written, strict=True):
            outputs[i] = tokenizer.decode(tokens)
    metric = sacrebleu.BLEU(trg_lang="de")
    bleu = metric.corpus_score(outputs, [[target for _, target in pairs]]).score
    return {"loss": validation_loss(model, ids, 2048), "bleu": bleu}


def main(out="results/since_the_paper.json", page=PAGE, names=None, seeds=SEEDS, sizes=SIZES,
         training=TRAINING, sentences=SENTENCES):
    keep_memory()
    code, page_space = page_code(page), {"__name__": "since_the_paper"}
    exec(compile(code, str(page), "exec"), page_space)
    corpus, tokenizer, held_out = task(sentences=sentences)
    metric = sacrebleu.BLEU(trg_lang="de")
    metric.corpus_score(["so"], [["so"]])  # it signs when it has scored
    facts = {"data": f"toy, all pairs of up to {LONGEST} tokens per side in training",
             "longest": LONGEST, "sentences": sentences,
             "model": asdict(replace(sizes, vocab_size=len(tokenizer))),
             "training": asdict(training), "decoding": "greedy", "metric":
             f"loss in nats per token without smoothing; sacreBLEU {metric.get_signature()}",
             "machine": describe_machine(), "command": "python experiments/since_the_paper.py",
             "code": hashlib.sha256(code.encode()).hexdigest(), **provenance()}
    kept = json.loads(Path(out).read_text(encoding="utf-8")) if Path(out).exists() else {"runs": []}
    alike = ("data", "sentences", "model", "training", "code", "machine", "revision")
    same = all(kept.get(name) == facts[name] for name in alike)
    runs = kept["runs"] if same else []
    for seed in seeds:
        for name in names or page_space["VARIANTS"]:
            if any((run["variant"], run["seed"]) == (name, seed) for run in runs):
                continue
            build, changes = page_space["VARIANTS"][name]
            config = replace(sizes, vocab_size=len(tokenizer), **changes)
            own = replace(training, seed=seed)
            model, _ = train_on(corpus, tokenizer, config, own, False, build=build)
            write = greedy_decode if hasattr(model, "decoder") else page_space["continue_prompt"]
            scores = {part: score(model, tokenizer, pairs, write)
                      for part, pairs in held_out.items()}
            parameters = sum(weight.numel() for weight in model.parameters())
            runs.append({"variant": name, "seed": seed, "parameters": parameters, **scores})
            write_json(out, {**facts, "runs": runs})
            print(runs[-1], flush=True)
    return runs


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
