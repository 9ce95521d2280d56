"""Entries of a reasoning-gym task, identified by (task, options, seed, size, index).

The only module that imports reasoning-gym. It runs in processes of its own, whose hash seed is fixed: some tasks
iterate over sets of strings, and would give other questions in every process.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

TRIES = 20
"""Questions generated for each one wanted, at most: tasks repeat themselves and overlap with the held-out ones."""


class TaskError(ValueError):
    """The task or its options do not exist; a message for the user."""


@lru_cache(maxsize=8)
def dataset(task: str, options: str, seed: int, size: int) -> Any:
    """The dataset object; `options` is JSON text, so that the call can be cached.

    Raises:
        TaskError: no such task, no such option, or a value the task refuses.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {len(DATASETS)}, such as basic_arithmetic"
        raise TaskError(f"reasoning-gym has no task {task!r}{hint}")
    if task == "composite":
        raise TaskError("`composite` mixes tasks and is not supported; choose one task")
    given = json.loads(options)
    fields = DATASETS[task][1].__dataclass_fields__
    for name in given:
        if name not in fields:
            known = ", ".join(sorted(set(fields) - {"seed", "size"}))
            raise TaskError(f"task {task!r} has no option {name!r}; it has: {known}")
    try:
        return reasoning_gym.create_dataset(task, **given, seed=seed, size=size)
    except (AssertionError, ValueError, TypeError) as error:
        raise TaskError(f"task {task!r} refuses its options: {error or type(error).__name__}") from error


@lru_cache(maxsize=4096)
def entry(task: str, options: str, seed: int, size: int, index: int) -> dict[str, Any]:
    """One question with its answer and metadata, exactly as the task made it."""
    made: dict[str, Any] = dataset(task, options, seed, size)[index]
    return made


def generate(task: str, options: str, seed: int, size: int, eval_seed: int, eval_size: int) -> dict[str, Any]:
    """Held-out questions first, all different; then training questions, none of them held out.

    Returns:
        ``{train, eval, size, eval_size}``: lists of (index, question, answer), and the sizes their datasets were made
        with.

    Raises:
        TaskError: see `dataset`; or the task has too few different questions.
    """
    pool, eval_pool = TRIES * size, TRIES * eval_size
    held_out: dict[str, tuple[int, str, str]] = {}
    for index, question, answer in _questions(task, options, eval_seed, eval_pool):
        held_out.setdefault(question, (index, question, answer))
        if len(held_out) == eval_size:
            break
    train: list[tuple[int, str, str]] = []
    for found in _questions(task, options, seed, pool):
        if found[1] not in held_out:
            train.append(found)
        if len(train) == size:
            break
    if len(held_out) < eval_size or len(train) < size:
        raise TaskError(
            f"task {task!r} has too few different questions: {len(held_out)} of {eval_size} held-out and "
            f"{len(train)} of {size} training questions found; lower eval_size and size, or widen task_options"
        )
    return {"train": train, "eval": list(held_out.values()), "size": pool, "eval_size": eval_pool}


def _questions(task: str, options: str, seed: int, size: int) -> Iterator[tuple[int, str, str]]:
    made = dataset(task, options, seed, size)
    for index in range(size):
        try:
            one = made[index]
        except IndexError:  # a few tasks hold a fixed number of questions
            return
        yield index, str(one["question"]), str(one["answer"])


def main() -> None:
    """Read the arguments of `generate` as JSON from stdin; write its result, or ``{"error": …}``, to stdout."""
    out = sys.stdout
    sys.stdout = sys.stderr  # tasks may print
    try:
        found: dict[str, Any] = generate(**json.load(sys.stdin))
    except TaskError as error:
        found = {"error": str(error)}
    json.dump(found, out)


if __name__ == "__main__":
    main()
