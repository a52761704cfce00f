#!/usr/bin/env bash
# Train and score a constituency parser on a treebank: `experiments/treebanks.sh gum` (90 minutes on
# 1 core) or `craft` (2.6 hours). Goes on where it was interrupted.
source "$(dirname "$0")/environment.sh"
annotated parse "$1" --out "_build/parse-$1" --results "results/parsing_$1.json" \
    --trees "_build/parse-$1.trees"
