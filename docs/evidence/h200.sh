#!/usr/bin/env bash
# Install Miles from this checkout on a machine with an NVIDIA GPU and no package index, then run h200.py there.
# Wheels that the machine lacks lie in .whl/ (see h200.md).
set -euo pipefail
SITE=${SITE:-/tmp/site}
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
export PYTHONPATH="$SITE" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -m pip install -q --no-index --no-deps --no-build-isolation --no-compile --no-cache-dir --target "$SITE" \
    ./miles_core ./miles_fsdp ./miles_transports ./plugins/miles-local ./plugins/miles-tito-chatml
python3 docs/evidence/h200.py
python3 -m pytest -q -p no:cacheprovider -m gpu miles_fsdp/tests/test_gpu.py plugins/miles-local/tests/test_gpu.py
