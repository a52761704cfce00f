"""Attention of a trained model on a few real sentences, as data for pictures.

    python experiments/real_attention.py MODEL CORPUS OUT.json WORDS

Of the test sentences with 7 to 14 source tokens the three whose greedy translation has the best chrF: readable, not typical.
WORDS says what the model was trained on.
"""

import json
import sys
from pathlib import Path

import sacrebleu
import torch

from annotated.checkpoints import load_checkpoint
from annotated.corpora import load_corpus
from annotated.decoding import greedy_decode, translate
from annotated.files import provenance
from annotated.multi_head import record_attention
from annotated.tokens import BEGIN, END


def rounded(weights, stack, kind):
    """[layer][head][query][key] of one kind of attention, to 4 digits."""
    layers = [weights[path][0] for path in sorted(weights) if path.startswith(f"{stack}.") and path.endswith(kind)]
    return [[[[round(w, 4) for w in row] for row in head] for head in layer.tolist()] for layer in layers]


def attention_of(saved, sentence, trained_on):
    """All attention weights while the model reads one sentence and its own greedy translation, dropout off."""
    model, tokenizer = saved.model.eval(), saved.tokenizer
    source = torch.tensor([[*tokenizer.encode(sentence, saved.info["source_language"]), END]])
    ids = greedy_decode(model, source)[0]
    with torch.no_grad(), record_attention(model) as weights:
        model(source, torch.tensor([[BEGIN, *ids]]))
    return {
        "source": tokenizer.pieces(source[0].tolist()),
        "target": tokenizer.pieces([*ids, END]),  # row i of the decoder's attention belongs to the token it predicts
        "translation": tokenizer.decode(ids),
        "trained_on": trained_on,
        "layers": model.config.N,
        "heads": model.config.h,
        "encoder": rounded(weights, "encoder", "self_attention"),
        "decoder": rounded(weights, "decoder", "self_attention"),
        "cross": rounded(weights, "decoder", "cross_attention"),
        **provenance("experiments/real_attention.py", "annotated/training.py", "annotated/decoding.py"),
    }


def main(model, corpus, out, trained_on):
    saved = load_checkpoint(model)
    pairs = load_corpus(corpus, source_language=saved.info["source_language"], target_language=saved.info["target_language"]).test
    short = [(s, t) for s, t in pairs if 7 <= len(saved.tokenizer.encode(s, saved.info["source_language"])) <= 14]
    outputs = translate(saved.model, saved.tokenizer, [source for source, _ in short], saved.info["source_language"])
    chrf = sacrebleu.CHRF()
    ranked = sorted(zip(outputs, short, strict=True), key=lambda row: -chrf.sentence_score(row[0], [row[1][1]]).score)
    data = [attention_of(saved, source, trained_on) for _, (source, _) in ranked[:3]]
    Path(out).write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"attention of {len(data)} sentences in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
