"""Lost engines: found, replaced while the trainer rests, and served from only once they hold the published version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from miles_core.driver import recovery
from miles_core.errors import EngineError, EngineLost, RunError, TrainerLost, TransportError
from miles_core.kinds.engine import EngineContext
from miles_core.kinds.transport import Staged
from miles_core.restarts import RestartBudget
from miles_core.session.pool import EnginePool
from miles_core.testing.executor import generate_request
from miles_core.testing.recording import RecordingEngine, RecordingOptions, example_weights
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.testing.waiting import until
from miles_core.types import NamedTensor
from miles_core.weights.digests import manifest
from miles_core.weights.fleet import Fleet
from miles_core.weights.lifecycle import UpdateSettings


class Memory:
    """Puts versions straight into whatever engines it was opened with."""

    error: Exception | None = None

    async def open(self, source: object, engines: Sequence[RecordingEngine]) -> None:
        self.engines = list(engines)

    async def publish(self, version: int) -> Staged:
        if self.error is not None:
            raise TransportError("not staged") from self.error
        tensors = [NamedTensor(name=name, tensor=tensor) for name, tensor in example_weights(version).items()]
        for engine in self.engines:
            engine.stage_directly(version, example_weights(version))
        sent = manifest(version, tensors)
        return Staged(sent=sent, received=(sent,) * len(self.engines))

    async def close(self) -> None: ...


class Hanging(RecordingEngine):
    hangs = False

    async def version(self) -> int:
        if self.hangs:
            await asyncio.sleep(3600)
        return await super().version()


class Place:
    """The parts of a run that recovery touches, with recording engines."""

    def __init__(self, *, broken_restarts: int = 0) -> None:
        self.engines: list[Any] = []
        self.transport = Memory()
        self.broken_restarts = broken_restarts
        self.said: list[str] = []
        self.version, self.published_step, self.trained_step, self.publishing = -1, -1, 0, False
        self.not_before: dict[int, float] = {}
        self.restarts: dict[int, asyncio.Task[Any]] = {}
        self.replaced: dict[int, RestartBudget] = {}
        self.executor = SimpleNamespace(restart_engine=self._restart, describe=self._describe)
        self.recorder = SimpleNamespace(
            alarm=lambda step, text: self.said.append(text), event=lambda kind, **facts: self.said.append(kind)
        )
        self.spec = SimpleNamespace(
            schedule=SimpleNamespace(on_weight_update="retract"),
            rollout=SimpleNamespace(
                health_interval_s=0.01, health_timeout_s=0.2, engine_restarts=3, engine_restarts_within_s=3600.0
            ),
        )

    async def start(self, count: int = 2) -> Any:
        self.engines = [await self._make(index) for index in range(count)]
        await self.transport.open(None, self.engines)
        self.pool = EnginePool(self.engines)
        self.fleet = Fleet(self.transport, None, self.engines, UpdateSettings())  # type: ignore[arg-type]
        await recovery.update(self, 0)  # type: ignore[arg-type]
        self.said.clear()
        return self

    async def _make(self, index: int) -> Hanging:
        context = EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=index)
        engine = Hanging(RecordingOptions(), context)
        await engine.start()
        return engine

    async def _restart(self, index: int) -> Hanging:
        if self.broken_restarts:
            self.broken_restarts -= 1
            raise EngineError("no room")
        return await self._make(index)

    async def _describe(self) -> dict[str, str]:
        return {}


async def recover(run: Any) -> None:
    """Once what is being started has started."""
    recovery._begin(run)
    await asyncio.wait(run.restarts.values())
    await recovery.recover(run)


@in_virtual_time
async def test_a_lost_engine_is_replaced_with_the_published_version_while_work_waits() -> None:
    run = await Place().start()
    old = run.engines[1]
    run.pool.lose(1, "its process ended")

    async def work() -> str:
        await until(lambda: not run.pool.lost())
        return "done"

    assert await asyncio.wait_for(recovery.attend(run, work()), 5) == "done"
    assert run.engines[1] is not old
    assert old not in run.fleet.members
    assert [await engine.version() for engine in run.engines] == [0, 0]
    assert run.said[0] == "engine 1 is lost and will be replaced: its process ended"
    assert run.said[-1] == "engine_replaced"


@in_virtual_time
async def test_where_the_trainer_has_moved_on_the_newcomer_brings_the_next_version() -> None:
    run = await Place().start()
    run.trained_step = 1
    run.pool.lose(0, "gone")
    await recover(run)
    assert (run.version, run.published_step) == (1, 1)
    assert [await engine.version() for engine in run.engines] == [1, 1]


@in_virtual_time
async def test_engines_that_hang_or_serve_another_version_are_lost() -> None:
    run = await Place().start(3)
    run.engines[0].hangs = True
    run.engines[1].stage_directly(9, example_weights(9))
    await run.engines[1].activate(9)
    monitor = asyncio.create_task(recovery.monitor(run))
    await asyncio.wait_for(run.pool.loss(), 5)
    await asyncio.sleep(0.5)
    monitor.cancel()
    assert set(run.pool.lost()) == {0, 1}
    assert "did not answer within 0.2 s" in run.pool.lost()[0]
    assert "serves version 9, published is 0" in run.pool.lost()[1]


@in_virtual_time
async def test_an_engine_that_died_does_not_keep_the_others_from_a_version() -> None:
    run = await Place().start(3)
    run.engines[1].hangs = True
    run.trained_step = 1
    await recovery.update(run, 1)
    assert set(run.pool.lost()) == {1}
    assert [await run.engines[index].version() for index in (0, 2)] == [1, 1]


@in_virtual_time
async def test_a_run_without_any_engine_left_says_so() -> None:
    run = await Place(broken_restarts=9).start(1)
    run.pool.lose(0, "gone")
    with pytest.raises(RunError, match="every engine is lost"):
        await recovery.recover(run)


@in_virtual_time
async def test_the_loss_of_the_trainer_is_not_blamed_on_engines() -> None:
    run = await Place().start()
    run.transport.error = TrainerLost("trainer rank 0 died")
    with pytest.raises(TrainerLost):
        await recovery.update(run, 1)
    assert run.pool.lost() == {}


class Dying(Hanging):
    """Answers nothing from a certain call on."""

    dies_at: str | None = None

    def _die(self, call: str) -> None:
        if call == self.dies_at:
            self.dead = True
        if getattr(self, "dead", False):
            raise EngineLost(f"died in {call}")

    async def version(self) -> int:
        self._die("version")
        return await super().version()

    async def activate(self, version: int) -> None:
        self._die("activate")
        await super().activate(version)

    async def resume(self) -> None:
        self._die("resume")
        await super().resume()


class DyingPlace(Place):
    """The first engine started anew dies in the call `at`."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at: str | None = at

    async def _restart(self, index: int) -> Hanging:
        context = EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=index)
        engine = Dying(RecordingOptions(), context)
        await engine.start()
        engine.dies_at, self.at = self.at, None
        return engine


