"""Environment and reward `reasoning-gym`, with the real library in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from miles_core.errors import ConfigError, RewardError
from miles_core.kinds.reward import Scored
from miles_core.rollout.rewards import RewardPool, RewardSpec
from miles_core.testing.environment import EnvironmentConformance
from miles_core.testing.reward import RewardConformance
from miles_core.types import Message, Prompt
from miles_env_reasoning_gym import entries
from miles_env_reasoning_gym.environment import ReasoningGymEnvironment, generated
from miles_env_reasoning_gym.options import EnvironmentOptions, RewardOptions
from miles_env_reasoning_gym.reward import find_answer

EASY = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+", "-"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def environment(task: str = "basic_arithmetic", **options: Any) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment(EnvironmentOptions(task=task, **{"size": 12, "eval_size": 5, **options}))


@pytest.fixture(scope="module")
def easy() -> ReasoningGymEnvironment:
    made = environment(task_options=EASY, size=300, eval_size=40)
    made.prompts("train")
    return made


def questions(prompts: Any) -> list[str]:
    return [prompt.messages[-1].content for prompt in prompts]


def test_no_held_out_question_is_ever_trained(easy: ReasoningGymEnvironment) -> None:
    train, held_out = easy.prompts("train"), easy.prompts("eval")
    assert (len(train), len(held_out)) == (300, 40)
    assert len(set(questions(held_out))) == 40
    # The task has some 240 different questions, so without the exclusion most held-out ones would be trained.
    assert set(questions(train)) & set(questions(held_out)) == set()
    assert len({prompt.id for prompt in (*train, *held_out)}) == 340


def test_prompts_are_short_labelled_and_json(easy: ReasoningGymEnvironment) -> None:
    prompt = easy.prompts("train")[0]
    assert [message.role for message in prompt.messages] == ["system", "user"]
    assert int(prompt.label) == eval(prompt.messages[-1].content.removeprefix("Calculate ").rstrip("."))
    assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata


def test_every_process_gets_the_same_questions() -> None:
    # This task iterates over sets of strings: with a free hash seed each process would ask something else.
    options = {"size": 3, "eval_size": 2, "system": None}
    first = environment("isomorphic_strings", **options)
    train, held_out = first.prompts("train"), first.prompts("eval")
    generated.cache_clear()
    second = environment("isomorphic_strings", **options)
    assert (second.prompts("train"), second.prompts("eval")) == (train, held_out)
    assert len(train[0].messages) == 1


def generate(task: str, options: dict[str, Any], *, seed: int = 0, eval_size: int = 5) -> dict[str, Any]:
    """What the environment's own process does, in this one: importing reasoning-gym once takes seconds."""
    return entries.generate(task, json.dumps(options), seed=seed, size=12, eval_seed=10**9, eval_size=eval_size)


def test_another_seed_asks_other_questions() -> None:
    assert generate("basic_arithmetic", {}, seed=500)["train"] != generate("basic_arithmetic", {})["train"]


