"""One run at a time drives an attached server, whatever is delayed, stopped or killed: on a clock of the tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import EngineError, EngineLost
from miles_core.testing.virtual_time import in_virtual_time, run_virtual
from miles_sglang.claim import RELEASED, Claim
from miles_sglang.client import Client
from miles_sglang.dialect import Dialect
from miles_sglang.lease import LEASE_S, RENEW_S
from miles_sglang.updates import DiskUpdate

DIALECT = Dialect.of("0.5.21", "test")


class FakeServer:
    """Sessions, weights and their name as SGLang keeps them, on the loop's clock."""

    def __init__(self) -> None:
        self.name, self.weights = "default", "checkpoint"
        self.sessions: dict[str, float] = {}
        self.load_s: Callable[[], float] = lambda: 1.0
        self.loading = asyncio.Event()
        self.loaded_at = 0.0
        self._asked: set[str] = set()
        self._reaped = 0.0
        self._scheduler = asyncio.Lock()

    async def handle(self, path: str, body: Any) -> Any:
        """Goes on without whoever asked."""
        if path == "/model_info":  # answered beside the scheduler
            return {"weight_version": self.name}
        if path == "/open_session":
            if body["session_id"] in self._asked:  # and so is this, where somebody waits for that name
                raise EngineError("a session with the same id is still open")
            self._asked.add(body["session_id"])
        work = asyncio.create_task(self._schedule(path, body))
        work.add_done_callback(lambda done: self._answered(body, done))
        return await asyncio.shield(work)

    def _answered(self, body: Any, done: asyncio.Task[Any]) -> None:
        self._asked.discard(body.get("session_id"))
        done.exception()  # whoever asked may be gone

    async def _schedule(self, path: str, body: Any) -> Any:
        async with self._scheduler:
            now = asyncio.get_running_loop().time()
            if now - self._reaped > 1.0:
                self._reaped = now
                self.sessions = {name: end for name, end in self.sessions.items() if end > now}
            if path == "/open_session":
                if body["session_id"] in self.sessions:
                    raise EngineError("a session with the same id is still open")
                self.sessions[body["session_id"]] = now + body["timeout"]
                return body["session_id"]
            if path == "/close_session":
                self.sessions.pop(body["session_id"], None)
            elif path == "/update_weight_version":
                self.name = body["new_version"]
            elif path == "/update_weights_from_disk":
                self.loading.set()
                await asyncio.sleep(self.load_s())
                self.weights, self.name = body["model_path"], body["weight_version"]
                self.loaded_at = asyncio.get_running_loop().time()
            return {"success": True}


class Line(Client):
    """A run's way to the server, with delays; one that is cut brings nothing."""

    def __init__(self, server: FakeServer, delay: Any) -> None:
        super().__init__("http://server", "test")
        self._server, self._delay = server, delay

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return await self.post(path, {})

    async def post(self, path: str, body: Any, *, timeout_s: float | None = None) -> Any:
        await asyncio.sleep(self._delay())
        found = await self._server.handle(path, body)
        await asyncio.sleep(self._delay())
        return found


class Driver:
    """What an engine does with a claim: takes it, loads, samples, publishes, until it is stopped or loses it."""

    def __init__(self, server: FakeServer, number: int, delay: Any = lambda: 0.01) -> None:
        self.server, self.line = server, Line(server, delay)
        owner = f"miles/host{number}+0/{number}/1/{number:02x}"
        self.claim = Claim(owner, f"run {number}", lambda: self.line, attached=True, lost=self._lose)
        self.version, self.lost, self.sampled = -1, False, 0

    async def attach(self) -> None:
        await self.claim.take()
        await self.push(-1)

    def _lose(self, why: EngineLost) -> None:
        self.lost = True

    async def push(self, version: int) -> None:
        await self.claim.check_held()
        folder = Path(f"{self.claim.owner}/{version}")
        await DiskUpdate().push(self.line, DIALECT, folder, self.claim.name(version), flush=True)
        self.version = version

    def die(self) -> None:
        """As kill -9 would: nothing is released. Its other tasks are the test's to cancel."""
        if self.claim._keeping is not None:
            self.claim._keeping.cancel()

    async def sample(self) -> None:
        """Tokens carry the name at the server; what passes as this run's must be of its weights."""
        name, weights = self.server.name, self.server.weights
        await asyncio.sleep(0.1)
        if self.claim.read(name, self.version) >= 0:
            assert weights == f"{self.claim.owner}/{name.rpartition('/')[2]}", "tokens of weights of another run"
            self.sampled += 1

    async def drive(self, steps: int, rest: Any) -> None:
        for step in range(steps):
            if self.lost:
                return
            await self.push(step)
            for _ in range(3):
                await asyncio.sleep(rest())
                await self.sample()


