"""One attempt at one prompt: opens a session, runs the environment, scores the result, and returns a trajectory.

Whatever an environment or a reward raises, the run goes on: the attempt becomes a failed trajectory that says where it
failed. Only errors that no retry could repair are raised: a broken contract, a broken plugin.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from miles_core import watch
from miles_core.errors import ContractError, PluginError, RewardError
from miles_core.kinds.environment import Completion, Environment, EpisodeResult, SessionHandle
from miles_core.kinds.reward import MAX_REWARD, Scored
from miles_core.rollout.first_failures import FirstFailures
from miles_core.rollout.rewards import RewardPool, RewardTimeout
from miles_core.session.assembly import assemble as assemble_linear
from miles_core.types import Boundary, Failure, Message, Prompt, SamplingParams, Status, Tool, Trajectory

SCORED = (Status.COMPLETED, Status.TRUNCATED)
"""Attempts that end like this are scored. All others failed for reasons that are not the policy's."""


class RecordedSession(SessionHandle, Protocol):
    """A session as the rollout uses it: an environment asks it for completions, `Assemble` reads it out."""

    @property
    def failure(self) -> Failure | None:
        """Why the latest engine call failed; None if it succeeded."""
        ...

    def close(self) -> None: ...


class Sessions(Protocol):
    def open(self, session_id: str, params: SamplingParams) -> RecordedSession: ...


class Assemble(Protocol):
    """Makes the trajectory of a session, whatever happened to it; see `session.assembly.assemble`."""

    def __call__(
        self, session: Any, *, prompt_id: str, error: BaseException | None, metadata: Mapping[str, Any]
    ) -> Trajectory: ...


GRACE_S = 5.0
"""How long an environment may take to end after its deadline. Then the run no longer waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Which attempt this is. Together with the run's seed it decides everything random about the attempt."""

    purpose: str
    """``train`` or ``eval``."""
    step: int
    epoch: int
    draw: int
    """How many prompts were drawn before; a prompt has another number in each epoch."""
    sample: int
    """Position in the group, from 0."""
    attempt: int = 0

    @property
    def session_id(self) -> str:
        return f"{self.purpose}-s{self.step}-p{self.draw}-{self.sample}-a{self.attempt}"

    def seed(self, run_seed: int, prompt_id: str) -> int:
        """A different seed for every attempt at every prompt in every epoch. It has 52 bits, so that any JSON reader
        represents it exactly."""
        text = f"{run_seed}/{self.purpose}/{self.epoch}/{prompt_id}/{self.sample}/{self.attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An attempt that was generated but not scored yet."""

    trajectory: Trajectory
    scored: Scored | None
    """What rewards get to see; None if the attempt failed, so that there is nothing to score."""
    own_reward: float | None
    """The environment's own score."""


