"""Transport `p2p` against a raw Mooncake write of the same bytes, between two processes of this machine.

    python benchmarks/p2p.py [--mib 512] [--bucket-mib 128] [--repeats 5] [--segment-mib 32] [--host 127.0.0.1]
                             [--protocol tcp]

raw       registered memory of all the bytes is written into as much at the other end, one call for as many as a bucket
          has; nothing is packed, announced or handed on, and both ends use their memory again
pieces    the same, one call a piece as large as those of p2p: what somebody gets out of it who knows that over TCP this
          is faster
p2p       buckets packed, announced, written, and handed on by the receiver

All are measured in turn, so that a busy machine burdens them alike. Processor seconds are those of both processes: with
few cores they bound what p2p can reach, since packing takes some and the network stack the rest. The digests that every
engine takes of what it received are the engine's own cost and are not in these figures.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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


def target(link: Connection, address: Address, options: P2pOptions, total: int) -> None:
    """The engine's process: a plain registered buffer, and a receiver."""
    wire = Wire("127.0.0.1", options.protocol, options.device, timeout_s=30.0, retries=0)
    buffer = torch.from_numpy(fresh(total))
    link.send(wire.register(buffer))
    receiver = P2pReceiver(address, options, 0)
    while (version := link.recv()) is not None:
        if version < 0:
            link.send(time.process_time())
            continue
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


@dataclass
class Cost:
    """Of one side, round by round."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def counted(self, link: Connection) -> Iterator[None]:
        before, began = processor_seconds(link), time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - began)
        self.processor_seconds.append(processor_seconds(link) - before)


def processor_seconds(link: Connection) -> float:
    """Of this process and the target's."""
    link.send(-1)
    return float(link.recv()) + time.process_time()


def write(wire: Wire, source: torch.Tensor, peer: Peer, step: int) -> None:
    """Write `source`, one call for each `step` bytes of it."""
    for start in range(0, len(source), step):
        wire.write(source, peer, [Segment(start, min(step, len(source) - start), start)], what="raw")


def publish(sender: P2pSender, export: list[WeightBucket], link: Connection, total: int) -> None:
    version = export[0].version
    link.send(version)
    for bucket in export:
        sender.send(bucket)
    sender.finish(version)
    assert link.recv() == total


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
    process = multiprocessing.get_context("spawn").Process(target=target, args=(there, address, options, total))
    process.start()
    peer = here.recv()
    wire = Wire(given.host, options.protocol, options.device, timeout_s=30.0, retries=0)
    source = torch.from_numpy(fresh(total))
    wire.register(source)
    sender = P2pSender(address, options, 0, 1)
    sides = {"raw": Cost(), "pieces": Cost(), "p2p": Cost()}
    for version in range(given.repeats + 1):
        meeting.tell("attempt", version)
        export = buckets(total, bucket_bytes, version)
        with sides["raw"].counted(here):
            write(wire, source, peer, bucket_bytes)
        with sides["pieces"].counted(here):
            write(wire, source, peer, options.segment_mib * MIB)
        with sides["p2p"].counted(here):
            publish(sender, export, here, total)
    here.send(None)
    process.join()
    sender.close()
    report(sides, total)


def report(sides: dict[str, Cost], total: int) -> None:
    """Medians over all rounds but the first, which touches its memory for the first time."""
    for name, cost in sides.items():
        speed, processor = (statistics.median(each[1:]) for each in (cost.seconds, cost.processor_seconds))
        rounds = " ".join(f"{seconds:.2f}" for seconds in cost.seconds[1:])
        print(f"{name:7s} {total / speed / 1e9:6.2f} GB/s   {processor:5.2f} processor s   rounds of {rounds} s")
    for name in ("raw", "pieces"):
        ratios = [a / b for a, b in zip(sides[name].seconds[1:], sides["p2p"].seconds[1:], strict=True)]
        print(
            f"p2p reaches {statistics.median(ratios):.0%} of {name} (median of {len(ratios)} rounds; goal {GOAL:.0%})"
        )


if __name__ == "__main__":
    main()