def test_the_driver_never_imports_reasoning_gym() -> None:
    code = (
        "import sys, miles_env_reasoning_gym.environment as e, miles_env_reasoning_gym.options as o\n"
        "e.ReasoningGymEnvironment(o.EnvironmentOptions(task='chain_sum', size=2, eval_size=2)).prompts('train')\n"
        "assert not {'reasoning_gym', 'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("basic_aritmetic", {}, "did you mean 'basic_arithmetic'"),
        ("basic_arithmetic", {"max_term": 3}, "has no option 'max_term'; it has: allow_negation"),
        ("basic_arithmetic", {"min_terms": 9, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("basic_arithmetic", {"min_terms": "two"}, "refuses its options"),
        ("composite", {}, "not supported"),
    ],
)
def test_a_wrong_task_or_option_is_a_clear_error(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(entries.TaskError, match=message):
        generate(task, options)


def test_a_task_with_too_few_questions_is_refused() -> None:
    one_term = {**EASY, "min_terms": 1, "max_terms": 1}
    assert len(generate("basic_arithmetic", one_term, eval_size=5)["train"]) == 12
    with pytest.raises(entries.TaskError, match="of 50 held-out and 0 of 12 training"):
        generate("basic_arithmetic", one_term, eval_size=50)


def test_the_error_reaches_the_user() -> None:
    with pytest.raises(ConfigError, match="did you mean 'basic_arithmetic'"):
        environment("basic_aritmetic").prompts("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task_options": {"seed": 3}}, "option of the environment itself"),
        ({"seed": 0, "eval_seed": 99, "size": 100}, "must lie outside the training seeds"),
        ({"seed": 10, "eval_seed": 5, "eval_size": 6}, "must lie outside"),
        ({"sise": 3}, "sise"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_generated(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EnvironmentOptions(task="basic_arithmetic", **options)


@pytest.mark.parametrize("pattern", ["(", "(a)(b)"])
def test_an_answer_pattern_must_compile_and_name_one_answer(pattern: str) -> None:
    with pytest.raises(ValidationError):
        RewardOptions(answer_pattern=pattern)


@pytest.mark.parametrize(
    ("reply", "pattern", "answer"),
    [
        (" 12\n", None, "12"),
        ("", None, None),
        ("first 3, so -7.", r"-?\d+", "-7"),
        ("none", r"-?\d+", None),
        ("<answer>a</answer> <answer>b</answer>", r"<answer>(.*?)</answer>", "b"),
    ],
)
def test_the_answer_is_found_in_the_reply(reply: str, pattern: str | None, answer: str | None) -> None:
    assert find_answer(reply, pattern) == answer


class TestEnvironmentConforms(EnvironmentConformance):
    provides = frozenset({"provides-prompts"})

    def make(self) -> ReasoningGymEnvironment:
        return environment(task_options=EASY, size=300, eval_size=40)


class TestRewardConforms(RewardConformance):
    load = "miles_env_reasoning_gym.reward:reasoning_gym_reward"
    options: ClassVar[dict[str, Any]] = {"answer_pattern": r"-?\d+"}

    def examples(self) -> list[tuple[Scored, float | None]]:
        prompt = environment(task_options=EASY, size=300, eval_size=40).prompts("train")[0]
        wrong = str(int(prompt.label) + 1)
        return [(scored(prompt, f"It is {prompt.label}."), 1.0), (scored(prompt, wrong), 0.0)]


def scored(prompt: Prompt, response: str) -> Scored:
    messages = (*prompt.messages, Message(role="assistant", content=response))
    return Scored(prompt=prompt, messages=messages, response=response, truncated=False, metadata={})


async def test_the_tasks_own_verifier_scores_in_a_worker(easy: ReasoningGymEnvironment) -> None:
    prompt = easy.prompts("train")[3]
    right = prompt.label
    load = "miles_env_reasoning_gym.reward:reasoning_gym_reward"
    plain = RewardSpec(name="plain", load=load)
    number = RewardSpec(name="number", load=load, options={"answer_pattern": r"-?\d+"})
    async with RewardPool([plain, number], workers=1, timeout_s=30.0) as pool:
        _, parts = await pool.score(scored(prompt, right))
        assert (parts["plain"], parts["plain.correct"], parts["number"]) == (1.0, 1.0, 1.0)
        wordy = f"It is {right}"
        _, parts = await pool.score(scored(prompt, wordy))
        assert parts["plain"] == len(right) / len(wordy)  # reasoning-gym's partial credit for a wordy answer
        assert (parts["plain.correct"], parts["number"]) == (0.0, 1.0)
        _, parts = await pool.score(scored(prompt, "no idea"))
        assert (parts["number"], parts["number.answered"], parts["plain.answered"]) == (0.0, 0.0, 1.0)
        with pytest.raises(RewardError, match="does not come from"):
            await pool.score(scored(Prompt(id="x", messages=prompt.messages), right))
        source = {**prompt.metadata["reasoning_gym"], "index": prompt.metadata["reasoning_gym"]["index"] + 1}
        with pytest.raises(RewardError, match="another entry"):
            await pool.score(scored(replace(prompt, metadata={"reasoning_gym": source}), right))
