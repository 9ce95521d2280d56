"""Core's own environment, filters and rewards pass the kits that plugin authors subclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from miles_core.kinds.environment import Environment
from miles_core.kinds.reward import Scored
from miles_core.rollout.chat import ChatEnvironment
from miles_core.rollout.filters import no_failures, nonzero_std
from miles_core.testing.environment import EnvironmentConformance
from miles_core.testing.filter import FilterConformance
from miles_core.testing.reward import RewardConformance, scored_answer


class TestChat(EnvironmentConformance):
    def make(self) -> Environment:
        return ChatEnvironment()


class TestNonzeroStd(FilterConformance):
    options: ClassVar[dict[str, Any]] = {"min_std": 0.1}

    def make(self) -> Callable[..., Any]:
        return nonzero_std


class TestNoFailures(FilterConformance):
    judges_failures = True

    def make(self) -> Callable[..., Any]:
        return no_failures


class TestLength(RewardConformance):
    load = f"{Path(__file__).with_name('graders.py')}:length"
    options: ClassVar[dict[str, Any]] = {"scale": 0.5}

    def examples(self) -> Sequence[tuple[Scored, float | None]]:
        return [(scored_answer("four"), 2.0), (scored_answer(""), 0.0)]
