"""What page 20 measures on the book's model holds when it is measured in another way."""

import pytest
import torch

from annotated import book_model, greedy_decode, record_attention
from annotated.data.batches import pad
from annotated.data.tokenizers import BEGIN, END
from annotated.data.toy_language import read_sentences
from annotated.files import checkout_data
from annotated.training.loop import evaluating


@pytest.fixture(scope="module")
def recorded():
    """(sentences translated without error, {layer: weights of their cross-attention})."""
    saved = book_model()
    model, tokenizer = saved.model, saved.tokenizer
    sentences = read_sentences(checkout_data() / "toy" / "test.tsv")[:60]
    sources = [[*tokenizer.encode(s.source, "en"), END] for s in sentences]
    written = zip(sentences, sources, greedy_decode(model, pad(sources)), strict=True)
    right = [(s, ids) for s, ids, out in written if tokenizer.pieces(out) == s.target_tokens]
    fed = [[BEGIN, *tokenizer.encode(s.target, "de")] for s, _ in right]
    with evaluating(model), record_attention(model) as weights:
        model(pad([ids for _, ids in right]), pad(fed))
    layers = range(model.config.N)
    return [s for s, _ in right], [weights[f"decoder.layers.{n}.cross_attention"] for n in layers]


def hits(sentences, weights):
    """Share of German tokens with a gold link whose heaviest English token is a gold one."""
    matches = [(int(w[t, :len(s.source_tokens)].argmax()), t) in s.alignment for s, w
               in zip(sentences, weights, strict=True) for t in {t for _, t in s.alignment}]
    return sum(matches) / len(matches)


def diagonal(s):
    n, m = len(s.source_tokens), len(s.target_tokens)
    return torch.eye(n)[[t * n // m for t in range(m)]]


def test_c31_cross_attention_follows_word_alignment_in_the_row_that_predicts(recorded):
    sentences, layers = recorded
    assert len(sentences) > 30
    best = max((hits(sentences, w[:, head]), n, head)
               for n, w in enumerate(layers) for head in range(w.size(1)))
    assert best[0] > 0.75 and best[0] > hits(sentences, map(diagonal, sentences)) + 0.2
    fed = layers[best[1]][:, best[2]].roll(-1, dims=1)  # the row that is fed a token
    assert hits(sentences, fed) < best[0] - 0.3
