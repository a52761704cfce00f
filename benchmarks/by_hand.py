"""CTranslate2 called directly, as one would by hand: `python -m benchmarks.by_hand SIZE PRECISION
BEAM BATCH WORKERSxTHREADS …`.

Prints [[workers, threads, tokens per second], …]. It shares with the benchmarks the model, and
nothing of how they measure.
"""

import json
import math
import random
import statistics
import sys
import time

import ctranslate2

from .systems import CTranslate2
from .work import SOURCE, WRITTEN


def main(size, precision, beam, batch, *settings):
    """Eleven calls in each setting, the first one not counted."""
    model, batch, rates = CTranslate2(size, precision), int(batch), []
    texts = [[*random.choices(model.names[3:], k=SOURCE - 1), "</s>"] for _ in range(batch)]
    for workers, threads in (map(int, setting.split("x")) for setting in settings):
        translator = ctranslate2.Translator(model.folder.name, inter_threads=workers,
                                            intra_threads=threads, compute_type=model.kind)
        seconds = []
        for _ in range(11):
            start = time.time()
            translator.translate_batch(texts, max_batch_size=math.ceil(batch / workers),
                                       beam_size=int(beam), length_penalty=0.6,
                                       max_decoding_length=WRITTEN, min_decoding_length=WRITTEN)
            seconds.append(time.time() - start)
        rates.append([workers, threads, round(batch * WRITTEN / statistics.median(seconds[1:]), 1)])
    print(json.dumps(rates))


if __name__ == "__main__":
    main(*sys.argv[1:])
