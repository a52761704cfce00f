#!/usr/bin/env bash
# English to German news with the corpora at hand: train on news of other years (three copies),
# Tatoeba and Multi30k; score newstest2014. About 2 hours on 2 cores; goes on where it was
# interrupted; the corpora lie in the folder that ANNOTATED_DATA names. Far from WMT14's 4.5 million
# pairs: for orientation. Two processes with a thread each.
#
#     experiments/newstest.sh de en      the other direction, from the same text
source "$(dirname "$0")/environment.sh"
from=${1:-en} to=${2:-de} data=_build/newstest/data
case $from-$to in
    en-de) work=_build/newstest results=results/newstest command="experiments/newstest.sh" ;;
    de-en)
        work=_build/newstest/de-en results=results/newstest/de-en
        command="experiments/newstest.sh de en" ;;
    *) echo "the text is English and German: give en de or de en, not $from $to" >&2; exit 2 ;;
esac
mkdir -p "$results"
[ -d "$data" ] || .venv/bin/python experiments/prepare.py newstest "$data"
[ -d "$work/model" ] || processes=2 annotated train "$data" --source "$from" --target "$to" \
    --out "$work/model" --checkpoints "$work/checkpoints" --resume --preset small --N 3 \
    --d-model 256 --d-ff 512 --h 4 --dropout 0.2 --vocab-size 6000 --precision bf16 \
    --steps 20000 --max-tokens 4096 --warmup 2000 --validate-every 500 --save-every 500 \
    --keep-last 40 --average 10
[ "$results/curve.json" -nt "$work/model/manifest.json" ] || .venv/bin/python \
    experiments/curve.py "$work/checkpoints" "$data" "$from" "$to" 2500 "$results/curve.json" \
    "$command"
trained="224,525 pairs: news-2008-2012, news-2015-2020, Tatoeba, Multi30k"
rm -rf "$work/scores"  # of another model
annotated score "$work/model" "$data" test "$work/scores" --beam 4 --alpha 0.6 \
    --command "$command" --data "newstest2014, all 3,003 sentences; trained on $trained"
mv "$work"/scores/test.* "$results"
