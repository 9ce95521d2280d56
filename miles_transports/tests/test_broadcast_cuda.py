"""Transport `broadcast` on GPUs: each party is a thread with a device of its own, as it would be a process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from miles_core.errors import TransportError
from miles_core.kinds.engine import EngineContext
from miles_core.kinds.transport import Receiver, Sender, SharedSender
from miles_core.testing.recording import RecordingEngine, RecordingOptions, Weights, buckets_of, example_weights
from miles_core.types import NamedTensor, WeightBucket, WeightManifest
from miles_core.weights import digests
from miles_transports.broadcast import BroadcastTransport
from miles_transports.options import BroadcastOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class Source:
    """A trainer thread on one GPU that sends given tensors."""

    model_path = ""

    def __init__(self, device: int) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))
        self._sender: Sender | None = None
        self.weights: Callable[[int], Weights] = example_weights

    async def open_sender(self, make: Callable[[], Sender]) -> None:
        self._sender = await asyncio.get_running_loop().run_in_executor(self._thread, make)

    async def open_senders(self, make: Callable[[int, int], SharedSender]) -> None:
        raise NotImplementedError

    async def send_weights(self, version: int) -> WeightManifest:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._send, version)

    def _send(self, version: int) -> WeightManifest:
        assert self._sender is not None
        weights = {name: tensor.to(f"cuda:{self.device}") for name, tensor in self.weights(version).items()}
        for bucket in buckets_of(weights, version, 2):
            self._sender.send(bucket)
        return digests.manifest(version, [NamedTensor(name=name, tensor=tensor) for name, tensor in weights.items()])

    async def close(self) -> None:
        if self._sender is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.close)
        self._thread.shutdown()


class CudaEngine(RecordingEngine):
    """Takes its buckets in a thread with a GPU of its own."""

    def __init__(self, device: int, index: int, options: RecordingOptions) -> None:
        context = EngineContext(model_path="", context_length=None, device="cuda:0", seed=0, index=index)
        super().__init__(options, context)
        self._thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))
        self.devices: set[str] = set()

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        self._receiver = await asyncio.get_running_loop().run_in_executor(self._thread, make)

    async def receive(self, version: int) -> WeightManifest:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._receive, version)

    def taken(self, bucket: WeightBucket) -> None:
        self.devices |= {str(named.tensor.device) for named in bucket.tensors}


@contextlib.asynccontextmanager
async def joined(
    trainer_device: int, *engine_devices: int, options: RecordingOptions | None = None
) -> AsyncIterator[tuple[BroadcastTransport, Source, list[CudaEngine]]]:
    source = Source(trainer_device)
    engines = [CudaEngine(device, index, options or RecordingOptions()) for index, device in enumerate(engine_devices)]
    transport = BroadcastTransport(BroadcastOptions(timeout_s=60.0))
    await transport.open(source, engines)
    try:
        yield transport, source, engines
    finally:
        await asyncio.gather(source.close(), *(engine.close() for engine in engines))
        await transport.close()


async def test_a_shared_gpu_goes_through_host_memory() -> None:
    async with joined(0, 0) as (transport, _, (engine,)):
        staged = await transport.publish(0)
        assert staged.received[0] == staged.sent
        assert engine.devices == {"cpu"}


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two_gpus
async def test_parties_with_gpus_of_their_own_use_nccl() -> None:
    async with joined(0, 1) as (transport, _, (engine,)):
        for version in range(3):
            staged = await transport.publish(version)
            assert staged.received[0] == staged.sent
        assert engine.devices == {"cuda:1"}


@needs_two_gpus
async def test_a_new_nccl_group_follows_a_failed_publish() -> None:
    async with joined(0, 1, options=RecordingOptions(fail_receive=(0, 2), fail_version=1)) as (transport, _, _engines):
        await transport.publish(0)
        with pytest.raises(TransportError, match="engine 0: planned failure"):
            await transport.publish(1)
        staged = await transport.publish(2)
        assert staged.received[0] == staged.sent


@needs_two_gpus
async def test_large_buckets_move_at_the_links_speed(capsys: pytest.CaptureFixture[str]) -> None:
    big = {name: torch.zeros(1 << 28, dtype=torch.bfloat16) for name in ("a", "b", "c", "d")}  # 512 MiB each
    async with joined(0, 1) as (transport, source, (engine,)):
        source.weights = lambda version: big
        engine.weights = dict(big)
        await transport.publish(0)
        began = time.monotonic()
        await transport.publish(1)
        seconds = time.monotonic() - began
    with capsys.disabled():
        print(f"\n2 GiB in {seconds:.2f} s, digests on both sides included")
