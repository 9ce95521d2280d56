"""Transport `broadcast`, its ends in threads of one process; across processes see miles-ray's tests."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from typing import NoReturn, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import EngineError, TransportError
from miles_core.kinds.transport import Transport, WeightSource
from miles_core.testing.recording import RecordingOptions, example_weights
from miles_core.testing.transport import TransportConformance
from miles_core.types import NamedTensor, WeightBucket
from miles_core.weights.digests import digest_tensor
from miles_transports.broadcast import BroadcastReceiver, BroadcastSender, BroadcastTransport, choose_wire
from miles_transports.meeting import Address, Meeting
from miles_transports.options import BroadcastOptions
from miles_transports.packing import ALIGNMENT_BYTES, Layout, layout_of, pack, unpack


class TestBroadcast(TransportConformance):
    def make(self) -> Transport:
        return BroadcastTransport(
            BroadcastOptions(timeout_s=300.0)
        )  # more than the kit's patience: nothing waits it out


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)


@given(st.lists(tensors, max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_packing_keeps_every_tensor_whatever_its_dtype_and_shape(values: list[torch.Tensor], last: bool) -> None:
    named = tuple(
        NamedTensor(name=f"t{i}", tensor=value.T if value.dim() == 2 else value) for i, value in enumerate(values)
    )
    bucket = WeightBucket(version=3, index=1, last=last, tensors=named)
    layout = Layout.from_json(layout_of(bucket).to_json())
    assert all(slot.offset % ALIGNMENT_BYTES == 0 for slot in layout.slots)
    copy = unpack(pack(bucket, layout, torch.device("cpu")), layout)
    assert (copy.version, copy.index, copy.last) == (3, 1, last)
    assert [(n.name, digest_tensor(n.tensor)) for n in copy.tensors] == [
        (n.name, digest_tensor(n.tensor)) for n in bucket.tensors
    ]


async def test_the_default_process_group_is_left_alone() -> None:
    kit = TestBroadcast()
    made = not dist.is_initialized()  # a test before may have left its own, which will do as well
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mine = dist.group.WORLD
        async with kit.connected() as connected:
            await kit.publish(connected, 0)
            assert dist.group.WORLD is mine
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 1.0
    finally:
        if made:
            dist.destroy_process_group()


async def test_two_transports_at_once_do_not_meet() -> None:
    kit = TestBroadcast()
    async with kit.connected(engines=1) as first, kit.connected(engines=1) as second:
        await asyncio.gather(kit.publish(first, 0), kit.publish(second, 5))
        await first.engines[0].activate(0)
        await second.engines[0].activate(5)
        for engine, version in ((first.engines[0], 0), (second.engines[0], 5)):
            expected = {name: digest_tensor(tensor) for name, tensor in example_weights(version).items()}
            assert await engine.digests() == expected


async def test_an_engine_that_does_not_answer_is_named_after_the_timeout() -> None:
    kit = TestBroadcast()
    async with kit.connected(engines=2) as connected:
        host, receiver = connected.trainer._host, connected.engines[1]._receiver
        assert host is not None
        assert isinstance(host._sender, BroadcastSender)
        assert isinstance(receiver, BroadcastReceiver)
        meeting = receiver._party.meeting

        async def never(version: int) -> None:
            attempt = await asyncio.to_thread(meeting.attempt)
            await asyncio.to_thread(meeting.wait, attempt, ["what nobody tells"], missing="the end")

        connected.engines[1].receive = never  # type: ignore[assignment,method-assign]
        host._sender._party.meeting._timeout_s = 0.5
        error = await kit.refused(connected, 0)
        assert re.search("nothing from (engine 0, )?engine 1", str(error)), "engine 0 may be slow"
        assert "within 0.5 s" in str(error)
        assert "transport.timeout_s" in str(error.__cause__)


async def test_a_receiver_that_dies_inside_the_collective_does_not_hang_the_sender() -> None:
    kit = TestBroadcast()
    async with kit.connected(engines=1) as connected:
        await kit.publish(connected, 0)
        engine = connected.engines[0]
        receiver = engine._receiver
        assert isinstance(receiver, BroadcastReceiver)

        async def dies(version: int) -> None:
            meeting = receiver._party.meeting
            attempt = await asyncio.to_thread(meeting.attempt)
            await asyncio.to_thread(meeting.tell, f"{attempt}/0/ready/engine 0", True)
            await asyncio.to_thread(meeting.wait, attempt, [f"{attempt}/0/layout"], missing="layout")
            receiver.close()  # as the operating system closes the sockets of a killed process
            raise EngineError("the process is gone")

        engine.receive = dies  # type: ignore[assignment,method-assign]
        error = await kit.refused(connected, 1)  # long before any time-out
        assert "engine 0: the process is gone" in str(error)


@pytest.mark.parametrize("taken", [0, 1])
async def test_who_leaves_before_a_collective_that_it_was_ready_for_holds_nobody_up(taken: int) -> None:
    """Before the group is made, or before a block that the trainer has sent already."""
    kit = TestBroadcast()
    async with kit.connected(options=RecordingOptions(fail_export_at=2, fail_version=0)) as connected:
        engine = connected.engines[1]
        receiver = engine._receiver
        assert isinstance(receiver, BroadcastReceiver)
        meeting = receiver._party.meeting

        def leave(version: int) -> NoReturn:
            attempt = meeting.attempt()
            buckets = receiver.receive(version)
            for _ in range(taken):
                next(buckets)
            if not taken:
                receiver._ready(attempt, 0)
            meeting.wait(attempt, [f"{attempt}/{taken}/layout"], missing="layout")
            if taken:
                meeting.wait(attempt, ["what nobody tells"], missing="the end")
            raise EngineError("it left")

        async def leaves(version: int) -> NoReturn:
            await asyncio.to_thread(leave, version)
            raise AssertionError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "receive", leaves)
            await kit.refused(connected, 0)
        await kit._next_version_arrives(connected, 1)


def test_who_gives_up_late_ends_its_own_attempt_and_not_the_next() -> None:
    driver, address = Meeting.host("127.0.0.1", 60.0, 1)
    late = Meeting.join(address, "trainer")
    driver.tell("attempt", 1)
    assert late.attempt() == 1
    driver.end(1, "the publish was cancelled")
    driver.tell("attempt", 2)
    late.give_up("it took too long")
    driver.raise_if_over(2)
    late.attempt()
    late.give_up("no memory")
    with pytest.raises(TransportError, match="no memory"):
        driver.raise_if_over(2)


def test_a_driver_that_cannot_be_reached_is_an_error_with_the_remedy() -> None:
    with socket.socket() as taken:  # bound, so that nobody else gets the port, but never listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(TransportError, match=r"transport\.host") as caught:
            Meeting.join(Address(host="127.0.0.1", port=port, timeout_s=0.5, num_engines=1), "engine 0")
    assert "engine 0 cannot reach the driver" in str(caught.value)


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
async def test_an_address_of_another_host_is_refused_at_once(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("it waited for the address to answer")

    monkeypatch.setattr("miles_transports.meeting.TCPStore", asked)
    transport = BroadcastTransport(BroadcastOptions(host=host))
    with pytest.raises(TransportError, match="meeting point") as caught:
        await transport.open(cast(WeightSource, None), [])
    assert "transport.host" in str(caught.value)
    assert caught.value.found is not None
    assert caught.value.found.startswith(f"{host}: ")
    assert "\n" not in caught.value.found


async def test_the_event_loop_runs_on_while_an_address_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = threading.Event()

    def slow(*args: object, **kwargs: object) -> NoReturn:
        raise OSError("no such name" if ran.wait(60) else "the loop stood still")

    monkeypatch.setattr("miles_transports.meeting.socket.getaddrinfo", slow)
    opening = asyncio.create_task(BroadcastTransport(BroadcastOptions()).open(cast(WeightSource, None), []))
    asyncio.get_running_loop().call_later(0, ran.set)
    with pytest.raises(TransportError, match="no such name"):
        await opening


async def test_the_store_does_not_grow_with_the_number_of_publishes() -> None:
    kit = TestBroadcast()
    async with kit.connected(options=RecordingOptions(tensors_per_bucket=3)) as connected:
        sizes = []
        for version in range(4):
            await kit.publish(connected, version)
            transport = connected.transport
            assert isinstance(transport, BroadcastTransport)
            assert transport._meeting is not None
            sizes.append(transport._meeting.store.num_keys())
        assert sizes[1] == sizes[2] == sizes[3]


@pytest.mark.parametrize(
    ("wanted", "devices", "chosen"),
    [
        ("auto", {"trainer": "a", "engine 0": "b"}, "nccl"),
        ("auto", {"trainer": "a", "engine 0": "a"}, "gloo"),
        ("auto", {"trainer": None, "engine 0": None}, "gloo"),
        ("gloo", {"trainer": "a", "engine 0": "b"}, "gloo"),
    ],
)
def test_the_wire_follows_the_devices(wanted: str, devices: dict[str, str | None], chosen: str) -> None:
    assert choose_wire(wanted, devices) == chosen


def test_nccl_on_one_shared_gpu_is_refused_before_it_hangs() -> None:
    with pytest.raises(TransportError, match=r"transport\.wire: gloo"):
        choose_wire("nccl", {"trainer": "a", "engine 0": "a"})
