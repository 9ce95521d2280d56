"""Options of environment and reward `reasoning-gym`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

SYSTEM = "Answer with the result only, without explanation."
"""Short on purpose: every token of it is in every prompt."""


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EnvironmentOptions(Options):
    """Which task, and which of its questions."""

    task: str
    """Name of a reasoning-gym dataset, such as basic_arithmetic."""
    task_options: dict[str, Any] = {}
    """Fields of the task's own configuration; `seed` and `size` are those below."""
    seed: Annotated[int, Field(ge=0)] = 0
    """First seed of the training questions."""
    size: PositiveInt = 1000
    """Training questions; all are generated when the run starts."""
    eval_seed: Annotated[int, Field(ge=0)] = 1_000_000_007
    """First seed of the held-out questions."""
    eval_size: PositiveInt = 64
    """Held-out questions, all different; no training question is one of them."""
    system: str | None = SYSTEM
    """System message of every prompt; null leaves it out."""

    @field_validator("task_options")
    @classmethod
    def _own_fields(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in ("seed", "size"):
            if name in options:
                raise ValueError(f"`{name}` is an option of the environment itself, beside `task`")
        return options

    @model_validator(mode="after")
    def _disjoint_seeds(self) -> Self:
        # reasoning-gym makes question i from seed + i, so neighbouring seeds share questions.
        if self.seed < self.eval_seed + self.eval_size and self.eval_seed < self.seed + self.size:
            raise ValueError(
                f"eval_seed ({self.eval_seed}) must lie outside the training seeds "
                f"{self.seed} to {self.seed + self.size - 1}, by at least eval_size ({self.eval_size})"
            )
        return self


class RewardOptions(Options):
    """How the answer is found in the reply."""

    answer_pattern: str | None = None
    """Regular expression; its last match in the reply (its group, if it has one) is the answer. null takes it whole."""

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
            if groups > 1:
                raise ValueError(f"has {groups} groups; expected none or one, which is the answer")
        return pattern
