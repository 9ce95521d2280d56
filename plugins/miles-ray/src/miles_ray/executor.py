"""Executor `ray`: every trainer rank and every engine is an actor with a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_core.errors import EngineError, EngineLost, RunError
from miles_core.executors.rank import device_of
from miles_core.kinds.engine import Engine
from miles_core.kinds.executor import EngineSpec, TrainerSpec
from miles_core.watch import progress, waiting
from miles_ray.actors import EngineActor, Process, RankActor
from miles_ray.engine import RayEngine
from miles_ray.options import RayOptions
from miles_ray.remote import fetch
from miles_ray.trainer import RayTrainer

MIB = 1024 * 1024
RETRY_S = 0.5
"""Between attempts to start an engine whose node turns out to be dead."""


class RayExecutor:
    """Joins the cluster on first use. What it started, it ends: actors, reservations, and a cluster of its own."""

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._owns_cluster = False
        self._groups: list[Any] = []
        self._trainer: RayTrainer | None = None
        self._engines: list[RayEngine] = []
        self._engine_places: list[tuple[EngineSpec, dict[str, float], Any, int]] = []
        """Of each engine: what it is told, and its bundle, reservation and position therein."""
        self._processes: dict[str, Process] = {}

    async def start_trainer(self, spec: TrainerSpec) -> RayTrainer:
        """Start all ranks; rank 0's host is where they meet.

        Raises:
            RunError: the cluster lacks the resources, or a rank did not start.
        """
        self._join_cluster()
        bundle = self._bundle(self._options.cpus_per_rank, self._options.gpus_per_rank, spec.device)
        actors = await self._place(RankActor, [bundle] * spec.world_size, "trainer ranks")
        self._trainer = trainer = RayTrainer(actors, spec.model_path)
        try:
            await self._start_ranks(spec, actors)
        except BaseException:
            trainer.abandon("a rank did not start")  # the others may wait for it; closing need not wait for them
            raise
        return trainer

    async def _start_ranks(self, spec: TrainerSpec, actors: Sequence[Any]) -> None:
        names = [f"trainer rank {rank}" for rank in range(spec.world_size)]
        processes = await self._ask_where(actors, names, RunError)
        # One host needs no interface that others reach; loopback always works there.
        one_host = len({process.node for process in processes}) == 1
        host = "127.0.0.1" if one_host else processes[0].address
        port = 0
        if spec.world_size > 1:
            opening = actors[0].open_store.remote(host)
            port = await fetch(opening, who=names[0], died=RunError, doing="open the rendezvous")
        arguments = (spec, device_of(spec.device), host, port, self._options.collective_timeout_s)
        await self._start(names, [actor.start.remote(*arguments) for actor in actors], RunError)

    async def start_engines(self, spec: EngineSpec) -> Sequence[Engine]:
        """Start all engines of the call at once."""
        self._join_cluster()
        first = len(self._engines)
        bundle = self._bundle(self._options.cpus_per_engine, self._options.gpus_per_engine, spec.device)
        actors = await self._place(EngineActor, [bundle] * spec.count, "engines")
        self._engine_places += [(spec, bundle, self._groups[-1], position) for position in range(spec.count)]
        engines = [RayEngine(actor, index) for index, actor in enumerate(actors, first)]
        self._engines.extend(engines)
        await self._start_in(list(enumerate(actors, first)), spec)
        return engines

    async def restart_engine(self, index: int) -> Engine:
        """Replace an engine; when its node is gone, Ray moves the reservation to another one that has room.

        Ray finds a node dead only after seconds of missed heartbeats. What it is asked to start there meanwhile dies
        before it ran, and is started anew for as long as there is time.
        """
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                while True:
                    node = self._reserved_node(index)
                    try:
                        return await self._start_anew(index)
                    except EngineLost:
                        if node in {found["NodeID"] for found in ray.nodes() if found["Alive"]}:
                            raise
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise EngineError(
                f"engine {index} did not start again within {self._options.start_timeout_s:g} s",
                found=f"free: {ray.available_resources()}",
                where="executor ray",
                do="add a node with room for it, or raise executor.start_timeout_s",
            ) from None

    def _reserved_node(self, index: int) -> str:
        """Node that Ray holds an engine's reservation on; empty while it looks for another one."""
        _, _, group, position = self._engine_places[index]
        return str(placement_group_table(group)["bundles_to_node_id"].get(position, ""))

    async def _start_anew(self, index: int) -> Engine:
        spec, bundle, group, position = self._engine_places[index]
        await self._engines[index].kill("it is replaced")
        actor = self._actor(EngineActor, group, position, bundle)
        engine = self._engines[index] = RayEngine(actor, index)
        await self._start_in([(index, actor)], spec)
        return engine

    async def _start_in(self, actors: Sequence[tuple[int, Any]], spec: EngineSpec) -> None:
        names = [f"engine {index}" for index, _ in actors]
        await self._ask_where([actor for _, actor in actors], names, EngineLost)
        starts = []
        for index, actor in actors:
            context = spec.context(index, device=device_of(spec.device))
            starts.append(actor.start.remote(spec.load, spec.options, context))
        await self._start(names, starts, EngineLost)

    async def describe(self) -> Mapping[str, str]:
        """Process and host of each part."""
        return {name: f"process {p.pid} on {p.host} ({p.address})" for name, p in self._processes.items()}

    async def close(self) -> None:
        """End engines, then ranks, reservations, and the cluster if it was started here. Idempotent."""
        engines, self._engines, self._engine_places = self._engines, [], []
        trainer, self._trainer = self._trainer, None
        groups, self._groups = self._groups, []
        try:
            await asyncio.gather(*(engine.close() for engine in engines))
            if trainer is not None:
                await trainer.close()
        finally:
            if ray.is_initialized():
                for group in groups:
                    remove_placement_group(group)
                if self._owns_cluster:
                    ray.shutdown()
            self._owns_cluster = False

    def _join_cluster(self) -> None:
        if ray.is_initialized():
            return
        options = self._options
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a training run reports to nobody
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; it warns otherwise
        # Ray lets its workers run at nice 15: on a host that does anything else, engines then miss their health checks.
        os.environ.setdefault("RAY_worker_niceness", "0")
        local = {
            "num_cpus": options.num_cpus or os.cpu_count(),
            "object_store_memory": options.object_store_mib * MIB,
            "include_dashboard": False,
        }
        ray.init(
            address=options.address or "local",
            log_to_driver=options.worker_logs,
            logging_level=logging.ERROR,
            **({} if options.address else local),
        )
        self._owns_cluster = True

    def _bundle(self, cpus: float, gpus: float, device: str) -> dict[str, float]:
        return {"CPU": cpus, **({"GPU": gpus} if device == "cuda" else {})}

    async def _place(self, actor_class: type, bundles: list[dict[str, float]], what: str) -> list[Any]:
        """Reserve the bundles together and start one actor in each."""
        group = placement_group(bundles, strategy="PACK")
        self._groups.append(group)
        try:
            with waiting("driver", on=f"Ray to reserve {len(bundles)} {what}"):
                async with asyncio.timeout(self._options.start_timeout_s):
                    await group.ready()
        except TimeoutError:
            raise RunError(
                f"the cluster has no room for {len(bundles)} {what}",
                expected=f"{len(bundles)} x {bundles[0]}",
                found=f"free: {ray.available_resources()}",
                where="executor ray",
                do="lower placement, or executor.cpus_per_rank, cpus_per_engine, gpus_per_rank, gpus_per_engine",
            ) from None
        progress()
        return [self._actor(actor_class, group, index, bundle) for index, bundle in enumerate(bundles)]

    def _actor(self, actor_class: type, group: Any, index: int, bundle: dict[str, float]) -> Any:
        env_vars = {"OMP_NUM_THREADS": str(self._options.threads), **self._options.env_vars}
        placed = ray.remote(actor_class).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            runtime_env={"env_vars": env_vars},
        )
        return placed.remote(index)

    async def _ask_where(
        self, actors: Sequence[Any], names: Sequence[str], died: type[RunError] | type[EngineError]
    ) -> list[Process]:
        asked = [
            fetch(actor.process.remote(), who=name, died=died, doing="start its process")
            for name, actor in zip(names, actors, strict=True)
        ]
        with waiting("driver", on=f"the processes of {', '.join(names)}"):
            processes: list[Process] = await asyncio.gather(*asked)
        self._processes.update(zip(names, processes, strict=True))
        return processes

    async def _start(self, names: Sequence[str], refs: Sequence[Any], died: type[RunError] | type[EngineError]) -> None:
        async def one(name: str, ref: Any) -> None:
            with waiting("driver", on=f"{name}: start"):
                await fetch(ref, who=name, died=died, doing="start")
            progress()

        await asyncio.gather(*(one(name, ref) for name, ref in zip(names, refs, strict=True)))
