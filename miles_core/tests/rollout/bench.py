"""What tests of `collect` share: prompts, a scripted engine, rewards without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

from miles_core import watch
from miles_core.config.spec import RolloutSpec
from miles_core.data.order import PromptStream
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.kinds.reward import Scored
from miles_core.rollout.episode import Episodes
from miles_core.rollout.rewards import RewardPool
from miles_core.rollout.scheduler import Collected, GroupFilter, collect
from miles_core.testing.scripted_session import Answer, Asked, ScriptedSessions, assemble_scripted
from miles_core.types import Message, Prompt

Script = Callable[[Asked], Answer | str]


class Grading(RewardPool):
    """A pool without processes: scores in the event loop, after as many ticks as the test wants."""

    def __init__(self, grade: Callable[[Scored], float], ticks: Callable[[Scored], int] = lambda scored: 0) -> None:
        super().__init__((), workers=1, timeout_s=1.0)
        self._grade = grade
        self._ticks = ticks

    async def score(self, scored: Scored) -> tuple[float | None, dict[str, float]]:
        for _ in range(self._ticks(scored)):
            await asyncio.sleep(0)
        return self._grade(scored), {}


class Chat:
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await session.complete(prompt.messages)
        return EpisodeResult()

    async def close(self) -> None:
        return None


class Bench:
    """A stream of prompts ``q0 … q<n-1>`` and everything `collect` needs."""

    def __init__(
        self,
        script: Script = lambda asked: f"{asked.params.seed}",
        grade: Callable[[Scored], float] = lambda scored: float(int(scored.response) % 7),
        *,
        prompts: int = 50,
        ticks: Callable[[Scored], int] = lambda scored: 0,
        seed: int = 0,
    ) -> None:
        items = [Prompt(id=f"q{i}", messages=(Message(role="user", content=f"q{i}"),)) for i in range(prompts)]
        self.stream = PromptStream(items, seed=seed)
        self.sessions = ScriptedSessions(script)
        self.episodes = Episodes(
            environment=Chat(),
            sessions=self.sessions,
            rewards=Grading(grade, ticks),
            seed=seed,
            timeout_s=60.0,
            assemble=assemble_scripted,
        )

    async def collect(
        self,
        *,
        groups: int = 3,
        size: int = 2,
        filters: Sequence[GroupFilter] = (),
        step: int = 1,
        on_accept: Callable[[int], None] | None = None,
        **spec: Any,
    ) -> Collected:
        try:
            return await collect(
                step,
                stream=self.stream,
                episodes=self.episodes,
                spec=RolloutSpec(**spec),
                filters=filters,
                groups=groups,
                group_size=size,
                on_accept=on_accept,
            )
        finally:
            assert self.sessions.left_open == []
            assert len(asyncio.all_tasks()) == 1, "collect left tasks behind"
            assert watch.waiters() == []

    def first_ids(self, count: int) -> list[str]:
        fresh = PromptStream(self.stream._prompts, seed=self.stream._seed)
        return [draw.prompt.id for draw in fresh.take(count)]


def names(collected: Collected) -> list[str]:
    return [group.prompt.id for group in collected.groups]


def question(asked: Asked) -> str:
    return asked.messages[-1].content


def drop(*reasons: str | None) -> GroupFilter:
    """A filter that gives these verdicts in turn, then keeps."""
    verdicts = list(reasons)
    return GroupFilter(name="listed", judge=lambda group: verdicts.pop(0) if verdicts else None)
