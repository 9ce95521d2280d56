"""The first failure is said at once, and a run in which nothing but failures comes ends after a wave of them."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from miles_core.config.spec import RolloutSpec
from miles_core.data.order import PromptStream
from miles_core.errors import RunError
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.rollout import episode
from miles_core.rollout.episode import EpisodeKey, Episodes
from miles_core.rollout.first_failures import FirstFailures
from miles_core.rollout.rewards import RewardPool
from miles_core.rollout.scheduler import collect
from miles_core.testing.filter import example_group
from miles_core.testing.scripted_session import ScriptedSessions, assemble_scripted
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.types import Boundary, Failure, Message, Prompt, SamplingParams, Status

PROMPTS = [Prompt(id=f"q{i}", messages=(Message(role="user", content="?"),)) for i in range(20)]


class Stuck:
    """Never returns; `good` episodes at the start do, and one that is `stubborn` ignores its cancellation."""

    def __init__(self, *, good: int = 0, stubborn: bool = False) -> None:
        self.left, self.stubborn, self.free = good, stubborn, asyncio.Event()

    def prompts(self, split: str) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        self.left -= 1
        while self.left < 0 and not self.free.is_set():
            try:
                await self.free.wait()
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
        await session.complete(prompt.messages)
        return EpisodeResult(reward=1.0)

    async def close(self) -> None: ...


def episodes(environment: Stuck, said: list[str], *, wave: int = 4, timeout_s: float = 0.1) -> Episodes:
    return Episodes(
        environment=environment,  # type: ignore[arg-type]
        sessions=ScriptedSessions(lambda asked: "x"),
        rewards=RewardPool((), workers=1, timeout_s=1.0),
        seed=0,
        timeout_s=timeout_s,
        assemble=assemble_scripted,
        first_failures=FirstFailures(said.append, wave=wave),
    )


@in_virtual_time
async def test_a_run_that_only_times_out_ends_after_one_wave_of_one_time_out() -> None:
    said: list[str] = []
    with pytest.raises(RunError, match="each of the first 4 attempts timed out"):
        await collect(
            1,
            stream=PromptStream(PROMPTS, seed=0),
            episodes=episodes(Stuck(), said, timeout_s=0.5),
            spec=RolloutSpec(retries=2, max_waves=8),
            groups=2,
            group_size=2,
        )
    assert asyncio.get_running_loop().time() == 0.5, "it waited for waves, or for retries"
    assert len(said) == 1
    assert "first failure at the environment" in said[0]


@in_virtual_time
async def test_one_attempt_that_ends_in_time_keeps_the_run_going() -> None:
    said: list[str] = []
    with pytest.raises(RunError, match="collected too few groups"):
        await collect(
            1,
            stream=PromptStream(PROMPTS, seed=0),
            episodes=episodes(Stuck(good=1), said, timeout_s=0.02),
            spec=RolloutSpec(retries=1, max_waves=3),
            groups=2,
            group_size=2,
        )
    assert len(said) == 1


class Raising(Stuck):
    """Raises, but for `good` episodes at the start."""

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        self.left -= 1
        if self.left < 0:
            raise KeyError("label")
        await session.complete(prompt.messages)
        return EpisodeResult(reward=1.0)


@pytest.mark.parametrize(("good", "ends"), [(0, r"each of the first 32 attempts failed"), (1, "too few groups")])
@in_virtual_time
async def test_a_run_in_which_everything_raises_ends_early_by_the_users_line(good: int, ends: str) -> None:
    environment, said = Raising(good=good), list[str]()
    with pytest.raises(RunError, match=ends) as raised:
        await collect(
            1,
            stream=PromptStream(PROMPTS, seed=0),
            episodes=episodes(environment, said),
            spec=RolloutSpec(retries=2, max_waves=8),
            groups=5,
            group_size=2,
        )
    (only,) = said
    line = Raising.run.__code__.co_firstlineno + 3
    assert re.search(
        rf"first failure at the environment \(prompt 'q\d+'\): KeyError: 'label' \(.*failures\.py:{line}\)", only
    )
    assert only.rpartition("): ")[2] in str(raised.value)
    assert not getattr(raised.value, "__notes__", ()), "it is said once, though every attempt in flight fails as well"


def test_engines_that_fail_may_come_back() -> None:
    """None of the attempts is held against the run while one of the first failed for its engine."""
    said, attempt = list[str](), example_group(1.0).trajectories[0]
    watched = FirstFailures(said.append, wave=4)
    for number in range(100):
        boundary = Boundary.REWARD if number else Boundary.ENGINE
        failure = Failure(boundary=boundary, message="gone")
        watched.observe(replace(attempt, status=Status.FAILED, reward=None, failure=failure))
    assert [text.split(" (")[0] for text in said] == ["first failure at the engine", "first failure at the reward"]


@in_virtual_time
async def test_an_environment_that_swallows_its_cancellation_holds_its_place_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode, "GRACE_S", 0.05)
    environment, said = Stuck(stubborn=True), list[str]()
    running = episodes(environment, said)
    key = EpisodeKey(purpose="train", step=1, epoch=0, draw=0, sample=0)
    found = await asyncio.wait_for(running.generate(PROMPTS[0], SamplingParams(), key), 5)
    failure = found.trajectory.failure
    assert failure is not None
    assert (failure.boundary, failure.timed_out) == (Boundary.ENVIRONMENT, True)
    assert len(asyncio.all_tasks()) == 2, "the stubborn episode is the only thing left"
    late = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: late.append(context))
    environment.free.set()
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == 1
    gc.collect()
    assert late == [], "its session is closed by now; the attempt was counted long ago, so its error is no news"
