"""What the tests of training share: a few pairs, a tiny model, configurations, runs in folders."""

import hashlib
import json
import math
import signal
from dataclasses import replace

from helpers import random_model

from annotated.model.transformer import Transformer
from annotated.training.checkpoints import MANIFEST, run_checkpoints
from annotated.training.loop import TrainingConfig, train

PAIRS = [([4, 5, 6], [7, 8]), ([9], [10, 11, 12, 13]), ([5, 4, 9, 6, 14], [13, 7, 15]),
         ([14, 14], [8, 8, 10]), ([6], [15])]
QUICK = TrainingConfig(steps=6, max_tokens=16, warmup=3, factor=0.3, validate_every=2)
LONG = replace(QUICK, steps=12, save_every=3, keep_last=2, accumulate=2)


def tiny(seed=0, **changes):
    return random_model(16, seed, **changes)


class Poisoned(Transformer):
    """In training hidden vectors are NaN for a batch with the source token 9, after some calls."""

    healthy = 1  # the rehearsal

    def hidden(self, source, target):
        self.healthy -= self.training
        bad = self.training and self.healthy < 0 and (source == 9).any()
        return super().hidden(source, target) * (math.nan if bad else 1)


def digests(folder):
    """What identifies the last checkpoint of a run: weights, optimiser, random numbers, log."""
    return json.loads((run_checkpoints(folder)[-1] / MANIFEST).read_text())["files"]


def run(folder, seed=0, config=LONG, pairs=PAIRS, hook=None, **changes):
    """Train a small model with dropout in a run folder."""
    model = tiny(seed, dropout=0.3, **changes)
    if hook is not None:
        model.encoder.register_forward_pre_hook(hook)
    return train(model, pairs, PAIRS[:2], config, show_progress=False, run_folder=folder), model


def interrupt(after, number=signal.SIGTERM):
    """A hook that sends a signal to this process at its forward pass number `after`."""
    calls = []
    return lambda *_: (calls.append(1), len(calls) == after and signal.raise_signal(number))[0]


def forge(folder, name, data):
    """Change a file of a checkpoint and its digest: what no manifest can notice."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = hashlib.sha256(data).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
