"""What the live page needs beside its code: `write(folder)` puts the book's model, its words and
examples into one file, model.js.

The weights are rounded to half precision. They travel as base64 in a script, not as a file of their
own, so that the page also works where it is opened from the disk: browsers let no script read a
file there, but they do run a script that stands beside the page.
"""

import base64
import json
from pathlib import Path

import torch

from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import UNKNOWN
from annotated.training.checkpoints import book_model

EXAMPLES = {  # all from `test` or `novel`, which the model has not seen
    "Relative clause": "The mouse that my uncle likes sleeps.",
    "Separable verb": "The queen has turned on the kitchen lamp.",
    "Another, which is not so easy": "The boy puts on his jacket.",
    "Compound noun": "The small kitchen lamp is black.",
    "Verb second": "Today my sad mother has read the old school book.",
    "Verb last, and a pronoun": "The girl will eat potato soup because it is fresh.",
    "Negation with “kein”": "Today we have not read a letter.",
    "Negation with “nicht”": "A woman does not want to pick up the brothers.",
    "Question": "When can my clever uncle fall asleep?",
    "Dative": "Today many women give their uncle the letter.",
    "Numbers": "Have eight women seen three girls?",
}


def check(config):
    """Raise a ValueError for a model that the page's arithmetic does not know."""
    known = {"norm_first": False, "positions": "sinusoidal", "d_k": None, "d_v": None}
    for name, value in known.items():
        if getattr(config, name) != value:
            raise ValueError(f"the model has {name}={getattr(config, name)!r}: transformer.js "
                             f"computes {name}={value!r} only")


def pack(model):
    """The weights of a model: [{name, size}, …] and all numbers as base64 of little-endian half
    precision.
    """
    state = model.state_dict()
    halves = [weight.half().flatten() for weight in state.values()]
    if not all(half.isfinite().all() for half in halves):
        raise ValueError("a weight is too large for half precision, which ends at 65504")
    data = torch.cat(halves).numpy().astype("<f2").tobytes()
    return [{"name": name, "size": weight.numel()}
            for name, weight in state.items()], base64.b64encode(data).decode("ascii")


def describe(saved):
    """Everything that the page has to know about a checkpoint of the book's model, as data for
    JSON.
    """
    check(saved.model.config)
    corpus, tokenizer = load_corpus("toy"), saved.tokenizer
    tensors, weights = pack(saved.model)
    sources = tokenizer.encode_batch([english for english, _ in corpus.train], "en")
    english = sorted({index for ids in sources for index in ids if index > UNKNOWN})
    pairs = [*corpus.test, *corpus.novel]
    return {"config": {name: getattr(saved.model.config, name)
                       for name in ("vocab_size", "N", "d_model", "d_ff", "h")},
            "parameters": sum(weight.numel() for weight in saved.model.parameters()),
            "vocabulary": tokenizer.table, "english": english,
            "longest": max(map(len, sources)), "examples": list(map(list, EXAMPLES.items())),
            "pairs": pairs, "tensors": tensors, "base64": weights}


def write(folder, saved=None):
    """Write model.js into `folder`, for the book's model unless another checkpoint is given.

    Returns the file's path.
    """
    path = Path(folder) / "model.js"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(describe(saved or book_model()), separators=(",", ":"))
    path.write_text(f'"use strict";\nconst MODEL = {data};\nif (typeof module === "object") '
                    'module.exports = MODEL;\n', encoding="ascii")
    return path
