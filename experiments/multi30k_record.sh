#!/usr/bin/env bash
# Multi30k English to German in the form that the literature scores (lower-cased, normalised, tokenised), with the sizes of
# Wu et al. (2021), Transformer-Tiny: train, average the last 10 checkpoints, score test_2016_flickr with beam 5.
# `make multi30k-record` runs it, and goes on where it was interrupted; ANNOTATED_DATA says where the corpora are.
source "$(dirname "$0")/environment.sh"
work=_build/multi30k_record results=results/multi30k_record
mkdir -p "$results"
[ -d "$work/data" ] || .venv/bin/python experiments/prepare.py multi30k "$work/data"
[ -d "$work/model" ] || annotated train "$work/data" --source en --target de --out "$work/model" --checkpoints "$work/checkpoints" \
    --resume --preset small --N 4 --d-model 128 --d-ff 256 --h 4 --dropout 0.3 --vocab-size 10000 --precision bf16 \
    --steps 8000 --max-tokens 4096 --warmup 2000 --factor 2.53 --validate-every 105 --save-every 105 --keep-last 40 --average 10 \
    2>&1 | tee >(without_bar "$results/train.log")
annotated score "$work/model" "$work/data" test "$results" --beam 5 --alpha 1.4 --moses --references multi30k \
    --command "make multi30k-record" --data "multi30k test_2016_flickr"
