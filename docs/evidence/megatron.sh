#!/usr/bin/env bash
# Run megatron_moe.py and the tests of GPUs on a machine with one or two NVIDIA H200s and no package index. Wheels of Miles,
# and those that the machine lacks, lie in the folder named first. On two GPUs both backends are tried side by side. PARTS may
# leave some of it out: bench, run, ep2, layouts, tests.
set -uo pipefail
WHEELS=$1
SITE=${SITE:-/tmp/megatron-site}
HERE=$(cd "$(dirname "$0")" && pwd)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$WHEELS"/*.whl || exit
export PYTHONPATH="$SITE" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
FOLDER=$(mktemp -d)
GPUS=$(nvidia-smi --list-gpus | wc -l)
say() { timeout "${LIMIT_S:-70}" python3 "$HERE/megatron_moe.py" "$@"; }
PARTS=${PARTS:-bench run ep2 layouts tests}
if_asked() { case " $PARTS " in *" $1 "*) "${@:2}" ;; esac; }
backend() { if_asked bench say bench "$FOLDER" "$1" '{}'; LIMIT_S=170 if_asked run say run "$FOLDER" "$1"; }
check() { timeout 150 python3 -m pytest -q --show-capture=no --tb=short -p no:cacheprovider -m gpu "$@"; }
say model "$FOLDER"
if [ "$GPUS" = 1 ]; then
    backend megatron
    backend fsdp
    if_asked tests check miles_megatron/tests/test_gpu.py miles_fsdp/tests/test_gpu.py
    exit
fi
CUDA_VISIBLE_DEVICES=0 backend megatron &
CUDA_VISIBLE_DEVICES=1 backend fsdp > "$FOLDER/fsdp.log" 2>&1
wait
cat "$FOLDER/fsdp.log"
if_asked ep2 say pair "$FOLDER" megatron '{"expert_parallel": 2, "distributed_optimizer": true}'
if_asked layouts say pair "$FOLDER" megatron '{"tensor_parallel": 2, "sequence_parallel": true}'
if_asked layouts say pair "$FOLDER" megatron '{"pipeline_parallel": 2}'
if_asked layouts say pair "$FOLDER" megatron '{"context_parallel": 2}'
if_asked layouts say pair "$FOLDER" fsdp '{}'
tests() {
    check miles_megatron/tests/test_gpu.py > "$FOLDER/gpu.log" 2>&1 &
    check miles_fsdp/tests/test_gpu.py miles_fsdp/tests/test_two_ranks.py miles_transports/tests/test_broadcast_cuda.py \
        plugins/miles-local/tests/test_gpu.py > "$FOLDER/fsdp.log" 2>&1 &
    check miles_megatron/tests/test_two_ranks.py
    wait
    cat "$FOLDER/gpu.log" "$FOLDER/fsdp.log"
}
if_asked tests tests
