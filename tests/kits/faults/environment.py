"""Environments that are wrong in one way each."""

import asyncio
import random

from miles_core.errors import EngineError
from miles_core.kinds.environment import EpisodeResult
from miles_core.testing.environment import EnvironmentConformance
from miles_core.testing.scripted_session import Answer
from miles_core.testing.virtual_time import in_virtual_time
from miles_core.types import FinishReason, Message, Prompt


class TwoTurns:
    """Sound: asks once, then asks for a check."""

    def prompts(self, split):
        return None

    async def run(self, prompt, session):
        messages = list(prompt.messages)
        found = await session.complete(messages, prompt.tools)
        if found.finish_reason is not FinishReason.STOP:
            return EpisodeResult(metadata={"cut": True})
        messages += [found.message, Message(role="user", content="sure?")]
        await session.complete(messages, prompt.tools)
        return EpisodeResult(reward=1.0, metadata={"cut": False})

    async def close(self):
        pass


@in_virtual_time
class Faulty(EnvironmentConformance):
    provides = frozenset({"multi-turn"})

    def make(self):
        return self.environment()

    def answer(self, asked):
        return Answer(content=f"answer to {asked.messages[-1].content}")


class TestReportsNaN(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            await super().run(prompt, session)
            return EpisodeResult(reward=float("nan"))

    caught_by = {"test_an_episode_asks_the_model_and_reports": "is no number"}


class TestReportsObjects(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            await super().run(prompt, session)
            return EpisodeResult(metadata={"seen": {1, 2}})

    caught_by = {"test_an_episode_asks_the_model_and_reports": "JSON-compatible"}


class TestReportsAFloat(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            await super().run(prompt, session)
            return 1.0

    caught_by = {"test_an_episode_asks_the_model_and_reports": "not an EpisodeResult"}


class TestOneTurnOnly(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            await session.complete(prompt.messages)
            return EpisodeResult()

    caught_by = {"test_a_multi_turn_episode_has_several_turns": "had one turn"}


class TestAddsItsOwnSystemPrompt(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            system = Message(role="system", content="Be good.")
            await super().run(Prompt(id=prompt.id, messages=(system, *prompt.messages)), session)
            return EpisodeResult()

    caught_by = {"test_the_prompt_comes_first_and_unchanged": "does not begin with the prompt"}


class TestGoesOnAfterACutOffTurn(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            found = await session.complete(prompt.messages)
            await session.complete([*prompt.messages, found.message, Message(role="user", content="sure?")])
            return EpisodeResult()

    caught_by = {"test_a_turn_that_was_cut_off_ends_the_episode": "cannot be extended"}


class TestTriesForEver(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            while True:
                try:
                    return await super().run(prompt, session)
                except EngineError:
                    await asyncio.sleep(0.01)

    caught_by = {"test_an_engine_error_ends_the_episode": "goes on for ever"}


class TestScoresAnEngineErrorAsZero(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            try:
                return await super().run(prompt, session)
            except EngineError:
                return EpisodeResult(reward=0.0)

    caught_by = {"test_an_engine_error_ends_the_episode": "although the engine never answered"}


class TestSwallowsCancellation(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            try:
                return await super().run(prompt, session)
            except asyncio.CancelledError:
                return EpisodeResult(reward=0.0)

    caught_by = {"test_cancellation_ends_it_and_leaves_nothing_behind": "swallowed its cancellation"}


class TestLeavesATaskBehind(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            beat = asyncio.create_task(asyncio.sleep(60), name="heartbeat")
            result = await super().run(prompt, session)
            beat.cancel()
            return result

    caught_by = {"test_cancellation_ends_it_and_leaves_nothing_behind": "left tasks behind: ['heartbeat']"}


class TestKeepsTheHistoryOnItself(Faulty):
    class environment(TwoTurns):
        async def run(self, prompt, session):
            self.messages = list(prompt.messages)
            found = await session.complete(self.messages)
            if found.finish_reason is not FinishReason.STOP:
                return EpisodeResult()
            self.messages += [found.message, Message(role="user", content="sure?")]
            await session.complete(self.messages)
            return EpisodeResult()

    caught_by = {"test_concurrent_episodes_share_nothing": "episodes that run together fail"}


class TestCountsOverAllEpisodes(Faulty):
    class environment(TwoTurns):
        count = 0

        async def run(self, prompt, session):
            found = await session.complete(prompt.messages)
            if found.finish_reason is not FinishReason.STOP:
                return EpisodeResult()
            self.count += 1
            question = Message(role="user", content=f"sure? ({self.count})")
            await session.complete([*prompt.messages, found.message, question])
            return EpisodeResult()

    caught_by = {"test_concurrent_episodes_share_nothing": "saw something of another"}


class TestBringsPromptsSecretly(Faulty):
    class environment(TwoTurns):
        def prompts(self, split):
            return [Prompt(id="p", messages=(Message(role="user", content="q"),))]

    caught_by = {"test_own_prompts_are_unique_and_the_same_every_time": "is not declared"}


def question(number):
    return Prompt(id=f"q{number}", messages=(Message(role="user", content=f"question {number}"),))


class WithPrompts(Faulty):
    provides = frozenset({"multi-turn", "provides-prompts"})


class TestDrawsPromptsAnew(WithPrompts):
    class environment(TwoTurns):
        def prompts(self, split):
            return [question(random.random()) for _ in range(4)]

    caught_by = {"test_own_prompts_are_unique_and_the_same_every_time": "prompts differ between two calls"}


class TestRepeatsIds(WithPrompts):
    class environment(TwoTurns):
        def prompts(self, split):
            return [question(number) for number in range(4)]

    caught_by = {"test_own_prompts_are_unique_and_the_same_every_time": "share an id"}


class TestTrainsHeldOutPrompts(WithPrompts):
    class environment(TwoTurns):
        def prompts(self, split):
            made = [question(number) for number in range(4)]
            return made if split == "train" else [Prompt(id="e0", messages=made[2].messages)]

    caught_by = {"test_own_prompts_are_unique_and_the_same_every_time": "held-out prompts are trained too"}


class TestHasNoPromptsAfterAll(WithPrompts):
    class environment(TwoTurns):
        pass

    declared = "the tag `provides-prompts` is declared, but prompts('train') is None"
    caught_by = dict.fromkeys(
        (
            "test_an_episode_asks_the_model_and_reports",
            "test_a_multi_turn_episode_has_several_turns",
            "test_the_prompt_comes_first_and_unchanged",
            "test_a_turn_that_was_cut_off_ends_the_episode",
            "test_an_engine_error_ends_the_episode",
            "test_cancellation_ends_it_and_leaves_nothing_behind",
            "test_concurrent_episodes_share_nothing",
            "test_own_prompts_are_unique_and_the_same_every_time",
        ),
        declared,
    )
