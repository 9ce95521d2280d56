"""One attempt: how each ending becomes a status with a boundary, and what reaches the trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from miles_core.errors import ContractError, EngineError
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.rollout.chat import ChatEnvironment
from miles_core.rollout.episode import EpisodeKey, Episodes
from miles_core.rollout.rewards import RewardPool, RewardSpec
from miles_core.testing.scripted_session import Answer, Asked, ScriptedSessions, assemble_scripted
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.types import Boundary, FinishReason, Message, Prompt, SamplingParams, Status, Trajectory

GRADERS = Path(__file__).with_name("graders.py")
PROMPT = Prompt(id="p", messages=(Message(role="user", content="q"),))
KEY = EpisodeKey(purpose="train", step=1, epoch=0, draw=0, sample=2)

Run = Callable[[Prompt, SessionHandle], Any]


class Custom:
    """An environment made of one function."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        result: EpisodeResult = await self._run(prompt, session)
        return result

    async def close(self) -> None:
        return None


def scoring(value: float | None = 1.0, **metadata: Any) -> Run:
    async def run(prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await session.complete(prompt.messages)
        return EpisodeResult(reward=value, metadata=metadata)

    return run


async def attempt(
    run: Run | None,
    script: Callable[[Asked], Answer | str] = lambda asked: "1.5",
    *,
    rewards: Sequence[RewardSpec] = (),
    timeout_s: float = 5.0,
    key: EpisodeKey = KEY,
) -> Trajectory:
    sessions = ScriptedSessions(script)
    environment = ChatEnvironment() if run is None else Custom(run)
    async with RewardPool(rewards, workers=1, timeout_s=5.0) as pool:
        episodes = Episodes(
            environment=environment,
            sessions=sessions,
            rewards=pool,
            seed=0,
            timeout_s=timeout_s,
            assemble=assemble_scripted,
        )
        found = await episodes.score(await episodes.generate(PROMPT, SamplingParams(temperature=0.7), key))
    assert sessions.left_open == []
    assert all(session.waiting == 0 for session in sessions.opened)
    found.check()
    return found


def raising(error: BaseException) -> Run:
    async def run(prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        raise error

    return run


def where(found: Trajectory) -> tuple[Status, Boundary | None, bool]:
    failure = found.failure
    return found.status, failure and failure.boundary, bool(failure and failure.timed_out)


async def test_a_chat_episode_is_scored_by_the_rewards() -> None:
    found = await attempt(None, rewards=[RewardSpec(name="said", load=f"{GRADERS}:by_response", weight=2.0)])
    assert where(found) == (Status.COMPLETED, None, False)
    assert found.reward == 3.0
    assert found.metadata["reward_parts"] == {"said": 1.5}
    assert (found.metadata["sample"], found.metadata["attempt"]) == (2, 0)
    assert [message.role for message in found.messages] == ["user", "assistant"]
    assert found.temperature == 0.7


async def test_the_environments_own_score_is_added() -> None:
    found = await attempt(scoring(0.25, kind="x"), rewards=[RewardSpec(name="said", load=f"{GRADERS}:by_response")])
    assert found.reward == 1.75
    assert found.metadata["reward_parts"] == {"said": 1.5, "environment": 0.25}
    assert found.metadata["kind"] == "x"


async def test_an_environments_score_needs_no_reward() -> None:
    assert (await attempt(scoring(0.0))).reward == 0.0


async def test_an_answer_cut_off_by_length_is_truncated_and_still_scored() -> None:
    found = await attempt(scoring(0.5), lambda asked: Answer(content="lo", finish_reason=FinishReason.LENGTH))
    assert where(found) == (Status.TRUNCATED, None, False)
    assert found.reward == 0.5


async def test_a_request_the_engine_aborted_is_aborted_and_not_scored() -> None:
    found = await attempt(scoring(0.5), lambda asked: Answer(content="lo", finish_reason=FinishReason.ABORT))
    assert where(found) == (Status.ABORTED, None, False)
    assert found.reward is None


async def test_nobody_scoring_is_a_failed_reward_and_not_a_zero() -> None:
    found = await attempt(None)
    assert where(found) == (Status.FAILED, Boundary.REWARD, False)
    assert found.reward is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
async def test_an_environments_score_that_is_no_number_is_a_failed_reward(value: float) -> None:
    found = await attempt(scoring(value))
    assert where(found) == (Status.FAILED, Boundary.REWARD, False)
    assert found.reward is None


async def test_a_weighted_sum_that_is_no_score_is_a_failed_reward() -> None:
    found = await attempt(None, rewards=[RewardSpec(name="said", load=f"{GRADERS}:by_response", weight=1e300)])
    assert where(found) == (Status.FAILED, Boundary.REWARD, False)
    assert found.failure is not None
    assert "weighted sum" in found.failure.message


async def test_a_raising_reward_fails_the_trajectory_with_its_message() -> None:
    found = await attempt(None, lambda asked: "raise", rewards=[RewardSpec(name="r", load=f"{GRADERS}:by_response")])
    assert where(found) == (Status.FAILED, Boundary.REWARD, False)
    assert found.failure is not None
    assert "no such answer" in found.failure.message
    assert found.reward is None
    assert found.response_tokens > 0  # what was sampled is kept for the record


@pytest.mark.parametrize(
    "error", [ValueError("bug"), RuntimeError("bug"), TimeoutError("its own sandbox"), ExceptionGroup("g", [OSError()])]
)
async def test_whatever_the_environment_raises_is_its_failure(error: Exception) -> None:
    status, boundary, _ = where(await attempt(raising(error)))
    assert (status, boundary) == (Status.FAILED, Boundary.ENVIRONMENT)


async def test_an_environment_that_returns_no_result_failed() -> None:
    async def run(prompt: Prompt, session: SessionHandle) -> Any:
        return 1.0

    assert where(await attempt(run)) == (Status.FAILED, Boundary.ENVIRONMENT, False)


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), object()])
async def test_metadata_that_no_file_could_hold_is_the_environments_failure(value: Any) -> None:
    found = await attempt(scoring(1.0, odd=value))
    assert where(found) == (Status.FAILED, Boundary.ENVIRONMENT, False)
    assert found.failure is not None
    assert "not JSON-compatible" in found.failure.message


