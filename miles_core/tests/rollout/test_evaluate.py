"""Held-out evaluation: what is in the means and what is counted apart."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from miles_core.config.spec import EvalSamplingSpec, EvalSpec
from miles_core.errors import ContractError, EngineError, RunError
from miles_core.kinds.reward import Scored
from miles_core.rollout.chat import ChatEnvironment
from miles_core.rollout.episode import Episodes
from miles_core.rollout.evaluate import evaluate
from miles_core.rollout.rewards import RewardPool
from miles_core.testing.scripted_session import Answer, Asked, Script, ScriptedSessions, assemble_scripted
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.types import FinishReason, Message, Prompt

PROMPTS = [Prompt(id=f"e{i}", messages=(Message(role="user", content=f"{i}"),)) for i in range(6)]


class Numbers(RewardPool):
    """Scores an answer that is a number with that number."""

    def __init__(self) -> None:
        super().__init__((), workers=1, timeout_s=1.0)

    async def score(self, scored: Scored) -> tuple[float | None, dict[str, float]]:
        value = float(scored.response)
        return value, {"said": value}


def bench(script: Script) -> tuple[Episodes, ScriptedSessions]:
    sessions = ScriptedSessions(script)
    episodes = Episodes(
        environment=ChatEnvironment(),
        sessions=sessions,
        rewards=Numbers(),
        seed=0,
        timeout_s=9.0,
        assemble=assemble_scripted,
    )
    return episodes, sessions


def echo(asked: Asked) -> str:
    return asked.messages[-1].content


@in_virtual_time
async def test_the_standard_error_is_over_prompts_and_not_over_samples() -> None:
    episodes, _ = bench(echo)
    spec = EvalSpec(prompts=4, samples_per_prompt=3)
    metrics = await evaluate(7, prompts=PROMPTS, episodes=episodes, spec=spec, retries=0, max_concurrent=2)
    assert metrics["eval/reward_mean"] == 1.5
    assert metrics["eval/reward_stderr"] == pytest.approx(statistics.stdev([0, 1, 2, 3]) / 2)
    assert (metrics["eval/prompts"], metrics["eval/scored"]) == (4, 12)
    assert metrics["eval/reward/said"] == 1.5
    assert metrics["eval/response_tokens_mean"] == 2.0


@in_virtual_time
async def test_its_sampling_is_its_own_and_every_time_the_same() -> None:
    spec = EvalSpec(prompts=2, samples_per_prompt=2, sampling=EvalSamplingSpec(temperature=0.3, max_tokens=5))
    seen = []
    for step in (1, 2):
        episodes, sessions = bench(echo)
        await evaluate(step, prompts=PROMPTS, episodes=episodes, spec=spec, retries=0, max_concurrent=9)
        assert {(s.params.temperature, s.params.max_tokens) for s in sessions.opened} == {(0.3, 5)}
        seen.append([session.params.seed for session in sessions.opened])
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 4


@in_virtual_time
async def test_failures_are_counted_apart_and_truncation_is_a_fraction() -> None:
    def script(asked: Asked) -> Answer | str:
        match asked.messages[-1].content:
            case "0":
                return Answer(error=EngineError("gone"))
            case "1":
                return Answer(content="1", finish_reason=FinishReason.LENGTH)
            case other:
                return other

    episodes, sessions = bench(script)
    metrics = await evaluate(1, prompts=PROMPTS[:3], episodes=episodes, spec=EvalSpec(), retries=1, max_concurrent=9)
    assert metrics["eval/reward_mean"] == 1.5
    assert metrics["eval/failed/engine"] == 1
    assert metrics["eval/scored"] == 2
    assert metrics["eval/truncated_fraction"] == 0.5
    assert len(sessions.opened) == 4  # the failed one was tried again


@in_virtual_time
async def test_an_evaluation_that_scores_nothing_is_an_error() -> None:
    episodes, _ = bench(lambda asked: Answer(error=EngineError("no engine")))
    with pytest.raises(RunError, match="no engine"):
        await evaluate(1, prompts=PROMPTS, episodes=episodes, spec=EvalSpec(), retries=0, max_concurrent=9)


@in_virtual_time
async def test_nothing_is_left_running_when_it_is_cancelled() -> None:
    episodes, sessions = bench(lambda asked: Answer(hangs=True))
    work = evaluate(1, prompts=PROMPTS, episodes=episodes, spec=EvalSpec(), retries=0, max_concurrent=3)
    task = asyncio.create_task(work)
    await asyncio.sleep(0.01)
    assert len(sessions.opened) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sessions.left_open == []
    assert len(asyncio.all_tasks()) == 1


@in_virtual_time
async def test_a_score_that_would_mix_checkpoints_is_none() -> None:
    episodes, _ = bench(echo)  # scripted sessions say that version 0 sampled
    spec = EvalSpec(prompts=2)
    await evaluate(1, prompts=PROMPTS, episodes=episodes, spec=spec, retries=0, max_concurrent=9, version=0)
    with pytest.raises(ContractError, match="mix checkpoints"):
        await evaluate(1, prompts=PROMPTS, episodes=episodes, spec=spec, retries=0, max_concurrent=9, version=1)
