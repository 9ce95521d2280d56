"""A fleet through every order of updates, joins, failures, cancellations and time-outs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_core.errors import ContractError, EngineError, MilesError, TransportError
from miles_core.kinds.engine import Engine, EngineContext
from miles_core.kinds.transport import Staged
from miles_core.testing.recording import RecordingEngine, RecordingOptions, example_weights
from miles_core.testing.virtual_time import VirtualLoop, in_virtual_time
from miles_core.types import NamedTensor, WeightManifest
from miles_core.watch import waiters
from miles_core.weights.digests import manifest
from miles_core.weights.fleet import Fleet
from miles_core.weights.lifecycle import Phase, UpdateSettings


def account(version: int) -> WeightManifest:
    return manifest(version, [NamedTensor(name=n, tensor=t) for n, t in example_weights(version).items()])


class FaultyEngine(RecordingEngine):
    """Fails at the call named by `fault`, once; hangs instead when `hangs`."""

    fault: str | None = None
    hangs = False
    fleet: Sequence[FaultyEngine] = ()
    """Those that get a version together with this one."""

    async def _maybe(self, call: str) -> None:
        if self.fault != call:
            return
        self.fault = None
        if self.hangs:
            await asyncio.Event().wait()
        raise EngineError(f"planned failure: {call}")

    @property
    def generating(self) -> bool:
        return self._running.is_set()

    async def pause(self, mode: Any = "retract") -> None:
        await self._maybe("pause")
        await super().pause(mode)

    async def activate(self, version: int) -> None:
        assert not any(each.generating for each in self.fleet), "two versions may be sampled from at once"
        await self._maybe("activate")
        if self.fault == "ignore":  # says that it is done, and goes on with what it had
            self.fault = None
            return
        await super().activate(version)

    async def resume(self) -> None:
        await self._maybe("resume")
        await super().resume()


class FaultyTransport:
    """Stages on the engines it was opened with; each may fail there."""

    def __init__(self) -> None:
        self.engines: Sequence[FaultyEngine] = ()
        self.opened = False
        self.slow = False

    async def open(self, source: object, engines: Sequence[Engine]) -> None:
        assert not self.opened, "opened twice without closing"
        self.engines, self.opened = [e for e in engines if isinstance(e, FaultyEngine)], True

    async def publish(self, version: int) -> Staged:
        assert self.opened
        if self.slow:
            self.slow = False
            await asyncio.Event().wait()
        received = []
        for engine in self.engines:
            engine.fleet = self.engines
            await engine._maybe("stage")
            differs, engine.fault = engine.fault == "differ", None if engine.fault == "differ" else engine.fault
            engine.stage_directly(version, example_weights(version + 1000 * differs))
            received.append(replace(account(version + 1000 * differs), version=version))
        return Staged(sent=account(version), received=tuple(received))

    async def close(self) -> None:
        self.opened = False


async def engine(index: int) -> FaultyEngine:
    made = FaultyEngine(
        RecordingOptions(), EngineContext(model_path="", context_length=None, device="cpu", seed=0, index=index)
    )
    await made.start()
    return made


async def fleet_of(count: int, **kwargs: Any) -> tuple[Fleet, FaultyTransport, list[FaultyEngine]]:
    engines = [await engine(index) for index in range(count)]
    transport = FaultyTransport()
    await transport.open(None, engines)
    return Fleet(transport, None, engines, UpdateSettings(**kwargs)), transport, engines  # type: ignore[arg-type]


class FleetMachine(RuleBasedStateMachine):
    """Whatever happens: all that generate serve one version, completely, and it never goes back.

    Without a delivery proof, which would stop the engines after mistakes of the lifecycle, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.next = 0
        self._begin()

    def _begin(self) -> None:
        self.fleet, self.transport, self.engines = self.run(fleet_of(2, timeout_s=0.05))
        self.served = -1

    def _resume_if_split(self) -> None:
        """A split fleet publishes nothing more, and a run that is resumed starts its engines anew."""
        if self.fleet.phase is Phase.SPLIT:
            with pytest.raises(TransportError, match="split"):
                self.run(self.fleet.publish(self.next))
            self._begin()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.loop.close()

    @rule(
        fault=st.sampled_from([None, None, "pause", "stage", "differ", "activate", "ignore", "resume"]),
        who=st.integers(0, 3),
        hangs=st.booleans(),
        again=st.booleans(),
    )
    def publish(self, fault: str | None, who: int, hangs: bool, again: bool) -> None:
        self._resume_if_split()
        version = self.served if again and self.served >= 0 else self.next
        self.next = max(self.next, version + 1)
        victim = self.engines[who % len(self.engines)]
        victim.fault, victim.hangs = fault, hangs
        try:
            report = self.run(self.fleet.publish(version))
        except MilesError:
            assert fault is not None, "a publish without a fault was refused"
            if fault in ("pause", "stage", "differ"):
                assert self.fleet.phase is Phase.REFUSED, "an engine took over what was not complete everywhere"
        else:
            assert report.version == version
            self.served = version
        victim.fault = None
        self.engines = [e for e in self.engines if e in self.fleet.members or e in self.fleet._newcomers]

    @rule()
    @precondition(lambda self: len(self.engines) < 4)
    def join(self) -> None:
        newcomer = self.run(engine(len(self.engines)))
        self.engines.append(newcomer)
        self.fleet.join(newcomer)

    @rule(who=st.integers(0, 3))
    @precondition(lambda self: len(self.engines) > 1)
    def leave(self, who: int) -> None:
        self._resume_if_split()
        gone = self.engines[who % len(self.engines)]
        if gone in self.fleet.members and len(self.fleet.members) == 1:
            return
        self.fleet.leave(gone)
        self.engines.remove(gone)

    @rule(turns=st.integers(1, 12))
    def cancel(self, turns: int) -> None:
        self._resume_if_split()
        version, self.next = self.next, self.next + 1

        async def cancelled() -> None:
            task = asyncio.create_task(self.fleet.publish(version))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

        self.run(cancelled())
        self.served = max(self.served, *(self.run(e.version()) for e in self.fleet.members))
        self.engines = [e for e in self.engines if e in self.fleet.members or e in self.fleet._newcomers]

    @rule()
    def a_transport_that_hangs_is_timed_out(self) -> None:
        self._resume_if_split()
        self.transport.slow = True
        before = self.served
        newcomers = bool(self.fleet._newcomers)
        version, self.next = self.next, self.next + 1
        refused: TransportError | None = None
        try:
            self.run(self.fleet.publish(version))
        except TransportError as error:
            refused = error
        if newcomers:  # the members got it in a second attempt
            assert refused is None
            self.served = version
        else:
            assert "within 0.05 s" in str(refused)
            assert self.served == before
        self.engines = [e for e in self.engines if e in self.fleet.members or e in self.fleet._newcomers]

    @invariant()
    def who_generates_serves_one_complete_version(self) -> None:
        generating = [e for e in self.fleet.members if e.generating]
        versions = {self.run(e.version()) for e in generating}
        assert len(versions) <= 1
        for each in generating:
            version = self.run(each.version())
            if version >= 0:
                assert self.run(each.digests()) == account(version).digests

    @invariant()
    def unless_split_every_member_generates_the_last_published_version(self) -> None:
        if self.fleet.phase is Phase.SPLIT:
            return
        for each in self.fleet.members:
            assert self.run(each.version()) == self.served
            assert each.generating

    @invariant()
    def nobody_is_left_waiting(self) -> None:
        assert waiters() == []


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


