"""Nine changes from outside the package, as a user would write them; `--plugin outside_parts`."""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from annotated import Corpus, LabelSmoothingLoss, Transformer
from annotated.cli import COMMANDS
from annotated.data.base_tokenizer import END, PAD, SPECIAL_PIECES, UNKNOWN, Tokenizer
from annotated.data.tokenizers import TOKENIZERS
from annotated.model.attention import DotProductAttention
from annotated.model.feed_forward import PositionwiseFeedForward
from annotated.options import read_options
from annotated.training.builders import BUILDERS
from annotated.training.schedule import SCHEDULES
from annotated.translation.search import generate

# 1. Another activation


class GeluFeedForward(PositionwiseFeedForward):
    def forward(self, x):
        return self.W_2(self.dropout(nn.functional.gelu(self.W_1(x))))


def with_gelu(config):
    model = Transformer(config)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        sizes = config.d_model, config.d_ff, config.feed_forward_dropout
        layer.feed_forward = GeluFeedForward(*sizes)
    return model


# 2. RMSNorm (Zhang and Sennrich, 2019)


def with_rms_norm(config):
    model = Transformer(config)
    for module in list(model.modules()):
        if isinstance(getattr(module, "norm", None), nn.LayerNorm):
            module.norm = nn.RMSNorm(config.d_model, eps=1e-6)
    return model


# 3. Rotary positions (Su et al., 2021): queries and keys turn by angles that grow with positions


class Rotary(DotProductAttention):
    def turned(self, x, start):
        places = torch.arange(start, start + x.size(-2), dtype=torch.float64)[:, None]
        pairs = torch.arange(0, x.size(-1), 2, dtype=torch.float64) / x.size(-1)
        angles, even, odd = places * 10_000.0**-pairs, x[..., ::2], x[..., 1::2]
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def forward(self, query, key, value, mask=None):
        newest = key.size(-2) - query.size(-2)  # the queries are the last of the positions
        return super().forward(self.turned(query, newest), self.turned(key, 0), value, mask)


class NoPositions(nn.Module):
    def forward(self, x, start=0):
        return x


def with_rotary(config):
    model = Transformer(config)
    model.source_positions = model.target_positions = NoPositions()
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.self_attention.attention = Rotary()
    return model


BUILDERS.update(gelu=with_gelu, rms_norm=with_rms_norm, rotary=with_rotary)

# 4. A tokenizer: an id for each letter


class LetterTokenizer(Tokenizer):
    def __init__(self, letters):
        self.table = [*SPECIAL_PIECES, *letters]

    @classmethod
    def fit_corpus(cls, corpus, vocab_size, normalizer):
        counts = Counter(letter for pair in corpus.train for text in pair for letter in text)
        return cls([letter for letter, _ in counts.most_common(vocab_size - len(SPECIAL_PIECES))])

    def encode_batch(self, texts, language=None):
        ids = {letter: index for index, letter in enumerate(self.table)}
        return [[ids.get(letter, UNKNOWN) for letter in text] for text in texts]

    def decode(self, ids):
        return "".join(self.pieces(self.content_ids(ids)))

    def as_dict(self):
        return {"kind": "letters", "letters": self.table[len(SPECIAL_PIECES):]}

    @classmethod
    def from_dict(cls, data):
        return cls(data["letters"])


TOKENIZERS["letters"] = LetterTokenizer

# 5. A corpus


def reversal_corpus(count=40):
    """Digits, and the same ones the other way round."""
    pairs = [(" ".join(f"{n:04d}"), " ".join(f"{n:04d}"[::-1])) for n in range(count)]
    return Corpus("reversal", "en", "de", pairs[8:], pairs[:4], pairs[4:8])


# 6. A schedule: up in a line, then down half a cosine


def cosine(optimizer, config, d_model):
    def rate(step):
        rest = (step + 1 - config.warmup) / (config.steps - config.warmup)
        return config.factor * min((step + 1) / config.warmup, (1 + math.cos(math.pi * rest)) / 2)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


SCHEDULES["cosine"] = cosine

# 7. A loss: right words that are sure already count less (focal loss; Lin et al., 2017)


class FocalLoss(LabelSmoothingLoss):
    def of_hidden(self, hidden, weight, target):
        real = target != self.pad_id
        log_p = (hidden[real] @ weight.T).log_softmax(dim=-1)
        log_p = log_p.gather(1, target[real].unsqueeze(1))
        return -((1 - log_p.exp()) ** 2 * log_p).sum() if self.smoothing else -log_p.sum()


# 8. A decoding rule: no token twice


def generate_without_repeating(model, source, extra=50):
    used = torch.zeros(len(source), model.config.vocab_size, dtype=torch.bool)
    left, step = (source != PAD).sum(dim=1) + extra, 0

    def next_token(logits):
        nonlocal used, left, step
        logits = logits.masked_fill(used, -math.inf)
        token, step = logits.argmax(dim=1, keepdim=True), step + 1
        stays = (token[:, 0] != END) & (step < left)
        used, left = used.scatter(1, token, True)[stays], left[stays]
        return token

    return generate(model, source, next_token, extra)


# 9. A command with an option


@dataclass
class Shout:
    """Print a text in capitals."""

    text: str = "annotated"  # what is printed
    marks: int = 1  # exclamation marks behind it


def shout(arguments):
    """Print a text in capitals."""
    options = read_options(Shout, "shout", arguments)
    print(options.text.upper() + "!" * options.marks)


COMMANDS["shout"] = shout
