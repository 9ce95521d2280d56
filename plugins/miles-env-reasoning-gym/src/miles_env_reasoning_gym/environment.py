"""Environment `reasoning-gym`: one generated question, one answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from miles_core import watch
from miles_core.errors import ConfigError, DataError
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.types import Message, Prompt
from miles_env_reasoning_gym.options import EnvironmentOptions

KEY = "reasoning_gym"
"""Key of a prompt's metadata under which the reward finds the entry."""


class ReasoningGymEnvironment:
    """Single turn; the reward of the same name scores it."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._options = options
        self._made: dict[str, tuple[Prompt, ...]] | None = None

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt]:
        """Questions of a split; generated once, in a process of their own, at the first call.

        Raises:
            ConfigError: the task or its options do not exist, or it has too few different questions.
        """
        if self._made is None:
            self._made = self._generate()
        return self._made[split]

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        await session.complete(prompt.messages)
        return EpisodeResult()

    async def close(self) -> None:
        return None

    def _generate(self) -> dict[str, tuple[Prompt, ...]]:
        options = self._options
        task_options = json.dumps(options.task_options, sort_keys=True)
        asked = {"task": options.task, "options": task_options, "seed": options.seed, "size": options.size}
        asked |= {"eval_seed": options.eval_seed, "eval_size": options.eval_size}
        found = generated(json.dumps(asked, sort_keys=True))
        if "error" in found:
            raise ConfigError(found["error"], where="environment")
        made = {}
        for split, seed, size in (("train", options.seed, "size"), ("eval", options.eval_seed, "eval_size")):
            source = {"task": options.task, "options": task_options, "seed": seed, "size": found[size]}
            made[split] = tuple(self._prompt(split, source, *one) for one in found[split])
        return made

    def _prompt(self, split: str, source: dict[str, Any], index: int, question: str, answer: str) -> Prompt:
        system = self._options.system
        messages = [Message(role="system", content=system)] if system is not None else []
        return Prompt(
            id=f"{source['task']}-{split}-{index}",
            messages=(*messages, Message(role="user", content=question)),
            label=answer,
            metadata={KEY: {**source, "index": index, "question": question}},
        )


@lru_cache(maxsize=4)
def generated(arguments: str) -> dict[str, Any]:
    """The result of `entries.generate` for JSON arguments, from a process of its own; a function of them alone.

    Raises:
        DataError: the process failed, with what it wrote to stderr.
    """
    task = json.loads(arguments)["task"]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with watch.waiting("driver", on=f"reasoning-gym to generate questions of {task}"):
        done = subprocess.run(
            [sys.executable, "-m", "miles_env_reasoning_gym.entries"],
            input=arguments,
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    if done.returncode:
        raise DataError(
            f"reasoning-gym could not generate questions of {task!r}",
            found=done.stderr.strip()[-2000:],
            where="environment",
            do="check that reasoning-gym is installed and that task_options fit the task",
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
