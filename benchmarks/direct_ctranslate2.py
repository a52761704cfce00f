"""CTranslate2 called directly, as a check of the harness: `python -m benchmarks.direct_ctranslate2
SIZE PRECISION BEAM BATCH WORKERSxTHREADS …`.

Prints [[workers, threads, tokens per second], …]. It shares the model with the benchmarks, and no
code that measures.
"""

import json
import math
import random
import statistics
import sys
import time

import ctranslate2

from .systems import CTranslate2
from .workloads import SOURCE_LENGTH, TARGET_LENGTH


def main(size, precision, beam, batch, *settings):
    """Time eleven calls in each setting; the first is a warm-up and does not count."""
    model, batch, rates = CTranslate2(size, precision), int(batch), []
    texts = [[*random.choices(model.vocabulary[3:], k=SOURCE_LENGTH - 1), "</s>"]
             for _ in range(batch)]
    for workers, threads in (map(int, setting.split("x")) for setting in settings):
        translator = ctranslate2.Translator(model.folder.name, inter_threads=workers,
                                            intra_threads=threads, compute_type=model.compute_type)
        seconds = []
        for _ in range(11):
            start = time.time()
            translator.translate_batch(texts, max_batch_size=math.ceil(batch / workers),
                                       beam_size=int(beam), length_penalty=0.6,
                                       max_decoding_length=TARGET_LENGTH,
                                       min_decoding_length=TARGET_LENGTH)
            seconds.append(time.time() - start)
        median = statistics.median(seconds[1:])
        rates.append([workers, threads, round(batch * TARGET_LENGTH / median, 1)])
    print(json.dumps(rates))


if __name__ == "__main__":
    main(*sys.argv[1:])
