#!/usr/bin/env bash
# True-on-policy on a machine with an NVIDIA GPU and no package index. Wheels that the machine lacks lie in .whl/
# (pydantic and what it needs); Miles is read from the checkout.
set -euo pipefail
SITE=${SITE:-/tmp/site}
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$SITE:$PWD/miles_core/src:$PWD/miles_fsdp/src:$PWD/miles_transports/src:$PWD/plugins/miles-local/src"
python3 benchmarks/true_on_policy.py
python3 docs/evidence/true_on_policy.py
python3 -m pytest -q -p no:cacheprovider -m gpu miles_core/tests/numerics/test_cuda.py plugins/miles-local/tests/test_gpu.py
