"""What the live page needs beside its code: `write(folder)` puts its two models into files.

toy.js holds the book's model, in half precision; captions.js the one of results/models/multi30k, in
8 bits, which the page loads when it is asked for. Weights travel as base64 in a script, so that the
page also works where it is opened from the disk: browsers let no script read a file there, but they
do run a script that stands beside the page.
"""

import base64
import itertools
import json
import random
from pathlib import Path

import torch

from annotated.data.corpora import load_corpus
from annotated.data.normalization import Normalizer
from annotated.data.tokenizers import UNKNOWN, byte_letters
from annotated.training.checkpoints import book_model, load_checkpoint
from notebooks import ROOT

CAPTIONS = ROOT / "results" / "models" / "multi30k"
TOY_EXAMPLES = {  # all from `test` or `novel`, which the model has not seen
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
CAPTION_EXAMPLES = {  # written for this page
    "One sentence, one photo": "A man in a red jacket is riding a bicycle down the street.",
    "Compound noun": "Three football players run across the wet grass.",
    "Participle": "A woman wearing a straw hat is selling fruit at a market.",
    "Place": "Two children build a sandcastle on the beach.",
    "Relative clause": "A dog that is soaking wet shakes itself beside a lake.",
    "Separable verb": "A little girl is putting on her shoes in front of the house.",
    "Possessive": "The boy's brother throws him a ball.",
    "Rare words, in pieces": "A beekeeper inspects a honeycomb with a magnifying glass.",
    "No caption, and it shows": "I doubt that the government will lower taxes next year.",
}
WHO = {
    "is": ["A man", "A young woman", "An old man", "A little girl", "A boy", "A street musician",
           "A tall cyclist", "The chef", "A farmer's daughter", "Someone"],
    "are": ["Two men", "Three children", "Several people", "Four students", "The firefighters",
            "A man and a woman", "Many tourists"],
}
LOOK = ["", " in a red jacket", " wearing a straw hat", " with a blue umbrella", " in wet clothes",
        " with a large, heavy backpack", " dressed in black and white", " wearing 3D glasses"]
DOING = ["riding a bicycle", "playing the guitar", "jumping over a puddle", "waiting for a bus",
         "selling fresh fruit", "looking at the camera", "climbing a rock", "eating ice-cream",
         "throwing a stick for a brown dog", "reading a newspaper", "taking a picture of a church",
         "pushing a wheelbarrow full of sand", "painting a fence", "dancing to loud music",
         "sleeping on a bench", "carrying a wooden ladder", "repairing an old car", "laughing"]
WHERE = ["", " on the beach", " in front of a shop window", " at night", " near a fountain",
         " in a crowded market", " under a tree", " beside a river", " on a snowy mountain",
         ", while a crowd watches"]


def captions(count, seed=0):
    """So many English sentences like captions of photos, no two the same."""
    who = [f"{someone}{look} {verb}" for verb, people in WHO.items()
           for someone, look in itertools.product(people, LOOK)]
    sentences = [f"{who} {doing}{where}." for who, doing, where in
                 itertools.product(who, DOING, WHERE)]
    return random.Random(seed).sample(sentences, count)


def check(config):
    """Raise a ValueError for a model that the page's arithmetic does not know."""
    known = {"norm_first": False, "positions": "sinusoidal", "d_k": None, "d_v": None}
    for name, value in known.items():
        if getattr(config, name) != value:
            raise ValueError(f"the model has {name}={getattr(config, name)!r}: transformer.js "
                             f"computes {name}={value!r} only")


def quantized(weight):
    """A matrix in 8 bits: a scale for each row, (rows, 1), and integers from -127 to 127.

    Their product is the matrix, up to half a scale for each weight.
    """
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return scale, (weight / scale).round().to(torch.int8)


def pack(model, bits=16):
    """The weights of a model: [{name, size, rows}, …], and their bytes, as base64.

    bits: 16 for half precision; 8 for `quantized` matrices, which have `rows`: first the scales, in
    single precision. The lower byte of each number comes first. ValueError for a weight that half
    precision does not hold.
    """
    tensors, data = [], b""
    for name, weight in model.state_dict().items():
        tensor = {"name": name, "size": weight.numel()}
        if bits == 8 and weight.dim() == 2:
            scale, integers = quantized(weight)
            tensor["rows"] = len(weight)
            data += scale.numpy().astype("<f4").tobytes() + integers.numpy().tobytes()
        else:
            half = weight.half()
            if not half.isfinite().all():
                raise ValueError(f"a weight of {name} is too large for half precision, which ends "
                                 "at 65504")
            data += half.numpy().astype("<f2").tobytes()
        tensors.append(tensor)
    return tensors, base64.b64encode(data).decode("ascii")


def describe(model, bits, examples, pairs, **words):
    """What the page has to know about a model and its words, as data for JSON."""
    check(model.config)
    tensors, weights = pack(model, bits)
    sizes = ("vocab_size", "N", "d_model", "d_ff", "h")
    return {"config": {name: getattr(model.config, name) for name in sizes},
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "examples": list(examples.items()), "pairs": pairs, **words,
            "tensors": tensors, "base64": weights}


def describe_toy(saved):
    """The book's model: its vocabulary, of which only the English words may go in."""
    corpus, tokenizer = load_corpus("toy"), saved.tokenizer
    sources = tokenizer.encode_batch([english for english, _ in corpus.train], "en")
    english = sorted({index for ids in sources for index in ids if index > UNKNOWN})
    return describe(saved.model, 16, TOY_EXAMPLES, [*corpus.test, *corpus.novel],
                    vocabulary=tokenizer.table, english=english,
                    longest=max(map(len, sources)))


def character_class(characters):
    """The inside of a class of a regular expression: "a-z" for all small letters."""
    codes = enumerate(sorted(map(ord, set(characters))))
    runs = [[code for _, code in run] for _, run in
            itertools.groupby(codes, key=lambda pair: pair[1] - pair[0])]
    return "".join(chr(run[0]) + (f"-{chr(run[-1])}" if len(run) > 1 else "") for run in runs)


def moses():
    """What Moses' rules for texts without capitals need: classes of characters, abbreviations."""
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
    """The model of captions, its merges, and what its form of text needs."""
    tokenizer, form = saved.tokenizer, Normalizer(lowercase=True, punctuation=True, moses=True)
    pieces = [*sorted(byte_letters()), *map("".join, tokenizer.merges)]
    if tokenizer.normalizer != form or tokenizer.vocabulary != pieces:
        raise ValueError("subwords.js knows byte-pair encoding of lower-cased English in Moses "
                         f"tokens only, not {tokenizer.model!r} with {tokenizer.normalizer}")
    subwords = {"merges": "\n".join(map(" ".join, tokenizer.merges)), "moses": moses()}
    return describe(saved.model, 8, CAPTION_EXAMPLES, [[text] for text in captions(48)],
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