@in_virtual_time
@pytest.mark.parametrize("at", ["version", "activate", "resume"])
async def test_a_newcomer_that_dies_again_costs_the_others_nothing_and_is_replaced_anew(at: str) -> None:
    run = await DyingPlace(at).start()
    run.trained_step = 1
    run.pool.lose(1, "gone")
    await recover(run)
    assert run.pool.serving() == {0}
    assert (run.version, await run.engines[0].version()) == (1, 1)
    async with asyncio.timeout(5):  # it is not left paused
        assert [chunk async for chunk in run.engines[0].generate(generate_request("a", (1, 2)))]
    run.trained_step = 2
    await recover(run)
    assert run.pool.serving() == {0, 1}
    assert [await engine.version() for engine in run.engines] == [2, 2]


@in_virtual_time
async def test_a_newcomer_that_dies_between_update_and_service_serves_nobody() -> None:
    run = await Place().start()
    run.pool.lose(1, "gone")
    recovery._begin(run)
    await asyncio.wait(run.restarts.values())
    newcomers = await recovery.replace_lost(run)
    await recovery.update(run, 0)
    run.engines[1].hangs = True
    await recovery.admit(run, newcomers)
    assert run.pool.serving() == {0}
    assert any("serves nobody: it did not answer within 0.2 s" in text for text in run.said)


