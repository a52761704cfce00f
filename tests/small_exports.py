"""Small models, tokenizers and an exported folder, for the tests of what leaves the library."""

import functools
import shutil

import torch
from helpers import PAIRS, disturbed, random_model
from torch.nn.functional import cross_entropy

from annotated.data.batches import pad
from annotated.data.tokenizers import BEGIN, END, PAD, SubwordTokenizer, WordTokenizer
from annotated.translation.search import greedy_decode

WORDS = WordTokenizer.fit(PAIRS)
BPE = SubwordTokenizer.fit(PAIRS, 300)
SIZE = len(BPE)
TOKENIZERS = {"words": WORDS, "bpe": BPE,
              "wordpiece": SubwordTokenizer.fit(PAIRS, 560, "wordpiece")}


def small_model(seed=0, vocab_size=SIZE, dtype=torch.float32, **changes):
    """A random model that is sure of what it says."""
    sizes = {"N": 2, "d_ff": 20, "dropout": 0.1, **changes}
    return disturbed(random_model(vocab_size, seed, **sizes), 0.5, 0.2).to(dtype)


def random_batch(vocab_size, lengths, seed=0):
    """Ids without special ones, one row of each length with END behind it."""
    draw = torch.Generator().manual_seed(seed)
    return [[*torch.randint(4, vocab_size, (length,), generator=draw).tolist(), END]
            for length in lengths]


@functools.cache
def model_that_writes(words, spare=0):
    """A model that has learned a few sentences by heart: a random one repeats one word."""
    model = small_model(0, words + spare, N=1).train()
    source = pad(random_batch(words, (8, 2, 14, 13, 1)))
    target = pad([[BEGIN, *row] for row in random_batch(words, (6, 12, 9, 3, 7), seed=1)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        logits = model(source, target[:, :-1])
        loss = cross_entropy(logits.mT, target[:, 1:], ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():  # padding would come first, were it not forbidden
        model.embedding.weight[PAD] = 3 * model.embedding.weight[greedy_decode(model, source)[0][0]]
    return model.eval()


def copy_of(folder, tmp_path):
    """A copy to be spoilt."""
    return shutil.copytree(folder, tmp_path / "copy")
