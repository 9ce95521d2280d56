#!/usr/bin/env bash
# Run sglang.py on a machine with NVIDIA GPUs and no package index. ARCHIVE holds SGLang's packages (see sglang.md), WHEELS
# the wheels of Miles itself and those it needs that the machine lacks. Two GPUs: the dense model on one, experts on the other.
# On one GPU, LANES says what runs, in turn; DENSE and MOE name runs of a lane where not all are wanted.
set -euo pipefail
SITE=/tmp/sglang-site MILES=/tmp/miles-site
mkdir -p "$SITE"
[ -f "$SITE/.ok" ] || { python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')" "$ARCHIVE" "$SITE" && touch "$SITE/.ok"; }
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$MILES" "$WHEELS"/*.whl
printf 'IPython\nxgrammar\nsoundfile\n' > /tmp/stubs.txt
export PYTHONPATH="$MILES" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
lane() { CUDA_VISIBLE_DEVICES=$1 python3 docs/evidence/sglang.py "$2" --site "$SITE" --seconds "$3" "${@:4}"; }
SECONDS_EACH=${SECONDS_EACH:-380}
if [ "$(nvidia-smi --list-gpus | wc -l)" = 1 ]; then
    for each in ${LANES:-dense moe}; do
        only=DENSE; [ "$each" = moe ] && only=MOE
        # shellcheck disable=SC2086
        lane 0 "$each" "$SECONDS_EACH" --only ${!only:-}
    done
    exit
fi
lane 0 dense "$SECONDS_EACH" > /tmp/dense.log 2>&1 &
lane 1 moe "$SECONDS_EACH" || true
wait
cat /tmp/dense.log
lane 0,1 nccl "${SECONDS_NCCL:-80}" --steps 5 --env CUDA_VISIBLE_DEVICES=1
