"""R-Drop (Liang et al., 2021), not of the paper, for a row of `experiments/multi30k_record.sh`.

    python experiments/r_drop.py 5 CORPUS --out MODEL --checkpoints RUN OPTIONS…

with the options of `annotated train`.

Each pair passes through the model twice with different dropout. The divergence of the two
distributions is added to the two losses.
"""

import shutil
import sys
from functools import partial
from types import MethodType

import torch

from annotated.cli import COMMANDS
from annotated.fast import prepare
from annotated.model.transformer import Transformer
from annotated.training.label_smoothing import LabelSmoothingLoss


def hidden_twice(model, source, target):
    """`Transformer.hidden`; while the model is trained it reads each pair twice.

    Both readings lie side by side: (batch, m, 2 · d_model).
    """
    if not model.training:
        return Transformer.hidden(model, source, target)
    twice = Transformer.hidden(model, source.repeat(2, 1), target.repeat(2, 1))
    return torch.cat(twice.chunk(2), dim=-1)


class RDropLoss(LabelSmoothingLoss):
    """The mean of both readings' losses, and alpha / 4 of their divergences, there and back.

    That is half of the published loss, whose sum would double the scale of the gradient.
    compile: it takes a C++ compiler, and a third less time.
    """

    def __init__(self, *arguments, alpha=5.0, compile=False, **named):
        super().__init__(*arguments, **named)
        self.alpha = alpha
        if compile:
            self.of_words = torch.compile(self.of_words, dynamic=True)

    def of_hidden(self, hidden, weight, target):
        if hidden.size(-1) == weight.size(-1):  # read once: validation
            return super().of_hidden(hidden, weight, target)
        mask = target != self.pad_id
        # few at a time stay in the caches
        words = zip(hidden[mask].split(256), target[mask].unsqueeze(-1).split(256), strict=True)
        return sum(self.of_words(*x.chunk(2, dim=-1), weight, right) for x, right in words)

    def of_words(self, first, second, weight, right):
        """Return the loss of both passes of words, (words, d_model) each; right: (words, 1)."""
        first, second = ((x @ weight.T).log_softmax(dim=-1, dtype=weight.dtype)
                         for x in (first, second))
        total = 0.0
        for log_p in (first, second):
            total = total - (1 - self.smoothing) * log_p.gather(-1, right).sum()
            total = total - self.smoothing * log_p.mean(dim=-1).sum()
        apart = ((first.exp() - second.exp()) * (first - second)).sum()  # KL(p, q) + KL(q, p)
        return total / 2 + self.alpha / 4 * apart


def build(config):
    """Build a prepared model that passes each pair twice in training, and once otherwise."""
    model = Transformer(config)
    model.hidden = MethodType(hidden_twice, model)
    return prepare.prepare(model)


def main(alpha, arguments):
    loss = partial(RDropLoss, alpha=alpha, compile=shutil.which("g++") is not None)
    COMMANDS["train"](arguments, build, loss)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(float(sys.argv[1]), sys.argv[2:])
