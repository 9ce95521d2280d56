"""Transport `p2p` against a raw Mooncake write of the same bytes, between two processes of this machine.

    python benchmarks/p2p.py [--mib 512] [--bucket-mib 128] [--repeats 5] [--segment-mib 16] [--host 127.0.0.1]
                             [--protocol tcp]

raw       one registered buffer as large as a bucket is written into another, one call a bucket; nothing is packed,
          announced or handed on, and both buffers are used again and again
pieces    the same, one call a piece as large as those of p2p: what somebody gets out of it who knows that over TCP this
          is faster
p2p       buckets packed, announced, written, and handed on by the receiver

All are measured in turn, so that a busy machine burdens them alike. The digests that every engine takes of what
it received are the engine's own cost and are not in either figure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch

from miles_core.types import NamedTensor, WeightBucket
from miles_transports.meeting import Address, Meeting
from miles_transports.memory import fresh
from miles_transports.options import P2pOptions
from miles_transports.p2p.ends import P2pReceiver, P2pSender
from miles_transports.p2p.wire import Peer, Segment, Wire

MIB = 1024 * 1024
GOAL = 0.85


def target(link: Connection, address: Address, options: P2pOptions, bucket_bytes: int) -> None:
    """The engine's process: a plain registered buffer, and a receiver."""
    wire = Wire("127.0.0.1", options.protocol, options.device, timeout_s=30.0, retries=0)
    buffer = torch.from_numpy(fresh(bucket_bytes))
    link.send(wire.register(buffer))
    receiver = P2pReceiver(address, options, 0)
    while (version := link.recv()) is not None:
        link.send(sum(t.tensor.nbytes for bucket in receiver.receive(version) for t in bucket.tensors))
    receiver.close()


def buckets(total: int, bucket_bytes: int, version: int) -> list[WeightBucket]:
    """Sixteen bfloat16 tensors in each, of random bits."""
    count = total // bucket_bytes
    size = bucket_bytes // 16 // 2
    made = []
    for index in range(count):
        tensors = tuple(
            NamedTensor(name=f"layers.{index}.{i}", tensor=torch.full((size,), float(i), dtype=torch.bfloat16))
            for i in range(16)
        )
        made.append(WeightBucket(version=version, index=index, last=index == count - 1, tensors=tensors))
    return made


def raw(wire: Wire, source: torch.Tensor, peer: Peer, total: int, step: int) -> float:
    """Seconds of writing `source` as often as makes `total`; one call for each `step` bytes of it."""
    began = time.perf_counter()
    for _ in range(total // len(source)):
        for start in range(0, len(source), step):
            wire.write(source, peer, [Segment(start, min(step, len(source) - start), start)], what="raw")
    return time.perf_counter() - began


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mib", type=int, default=512)
    arguments.add_argument("--bucket-mib", type=int, default=128)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--segment-mib", type=int, default=P2pOptions().segment_mib)
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--protocol", choices=["tcp", "rdma"], default="tcp")
    given = arguments.parse_args()
    total, bucket_bytes = given.mib * MIB, given.bucket_mib * MIB
    options = P2pOptions(host=given.host, protocol=given.protocol, segment_mib=given.segment_mib)
    meeting, address = Meeting.host(given.host, options.timeout_s, 1)
    meeting.tell("generation", 0)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(there, address, options, bucket_bytes))
    process.start()
    peer = here.recv()
    wire = Wire(given.host, options.protocol, options.device, timeout_s=30.0, retries=0)
    source = torch.from_numpy(fresh(bucket_bytes))
    wire.register(source)
    sender = P2pSender(address, options, 0, 1)
    times: dict[str, list[float]] = {"raw": [], "pieces": [], "p2p": []}
    for version in range(given.repeats + 1):
        meeting.tell("attempt", version)
        raw_s = raw(wire, source, peer, total, bucket_bytes)
        pieces_s = raw(wire, source, peer, total, options.segment_mib * MIB)
        export = buckets(total, bucket_bytes, version)
        here.send(version)
        began = time.perf_counter()
        for bucket in export:
            sender.send(bucket)
        sender.finish(version)
        assert here.recv() == total
        p2p_s = time.perf_counter() - began
        if version:  # the first round touches its memory for the first time
            for name, seconds in zip(times, (raw_s, pieces_s, p2p_s), strict=True):
                times[name].append(seconds)
    here.send(None)
    process.join()
    sender.close()
    for name, measured in times.items():
        print(f"{name:7s} {total / statistics.median(measured) / 1e9:6.2f} GB/s   {[f'{s:.2f}' for s in measured]}")
    for name in ("raw", "pieces"):
        ratios = [a / b for a, b in zip(times[name], times["p2p"], strict=True)]
        print(
            f"p2p reaches {statistics.median(ratios):.0%} of {name} (median of {len(ratios)} rounds; goal {GOAL:.0%})"
        )


if __name__ == "__main__":
    main()
