"""Words of other frameworks lead to what means the same here."""

from __future__ import annotations

import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from miles_core.config.load import parse
from miles_core.config.resolve import check_run
from miles_core.config.spec import RunSpec
from miles_core.config.translate import known_paths
from miles_core.guesses import KEYS, MEANT, closest, plain
from miles_core.registry import discover, load_target

BASE = "name: x\nmodel: m\nschedule: {steps: 1}\n"


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("schedule.mode=async", "fully-async"),
        ("schedule.mode=fully_async", "fully-async"),
        ("schedule.mode=one_step_off_policy", "one-step-off"),
        ("placement.device=gpu", "cuda"),
        ("placement.mode=disaggregated", "separate"),
        ("objective.kl_estimator=low_var_kl", "k3"),
        ("objective.reduction=seq-mean-token-sum-norm", "fixed-length"),
        ("engine=vllm", "sglang"),
        ("engine=hf", "local"),
        ("loss=grpo", "ppo-clip"),
        ("advantage=gspo", "grpo"),
        ("advantage=Reinforce++", "reinforce-pp"),
        ("transport=nccl", "broadcast"),
        ("backend.export_dtype=bf16", "bfloat16"),
        ("optimizer.learning_rate=1", "lr"),
        ("learning_rate=1", "optimizer.lr"),
        ("schedule.num_generations=8", "group_size"),
        ("rollout.n=8", "schedule.group_size"),
        ("reward=[]", "rewards"),
        ("optimizer.warmup_step=1", "warmup_steps"),
    ],
)
def test_a_suggestion_follows_the_meaning(override: str, suggestion: str) -> None:
    problems = check_run(parse(BASE, [override]), discover(), files=False)[1]
    said = [f"{each.message} {each.do}" for each in problems if each.source.startswith("--set")]
    assert any(f"id you mean `{suggestion}`?" in text for text in said), said


def _choices() -> Iterator[str]:
    """Every name that a run-file can have somewhere."""
    registry = discover()
    models = [load_target(each.capability.options) for each in registry.entries() if each.capability.options]
    for entry in registry.entries():
        yield entry.name
    todo: list[object] = [RunSpec, *models]
    while todo:
        at = todo.pop()
        if isinstance(at, type) and issubclass(at, BaseModel):
            todo += [field.annotation for field in at.model_fields.values()]
        elif typing.get_origin(at) is typing.Literal:
            yield from map(str, typing.get_args(at))
        else:
            todo += typing.get_args(at)


def test_every_meaning_exists() -> None:
    assert {each for meant in MEANT.values() for each in meant} <= set(_choices())
    assert set(KEYS.values()) <= set(known_paths(RunSpec))
    assert all(word == plain(word) for word in (*MEANT, *KEYS))


def test_what_resembles_nothing_is_not_guessed() -> None:
    assert closest("zebra", ["sync", "fully-async"]) is None