@in_virtual_time
async def test_a_second_run_waits_for_the_lease_of_a_dead_one_and_no_longer() -> None:
    server = FakeServer()
    first, second = Driver(server, 1), Driver(server, 2)
    await first.attach()
    await asyncio.sleep(10 * RENEW_S + 1)
    first.die()
    began = asyncio.get_running_loop().time()
    await second.attach()
    assert LEASE_S - RENEW_S < asyncio.get_running_loop().time() - began < LEASE_S + 10
    await second.drive(2, lambda: 1.0)
    assert second.sampled == 6


@in_virtual_time
async def test_a_living_run_keeps_its_server_through_a_load_that_outlasts_many_leases() -> None:
    server = FakeServer()
    first, second = Driver(server, 1), Driver(server, 2)
    server.load_s = lambda: 20 * LEASE_S
    attaching = asyncio.create_task(first.attach())
    await server.loading.wait()
    with pytest.raises(EngineError, match="another engine of Miles uses this server"):
        await second.attach()
    assert server.loaded_at, "it was told before the server could answer"
    await attaching
    update = asyncio.create_task(first.push(0))
    with pytest.raises(EngineError, match="process 1 on host1, its version 0"):
        await second.attach()
    await update
    assert not first.lost
    await first.claim.release()
    assert server.name == RELEASED
    server.load_s = lambda: 1.0
    await second.attach()


@pytest.mark.parametrize("load_s", [2.0, LEASE_S, 20 * LEASE_S])
@pytest.mark.parametrize("killed_after_s", [0.1, 0.9 * LEASE_S, 10 * LEASE_S])
@pytest.mark.parametrize("engine_start", [False, True])
def test_a_run_that_is_killed_while_weights_load_leaves_its_server_within_a_lease(
    load_s: float, killed_after_s: float, engine_start: bool
) -> None:
    async def main() -> None:
        server = FakeServer()
        first, second = Driver(server, 1), Driver(server, 2)
        if not engine_start:
            await first.attach()
        server.load_s, server.loading = (lambda: load_s), asyncio.Event()
        load = asyncio.create_task(first.attach() if engine_start else first.push(0))
        await server.loading.wait()
        taking = asyncio.create_task(second.claim.take())
        await asyncio.sleep(min(killed_after_s, load_s / 2))
        first.die()
        load.cancel()
        await taking
        assert asyncio.get_running_loop().time() - server.loaded_at < LEASE_S + 10
        server.load_s = lambda: 1.0
        await second.push(-1)
        await second.drive(2, lambda: 1.0)
        assert second.sampled == 6

    run_virtual(main())


@in_virtual_time
async def test_of_runs_that_attach_at_once_one_gets_the_server() -> None:
    server = FakeServer()
    runs = [Driver(server, number) for number in range(6)]
    outcomes = await asyncio.gather(*(run.attach() for run in runs), return_exceptions=True)
    assert sum(outcome is None for outcome in outcomes) == 1
    (winner,) = (run for run, outcome in zip(runs, outcomes, strict=True) if outcome is None)
    await winner.drive(2, lambda: 1.0)
    assert winner.sampled == 6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_no_run_trains_on_tokens_of_another_whatever_is_delayed(seed: int, stalls: bool) -> None:
    """Runs come, load for a second or many leases, are killed, and, with `stalls`, are stopped between any two messages
    for longer than a lease."""
    rng = random.Random(seed)
    load_s = rng.choice((1.0, 1.0, RENEW_S, 3 * LEASE_S))

    def delay() -> float:
        if stalls and rng.random() < 0.03:
            return rng.uniform(LEASE_S, 4 * LEASE_S)
        return rng.uniform(0.0, 0.3)

    async def life(run: Driver) -> None:
        try:
            await run.attach()
            await run.drive(rng.randrange(2, 6), lambda: rng.uniform(1.0, 2 * RENEW_S))
            await run.claim.release()
        except EngineError:
            if not stalls:
                assert not run.sampled, "a run that was never stopped lost its server"

    async def main() -> None:
        server = FakeServer()
        server.load_s = lambda: rng.uniform(0.1, load_s)
        runs = [Driver(server, number, delay) for number in range(4)]
        lives = []
        for run in runs:
            lives.append(asyncio.create_task(life(run)))
            await asyncio.sleep(rng.uniform(0.0, 2 * LEASE_S))
            if rng.random() < 0.3:
                killed = rng.choice(range(len(lives)))
                lives[killed].cancel()
                runs[killed].die()
        await _all(lives)

    run_virtual(main())


async def _all(lives: list[asyncio.Task[None]]) -> None:
    for outcome in await asyncio.gather(*lives, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
