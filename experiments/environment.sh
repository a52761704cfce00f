# Every long run here begins with `source experiments/environment.sh`. Batches of ever new shapes let
# memory grow for hours. So fewer kernels are kept, and jemalloc, where it is installed, gives memory
# back.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export ONEDNN_PRIMITIVE_CACHE_CAPACITY=100 TOKENIZERS_PARALLELISM=false
jemalloc=$(ldconfig -p | grep -o '/[^ ]*libjemalloc\.so\.2' | head -n 1 || true)
if [ -n "$jemalloc" ]; then
    export LD_PRELOAD="$jemalloc" MALLOC_CONF="oversize_threshold:1,background_thread:false"
    MALLOC_CONF+=",dirty_decay_ms:3000,muzzy_decay_ms:3000,narenas:1"
fi
start() {  # a script; with processes=2: by two of them, a thread each
    if [ -z "${processes:-}" ]; then .venv/bin/python "$@"; else
        OMP_NUM_THREADS=1 .venv/bin/torchrun --nproc-per-node "$processes" "$@"; fi
}
annotated() { start -m annotated "$@"; }
