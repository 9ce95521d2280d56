#!/usr/bin/env bash
# Run megatron_moe.py and the tests of one GPU on machines with NVIDIA H200s and no package index. Wheels of Miles, and those
# that the machine lacks, lie in the folder named first. Usage: megatron.sh WHEELS one|two
set -uo pipefail
WHEELS=$1
SITE=${SITE:-/tmp/megatron-site}
HERE=$(cd "$(dirname "$0")" && pwd)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$WHEELS"/*.whl || exit
export PYTHONPATH="$SITE" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
FOLDER=$(mktemp -d)
say() { timeout "${LIMIT_S:-70}" python3 "$HERE/megatron_moe.py" "$@"; }
say model "$FOLDER"
if [ "$2" = one ]; then
    say bench "$FOLDER" megatron '{}'
    say bench "$FOLDER" fsdp '{}'
    LIMIT_S=130 say run "$FOLDER" megatron
    LIMIT_S=130 say run "$FOLDER" fsdp
    timeout 120 python3 -m pytest -q -p no:cacheprovider -m gpu miles_megatron/tests/test_gpu.py
else
    say pair "$FOLDER" megatron '{"expert_parallel": 2, "distributed_optimizer": true}'
    say pair "$FOLDER" megatron '{"tensor_parallel": 2, "sequence_parallel": true}'
    say pair "$FOLDER" megatron '{"pipeline_parallel": 2}'
    say pair "$FOLDER" megatron '{"context_parallel": 2}'
    say pair "$FOLDER" fsdp '{}'
fi
