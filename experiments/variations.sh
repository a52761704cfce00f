#!/usr/bin/env bash
# Rows of Table 3 for page 21, several seeds each, by two processes of one thread; a line of a file
# for each run. What is there is not run again.
#     experiments/variations.sh            on Multi30k, 900 updates: about two hours
#     experiments/variations.sh multi30k-long        on Multi30k until base translates: nine rows,
#                                      two seeds, some ten minutes of one core per run
#     experiments/variations.sh toy        on toy, 2,000 updates, all pairs and the first 2,000, the
#                                      latter with base and the rows of dropout and smoothing alone
# On toy base goes first, with all seeds: its spread says beforehand which differences can be
# resolved. Then the rows follow seed by seed, so that a stop anywhere leaves whole seeds. A run of
# base takes four minutes of one core; there are 75 runs, some of larger models.
source "$(dirname "$0")/environment.sh"
export OMP_NUM_THREADS=1
sweep() {
    vary=(annotated vary "$1" --scale "$2" --out "results/table3_$2.jsonl"
          --work "_build/table3-$2" "${@:3}")
    "${vary[@]}" & "${vary[@]}"; wait $!
}
case "${1:-multi30k}" in
    multi30k) sweep multi30k multi30k ;;
    multi30k-long)
        rows="base A-h1 A-h4 B-dk16 C-N2 C-dff1024 D-P0.0 D-eps0.0 E-learned"
        sweep multi30k multi30k-long --rows $rows --seeds "${seeds:-2}" "${@:2}" ;;
    toy)
        for scale in toy-long toy-few; do sweep toy "$scale" --rows base; done
        for seeds in 1 2 3; do
            sweep toy toy-long --seeds "$seeds"
            sweep toy toy-few --seeds "$seeds" --rows base D-P0.0 D-P0.2 D-eps0.0 D-eps0.2
        done ;;
    *) echo "usage: experiments/variations.sh [multi30k|multi30k-long|toy]" >&2; exit 2 ;;
esac
