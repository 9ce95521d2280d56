"""Conformance kit for environments: an episode asks the model, reports what happened, ends when it is cancelled, and
shares nothing with episodes beside it.

    class TestMine(EnvironmentConformance):
        provides = frozenset({"multi-turn"})
        def make(self): return MyEnvironment(MyOptions())
        def answer(self, asked): return Answer(content="4")

There is no model: `answer` says what it would answer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import ClassVar

import pytest

from miles_core.errors import EngineError
from miles_core.kinds.environment import Environment, EpisodeResult
from miles_core.testing.scripted_session import Answer, Asked, Script, ScriptedSession, ScriptedSessions
from miles_core.types import FinishReason, Message, Prompt, SamplingParams


class EnvironmentConformance:
    """Subclass it and say how to make the environment."""

    provides: ClassVar[frozenset[str]] = frozenset()
    """The tags its capability declares; what is not declared is not tried."""
    deadline_s = 60.0
    """An episode over a scripted session that takes longer hangs."""

    def make(self) -> Environment:
        raise NotImplementedError

    def answer(self, asked: Asked) -> Answer | str:
        """The model's answer; for a multi-turn environment, one that leads to a further turn when ``asked.turn ==
        0``."""
        return "4"

    def prompt(self, number: int) -> Prompt:
        """A prompt the environment can run; the first of its own when it brings some."""
        if "provides-prompts" in self.provides:
            own = self.make().prompts("train")
            assert own is not None, "the tag `provides-prompts` is declared, but prompts('train') is None"
            return own[number % len(own)]
        return Prompt(id=f"p{number}", messages=(Message(role="user", content=f"{number} + {number} = ?"),))

    async def _episode(
        self, environment: Environment, session: ScriptedSession, prompt: Prompt | None = None
    ) -> EpisodeResult:
        async with asyncio.timeout(self.deadline_s):
            return await environment.run(prompt or self.prompt(0), session)

    # --- one episode --------------------------------------------------------------------------------------------------

    async def test_an_episode_asks_the_model_and_reports(self) -> None:
        environment, session = self.make(), _session(self.answer)
        result = await self._episode(environment, session)
        await environment.close()
        assert session.turns, "the episode ended without asking the session for a completion"
        assert isinstance(result, EpisodeResult), f"run returned {type(result).__name__}, not an EpisodeResult"
        assert result.reward is None or math.isfinite(result.reward), f"the reward {result.reward} is no number"
        try:
            json.dumps(dict(result.metadata), allow_nan=False)
        except (TypeError, ValueError) as error:
            pytest.fail(f"metadata must be JSON-compatible: {error}")

    async def test_a_multi_turn_episode_has_several_turns(self) -> None:
        if "multi-turn" not in self.provides:
            pytest.skip("the tag `multi-turn` is not declared")
        session = _session(self.answer)
        await self._episode(self.make(), session)
        assert len(session.turns) > 1, "the tag `multi-turn` is declared, but the episode had one turn"

    async def test_the_prompt_comes_first_and_unchanged(self) -> None:
        prompt, asked = self.prompt(0), []

        def noting(one: Asked) -> Answer | str:
            asked.append(one)
            return self.answer(one)

        await self._episode(self.make(), _session(noting), prompt)
        assert asked[0].messages[: len(prompt.messages)] == prompt.messages, (
            "the episode does not begin with the prompt"
        )

    async def test_a_turn_that_was_cut_off_ends_the_episode(self) -> None:
        def cut(asked: Asked) -> Answer:
            whole = self.answer(asked)
            whole = Answer(content=whole) if isinstance(whole, str) else whole
            return Answer(content=whole.content, tool_calls=whole.tool_calls, finish_reason=FinishReason.LENGTH)

        session = _session(cut)
        try:
            await self._episode(self.make(), session)
        except TimeoutError:
            pytest.fail("the episode hangs after a turn that was cut off")
        except Exception as error:  # noqa: BLE001 - a kit reports whatever the environment raises
            pytest.fail(f"after a turn that was cut off by length: {type(error).__name__}: {error}")
        assert len(session.turns) == 1

    # --- endings ------------------------------------------------------------------------------------------------------

    async def test_an_engine_error_ends_the_episode(self) -> None:
        session = _session(lambda asked: Answer(error=EngineError("the engine is gone")))
        try:
            await self._episode(self.make(), session)
        except TimeoutError:
            pytest.fail("the episode goes on for ever when the engine is gone")
        except EngineError:
            return
        except Exception as error:
            raise AssertionError(f"the engine's error was replaced by {type(error).__name__}: {error}") from error
        pytest.fail("the episode reports a result although the engine never answered")

    async def test_cancellation_ends_it_and_leaves_nothing_behind(self) -> None:
        before = asyncio.all_tasks()
        session = _session(lambda asked: Answer(hangs=True))
        task = asyncio.create_task(self.make().run(self.prompt(0), session))
        while not session.waiting:
            assert not task.done(), "the episode ended without asking the session for a completion"
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=self.deadline_s)
        assert done, "the episode goes on after it was cancelled"
        assert task.cancelled(), "the episode swallowed its cancellation and reported something instead"
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
        for each in left:
            each.cancel()
        assert not left, f"a cancelled episode left tasks behind: {[each.get_name() for each in left]}"

    # --- several episodes ---------------------------------------------------------------------------------------------

    async def test_concurrent_episodes_share_nothing(self) -> None:
        environment = self.make()
        prompts = [self.prompt(number) for number in range(4)]
        alone = [_session(self.answer) for _ in prompts]
        for prompt, session in zip(prompts, alone, strict=True):
            await self._episode(environment, session, prompt)
        # Different paces make the episodes interleave differently from one after the other.
        together = [_session(_slowly(self.answer, ticks)) for ticks in (7, 1, 4, 2)]
        pairs = zip(prompts, together, strict=True)
        episodes = (self._episode(environment, session, prompt) for prompt, session in pairs)
        errors = [found for found in await asyncio.gather(*episodes, return_exceptions=True) if _is_error(found)]
        assert not errors, f"episodes that run together fail: {errors[0]!r}"
        for one, other in zip(alone, together, strict=True):
            assert one.messages == other.messages, "an episode saw something of another that ran at the same time"

    # --- prompts ------------------------------------------------------------------------------------------------------

    def test_own_prompts_are_unique_and_the_same_every_time(self) -> None:
        environment, again = self.make(), self.make()
        train = environment.prompts("train")
        if "provides-prompts" not in self.provides:
            assert train is None, "prompts('train') is not None, but the tag `provides-prompts` is not declared"
            return
        assert train is not None, "the tag `provides-prompts` is declared, but prompts('train') is None"
        held_out = environment.prompts("eval") or ()
        first, second = _spelled(train), _spelled(again.prompts("train") or ())
        assert first == second == _spelled(environment.prompts("train") or ()), "prompts differ between two calls"
        ids = [prompt.id for prompt in (*train, *held_out)]
        assert len(ids) == len(set(ids)), "two prompts share an id"
        shared = {prompt.messages for prompt in train} & {prompt.messages for prompt in held_out}
        assert not shared, f"{len(shared)} held-out prompts are trained too"


def _session(script: Script) -> ScriptedSession:
    return ScriptedSessions(script).open("kit", SamplingParams())


def _slowly(script: Script, ticks: int) -> Script:
    def slower(asked: Asked) -> Answer:
        found = script(asked)
        found = Answer(content=found) if isinstance(found, str) else found
        return Answer(
            content=found.content, tool_calls=found.tool_calls, finish_reason=found.finish_reason, ticks=ticks
        )

    return slower


def _is_error(found: object) -> bool:
    return isinstance(found, BaseException)


def _spelled(prompts: Sequence[Prompt]) -> list[tuple[object, ...]]:
    return [(p.id, p.messages, p.tools, repr(p.label), json.dumps(p.metadata, sort_keys=True)) for p in prompts]
