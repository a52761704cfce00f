"""The two models of the live page, which `write(folder)` puts into files.

toy.js holds the book's model in half precision; captions.js holds that of results/models/multi30k
in 8 bits, and the page loads it on demand. Weights are base64 in a script, so that the page also
works when it is opened from the disk: there browsers let no script read a file, but they run a
script beside the page.
"""

import base64
import itertools
import json
import random
import tomllib
from pathlib import Path

import torch

from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import UNKNOWN
from annotated.training.checkpoints import book_model, load_checkpoint
from notebooks import ROOT

CAPTIONS = ROOT / "results" / "models" / "multi30k"
SENTENCES = tomllib.loads((ROOT / "docs" / "live.toml").read_text(encoding="utf-8"))


def captions(count, seed=0):
    """Return so many different English sentences like captions of photos."""
    parts = SENTENCES["parts"]
    subjects = [f"{person}{look} {verb}" for number, verb in (("singular", "is"), ("plural", "are"))
                for person, look in itertools.product(parts[number], parts["look"])]
    sentences = [f"{subject} {doing}{place}." for subject, doing, place in
                 itertools.product(subjects, parts["doing"], parts["place"])]
    return random.Random(seed).sample(sentences, count)


def quantized(weight):
    """Quantise a matrix to 8 bits; returns a scale for each row, (rows, 1), and integers from -127
    to 127, whose product is within half a scale of each weight.
    """
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return scale, (weight / scale).round().to(torch.int8)


def pack(model, bits=16):
    """Return the weights of a model: [{name, size, rows}, …], and their bytes in base64.

    bits: 16 for half precision; 8 for `quantized` matrices, which have `rows`, and their scales
    first, in single precision. Numbers are little-endian.
    """
    tensors, data = [], b""
    for name, weight in model.state_dict().items():
        tensor = {"name": name, "size": weight.numel()}
        if bits == 8 and weight.dim() == 2:
            scale, integers = quantized(weight)
            tensor["rows"] = len(weight)
            data += scale.numpy().astype("<f4").tobytes() + integers.numpy().tobytes()
        else:
            data += weight.half().numpy().astype("<f2").tobytes()
        tensors.append(tensor)
    return tensors, base64.b64encode(data).decode("ascii")


def describe(model, bits, examples, pairs, **tokenizer):
    """Return what the page needs of a model and its tokenizer, as data for JSON."""
    tensors, weights = pack(model, bits)
    sizes = ("vocab_size", "N", "d_model", "d_ff", "h")
    return {"config": {name: getattr(model.config, name) for name in sizes},
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "examples": list(examples.items()), "pairs": pairs, **tokenizer,
            "tensors": tensors, "base64": weights}


def describe_toy(saved):
    """Describe the book's model with its vocabulary, and which of it may stand in a source."""
    corpus, tokenizer = load_corpus("toy"), saved.tokenizer
    sources = tokenizer.encode_batch([english for english, _ in corpus.train], "en")
    english = sorted({index for ids in sources for index in ids if index > UNKNOWN})
    return describe(saved.model, 16, SENTENCES["toy"], [*corpus.test, *corpus.novel],
                    vocabulary=tokenizer.table, english=english,
                    longest=max(map(len, sources)))


def character_class(characters):
    """Return the inside of a character class of a regular expression, such as "a-z"."""
    codes = enumerate(sorted(map(ord, set(characters))))
    runs = [[code for _, code in run] for _, run in
            itertools.groupby(codes, key=lambda pair: pair[1] - pair[0])]
    return "".join(chr(run[0]) + (f"-{chr(run[-1])}" if len(run) > 1 else "") for run in runs)


def moses():
    """Return the character classes and abbreviations of Moses' rules for lower-cased text."""
    from sacremoses import MosesDetokenizer, MosesTokenizer
    from sacremoses.util import CJKChars

    english = MosesTokenizer("en")
    classes = {"alphabet": english.IsAlpha, "digits": english.IsN, "letters": english.IsAlnum,
               "small": english.IsLower, "currency": MosesDetokenizer.IsSc}
    cjk = "".join(f"{chr(first)}-{chr(last)}" for first, last in CJKChars().ranges)
    before_numbers = set(english.NUMERIC_ONLY_PREFIXES)
    always = set(english.NONBREAKING_PREFIXES) - before_numbers
    return {**{name: character_class(letters) for name, letters in classes.items()}, "cjk": cjk,
            "abbreviations": sorted(word for word in always if word == word.lower()),
            "beforeNumbers": sorted(word for word in before_numbers if word == word.lower())}


def describe_captions(saved):
    """Describe the model of captions with its merges and the rules of its normalisation."""
    tokenizer = saved.tokenizer
    subwords = {"merges": "\n".join(map(" ".join, tokenizer.merges)), "moses": moses()}
    return describe(saved.model, 8, SENTENCES["captions"], [[text] for text in captions(48)],
                    subwords=subwords)


def write(folder):
    """Write toy.js and captions.js into `folder`; returns {name: path of the file}."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    described = {"toy": describe_toy(book_model()),
                 "captions": describe_captions(load_checkpoint(CAPTIONS))}
    for name, data in described.items():
        text = json.dumps(data, separators=(",", ":"))
        (folder / f"{name}.js").write_text(
            f'"use strict";\n(globalThis.MODELS ??= {{}}).{name} = {text};\n'
            f'if (typeof module === "object") module.exports = MODELS.{name};\n', encoding="ascii")
    return {name: folder / f"{name}.js" for name in described}
