#!/usr/bin/env bash
# What a GPU that is new to the book should say, in at most nine minutes, the most wanted first:
#
#     tools/gpu_first_run.sh OUT [--device cpu]
#
# It needs Python with torch (2.11 or later), numpy, transformers, jaxtyping, tokenizers,
# safetensors, sacrebleu, tqdm and filelock, and no network. Multi30k lies in the folder that
# ANNOTATED_DATA names, or in shared/data, here or beside the checkout. With --device cpu tiny
# models go the same way.
#
# Each part is a process of its own. It ends, at the latest, when the seconds of all parts up to it
# are over; what it had written by then stays. OUT gets its figures as NAME.json or a folder, what
# it printed as NAME.log, and in parts.tsv how it ended. GPU_SECONDS is how long all may take: with
# fewer than 540 the last parts are cut, 1080 give each part twice its time, on a busy machine.
set -uo pipefail
if [[ $# != 1 && "$*" != *" --device "@(cpu|cuda) ]]; then
    echo "usage: tools/gpu_first_run.sh OUT [--device cpu]" >&2
    exit 2
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
device=${3:-cuda}
cd "$(dirname "$0")/.." || exit 2
for data in shared/data ../shared/data; do
    [ -d "$data/multi30k" ] && export ANNOTATED_DATA=${ANNOTATED_DATA:-$PWD/$data}
done
export PYTHONPATH=$PWD TEST_DEVICE=$device
printf 'part\tseconds\thow it ended\n' | tee "$out/parts.tsv"
total=${GPU_SECONDS:-540} planned=0 bad=0 SECONDS=0
slow=$((total < 1080 ? 1 : total / 540))

part() {  # its seconds, its name, and what Python shall run; {left}: the seconds that it has
    local name=$2 command=("${@:3}") begin=$SECONDS left status how
    planned=$((planned + $1 * slow))
    left=$(((total < planned ? total : planned) - SECONDS))
    if ((left < 2)); then
        how="cut: no time was left"
    else
        timeout --kill-after=5 "$left" python3 "${command[@]/'{left}'/$left}" \
            > "$out/$name.log" 2>&1
        status=$?
        if ((status == 0)); then how=ok
        elif ((status == 124 || SECONDS - begin >= left)); then how="cut after $left s"
        else how="failed with status $status: $(tail -n 1 "$out/$name.log")"; fi
    fi
    [ "$how" = ok ] || bad=1
    printf '%s\t%s\t%s\n' "$name" $((SECONDS - begin)) "$how" | tee -a "$out/parts.tsv"
}

base=base big=big tokens=25000
[ "$device" = cuda ] || { base=tiny big=tiny tokens=256 && export OMP_NUM_THREADS=1; }
bench=(-m benchmarks --device "$device" --threads 1 --allow-load --time-scale 0.1)
train=("${bench[@]}" --tokens $tokens --systems annotated,torch,marian)

part 215 check tools/gpu_check.py --device "$device" --out "$out/check" \
    --parts versions=$((40 * slow)) steps=$((45 * slow)) compiled=$((70 * slow)) \
    resume=$((35 * slow)) processes=$((25 * slow))
part 70 base "${train[@]}" --only "^train, $base$" --no-compile --out "$out/base.json"
part 65 big "${train[@]}" --only "^train, $big$" --no-compile --out "$out/big.json"
part 20 profile -m benchmarks.profile --device "$device" --tokens $tokens --size $base \
    --systems annotated --profiles 1 --threads 1 --out "$out/profile.json"
part 50 decoding "${bench[@]}" --only "^(greedy|beam 4), $base, batch 32$" --precision bf16 \
    --systems annotated,marian --out "$out/decoding.json"
part 65 multi30k experiments/multi30k_gpu.py "$out/multi30k" --device "$device" --seconds '{left}'
part 28 tests tests/test_cuda.py
part 17 compiled "${train[@]}" --only "^train, $base$" --precision bf16 --out "$out/compiled.json"
exit $bad
