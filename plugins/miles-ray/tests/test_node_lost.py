"""A cluster of two nodes on one machine loses the one that an engine runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from miles_core.errors import EngineError, EngineLost
from miles_core.kinds.engine import Engine
from miles_core.testing.executor import engine_spec, generate_request
from miles_ray.executor import RayExecutor
from miles_ray.options import RayOptions

pytestmark = pytest.mark.slow

NODE = {"num_cpus": 1, "object_store_memory": 100 * 1024 * 1024}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


async def collect(engine: Engine, name: str, tokens: int) -> list[int]:
    request = generate_request(name, tuple(range(tokens)))
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


async def test_an_engine_on_a_lost_node_is_lost_by_name_and_starts_again_where_there_is_room(cluster: Cluster) -> None:
    second = cluster.add_node(**NODE)
    options = RayOptions(address=cluster.address, cpus_per_engine=1.0, start_timeout_s=150.0)
    executor = RayExecutor(options)
    try:
        engines = list(await executor.start_engines(engine_spec(count=2)))
        nodes = [executor._processes[f"engine {index}"].node for index in range(2)]
        assert len(set(nodes)) == 2
        gone = nodes.index(second.node_id)
        await engines[gone].pause()
        waiting = asyncio.create_task(collect(engines[gone], "cut", 5))
        await asyncio.sleep(0.5)

        cluster.remove_node(second, allow_graceful=False)
        with pytest.raises(EngineLost, match=f"engine {gone} died while it was to generate"):
            await asyncio.wait_for(waiting, 100)
        assert await collect(engines[1 - gone], "spared", 5) == [0, 1, 2, 3, 4]

        executor._options = options.model_copy(update={"start_timeout_s": 5.0})
        with pytest.raises(EngineError, match="did not start again within 5 s"):
            await executor.restart_engine(gone)

        executor._options = options
        third = cluster.add_node(**NODE)
        engine = await executor.restart_engine(gone)
        assert executor._processes[f"engine {gone}"].node == third.node_id
        assert await collect(engine, "anew", 5) == [0, 1, 2, 3, 4]
    finally:
        await executor.close()
