#!/usr/bin/env bash
# Run sglang.py on a machine with an NVIDIA GPU and no package index. ARCHIVE holds SGLang's packages (see sglang.md),
# WHEELS the wheels of Miles itself and those it needs that the machine lacks.
set -euo pipefail
SITE=/tmp/sglang-site MILES=/tmp/miles-site
mkdir -p "$SITE"
[ -f "$SITE/.ok" ] || { python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')" "$ARCHIVE" "$SITE" && touch "$SITE/.ok"; }
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$MILES" "$WHEELS"/*.whl
printf 'IPython\nxgrammar\nsoundfile\n' > /tmp/stubs.txt
export PYTHONPATH="$MILES" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 docs/evidence/sglang.py --site "$SITE" "$@"