@in_virtual_time
async def test_the_second_of_two_publishers_waits_and_the_watch_names_both() -> None:
    fleet, transport, engines = await fleet_of(1)
    gate = asyncio.Event()

    async def gated(call: str) -> None:
        if call == "stage":
            await gate.wait()

    engines[0]._maybe = gated  # type: ignore[method-assign]
    first = asyncio.create_task(fleet.publish(0))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(fleet.publish(1))
    await asyncio.sleep(0.01)
    assert ("publish of version 1", "the end of the publish of version 0") in [(w.who, w.on) for w in waiters()]
    gate.set()
    assert [(await first).version, (await second).version] == [0, 1]
    assert transport.opened
    assert waiters() == []


@in_virtual_time
async def test_a_newcomer_that_fails_is_left_out_and_named_and_the_members_get_the_version() -> None:
    fleet, _, engines = await fleet_of(2)
    await fleet.publish(0)
    late = await engine(2)
    late.fault = "stage"
    fleet.join(late)
    report = await fleet.publish(1)
    assert report.refused == {2: "planned failure: stage"}
    assert fleet.members == tuple(engines)
    assert [await e.version() for e in (*engines, late)] == [1, 1, -1]
    fleet.join(late)
    assert (await fleet.publish(2)).refused == {}
    assert await late.version() == 2


@in_virtual_time
async def test_an_engine_that_does_not_answer_is_named_after_the_time_out() -> None:
    fleet, _, engines = await fleet_of(2, timeout_s=0.05)
    engines[1].fault, engines[1].hangs = "pause", True
    with pytest.raises(TransportError, match=r"engine 1: pause did not end within 0\.05 s"):
        await fleet.publish(0)
    assert engines[0].generating


@in_virtual_time
async def test_a_split_fleet_publishes_nothing_more() -> None:
    fleet, _, engines = await fleet_of(2)
    engines[0].fault = "activate"
    with pytest.raises(TransportError, match="active on some engines only"):
        await fleet.publish(0)
    with pytest.raises(TransportError, match="split"):
        await fleet.publish(1)
    assert not engines[0].generating
    assert not engines[1].generating


@in_virtual_time
async def test_joining_twice_is_a_mistake_that_is_told() -> None:
    fleet, _, engines = await fleet_of(1)
    with pytest.raises(TransportError, match="already"):
        fleet.join(engines[0])


@in_virtual_time
async def test_a_broken_proof_stops_every_engine() -> None:
    class Doubts:
        async def weights(self, engines: Sequence[FaultyEngine], manifest: object) -> dict[str, float]:
            assert not any(e.generating for e in engines), "who serves is proven too late"
            raise ContractError("not these weights")

        async def logprobs(self, engines: object, version: int) -> dict[str, float]:
            return {}

    fleet, _, engines = await fleet_of(2, proof=Doubts())
    with pytest.raises(ContractError, match="not these weights"):
        await fleet.publish(0)
    assert fleet.phase is Phase.SPLIT
    assert not any(e.generating for e in engines)


@in_virtual_time
async def test_engines_that_stage_aside_are_paused_after_staging() -> None:
    fleet, transport, engines = await fleet_of(1, overlap=True)
    seen: list[bool] = []

    async def note(call: str) -> None:
        if call == "stage":
            seen.append(engines[0].generating)

    engines[0]._maybe = note  # type: ignore[method-assign]
    report = await fleet.publish(0)
    assert seen == [True]
    assert list(report.seconds_by_phase)[:3] == ["staging", "verifying", "pausing"]
    assert report.figures["sync/pause_s"] < sum(report.seconds_by_phase.values())
    assert transport.opened
