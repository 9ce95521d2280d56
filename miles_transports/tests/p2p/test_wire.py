"""Writes over the real transfer engine (TCP, loopback), and what becomes of them when the other side suffers."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_core.errors import TransportError
from miles_core.types import NamedTensor, WeightBucket
from miles_transports.meeting import Meeting
from miles_transports.options import P2pOptions
from miles_transports.p2p.ends import P2pSender
from miles_transports.p2p.wire import MAX_SEGMENTS, Peer, Segment, Wire

pytest.importorskip("mooncake.engine", reason="the transfer engine of mooncake-transfer-engine-non-cuda is absent")

SIZE = 1 << 20


class Other:
    """The process at the other end."""

    def __init__(self, num_bytes: int = SIZE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py")), str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        endpoint, address, size = json.loads(self.process.stdout.readline())
        self.peer = Peer(endpoint=endpoint, address=address, num_bytes=size)

    def checksum(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("sum\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def shared() -> Iterator[Other]:
    """For tests that leave it alive; what it holds is another test's."""
    yield from living()


@pytest.fixture
def other() -> Iterator[Other]:
    """For a test that hurts it."""
    yield from living()


def living() -> Iterator[Other]:
    started = Other()
    yield started
    started.process.kill()
    started.process.wait()
    for stream in (started.process.stdin, started.process.stdout):
        assert stream is not None
        stream.close()


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    opened = Wire("127.0.0.1", "tcp", "", timeout_s=60.0, retries=1)
    yield opened
    opened.close()


def noise(num_bytes: int = SIZE, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_bytes_arrive_as_they_were_in_more_segments_than_one_call_takes(wire: Wire, shared: Other) -> None:
    data = noise()
    wire.register(data)
    count = 2 * MAX_SEGMENTS + 3
    step = SIZE // count
    ends = [*range(0, step * count, step), SIZE]
    segments = [Segment(start, end - start, start) for start, end in itertools.pairwise(ends)]
    wire.write(data, shared.peer, segments, what="bucket 0")
    assert shared.checksum() == zlib.crc32(data.numpy().data)


def test_a_target_killed_between_two_pieces_fails_the_bucket_and_is_named(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_transports.p2p.ends.MIB", SIZE // 4)
    options = P2pOptions(timeout_s=120.0, write_timeout_s=60.0, write_retries=1, segment_mib=1)
    meeting, address = Meeting.host("127.0.0.1", options.timeout_s, 1)
    meeting.tell("generation", 0)
    meeting.tell("attempt", 0)
    meeting.tell("0/0.0/0/offer/engine 0", [other.peer.endpoint, other.peer.address, other.peer.num_bytes])
    sender = P2pSender(address, options, 0, 1)
    write, pieces = Wire._confirmed, []

    def second_kills(self: Wire, buffer: torch.Tensor, peer: Peer, segments: Sequence[Segment], what: str) -> None:
        pieces.append(segments[0].peer_offset)
        if len(pieces) == 2:
            other.process.kill()
            other.process.wait()
        write(self, buffer, peer, segments, what)

    monkeypatch.setattr(Wire, "_confirmed", second_kills)
    tensors = (NamedTensor(name="layers.0.weight", tensor=noise()),)
    sender.send(WeightBucket(version=7, index=0, last=True, tensors=tensors))
    with pytest.raises(TransportError, match="bucket 0 of version 7 to engine 0: the write failed") as caught:
        sender.finish(7)
    assert re.search("return code -?[0-9]+ to try 2", str(caught.value)), "it was waited for"
    assert "layers.0.weight" in str(caught.value)
    assert pieces == [0, SIZE // 4], "nothing is written after a piece that failed"
    assert not meeting.store.check(["0/0.0/0/written/engine 0"])
    sender.close()


def test_a_hung_target_fails_the_write_after_the_timeout(
    wire: Wire, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_timeout_s", 1.0)
    data = noise(SIZE)
    wire.register(data)
    os.kill(other.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TransportError, match="no answer to try 1"):
            wire.write(data, other.peer, [Segment(0, SIZE, 0)], what="bucket 0")
    finally:
        os.kill(other.process.pid, signal.SIGCONT)


def test_a_corrupt_address_fails_and_the_target_lives_on(wire: Wire, shared: Other) -> None:
    data = noise(seed=2)
    wire.register(data)
    wrong = replace(shared.peer, address=0x1234000)
    with pytest.raises(TransportError, match="the write failed"):
        wire.write(data, wrong, [Segment(0, 4096, 0)], what="bucket 0")
    wire.write(data, shared.peer, [Segment(0, SIZE, 0)], what="bucket 0")
    assert shared.checksum() == zlib.crc32(data.numpy().data)


def test_a_write_past_the_end_is_refused_before_anything_moves(wire: Wire, shared: Other) -> None:
    data = noise(seed=3)
    before = shared.checksum()
    with pytest.raises(TransportError, match="leave the engine's registered memory"):
        wire.write(data, shared.peer, [Segment(0, 100, 0), Segment(0, 100, SIZE - 50)], what="bucket 0")
    assert shared.checksum() == before


def test_nobody_listening_is_an_error_at_once(wire: Wire) -> None:
    data = noise(4096)
    nobody = Peer(endpoint="127.0.0.1:1", address=0, num_bytes=4096)
    with pytest.raises(TransportError, match="the write failed"):
        wire.write(data, nobody, [Segment(0, 4096, 0)], what="bucket 0")


def test_a_protocol_without_hardware_says_what_would_work() -> None:
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this machine has RDMA devices")
    with pytest.raises(TransportError, match="protocol: tcp"):
        Wire("127.0.0.1", "rdma", "", timeout_s=1.0, retries=0)