def engine_down(asked: Asked) -> Answer:
    return Answer(error=EngineError("out of memory"))


async def test_an_engine_error_is_the_engines_failure() -> None:
    assert where(await attempt(None, engine_down)) == (Status.FAILED, Boundary.ENGINE, False)


async def test_an_engine_error_that_the_environment_wraps_or_swallows_is_still_the_engines() -> None:
    async def wraps(prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        try:
            await session.complete(prompt.messages)
        except EngineError as error:
            raise ValueError("tool failed") from error
        raise AssertionError

    async def swallows(prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        try:
            await session.complete(prompt.messages)
        except EngineError:
            return EpisodeResult(reward=0.0)
        raise AssertionError

    for run in (wraps, swallows):
        assert where(await attempt(run, engine_down)) == (Status.FAILED, Boundary.ENGINE, False)


async def test_an_environment_may_ask_again_after_an_engine_error() -> None:
    answers = [Answer(error=EngineError("hiccup")), Answer(content="fine")]

    async def patient(prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        try:
            await session.complete(prompt.messages)
        except EngineError:
            await session.complete(prompt.messages)
        return EpisodeResult(reward=1.0)

    found = await attempt(patient, lambda asked: answers.pop(0))
    assert where(found) == (Status.COMPLETED, None, False)


async def test_a_refused_history_is_the_harness_failure() -> None:
    async def run(prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await session.complete(prompt.messages)
        await session.complete((Message(role="user", content="something else"),))
        raise AssertionError

    assert where(await attempt(run)) == (Status.FAILED, Boundary.HARNESS, False)


@in_virtual_time
async def test_the_deadline_says_who_was_late() -> None:
    async def slow_tool(prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await session.complete(prompt.messages)
        await asyncio.sleep(60)
        raise AssertionError

    found = await attempt(slow_tool, timeout_s=0.05)
    assert where(found) == (Status.FAILED, Boundary.ENVIRONMENT, True)
    found = await attempt(None, lambda asked: Answer(hangs=True), timeout_s=0.05)
    assert where(found) == (Status.FAILED, Boundary.ENGINE, True)


async def test_an_episode_that_never_asks_has_nothing_to_train() -> None:
    async def idle(prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        return EpisodeResult(reward=1.0)

    found = await attempt(idle)
    assert found.status is Status.FAILED
    assert found.length == 0


async def test_a_broken_contract_stops_the_run_instead_of_failing_an_attempt() -> None:
    with pytest.raises(ContractError):
        await attempt(raising(ContractError("tokens contract")))


@in_virtual_time
async def test_a_cancelled_attempt_closes_its_session() -> None:
    sessions = ScriptedSessions(lambda asked: Answer(hangs=True))
    pool = RewardPool((), workers=1, timeout_s=1.0)
    episodes = Episodes(
        environment=ChatEnvironment(),
        sessions=sessions,
        rewards=pool,
        seed=0,
        timeout_s=9.0,
        assemble=assemble_scripted,
    )
    task = asyncio.create_task(episodes.generate(PROMPT, SamplingParams(), KEY))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sessions.left_open == []
    assert sessions.opened[0].waiting == 0


async def test_each_attempt_has_a_seed_and_a_session_of_its_own() -> None:
    def key(**changes: Any) -> EpisodeKey:
        return EpisodeKey(
            **{"purpose": "train", "step": 1, "epoch": 0, "draw": 0, "sample": 0, "attempt": 0, **changes}
        )

    variants = [key(), key(sample=1), key(attempt=1), key(epoch=1, draw=9), key(purpose="eval")]
    assert len({each.seed(0, "p") for each in variants}) == len(variants)
    assert len({each.session_id for each in variants}) == len(variants)
    assert key().seed(0, "p") == key(step=5).seed(0, "p")  # of the prompt's place in the data, not of the step
    assert key().seed(0, "p") != key().seed(1, "p")
    assert key().seed(0, "p") != key().seed(0, "q")
    assert all(0 <= each.seed(0, "p") < 2**52 for each in variants)
