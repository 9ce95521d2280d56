"""Transport `p2p` between processes: two trainer ranks, three engines, and an engine that dies."""

from __future__ import annotations

import os
import signal

import pytest

from miles_core.errors import TransportError
from miles_core.testing.executor import engine_spec, trainer_spec
from miles_core.testing.recording import example_weights
from miles_core.weights.digests import digest_tensor
from miles_core.weights.lifecycle import publish
from miles_ray.executor import RayExecutor
from miles_ray.options import RayOptions
from miles_transports.options import P2pOptions
from miles_transports.p2p.transport import P2pTransport

pytest.importorskip("mooncake.engine", reason="the transfer engine of mooncake-transfer-engine-non-cuda is absent")

OPTIONS = RayOptions(num_cpus=2, object_store_mib=100, cpus_per_rank=0.1, cpus_per_engine=0.1, start_timeout_s=240.0)


async def test_two_ranks_write_to_three_engines_and_a_killed_one_leaves_the_old_version_serving() -> None:
    executor = RayExecutor(OPTIONS)
    transport = P2pTransport(P2pOptions(timeout_s=120.0, write_timeout_s=60.0, write_retries=1))
    try:
        trainer = await executor.start_trainer(trainer_spec(world_size=2))
        engines = await executor.start_engines(engine_spec(count=3))
        await transport.open(trainer, engines)
        for version in (0, 1):
            await publish(transport, engines, version)
            expected = {name: digest_tensor(tensor) for name, tensor in example_weights(version).items()}
            for engine in engines:
                assert await engine.version() == version
                assert await engine.digests() == expected
        pid = int((await executor.describe())["engine 2"].split()[1])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TransportError, match="engine 2"):
            await publish(transport, engines, 2)
        assert [await engine.version() for engine in engines[:2]] == [1, 1]
        assert await engines[0].digests() == expected
    finally:
        await transport.close()
        await executor.close()
