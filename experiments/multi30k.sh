#!/usr/bin/env bash
# Multi30k English to German: train, translate test_2016_flickr greedily, score with sacreBLEU; logs
# and figures to results/. About 30 minutes on 2 cores. ANNOTATED_DATA says where the corpora are
# (fetched from the publisher if they are not there).
export OMP_NUM_THREADS=2
source "$(dirname "$0")/environment.sh"
model=_build/multi30k results=results/multi30k
mkdir -p _build "$results"
rm -rf "$model"
annotated train multi30k --out "$model" --precision bf16
rm -rf "$model-scores"  # of another model
annotated score "$model" multi30k test "$model-scores" --command "experiments/multi30k.sh"
mv "$model-scores"/test.* "$results"