@in_virtual_time
async def test_a_place_that_cannot_be_filled_is_left_alone_for_a_while_unless_nobody_serves() -> None:
    run = await Place(broken_restarts=1).start()
    run.pool.lose(1, "gone")
    await recover(run)
    run.not_before[1] += 3600
    await recovery.recover(run)
    assert run.pool.serving() == {0}
    assert not run.restarts
    run.pool.lose(0, "gone too")
    while run.pool.lost():
        await recover(run)
    assert run.pool.serving() == {0, 1}


@in_virtual_time
async def test_an_engine_that_dies_again_and_again_stays_out_until_the_window_has_passed() -> None:
    run, now = await Place().start(), 0.0
    run.replaced = {index: RestartBudget(2, 3600.0, clock=lambda: now) for index in (0, 1)}
    for _ in range(2):
        run.pool.lose(1, "a poisoned request")
        await recover(run)
        assert run.pool.serving() == {0, 1}
        now += 600.0
    run.pool.lose(1, "a poisoned request")
    for _ in range(3):
        await recovery.recover(run)
    assert (run.pool.serving(), run.restarts) == ({0}, {})
    told = [text for text in run.said if "too often" in text]
    assert told == ["engine 1 is lost too often to be replaced (at most 2 within 3600 s): a poisoned request"]
    now += 2400.0
    run.not_before.clear()  # the loop's own clock has come as far
    await recover(run)
    assert run.pool.serving() == {0, 1}


@in_virtual_time
async def test_a_run_ends_when_its_only_engine_dies_too_often() -> None:
    run = await Place().start(1)
    run.spec.rollout.engine_restarts = 0
    run.pool.lose(0, "gone")
    with pytest.raises(RunError, match=r"(?s)every engine is lost.*rollout\.engine_restarts"):
        await recovery.recover(run)


@in_virtual_time
async def test_work_and_updates_go_on_while_an_engine_takes_its_time_to_start() -> None:
    run = await Place().start()
    room, asked = asyncio.Event(), asyncio.Event()

    async def slow(index: int) -> Hanging:
        asked.set()
        await room.wait()
        return await run._make(index)

    run.executor.restart_engine = slow
    run.pool.lose(1, "its node is gone")
    assert await asyncio.wait_for(recovery.attend(run, asked.wait()), 5)
    run.trained_step = 1
    assert await recovery.replace_lost(run) == set()
    await recovery.update(run, 1)
    assert await run.engines[0].version() == 1
    room.set()
    await recover(run)
    assert [await engine.version() for engine in run.engines] == [1, 1]
    assert run.said.count("engine 1 is lost and will be replaced: its node is gone") == 1


@in_virtual_time
@pytest.mark.parametrize("count", [1, 2])
async def test_engines_that_all_died_while_the_trainer_worked_are_replaced_by_the_next_version(count: int) -> None:
    run = await Place().start(count)
    for engine in run.engines:
        engine.hangs = True
    run.trained_step = 1
    assert await asyncio.wait_for(recovery.publish(run, 1), 5) is None
    assert run.pool.serving()
    assert (run.version, run.published_step) == (1, 1)
    assert {await run.engines[index].version() for index in run.pool.serving()} == {1}


@in_virtual_time
async def test_one_that_cannot_start_does_not_end_the_run_while_another_still_does() -> None:
    run = await Place().start()
    started = asyncio.Event()

    async def restart(index: int) -> Hanging:
        if index == 0:
            raise EngineError("no room")
        await asyncio.wait_for(started.wait(), 5)
        return await run._make(index)

    run.executor.restart_engine = restart
    for index in (0, 1):
        run.pool.lose(index, "gone")
    recovering = asyncio.create_task(recovery.recover(run))
    await until(lambda: any("could not be replaced" in text for text in run.said))
    started.set()
    await asyncio.wait_for(recovering, 5)
    assert run.pool.serving() == {1}


@in_virtual_time
async def test_a_late_answer_of_a_replaced_engine_is_not_held_against_its_successor() -> None:
    run = await Place().start()
    run.engines[1].hangs = True
    asking = asyncio.create_task(recovery.probe(run, 1, 0.2))
    await asyncio.sleep(0)
    run.pool.lose(1, "gone")
    await recover(run)
    await asking
    assert run.pool.serving() == {0, 1}
