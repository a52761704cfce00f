#!/usr/bin/env bash
# Every row of Table 3 for page 21, three seeds each, a process and a file a run. What is there is not run again.
#     experiments/variations.sh            on Multi30k, 900 updates: `make variations`
#     experiments/variations.sh toy        on toy, 2,000 updates, all pairs and the first 2,000: `make variations-toy`
# On toy base goes first, with all seeds: its spread says beforehand which differences can be resolved. Then the rows follow seed by seed,
# so that a stop anywhere leaves whole seeds. A run of base takes four minutes of one core; there are 120 runs, some of larger models.
source "$(dirname "$0")/environment.sh"
if [ "${1:-multi30k}" = multi30k ]; then
    annotated vary multi30k --out results/variations
    exit
fi
on_toy() { annotated vary toy --scale "$1" --out "results/variations_$1" --work "_build/variations-$1" "${@:2}"; }
for scale in toy-long toy-few; do on_toy "$scale" --rows base; done
for seeds in 1 2 3; do
    for scale in toy-long toy-few; do on_toy "$scale" --seeds "$seeds"; done
done
