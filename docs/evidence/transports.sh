#!/usr/bin/env bash
# The ratios of transports.md on a machine with NVIDIA GPUs and no package index, after megatron.sh or h200.sh installed
# Miles into SITE. MOONCAKE is an archive of the wheel for transport p2p and of the system libraries it needs.
set -uo pipefail
SITE=${SITE:-/tmp/megatron-site}
export PYTHONPATH="$SITE" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
if [ -n "${MOONCAKE:-}" ]; then
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')" "$MOONCAKE" "$SITE"
    mkdir -p "$SITE/system"
    for library in "$SITE"/so/*; do
        ldconfig -p | grep -q "$(basename "$library") " || cp "$library" "$SITE/system/"
    done
    LD_LIBRARY_PATH="$SITE/system" timeout 90 python3 benchmarks/p2p.py --mib 2048 --bucket-mib 512 --repeats 5
fi
timeout 90 python3 benchmarks/transports.py cuda-ipc --mib 8192 --bucket-mib 512 --repeats 7
timeout 120 python3 benchmarks/transports.py delta --mib 2048 --bucket-mib 512 --repeats 3
if [ "$(nvidia-smi --list-gpus | wc -l)" -gt 1 ]; then
    timeout 90 python3 benchmarks/transports.py broadcast --mib 8192 --bucket-mib 512 --repeats 7
fi
