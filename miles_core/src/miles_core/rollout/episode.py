"""One attempt at one prompt: a session, an environment, the rewards, and a trajectory that says how it ended.

A bad rollout is data, not a crash. This is one of the few places that catch everything: whatever an environment raises
becomes a failed trajectory with the boundary it failed at. Errors of Miles itself (a broken contract, a missing plugin)
still surface.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from miles_core import watch
from miles_core.errors import ContractError, EngineError, PluginError, RewardError, SessionError
from miles_core.kinds.environment import Completion, Environment, EpisodeResult, SessionHandle
from miles_core.kinds.reward import Scored
from miles_core.rollout.rewards import RewardPool, RewardTimeout
from miles_core.types import Boundary, Failure, FinishReason, Message, Prompt, SamplingParams, Status, Tool, Trajectory


class RecordedSession(SessionHandle, Protocol):
    """A session as the rollout sees it: beside asking for completions, it can be read out."""

    def trajectory(self, *, prompt_id: str, status: Status) -> Trajectory:
        """The row the session recorded so far, unscored; with no turn yet, an empty row."""
        ...

    def close(self) -> None: ...


class SessionFactory(Protocol):
    def open(self, session_id: str, params: SamplingParams) -> RecordedSession: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Which attempt this is. Everything random about it follows from these and the run's seed."""

    purpose: str
    """``train`` or ``eval``."""
    step: int
    epoch: int
    draw: int
    """Number of the draw in the run; tells sessions of one prompt in two epochs apart."""
    sample: int
    """Position in the group, from 0."""
    attempt: int = 0

    @property
    def session_id(self) -> str:
        return f"{self.purpose}-s{self.step}-p{self.draw}-{self.sample}-a{self.attempt}"

    def seed(self, run_seed: int, prompt_id: str) -> int:
        """52 bits (exact in any JSON reader), different for every attempt at every prompt in every epoch."""
        text = f"{run_seed}/{self.purpose}/{self.epoch}/{prompt_id}/{self.sample}/{self.attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An attempt whose tokens are complete; `scored` is None when it already failed and nothing is left to score."""

    trajectory: Trajectory
    scored: Scored | None
    own_reward: float | None
    """The environment's own score."""


