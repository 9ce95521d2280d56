"""A process with registered memory, for tests that hurt it: prints its peer as JSON, then answers lines on stdin."""

from __future__ import annotations

import json
import sys
import zlib

import torch

from miles_transports.p2p.wire import Wire


def main() -> None:
    buffer = torch.zeros(int(sys.argv[1]), dtype=torch.uint8)
    wire = Wire("127.0.0.1", "tcp", "", timeout_s=60.0, retries=0)
    peer = wire.register(buffer)
    print(json.dumps([peer.endpoint, peer.address, peer.num_bytes]), flush=True)
    for line in sys.stdin:
        if line.strip() == "sum":
            print(zlib.crc32(buffer.numpy().data), flush=True)


if __name__ == "__main__":
    main()
