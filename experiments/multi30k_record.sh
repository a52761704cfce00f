#!/usr/bin/env bash
# Multi30k English to German in the form that the literature scores (lower-cased, normalised,
# tokenised), by the recipe of Wu et al. (2021), Transformer-Tiny: 8,192 tokens an update, a
# validation and a checkpoint an epoch, an end after ten epochs without a lower validation loss or
# 8,004 updates, mean of the last ten epochs, beam 5, three seeds. They divide a score by the length
# of the output: so does alpha 1.4, nearly, for captions (chosen on `val`, results/multi30k_choices.json). Two
# departures, which the row `fp32` does not have: the published run trained in fp32 and ended by the
# smoothed loss. It goes on where it was interrupted; ANNOTATED_DATA says where the corpora are. Hours:
# 1.5 for the first seed, on one core beside other work.
#
# A row of its own has a name and options of `annotated train` beyond the paper:
#
#     experiments/multi30k_record.sh NAME OPTIONS…
#     split=valid experiments/multi30k_record.sh NAME OPTIONS…
#         scored on `val`, to choose before `test` is seen
#     seeds="1 2" experiments/multi30k_record.sh
#         these only: another core may run the others at the same time, once the first has made
#         what they learn from
#
# The rows beside the published one; add --attention-gain 0.70710678 to the options of each:
#
#     experiments/multi30k_record.sh smaller-start
#         W_Q, W_K, W_V drawn as where the published run was made (2.2 hours a seed)
#     smoothed_stop=1 experiments/multi30k_record.sh fp32 --precision fp32
#         by the loss of smoothed_stop.py
#     experiments/multi30k_record.sh attention-dropout --attention-dropout 0.1
#     experiments/multi30k_record.sh to-the-end --patience 0 --keep-last 140
#         all updates, all checkpoints
#     r_drop=5 processes=2 experiments/multi30k_record.sh r-drop --accumulate 1
#         with the loss of r_drop.py, on both cores
#     copies=10 experiments/multi30k_record.sh bpe-dropout
#         ten copies of each pair, each cut anew
#     teachers=to-the-end experiments/multi30k_record.sh taught --patience 0
#         also learns from what the models of another row make of the training sentences, each
#         different pair once (Nguyen et al., 2020, forward half); teacher_seeds=0 takes the model
#         of one seed in place of three
source "$(dirname "$0")/environment.sh"
name=${1:-published} split=${split:-test} trainers=${processes:-}
unset processes  # they train; one process prepares and scores
work=_build/multi30k_record scores=_build/multi30k_record/$name.scores
data=$work/data
epoch=58  # updates: 29,000 pairs, a vocabulary of 10,000, batches of 8,192 tokens
command="experiments/multi30k_record.sh"
if [ $# != 0 ]; then
    command="${smoothed_stop:+smoothed_stop=1 }${trainers:+processes=$trainers }$command $*"
    command="${copies:+copies=$copies }${r_drop:+r_drop=$r_drop }$command"
    command="${teacher_seeds:+teacher_seeds=$teacher_seeds }${teachers:+teachers=$teachers }$command"
fi
[ "$split" = test ] || command="split=$split $command"
mkdir -p "$scores"
with_loss() {
    if [ -n "${r_drop:-}" ]; then start experiments/r_drop.py "$r_drop" "${@:3}"
    elif [ -n "${smoothed_stop:-}" ]; then start experiments/smoothed_stop.py "${@:3}"
    else "$@"; fi
}
[ -d "$data" ] || .venv/bin/python experiments/prepare.py multi30k "$data"
if [ -n "${copies:-}" ]; then
    data=$work/copies.$copies
    [ -d "$data" ] || annotated prepare "$work/data" "$data" --vocab-size 10000 \
        --max-ratio 1000 --copies "$copies" --source-language en --target-language de
fi
if [ -n "${teachers:-}" ]; then
    data=$work/data.$teachers${teacher_seeds:+.seeds${teacher_seeds// /-}}
    if [ ! -d "$data" ]; then
        for seed in ${teacher_seeds:-0 1 2}; do
            [ -d "$work/$teachers.seed$seed" ] || {
                echo "no $teachers.seed$seed in $work: train that row first" >&2; exit 2; }
        done
        part=$data.part
        rm -rf "$part"
        cp -r "$work/data" "$part"
        paste "$part"/train.{en,de} > "$part/pairs"
        for seed in ${teacher_seeds:-0 1 2}; do
            annotated translate --model "$work/$teachers.seed$seed" --input "$part/train.en" \
                --output "$part/written" --beam 5 --alpha 1.4
            paste "$part/train.en" "$part/written" >> "$part/pairs"
        done
        awk '!seen[$0]++' "$part/pairs" > "$part/train.tsv"  # each pair once
        rm "$part"/train.{en,de} "$part/pairs" "$part/written"
        mv "$part" "$data"
    fi
fi
for seed in ${seeds:-0 1 2}; do
    model=$work/$name.seed$seed
    [ -d "$model" ] || processes=$trainers with_loss annotated train "$data" --source en \
        --target de --out "$model" --checkpoints "$model-checkpoints" --resume --preset small \
        --N 4 --d-model 128 --d-ff 256 --h 4 --dropout 0.3 --vocab-size 10000 --precision bf16 \
        --seed "$seed" --max-tokens 8192 --accumulate 2 --warmup 2000 --factor 2.53 \
        --steps $((138 * epoch)) --validate-every "$epoch" --save-every "$epoch" --keep-last 10 \
        --average 10 --patience 10 "${@:2}"
    result=$scores/seed$seed/$split.json
    [ "$result" -nt "$model/manifest.json" ] || {  # or it is of a model before
        rm -f "$result"
        annotated score "$model" "$work/data" "$split" "$scores/seed$seed" \
            --beam 5 --alpha 1.4 --moses --references multi30k --command "$command" \
            --data "multi30k $split, seed $seed"
    }
    start experiments/collect.py results/multi30k_record.jsonl "$name" "$seed" "$result"
done
.venv/bin/python - "$scores"/seed?/"$split.json" <<'END'
import json, statistics, sys
files = [json.load(open(path, encoding="utf-8")) for path in sys.argv[1:]]
scores = [file["entries"]["multi30k"]["score"] for file in files]
deviation = f", deviation {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
listed = ", ".join(f"{score:.2f}" for score in scores)
print(f"BLEU {listed}: mean {statistics.fmean(scores):.2f}{deviation}")
END
