"""The weight update as a state machine: what each failure leaves behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from miles_core.errors import EngineError, TransportError
from miles_core.kinds.engine import EngineContext, PauseMode
from miles_core.kinds.transport import Staged
from miles_core.testing.recording import RecordingEngine, RecordingOptions, example_weights
from miles_core.types import WeightManifest
from miles_core.watch import waiters
from miles_core.weights.digests import digest_tensor
from miles_core.weights.lifecycle import TRANSITIONS, Phase, WeightUpdate, publish, run_update


def manifest_of(version: int) -> WeightManifest:
    weights = example_weights(version)
    return WeightManifest(version=version, digests={n: digest_tensor(t) for n, t in weights.items()}, num_bytes=1)


class MemoryTransport:
    """Puts the version straight into the engines; `tamper` changes what it reports, `error` what it raises."""

    def __init__(
        self,
        engines: list[RecordingEngine],
        tamper: Callable[[Staged], Staged] = lambda staged: staged,
        error: Exception | None = None,
    ) -> None:
        self.engines, self.tamper, self.error = engines, tamper, error

    async def open(self, source: object, engines: object) -> None: ...

    async def publish(self, version: int) -> Staged:
        for engine in self.engines:
            engine.stage_directly(version, example_weights(version))
        if self.error is not None:
            raise self.error
        received = tuple(manifest_of(version) for _ in self.engines)
        return self.tamper(Staged(sent=manifest_of(version), received=received))

    async def close(self) -> None: ...


async def started(count: int, options: RecordingOptions | None = None) -> list[RecordingEngine]:
    engines = [
        RecordingEngine(
            options or RecordingOptions(),
            EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=index),
        )
        for index in range(count)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    return engines


async def versions(engines: list[RecordingEngine]) -> list[int]:
    return [await engine.version() for engine in engines]


async def test_publish_pauses_stages_activates_and_resumes_every_engine() -> None:
    engines = await started(2)
    report = await publish(MemoryTransport(engines), engines, 4)
    assert [engine.events for engine in engines] == [["pause", "activate 4", "resume"]] * 2
    assert await versions(engines) == [4, 4]
    assert report.version == 4
    assert report.num_tensors == len(example_weights(4))
    assert list(report.seconds_by_phase) == [
        *("pausing", "staging", "verifying", "activating", "proving", "resuming", "probing"),
    ]
    assert waiters() == []


def missing(staged: Staged) -> Staged:
    digests = dict(staged.received[1].digests)
    del digests["model.norm.weight"]
    return replace(staged, received=(staged.received[0], replace(staged.received[1], digests=digests)))


def changed(staged: Staged) -> Staged:
    digests = {**staged.received[0].digests, "lm_head.weight": "0" * 32}
    return replace(staged, received=(replace(staged.received[0], digests=digests), staged.received[1]))


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (missing, ["engine 1", "missing", "model.norm.weight"]),
        (changed, ["engine 0", "different", "lm_head.weight"]),
        (lambda staged: replace(staged, received=staged.received[:1]), ["1 engines accounted", "2 are there"]),
        (lambda staged: replace(staged, sent=replace(staged.sent, version=3)), ["trainer sent version 3"]),
        (
            lambda staged: Staged(
                sent=replace(staged.sent, digests={}), received=(replace(staged.sent, digests={}),) * 2
            ),
            ["the trainer sent no tensor"],
        ),
    ],
)
async def test_a_version_that_arrived_otherwise_is_refused_by_name_and_the_old_one_serves_on(
    tamper: Callable[[Staged], Staged], named: list[str]
) -> None:
    engines = await started(2)
    await publish(MemoryTransport(engines), engines, 1)
    update = WeightUpdate(2)
    with pytest.raises(TransportError) as caught:
        await run_update(update, MemoryTransport(engines, tamper), engines)
    for text in named:
        assert text in str(caught.value)
    assert update.phase is Phase.REFUSED
    assert await versions(engines) == [1, 1]
    assert all(engine.events[-1] == "resume" for engine in engines)


async def test_a_transport_that_raises_resumes_the_engines_and_lets_its_error_through() -> None:
    engines = await started(2)
    transport = MemoryTransport(engines, error=TransportError("the wire broke"))
    with pytest.raises(TransportError, match="the wire broke"):
        await publish(transport, engines, 0)
    assert await versions(engines) == [-1, -1]
    assert all(engine.events == ["pause", "resume"] for engine in engines)


async def test_a_cancelled_publish_resumes_the_engines() -> None:
    engines = await started(1)

    begun = asyncio.Event()

    class Endless(MemoryTransport):
        async def publish(self, version: int) -> Staged:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

    update = WeightUpdate(0)
    task = asyncio.create_task(run_update(update, Endless(engines), engines))
    await begun.wait()
    assert update.phase is Phase.STAGING
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engines[0].events == ["pause", "resume"]
    assert update.phase is Phase.REFUSED


async def test_activation_that_fails_on_one_of_two_engines_leaves_nobody_serving() -> None:
    engines = await started(2)
    await publish(MemoryTransport(engines), engines, 1)
    broken = await started(1, RecordingOptions(fail_activate=(0,)))
    broken[0].stage_directly(1, example_weights(1))
    broken[0].adopt_staged()
    mixed = [engines[0], broken[0]]
    for engine in mixed:
        engine.events.clear()
    update = WeightUpdate(2)
    with pytest.raises(TransportError, match="some engines only") as caught:
        await run_update(update, MemoryTransport(mixed), mixed)
    assert "engine 1: planned failure to activate" in str(caught.value)
    assert isinstance(caught.value.__cause__, EngineError)
    assert update.phase is Phase.SPLIT
    assert all("resume" not in engine.events for engine in mixed)


async def test_activation_that_fails_on_all_engines_serves_the_old_version_again() -> None:
    engines = await started(2, RecordingOptions(fail_activate=(0, 1)))
    update = WeightUpdate(0)
    with pytest.raises(TransportError, match="could not be activated"):
        await run_update(update, MemoryTransport(engines), engines)
    assert update.phase is Phase.REFUSED
    assert all(engine.events[-1] == "resume" for engine in engines)


async def test_an_engine_that_silently_keeps_its_version_is_found_out() -> None:
    engines = await started(2)

    class Deaf(RecordingEngine):
        async def activate(self, version: int) -> None:
            self.events.append("ignored")

    context = EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=1)
    mixed = [engines[0], Deaf(RecordingOptions(), context)]
    with pytest.raises(TransportError, match=r"engine 1: serves -1"):
        await publish(MemoryTransport(mixed), mixed, 0)


async def test_engines_on_different_versions_are_refused_before_anything_moves() -> None:
    engines = await started(2)
    engines[1].stage_directly(3, example_weights(3))
    engines[1].adopt_staged()
    with pytest.raises(TransportError, match=r"engine 0: -1, engine 1: 3"):
        await publish(MemoryTransport(engines), engines, 4)


async def test_versions_do_not_go_backwards() -> None:
    engines = await started(1)
    await publish(MemoryTransport(engines), engines, 5)
    with pytest.raises(TransportError, match="at most 4"):
        await publish(MemoryTransport(engines), engines, 4)
    await publish(MemoryTransport(engines), engines, 5)  # the same version again is a repetition, not a step back


async def test_publishing_to_no_engine_is_an_error() -> None:
    with pytest.raises(TransportError, match="no engine"):
        await publish(MemoryTransport([]), [], 0)


async def test_an_engine_that_cannot_pause_is_named_and_the_others_resume() -> None:
    engines = await started(2)

    class Stuck(RecordingEngine):
        async def pause(self, mode: PauseMode = "retract") -> None:
            raise EngineError("cannot pause")

    context = EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=1)
    mixed = [engines[0], Stuck(RecordingOptions(), context)]
    with pytest.raises(TransportError, match="engine 1: cannot pause") as caught:
        await publish(MemoryTransport(mixed), mixed, 0)
    assert caught.value.where == "engine 1"
    assert engines[0].events == ["pause", "resume"]


async def test_an_engine_that_cannot_resume_after_activation_splits_the_update() -> None:
    class Stuck(RecordingEngine):
        async def resume(self) -> None:
            raise EngineError("cannot resume")

    engine = Stuck(RecordingOptions(), EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=0))
    update = WeightUpdate(0)
    with pytest.raises(TransportError, match="resume failed"):
        await run_update(update, MemoryTransport([engine]), [engine])
    assert update.phase is Phase.SPLIT


def test_the_machine_takes_every_edge_of_its_table_and_no_other() -> None:
    for start, end in itertools.product(Phase, Phase):
        update = WeightUpdate(0)
        update.phase = start
        if end in TRANSITIONS[start]:
            update.enter(end)
            assert update.phase is end
        else:
            with pytest.raises(AssertionError, match="cannot go from"):
                update.enter(end)


def test_every_phase_is_reachable_and_every_path_ends_in_one_of_three_outcomes() -> None:
    reached, frontier = {Phase.SERVING}, [Phase.SERVING]
    while frontier:
        for phase in TRANSITIONS[frontier.pop()] - reached:
            reached.add(phase)
            frontier.append(phase)
    assert reached == set(Phase)
    ends = {phase for phase, following in TRANSITIONS.items() if not following}
    assert ends == {Phase.PUBLISHED, Phase.REFUSED, Phase.SPLIT}