class Episodes:
    """Runs attempts; holds what they all share."""

    def __init__(
        self, *, environment: Environment, sessions: SessionFactory, rewards: RewardPool, seed: int, timeout_s: float
    ) -> None:
        self._environment = environment
        self._sessions = sessions
        self._rewards = rewards
        self._seed = seed
        self._timeout_s = timeout_s

    async def generate(self, prompt: Prompt, params: SamplingParams, key: EpisodeKey) -> Generated:
        """Run the environment to its end or its deadline.

        Raises:
            ContractError, PluginError: the session or a plugin is broken; no retry mends that.
        """
        params = replace(params, seed=key.seed(self._seed, prompt.id))
        session = self._sessions.open(key.session_id, params)
        observed = _Observed(session)
        try:
            result, failure = await self._run(prompt, observed, key)
            status = Status.FAILED if failure else observed.status
            trajectory = session.trajectory(prompt_id=prompt.id, status=status)
        finally:
            session.close()
        facts = {} if result is None else dict(result.metadata)
        trajectory = replace(
            trajectory,
            failure=failure,
            metadata={**facts, "turns": observed.turns, "sample": key.sample, "attempt": key.attempt},
        )
        if failure is None and not trajectory.sampled.any() and status is not Status.ABORTED:
            failure = Failure(boundary=Boundary.ENVIRONMENT, message="the episode ended without a sampled token")
            trajectory = replace(trajectory, status=Status.FAILED, failure=failure)
        trajectory.check()
        if trajectory.status in (Status.FAILED, Status.ABORTED) or result is None:
            return Generated(trajectory=trajectory, scored=None, own_reward=None)
        scored = Scored(
            prompt=prompt,
            messages=trajectory.messages,
            response=observed.response,
            truncated=trajectory.status is Status.TRUNCATED,
            metadata=facts,
        )
        return Generated(trajectory=trajectory, scored=scored, own_reward=result.reward)

    async def score(self, generated: Generated) -> Trajectory:
        """The trajectory with its reward, or failed(reward)."""
        trajectory, scored = generated.trajectory, generated.scored
        if scored is None:
            return trajectory
        try:
            reward, parts = await self._rewards.score(scored)
        except RewardError as error:
            return _failed(trajectory, Boundary.REWARD, str(error), timed_out=isinstance(error, RewardTimeout))
        own = generated.own_reward
        if own is not None and not math.isfinite(own):
            return _failed(trajectory, Boundary.REWARD, f"the environment reported the reward {own}")
        if reward is None and own is None:
            return _failed(trajectory, Boundary.REWARD, "neither a reward nor the environment scored the episode")
        if own is not None:
            parts = {**parts, "environment": own}
        return trajectory.with_reward((reward or 0.0) + (own or 0.0), reward_parts=parts)

    async def _run(
        self, prompt: Prompt, observed: _Observed, key: EpisodeKey
    ) -> tuple[EpisodeResult | None, Failure | None]:
        result: EpisodeResult | None = None
        failure: Failure | None = None
        who = f"sample {key.sample} of prompt {prompt.id} ({key.purpose} step {key.step})"
        try:
            with watch.waiting(who, on=f"environment {type(self._environment).__name__}"):
                async with asyncio.timeout(self._timeout_s) as deadline:
                    result = await self._environment.run(prompt, observed)
        except TimeoutError as error:
            if deadline.expired():
                boundary = Boundary.ENGINE if observed.completing else Boundary.ENVIRONMENT
                message = f"passed its deadline of {self._timeout_s:g} s in the {boundary}"
                return None, Failure(boundary=boundary, message=message, timed_out=True)
            failure = _failure(Boundary.ENVIRONMENT, error)
        except (ContractError, PluginError):
            raise
        except Exception as error:  # noqa: BLE001 - the episode boundary: fails this attempt, not the run
            failure = _failure(Boundary.ENVIRONMENT, error)
        if failure is None and not isinstance(result, EpisodeResult):
            found = type(result).__name__
            failure = Failure(boundary=Boundary.ENVIRONMENT, message=f"run returned {found}, not an EpisodeResult")
        # What the session itself raised comes first, whether the environment let it through, wrapped it or swallowed
        # it: the row lacks a turn the episode asked for.
        failure = observed.failure or failure
        watch.progress()
        return (None if failure else result), failure


class _Observed:
    """The session an environment gets: notes where a failure came from and how the last turn ended."""

    def __init__(self, session: SessionHandle) -> None:
        self._session = session
        self.completing = 0
        self.turns = 0
        self.failure: Failure | None = None
        self._last: Completion | None = None

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Completion:
        self.completing += 1
        try:
            completion = await self._session.complete(messages, tools)
        except EngineError as error:
            self.failure = self.failure or _failure(Boundary.ENGINE, error)
            raise
        except SessionError as error:
            self.failure = self.failure or _failure(Boundary.HARNESS, error)
            raise
        finally:
            self.completing -= 1
        self.turns += 1
        self._last = completion
        return completion

    @property
    def status(self) -> Status:
        reason = None if self._last is None else self._last.finish_reason
        if reason is FinishReason.ABORT:
            return Status.ABORTED
        return Status.TRUNCATED if reason is FinishReason.LENGTH else Status.COMPLETED

    @property
    def response(self) -> str:
        return "" if self._last is None else self._last.message.content


def _failure(boundary: Boundary, error: BaseException) -> Failure:
    return Failure(boundary=boundary, message=f"{type(error).__name__}: {error}")


def _failed(trajectory: Trajectory, boundary: Boundary, message: str, *, timed_out: bool = False) -> Trajectory:
    failure = Failure(boundary=boundary, message=message, timed_out=timed_out)
    return replace(trajectory, status=Status.FAILED, failure=failure, reward=None)


def empty_trajectory(*, prompt_id: str, session_id: str, temperature: float, status: Status) -> Trajectory:
    """A row without tokens: an attempt that failed before anything was rendered."""
    return Trajectory(
        prompt_id=prompt_id,
        session_id=session_id,
        token_ids=np.zeros(0, np.int32),
        sampled=np.zeros(0, np.bool_),
        loss_mask=np.zeros(0, np.bool_),
        logprobs=np.zeros(0, np.float32),
        spans=(),
        temperature=temperature,
        status=status,
    )
