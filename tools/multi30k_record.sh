#!/usr/bin/env bash
# Multi30k English to German in the form that the literature scores (lower-cased, normalised, tokenised), with the sizes of
# Wu et al. (2021), Transformer-Tiny: train, average the last 10 checkpoints, score test_2016_flickr with beam 5.
# `make multi30k-record` runs it; ANNOTATED_DATA says where the corpora are (fetched from the publisher if they are not there).
set -euo pipefail
cd "$(dirname "$0")/.."
# batches of ever new shapes let memory grow for hours: fewer kept kernels, and an allocator that gives memory back, where there is one
export ONEDNN_PRIMITIVE_CACHE_CAPACITY=100
jemalloc=$(ldconfig -p | grep -o '/[^ ]*libjemalloc\.so\.2' | head -n 1 || true)
[ -z "$jemalloc" ] || export LD_PRELOAD="$jemalloc" MALLOC_CONF="oversize_threshold:1,background_thread:false,dirty_decay_ms:3000,muzzy_decay_ms:3000,narenas:1"
python=.venv/bin/python work=_build/multi30k_record results=results/multi30k_record
mkdir -p "$results"
rm -rf "$work"
$python tools/prepare.py multi30k "$work/data"
$python -m annotated.training "$work/data" --source en --target de --out "$work/model" --checkpoints "$work/checkpoints" \
    --preset small --N 4 --d_model 128 --d_ff 256 --h 4 --dropout 0.3 --vocab_size 10000 --precision bf16 \
    --steps 8000 --max_tokens 4096 --warmup 2000 --factor 2.53 --validate_every 105 --save_every 105 --keep_last 40 --average 10 \
    2>&1 | tee >(tr '\r' '\n' | grep -v '^training:' > "$results/train.log")
$python tools/score.py "$work/model" "$work/data" test "$results" --beam 5 --alpha 1.4 --tokens --references multi30k \
    --command "make multi30k-record" --data "multi30k test_2016_flickr"
