"""RewardPool: scores finished episodes in worker processes, each call with a deadline.

A grader may loop for ever inside a regular expression, leak memory or call `exit`. When a call passes its deadline, or
its process dies, the process and its children are killed, that one trajectory fails, and the driver goes on. A failure
is never turned into a score of 0.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from miles_core import watch
from miles_core.config.resolve import ResolvedRun
from miles_core.errors import PluginError, RewardError
from miles_core.kinds.reward import Scored
from miles_core.rollout.reward_process import Lost, RewardProcess

STARTUP_S = 120.0
"""Deadline for a worker to import its rewards: a large grader on a loaded machine takes tens of seconds."""


class RewardTimeout(RewardError):
    """A reward call passed its deadline; its worker was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One reward of a run."""

    name: str
    """Prefix of its parts; unique in the run."""
    load: str
    """``module:attr`` or ``/absolute/file.py:fn``, as `registry.resolve` gives it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call; picklable."""
    weight: float = 1.0


def reward_specs(run: ResolvedRun) -> tuple[RewardSpec, ...]:
    """The rewards that a run-file picks. The name of a user's function is the function's own, without file or module; a
    name that is picked twice gets a number."""
    specs: list[RewardSpec] = []
    taken: Counter[str] = Counter()
    for pick, resolved in zip(run.spec.rewards, run.many.get("reward", ()), strict=True):
        name = resolved.capability.name.rpartition(":")[2]
        taken[name] += 1
        name += f"#{taken[name]}" if taken[name] > 1 else ""
        options = resolved.options.model_dump() if resolved.options is not None else {}
        specs.append(RewardSpec(name=name, load=resolved.capability.load, options=options, weight=pick.weight))
    return tuple(specs)


class RewardPool:
    """A fixed number of worker processes that every trajectory of the run shares.

    Example:
        async with RewardPool([RewardSpec(name="math", load="my_pkg:score")], workers=2, timeout_s=30.0) as pool:
            reward, parts = await pool.score(scored)
    """

    def __init__(self, rewards: Sequence[RewardSpec], *, workers: int, timeout_s: float) -> None:
        self._rewards = tuple(rewards)
        self._timeout_s = timeout_s
        self._workers = [_Worker(self._rewards) for _ in range(workers if self._rewards else 0)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._closed = False
        self.restarts = 0
        """Workers replaced because a call hung or killed them."""

    @property
    def empty(self) -> bool:
        """Whether the run picks no reward, so that the environment has to score."""
        return not self._rewards

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every worker and import every reward in each.

        Raises:
            PluginError: a reward cannot be imported, with its own traceback's last line.
        """
        with watch.waiting("driver", on="reward workers importing their rewards"):
            started = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for outcome in started:
            if outcome is not None:
                raise outcome
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, scored: Scored) -> tuple[float | None, dict[str, float]]:
        """The weighted sum of all rewards (None if the run picks none), and the value and parts of each, as ``name``
        and ``name.part``.

        Raises:
            RewardError: a reward raised, returned no finite number, or its process died.
            RewardTimeout: a reward passed its deadline.
        """
        if self.empty:
            return None, {}
        calls = [self._one(index, scored) for index in range(len(self._rewards))]
        values = []
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer  # the first in the run-file's order, whichever came first in time
            values.append(answer)
        parts: dict[str, float] = {}
        total = 0.0
        for spec, (value, own) in zip(self._rewards, values, strict=True):
            total += spec.weight * value
            parts[spec.name] = value
            parts |= {f"{spec.name}.{name}": part for name, part in own.items()}
        return total, parts

    async def _one(self, index: int, scored: Scored) -> tuple[float, dict[str, float]]:
        spec = self._rewards[index]
        with watch.waiting(f"reward {spec.name} of {scored.prompt.id}", on="a reward worker"):
            worker = await self._idle.get()
        if self._closed:
            self._idle.put_nowait(worker)
            raise RewardError(f"reward {spec.name!r} was asked after its workers were closed")
        try:
            verdict = await worker.call(index, scored, self._timeout_s)
        except Lost as lost:
            self.restarts += 1
            error = RewardTimeout if lost.timed_out else RewardError
            raise error(
                f"reward {spec.name!r} {lost}",
                where=f"prompt {scored.prompt.id!r}",
                do="make the reward faster or raise rollout.reward_timeout_s" if lost.timed_out else None,
            ) from None
        finally:
            self._idle.put_nowait(worker)
        if "error" in verdict:
            raise RewardError(
                f"reward {spec.name!r} failed: {verdict['error']}",
                expected="a finite number, or a mapping with the key 'reward'",
                found=verdict.get("trace"),
                where=f"prompt {scored.prompt.id!r}",
            )
        return verdict["reward"], verdict["parts"]

    async def close(self) -> None:
        """Kill every worker with its children; calls under way or waiting fail. Idempotent."""
        self._closed = True
        await asyncio.gather(*(worker.stop() for worker in self._workers))


class _Worker:
    """A place in the pool. If its process was killed, the next call starts another."""

    def __init__(self, rewards: Sequence[RewardSpec]) -> None:
        self._rewards = rewards
        self._process: RewardProcess | None = None

    async def start(self) -> None:
        process = self._process = await RewardProcess.start()
        try:
            async with asyncio.timeout(STARTUP_S):
                await process.send([(spec.load, dict(spec.options)) for spec in self._rewards])
                answer = await process.receive()
        except (Lost, TimeoutError) as error:
            await self.stop()
            reason = f"took more than {STARTUP_S:.0f} s" if isinstance(error, TimeoutError) else f"it {error}"
            raise PluginError(f"a reward worker did not start: {reason}", where=self._names()) from None
        except BaseException:
            await self.stop()
            raise
        if "error" in answer:
            await self.stop()
            raise PluginError(
                f"a reward cannot be loaded: {answer['error']}", found=answer["trace"], where=self._names()
            )

    async def call(self, index: int, scored: Scored, timeout_s: float) -> dict[str, Any]:
        """One verdict. The deadline runs from the moment the worker says it began, by the worker's clock.

        Raises:
            Lost: the deadline passed or the process died; it is gone afterwards.
        """
        if self._process is None:
            await self.start()
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(STARTUP_S):
                await process.send((index, scored))
                await process.receive()
            verdict = await process.receive_within(timeout_s)
            if verdict["elapsed_s"] > timeout_s:
                raise Lost(f"took {verdict['elapsed_s']:.1f} s, more than {timeout_s:g} s", timed_out=True)
        except TimeoutError:
            await self.stop()
            raise Lost(f"was never begun by its worker within {STARTUP_S:.0f} s") from None
        except BaseException:
            # Also when cancelled: the process still computes, and its next answer would be that of the wrong call.
            await self.stop()
            raise
        return verdict

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    def _names(self) -> str:
        return "rewards " + ", ".join(f"{spec.name} ({spec.load})" for spec in self._rewards)
