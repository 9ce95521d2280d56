"""A multi-turn episode with a tool, through the real session: what the model sampled is trained, what the tool said is
not."""

from __future__ import annotations

import ast
import asyncio
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from miles_core.config.spec import RolloutSpec
from miles_core.data.order import PromptStream
from miles_core.errors import EngineError, RunError
from miles_core.kinds.engine import GenerateRequest
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.rollout.episode import Episodes
from miles_core.rollout.rewards import RewardPool
from miles_core.rollout.scheduler import Collected, collect
from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import SessionFactory
from miles_core.session.matching import strict
from miles_core.testing.environment import EnvironmentConformance
from miles_core.testing.scripted import ScriptedEngine
from miles_core.testing.scripted_session import Answer, Asked
from miles_core.testing.tiny import IM_END, write_tiny_tokenizer
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Boundary, FinishReason, Message, Prompt, Status, ToolCall, Trajectory

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(text: str) -> str:
    """What the tool answers; a bad call is answered, not raised: the model is to see it."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return int(OPERATORS[type(op)](value(left), value(right)))
        raise ValueError(f"cannot evaluate {ast.dump(node)}")

    try:
        return str(value(ast.parse(json.loads(text)["expression"], mode="eval").body))
    except (ValueError, KeyError, SyntaxError, TypeError) as error:
        return f"error: {type(error).__name__}"


class CalculatorEnvironment:
    """Lets the model calculate, at most `turns` times; scores the last word against the label."""

    def __init__(self, turns: int = 4) -> None:
        self._turns = turns

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        messages = list(prompt.messages)
        calls = 0
        for _ in range(self._turns):
            answer = await session.complete(messages, (CALCULATOR,))
            messages.append(answer.message)
            if answer.finish_reason is not FinishReason.STOP or not answer.message.tool_calls:
                break
            for call in answer.message.tool_calls:
                calls += 1
                await asyncio.sleep(0)
                messages.append(Message(role="tool", content=calculate(call.arguments), tool_call_id=call.id))
        right = messages[-1].role == "assistant" and messages[-1].content.strip() == str(prompt.label)
        return EpisodeResult(reward=float(right), metadata={"calls": calls})

    async def close(self) -> None:
        return None


class TestCalculatorConforms(EnvironmentConformance):
    provides = frozenset({"multi-turn"})

    def make(self) -> CalculatorEnvironment:
        return CalculatorEnvironment()

    def answer(self, asked: Asked) -> Answer:
        if asked.turn:
            return Answer(content=asked.messages[-1].content)
        left = asked.messages[0].content.split()[0]
        call = ToolCall(id="c0", name="calculate", arguments=json.dumps({"expression": f"{left} + {left}"}))
        return Answer(tool_calls=(call,))


def call_text(expression: str) -> str:
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


class Bench:
    """The real session over a scripted engine and a tiny tokenizer."""

    def __init__(self, folder: Path, replies: Callable[[str], str | Exception]) -> None:
        write_tiny_tokenizer(folder)
        self.tokenizer = ChatTokenizer.from_dir(folder)

        def reply(request: GenerateRequest) -> Sequence[int] | Exception:
            said = replies(self.tokenizer.decode(list(request.token_ids)))
            return said if isinstance(said, Exception) else [*self.tokenizer.encode(said), IM_END]

        self.engine = ScriptedEngine(reply)
        self.factory = SessionFactory([self.engine], DefaultFamily(None, self.tokenizer), strict, context_length=1200)

    async def collect(self, label: str = "42", **spec: Any) -> Collected:
        prompts = [
            Prompt(id=f"p{i}", messages=(Message(role="user", content="6 * 7 = ?"),), label=label) for i in range(3)
        ]
        async with RewardPool((), workers=1, timeout_s=5.0) as rewards:
            episodes = Episodes(
                environment=CalculatorEnvironment(), sessions=self.factory, rewards=rewards, seed=0, timeout_s=20.0
            )
            stream = PromptStream(prompts, seed=0)
            return await collect(1, stream=stream, episodes=episodes, spec=RolloutSpec(**spec), groups=2, group_size=2)

    def spoken(self, row: Trajectory) -> str:
        return self.tokenizer.decode([int(token) for token in row.token_ids[row.sampled]])

    def given(self, row: Trajectory) -> str:
        return self.tokenizer.decode([int(token) for token in row.token_ids[~row.sampled]])


def model(history: str) -> str:
    """Calls the calculator once, then says what it said."""
    if "<|im_start|>tool\n" not in history:
        return call_text("6 * 7")
    return history.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]


async def test_a_tool_episode_is_one_row_with_only_the_models_tokens_trained(tmp_path: Path) -> None:
    bench = Bench(tmp_path, model)
    collected = await bench.collect()
    for group in collected.groups:
        for row in group.trajectories:
            assert (row.status, row.reward) == (Status.COMPLETED, 1.0)
            assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]
            assert row.messages[2].content == "42"
            assert bench.spoken(row) == call_text("6 * 7") + "<|im_end|>" + "42" + "<|im_end|>"
            assert "<|im_start|>tool\n42" in bench.given(row)
            assert np.array_equal(row.loss_mask, row.sampled)
            assert len(row.spans) == 2
            assert (row.metadata["turns"], row.metadata["calls"]) == (2, 1)
    assert collected.stats["rollout/reward_mean"] == 1.0
    assert bench.factory.load() == (0,)
    assert bench.engine.running == set()


async def test_the_second_turn_continues_the_very_tokens_of_the_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path, model)
    await bench.collect()
    by_session: dict[str, list[GenerateRequest]] = {}
    for request in bench.engine.requests:
        by_session.setdefault(request.session_id, []).append(request)
    for first, second in by_session.values():
        assert second.token_ids[: len(first.token_ids)] == first.token_ids
        assert first.params.seed != second.params.seed
    seeds = [request.params.seed for request in bench.engine.requests]
    assert len(set(seeds)) == len(seeds)


async def test_a_bad_tool_call_is_answered_and_the_episode_goes_on(tmp_path: Path) -> None:
    def confused(history: str) -> str:
        return call_text("6 ** oops") if "<|im_start|>tool\n" not in history else "42"

    collected = await Bench(tmp_path, confused).collect()
    row = collected.groups[0].trajectories[0]
    assert row.messages[2].content.startswith("error: ")
    assert row.reward == 1.0


async def test_the_turn_limit_ends_an_endless_calculation(tmp_path: Path) -> None:
    collected = await Bench(tmp_path, lambda history: call_text("1 + 1")).collect()
    row = collected.groups[0].trajectories[0]
    assert (row.metadata["turns"], row.reward, row.status) == (4, 0.0, Status.COMPLETED)


async def test_a_turn_cut_off_by_length_truncates_the_trajectory(tmp_path: Path) -> None:
    collected = await Bench(tmp_path, model).collect(sampling={"max_tokens": 5})
    row = collected.groups[0].trajectories[0]
    assert (row.status, row.response_tokens, row.reward) == (Status.TRUNCATED, 5, 0.0)
    assert collected.stats["rollout/truncated_fraction"] == 1.0


async def test_a_context_that_a_tool_fills_is_no_zero_but_says_who_did_not_score(tmp_path: Path) -> None:
    nines = "9" * 60
    bench = Bench(tmp_path, lambda history: call_text(f"{nines} * {nines}"))  # the result has twice as many digits
    bench.factory.context_length = 700
    with pytest.raises(RunError, match="context was full before the environment scored"):
        await bench.collect(max_waves=1, retries=0)
    assert len(bench.engine.requests) == 4  # one turn each


async def test_a_prompt_beyond_the_context_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, model)
    bench.factory.context_length = 8
    with pytest.raises(RunError, match="context is full"):
        await bench.collect(max_waves=1, retries=0)


async def test_an_engine_that_fails_between_turns_fails_the_engine_and_is_tried_again(tmp_path: Path) -> None:
    failures = [EngineError("lost a worker")]

    def flaky(history: str) -> str | Exception:
        if "<|im_start|>tool\n" in history and failures:
            return failures.pop()
        return model(history)

    collected = await Bench(tmp_path, flaky).collect()
    assert collected.stats[f"rollout/failed/{Boundary.ENGINE}"] == 1
    assert collected.stats["rollout/retried"] == 1
    assert collected.stats["rollout/trained"] == 4
    assert "lost a worker" in collected.failures["engine"]
