#!/usr/bin/env bash
# Run megatron_moe.py on machines with NVIDIA H200s and no package index. Wheels that the machine lacks, and those of this
# checkout, lie in the folder named first. Usage: megatron.sh WHEELS one|two
set -uo pipefail
WHEELS=$1
SITE=${SITE:-/tmp/megatron-site}
HERE=$(cd "$(dirname "$0")" && pwd)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$WHEELS"/*.whl
export PYTHONPATH="$SITE" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
FOLDER=$(mktemp -d)
say() { timeout "${LIMIT_S:-70}" python3 "$HERE/megatron_moe.py" "$@"; }
say model "$FOLDER"
if [ "$2" = one ]; then
    say bench "$FOLDER" megatron '{}'
    [ -n "${SKIP_FSDP:-}" ] || say bench "$FOLDER" fsdp '{}'
    LIMIT_S=100 say run "$FOLDER"
else
    say pair "$FOLDER" megatron '{"expert_parallel": 2, "distributed_optimizer": true}'
    say pair "$FOLDER" megatron '{"tensor_parallel": 2, "sequence_parallel": true}'
    say pair "$FOLDER" megatron '{"pipeline_parallel": 2}'
    say pair "$FOLDER" megatron '{"context_parallel": 2}'
    say pair "$FOLDER" fsdp '{}'
fi
