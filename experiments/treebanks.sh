#!/usr/bin/env bash
# Train and score a constituency parser on a treebank, gum or craft: `make parse-gum`, `make parse-craft`. Goes on where it was interrupted.
source "$(dirname "$0")/environment.sh"
annotated parse "$1" --out "_build/parse-$1" --results "results/parsing_$1.json" --trees "_build/parse-$1.trees"
