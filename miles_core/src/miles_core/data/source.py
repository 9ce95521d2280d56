"""Where a run's prompts come from: its dataset, or the environment that brings its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import overload

from miles_core.config.spec import DataSpec
from miles_core.data.readers import Columns, read_prompts
from miles_core.data.rows import RowProblem, Split
from miles_core.errors import ConfigError, DataError
from miles_core.kinds.environment import Environment
from miles_core.types import Prompt


class PromptSet(Sequence[Prompt]):
    """The prompts of one split, where they come from, and the rows that were left out."""

    def __init__(self, prompts: Sequence[Prompt], *, origin: str, problems: tuple[RowProblem, ...] = ()) -> None:
        if not len(prompts):
            raise DataError("no prompts", expected="at least one prompt", found="none", where=origin)
        repeated = [name for name, times in Counter(prompt.id for prompt in prompts).items() if times > 1]
        if repeated:
            raise DataError("prompt ids repeat", expected="unique ids", found=", ".join(repeated[:5]), where=origin)
        self._prompts = prompts
        self.origin = origin
        self.problems = problems

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self._prompts[index]

    def __len__(self) -> int:
        return len(self._prompts)


def columns_of(data: DataSpec) -> Columns:
    """Where a run-file says that each part of a prompt stands."""
    fields = {"prompt_field": data.prompt_field, "label_field": data.label_field}
    fields |= {"tools_field": data.tools_field, "metadata_field": data.metadata_field}
    return Columns(
        prompt=data.prompt_field,
        label=data.label_field,
        tools=data.tools_field,
        metadata=data.metadata_field,
        system=data.system,
        # A resolved run-file writes every default out, so only a name that is not the default was asked for.
        named=frozenset(column for name, column in fields.items() if column != DataSpec.model_fields[name].default),
    )


def build_prompts(data: DataSpec | None, environment: Environment, split: Split) -> PromptSet:
    """The prompts of a split. A `data` section is used whenever there is one; otherwise the environment's own.

    Raises:
        ConfigError: nobody provides this split.
        DataError: the data is missing, empty or has unusable rows (see `read_prompts`).
    """
    if data is not None:
        path = data.train if split == "train" else data.eval
        if path is None:
            raise ConfigError(
                "no held-out prompts", where="data.eval", do="name a held-out dataset, or set eval.every_steps: null"
            )
        prompts, problems = read_prompts(path, columns=columns_of(data), split=split, bad_rows=data.bad_rows)
        return PromptSet(prompts, origin=path, problems=problems)
    own = environment.prompts(split)
    if own is None:
        raise ConfigError(
            f"nobody provides {'training' if split == 'train' else 'held-out'} prompts",
            expected="a `data` section, or an environment that brings its own prompts",
            where="data",
            do="add `data: {train: FILE}` to the run-file, or pick another environment",
        )
    return PromptSet(own, origin=f"environment {type(environment).__name__}")
