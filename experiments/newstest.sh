#!/usr/bin/env bash
# English to German news with the corpora at hand: train on news of other years (three copies), Tatoeba and Multi30k; score newstest2014.
# `make newstest` runs it, and goes on where it was interrupted; the corpora lie in the folder that ANNOTATED_DATA names.
# Far from WMT14's 4.5 million pairs: for orientation. Two processes with a thread each.
source "$(dirname "$0")/environment.sh"
work=_build/newstest results=results/newstest
mkdir -p "$results"
[ -d "$work/data" ] || .venv/bin/python experiments/prepare.py newstest "$work/data"
[ -d "$work/model" ] || [ -d "$work/checkpoints" ] || rm -f "$results/train.log"  # of another run
[ -d "$work/model" ] || processes=2 annotated train "$work/data" --source en --target de --out "$work/model" \
    --checkpoints "$work/checkpoints" --resume --preset small --N 3 --d-model 256 --d-ff 512 --h 4 --dropout 0.2 --vocab-size 6000 \
    --precision bf16 --steps 20000 --max-tokens 4096 --warmup 2000 --validate-every 500 --save-every 500 --keep-last 40 --average 10 \
    2>&1 | tee >(without_bar "$results/train.log")
[ -f "$results/curve.json" ] || .venv/bin/python experiments/curve.py "$work/checkpoints" "$work/data" 2500 "$results/curve.json"
annotated score "$work/model" "$work/data" test "$results" --beam 4 --alpha 0.6 --command "make newstest" \
    --data "newstest2014, all 3,003 sentences; trained on 224,525 pairs: news-2008-2012, news-2015-2020, Tatoeba, Multi30k"
