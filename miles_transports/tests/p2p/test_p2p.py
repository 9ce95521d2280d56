"""Transport `p2p` over the real transfer engine: threads of one process; across processes see miles-ray's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from miles_core.errors import TransportError
from miles_core.kinds.transport import Transport
from miles_core.testing.recording import buckets_of, example_weights
from miles_core.testing.transport import TransportConformance
from miles_core.weights.digests import digest_tensor
from miles_transports.meeting import Meeting
from miles_transports.options import P2pOptions
from miles_transports.p2p.ends import P2pReceiver, P2pSender
from miles_transports.p2p.transport import P2pTransport
from miles_transports.p2p.wire import Peer, Wire

pytest.importorskip("mooncake.engine", reason="the transfer engine of mooncake-transfer-engine-non-cuda is absent")

WRITE = Wire._confirmed
OPTIONS = P2pOptions(timeout_s=120.0, write_timeout_s=60.0, write_retries=1)


def in_pieces_of(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> P2pOptions:
    """Of so many bytes, where a user has whole MiB."""
    monkeypatch.setattr("miles_transports.p2p.ends.MIB", num_bytes)
    return OPTIONS.model_copy(update={"segment_mib": 1})


class TestP2p(TransportConformance):
    options = OPTIONS

    def make(self) -> Transport:
        return P2pTransport(self.options)


class Ends:
    """S sources and T engines at one meeting point, without trainer or engines around them."""

    def __init__(self, sources: int, engines: int, options: P2pOptions = OPTIONS) -> None:
        self.meeting, address = Meeting.host("127.0.0.1", options.timeout_s, engines)
        self.meeting.tell("generation", 0)
        self.attempt = 0
        self._threads = ThreadPoolExecutor(sources + engines)
        self.senders = [P2pSender(address, options, rank, sources) for rank in range(sources)]
        self.receivers = [P2pReceiver(address, options, engine) for engine in range(engines)]

    def publish(
        self,
        version: int,
        weights: dict[str, torch.Tensor],
        per_bucket: int,
        keep: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> list[dict[str, torch.Tensor]]:
        self.attempt += 1
        self.meeting.tell("attempt", self.attempt)

        def send(sender: P2pSender) -> None:
            try:
                for bucket in buckets_of(weights, version, per_bucket):
                    sender.send(bucket)
                sender.finish(version)
            except Exception as error:
                sender.abort(str(error))
                raise

        def receive(receiver: P2pReceiver) -> dict[str, torch.Tensor]:
            return {n.name: keep(n.tensor) for bucket in receiver.receive(version) for n in bucket.tensors}

        sends = [self._threads.submit(send, sender) for sender in self.senders]
        receives = [self._threads.submit(receive, receiver) for receiver in self.receivers]
        for each in sends:
            each.result()
        return [each.result() for each in receives]

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end.close()
        self._threads.shutdown()


@pytest.fixture
def ends() -> Iterator[Any]:
    opened: list[Ends] = []

    def make(*args: Any, **kwargs: Any) -> Ends:
        opened.append(Ends(*args, **kwargs))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return {name: digest_tensor(tensor) for name, tensor in found.items()} == {
        name: digest_tensor(tensor) for name, tensor in expected.items()
    }


def test_two_sources_serve_three_engines_version_after_version(ends: Any) -> None:
    joined = ends(2, 3)
    assert [len(sender._targets) for sender in joined.senders] == [2, 1]
    for version in range(3):
        weights = example_weights(version)
        for found in joined.publish(version, weights, per_bucket=2):
            assert same(found, weights)


def test_more_sources_than_engines_leave_some_idle(ends: Any) -> None:
    joined = ends(3, 1)
    assert same(joined.publish(0, example_weights(0), per_bucket=3)[0], example_weights(0))
    assert joined.senders[2].finish(0) == {"wire_bytes": 0.0, "write_retries": 0.0}


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_of_several_ranks_get_fused_shards(ends: Any, ranks: int) -> None:
    layer = "model.layers.0.self_attn."
    weights = {f"{layer}{part}_proj.weight": torch.randn(8, 4) for part in "qkv"}
    weights |= {f"{layer}o_proj.weight": torch.randn(4, 8), "model.norm.weight": torch.randn(4)}
    joined = ends(2, 3, OPTIONS.model_copy(update={"layout": "fused", "engine_ranks": ranks}))
    for found in joined.publish(0, weights, per_bucket=2):  # the fused matrix waits for its part in the next bucket
        assert same(found, weights)
    # Divided tensors travel once in all, whatever the number of ranks; whole ones once to every rank.
    divided = sum(t.nbytes for n, t in weights.items() if "norm" not in n)
    whole = weights["model.norm.weight"].nbytes
    assert sum(s.finish(0)["wire_bytes"] for s in joined.senders) == 3 * (divided + ranks * whole)


def test_registered_memory_does_not_grow_with_versions_or_engines(ends: Any) -> None:
    joined = ends(1, 3)
    registered = []
    for version in range(4):
        joined.publish(version, example_weights(version), per_bucket=2)
        (sender,) = joined.senders
        registered.append((len(sender._wire._registered), *(len(r._wire._registered) for r in joined.receivers)))
    assert registered[1] == registered[3] == (1, 3, 3, 3)


def test_buckets_that_are_kept_stay_what_they_were_and_their_memory_is_used_again(ends: Any) -> None:
    joined = ends(1, 1)
    kept = [joined.publish(version, example_weights(version), 2, keep=lambda tensor: tensor) for version in range(3)]
    for version, (found,) in enumerate(kept):
        assert same(found, example_weights(version)), f"version {version} was written over"
    held = len(joined.receivers[0]._wire._registered)
    kept.clear()
    del found
    for version in range(3, 5):
        joined.publish(version, example_weights(version), per_bucket=2)
        assert len(joined.receivers[0]._wire._registered) == held


@pytest.mark.parametrize("piece_bytes", [1, 100, 4096])
def test_a_bucket_in_pieces_of_any_size_arrives(ends: Any, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.randn(9, 7), "none": torch.empty(0, 3), "b": torch.arange(33).to(torch.bfloat16)}
    for found in ends(1, 2, in_pieces_of(piece_bytes, monkeypatch)).publish(0, weights, per_bucket=2):
        assert same(found, weights)


def test_the_store_does_not_grow_with_the_number_of_publishes(ends: Any) -> None:
    joined = ends(2, 3)
    sizes = []
    for version in range(4):
        joined.publish(version, example_weights(version), per_bucket=2)
        sizes.append(joined.meeting.store.num_keys())
    assert sizes[1] == sizes[2] == sizes[3]


def cut(self: Wire, buffer: torch.Tensor, peer: Peer, segments: Any, what: str) -> None:
    """All but the last byte is written."""
    *others, last = segments
    WRITE(self, buffer, peer, [*others, replace(last, num_bytes=last.num_bytes - 1)], what)


def misplaced(self: Wire, buffer: torch.Tensor, peer: Peer, segments: Any, what: str) -> None:
    """It lands on another piece."""
    WRITE(self, buffer, peer, [replace(each, peer_offset=0) for each in segments], what)


@pytest.mark.parametrize("harm", [cut, misplaced])
async def test_a_piece_that_does_not_arrive_is_caught_and_the_next_publish_is_whole(
    monkeypatch: pytest.MonkeyPatch, harm: Any
) -> None:
    """The transfer engine says 0 all the same: no return code tells, the digests do."""
    kit = TestP2p()
    kit.options = in_pieces_of(64, monkeypatch)
    async with kit.connected(engines=1) as connected:
        await kit.publish(connected, 0)
        await connected.engines[0].activate(0)

        def second_piece(self: Wire, buffer: torch.Tensor, peer: Peer, segments: Any, what: str) -> None:
            (harm if segments[0].peer_offset == 64 else WRITE)(self, buffer, peer, segments, what)

        with monkeypatch.context() as patch:
            patch.setattr(Wire, "_confirmed", second_piece)
            error = await kit.refused(connected, 1)
        assert "does not hold what was written" in str(error)
        assert await connected.engines[0].version() == 0
        staged = await kit.publish(connected, 2)
        assert all(received == staged.sent for received in staged.received)


async def test_a_write_that_fails_in_the_background_fails_the_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Wire, buffer: torch.Tensor, peer: Peer, segments: Any, what: str) -> None:
        if "bucket 4 " in what and "engine 1" in what:  # the last bucket to the last target: nobody waits for it
            raise TransportError(f"{what}: the write failed", found="planned failure")
        WRITE(self, buffer, peer, segments, what)

    monkeypatch.setattr(Wire, "_confirmed", fails)
    kit = TestP2p()
    async with kit.connected() as connected:
        error = await kit.refused(connected, 0)
        assert "bucket 4 of version 0 to engine 1" in str(error)
        monkeypatch.undo()
        await kit._next_version_arrives(connected, 1)


async def test_a_refused_write_is_tried_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = TestP2p()
    async with kit.connected(engines=1) as connected:
        host = connected.trainer._host
        assert host is not None
        sender = host._sender
        assert isinstance(sender, P2pSender)
        assert sender._wire is not None
        real, refusals = sender._wire._engine, iter([-1])

        class Flaky:
            def batch_transfer_sync_write(self, *arguments: Any) -> int:
                return next(refusals, None) or real.batch_transfer_sync_write(*arguments)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(sender._wire, "_engine", Flaky())
        staged = await kit.publish(connected, 0)
        assert staged.sent.figures["write_retries"] == 1
        assert staged.received[0].digests == staged.sent.digests
