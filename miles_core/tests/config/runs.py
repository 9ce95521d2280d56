"""A sound run-file, and what validation finds in it after changes."""

from __future__ import annotations

from miles_core.config.load import parse
from miles_core.config.problems import Problem
from miles_core.config.resolve import check_run
from miles_core.registry import Registry

BASE = """\
name: run
model: model
data: train.jsonl
rewards: [score.py:score]
rollout: {sampling: {max_tokens: 16}}
schedule: {steps: 3, group_size: 4}
"""


def problems(registry: Registry, *overrides: str, text: str = BASE) -> list[Problem]:
    return check_run(parse(text, overrides), registry)[1]


def only(registry: Registry, *overrides: str, text: str = BASE) -> Problem:
    (problem,) = problems(registry, *overrides, text=text)
    return problem
