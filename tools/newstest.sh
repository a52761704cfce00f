#!/usr/bin/env bash
# English to German news with the corpora at hand: train on news of other years, Tatoeba and Multi30k; score newstest2014.
# The model also gives page 20 its attention on real sentences. `make newstest` runs it; the corpora lie in the folder that ANNOTATED_DATA names. Far from WMT14's 4.5 million pairs: for orientation.
set -euo pipefail
cd "$(dirname "$0")/.."
# batches of ever new shapes let memory grow for hours: fewer kept kernels, and an allocator that gives memory back, where there is one
export ONEDNN_PRIMITIVE_CACHE_CAPACITY=100
jemalloc=$(ldconfig -p | grep -o '/[^ ]*libjemalloc\.so\.2' | head -n 1 || true)
[ -z "$jemalloc" ] || export LD_PRELOAD="$jemalloc" MALLOC_CONF="oversize_threshold:1,background_thread:false,dirty_decay_ms:3000,muzzy_decay_ms:3000,narenas:1"
python=.venv/bin/python work=_build/newstest results=results/newstest
mkdir -p "$results"
rm -rf "$work"
$python tools/prepare.py newstest "$work/data"
$python -m annotated.training "$work/data" --source en --target de --out "$work/model" --checkpoints "$work/checkpoints" \
    --preset small --N 3 --d_model 256 --d_ff 1024 --h 4 --dropout 0.1 --vocab_size 10000 --precision bf16 \
    --steps 3300 --max_tokens 4096 --warmup 1000 --validate_every 300 --save_every 150 --keep_last 10 --average 5 \
    2>&1 | tee >(tr '\r' '\n' | grep -v '^training:' > "$results/train.log")
$python tools/score.py "$work/model" "$work/data" test "$results" --beam 4 --alpha 0.6 --command "make newstest" \
    --data "newstest2014, all 3,003 sentences; trained on 224,525 pairs: news-2008-2012, news-2015-2020, Tatoeba, Multi30k"
$python tools/attention.py "$work/model" "$work/data" results/real_attention.json \
    "newstest2014, translated by the model of make newstest"
