"""Training with early stopping by the label-smoothed validation loss, as in the published run.

    python experiments/smoothed_stop.py CORPUS --out MODEL --checkpoints RUN OPTIONS…

with the options of `annotated train`, for a row of `experiments/multi30k_record.sh`.

The validation loss and the perplexity in the log of such a run are smoothed ones, too.
"""

import sys

from annotated.cli import COMMANDS
from annotated.fast.chunked_loss import ChunkedLoss


def smoothed(smoothing, *arguments, **named):
    """Return the loss with label smoothing of 0.1 where `validation_loss` asks for none."""
    return ChunkedLoss(smoothing or 0.1, *arguments, **named)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    COMMANDS["train"](sys.argv[1:], loss=smoothed)