class Episodes:
    """Runs attempts, and holds what all of them share."""

    def __init__(
        self,
        *,
        environment: Environment,
        sessions: Sessions,
        rewards: RewardPool,
        seed: int,
        timeout_s: float,
        assemble: Assemble = assemble_linear,
        first_failures: FirstFailures | None = None,
    ) -> None:
        self._environment = environment
        self._sessions = sessions
        self._rewards = rewards
        self._seed = seed
        self._timeout_s = timeout_s
        self._assemble = assemble
        self._first_failures = first_failures
        self._abandoned: set[asyncio.Task[EpisodeResult]] = set()
        """Tasks that did not end when they were cancelled. A task that nobody refers to could be garbage-collected."""

    async def generate(self, prompt: Prompt, params: SamplingParams, key: EpisodeKey) -> Generated:
        """Run the environment to its end or its deadline.

        Raises:
            ContractError, PluginError: the session or a plugin is broken.
        """
        session = self._sessions.open(key.session_id, replace(params, seed=key.seed(self._seed, prompt.id)))
        try:
            watched = _Watched(session)
            result, error = await self._run(prompt, watched, key)
            facts = {} if result is None else dict(result.metadata)
            own = {"sample": key.sample, "attempt": key.attempt}
            trajectory = self._assemble(session, prompt_id=prompt.id, error=error, metadata={**facts, **own})
            failure = watched.timeout or session.failure
            if failure is not None and trajectory.status is not Status.ABORTED:
                # The environment may have raised this error, wrapped it or swallowed it. In any case a turn is missing
                # that the episode asked for.
                trajectory = replace(trajectory, status=Status.FAILED, failure=failure)
        finally:
            session.close()
        trajectory.check()
        watch.progress()
        if trajectory.status not in SCORED:
            return Generated(trajectory=trajectory, scored=None, own_reward=None)
        scored = Scored(
            prompt=prompt,
            messages=trajectory.messages,
            response=_response(trajectory.messages),
            truncated=trajectory.status is Status.TRUNCATED,
            metadata=facts,
        )
        return Generated(trajectory=trajectory, scored=scored, own_reward=None if result is None else result.reward)

    async def _until_deadline(self, episode: Coroutine[Any, Any, EpisodeResult]) -> asyncio.Task[EpisodeResult] | None:
        """The finished task of an episode, or None if its deadline passed.

        The episode has a task of its own because an environment may ignore its cancellation. Then the run goes on
        without waiting for it.
        """
        task = asyncio.create_task(episode)
        task.add_done_callback(_take_note)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE_S)
            if not task.done():
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)
        return task if done else None

    async def score(self, generated: Generated) -> Trajectory:
        """The trajectory with its reward, or a failed one if a reward failed.

        Raises:
            RunError: since the run began, every attempt has timed out.
        """
        attempt = await self._score(generated)
        if self._first_failures is not None:
            self._first_failures.observe(attempt)
        return attempt

    async def _score(self, generated: Generated) -> Trajectory:
        trajectory, scored = generated.trajectory, generated.scored
        if scored is None:
            return trajectory
        try:
            reward, parts = await self._rewards.score(scored)
        except RewardError as error:
            return _failed(trajectory, Boundary.REWARD, str(error), timed_out=isinstance(error, RewardTimeout))
        own = generated.own_reward
        if own is not None and not abs(own) <= MAX_REWARD:
            return _failed(trajectory, Boundary.REWARD, f"the environment reported the reward {own}")
        if reward is None and own is None:
            message = "neither a reward nor the environment scored the episode"
            if trajectory.status is Status.TRUNCATED:
                message += (
                    ": the context was full before the environment scored (it may catch SessionError and score then)"
                )
            return _failed(trajectory, Boundary.REWARD, message)
        if own is not None:
            parts = {**parts, "environment": own}
        total = (reward or 0.0) + (own or 0.0)
        if not abs(total) <= MAX_REWARD:
            return _failed(
                trajectory, Boundary.REWARD, f"the weighted sum of the rewards is {total}, which is no score"
            )
        return trajectory.with_reward(total, reward_parts=parts)

    async def _run(
        self, prompt: Prompt, watched: _Watched, key: EpisodeKey
    ) -> tuple[EpisodeResult | None, Exception | None]:
        """What the environment reported, or what it raised."""
        who = f"sample {key.sample} of prompt {prompt.id} ({key.purpose} step {key.step})"
        with watch.waiting(who, on=f"environment {type(self._environment).__name__}"):
            task = await self._until_deadline(self._environment.run(prompt, watched))
        if task is None:
            watched.ran_out(self._timeout_s)
            return None, TimeoutError()
        try:
            result = task.result()
        except asyncio.CancelledError:
            return None, RuntimeError("the environment cancelled itself")
        except (ContractError, PluginError):
            raise
        except Exception as error:  # noqa: BLE001 - the episode boundary: fails this attempt, not the run
            return None, error
        if not isinstance(result, EpisodeResult):
            return None, TypeError(f"the environment's run returned {type(result).__name__}, not an EpisodeResult")
        try:
            json.dumps(dict(result.metadata), allow_nan=False)
        except (TypeError, ValueError) as error:
            return None, TypeError(f"the environment's metadata is not JSON-compatible: {error}")
        return result, None


def _take_note(task: asyncio.Task[EpisodeResult]) -> None:
    """Mark the error of an episode that nobody waits for any more as seen, or asyncio reports it at some later time."""
    if not task.cancelled():
        task.exception()


class _Watched:
    """The session as an environment gets it. It knows whether an answer is awaited, so that a missed deadline can name
    who was late."""

    def __init__(self, session: SessionHandle) -> None:
        self.session = session
        """For environments that serve it to somebody else."""
        self._late: Boundary = Boundary.ENVIRONMENT
        self.timeout: Failure | None = None

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Completion:
        # Not reset when the call is cancelled: that is how a deadline ends it.
        self._late = Boundary.ENGINE
        try:
            completion = await self.session.complete(messages, tools)
        except Exception:
            self._late = Boundary.ENVIRONMENT
            raise
        self._late = Boundary.ENVIRONMENT
        return completion

    def ran_out(self, timeout_s: float) -> None:
        if getattr(self.session, "reserved", 0) or getattr(self.session, "abandoned", False):
            self._late = Boundary.ENGINE  # a served turn was under way, or has just been given up for the deadline
        message = f"the episode passed its deadline of {timeout_s:g} s, waiting for the {self._late}"
        self.timeout = Failure(boundary=self._late, message=message, timed_out=True)


def _response(messages: Sequence[Message]) -> str:
    """Text of the last assistant message."""
    return next((message.content for message in reversed(messages) if message.role == "assistant"), "")


def _failed(trajectory: Trajectory, boundary: Boundary, message: str, *, timed_out: bool = False) -> Trajectory:
    failure = Failure(boundary=boundary, message=message, timed_out=timed_out)
    return replace(trajectory, status=Status.FAILED, failure=failure, reward=None)
