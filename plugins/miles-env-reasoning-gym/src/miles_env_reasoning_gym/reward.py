"""Reward `reasoning-gym`: the task's own `score_answer`, called in a reward worker."""

from __future__ import annotations

import re
from typing import Any

from miles_core.errors import RewardError
from miles_core.kinds.reward import Scored
from miles_env_reasoning_gym import entries
from miles_env_reasoning_gym.environment import KEY


def reasoning_gym_reward(scored: Scored, /, *, answer_pattern: str | None = None) -> dict[str, float]:
    """Score the answer as the task defines it, partial credit included.

    Returns:
        ``reward`` as reasoning-gym gives it, and the parts ``correct`` (full score) and ``answered`` (an answer was
        found).

    Raises:
        RewardError: the prompt is not one of the environment `reasoning-gym`, or this machine generates another entry
        for it.
    """
    source = scored.prompt.metadata.get(KEY)
    if source is None:
        raise RewardError(
            "the prompt does not come from the environment `reasoning-gym`",
            expected=f"metadata with the key {KEY!r}",
            found=", ".join(scored.prompt.metadata) or "no metadata",
            where=f"prompt {scored.prompt.id!r}",
            do="use the reward with the environment of the same name",
        )
    answer = find_answer(scored.response, answer_pattern)
    key = (source["task"], source["options"], source["seed"], source["size"])
    entry = entries.entry(*key, source["index"])
    _same(entry, source["question"], scored.prompt)
    score = float(entries.dataset(*key).score_answer(answer, entry))
    return {"reward": score, "correct": float(score >= 1.0), "answered": float(answer is not None)}


def find_answer(reply: str, pattern: str | None) -> str | None:
    """The answer in a reply, or None when there is none."""
    if pattern is None:
        return reply.strip() or None
    found = list(re.finditer(pattern, reply))
    return found[-1].group(found[-1].re.groups) if found else None


def _same(entry: dict[str, Any], question: str, prompt: Any) -> None:
    """The entry is made anew here rather than sent along, since its metadata need not survive a pickle or JSON."""
    if (str(entry["question"]), str(entry["answer"])) != (question, prompt.label):
        raise RewardError(
            "reasoning-gym generated another entry than the one that was asked",
            expected=f"{question!r} with answer {prompt.label!r}",
            found=f"{entry['question']!r} with answer {entry['answer']!r}",
            where=f"prompt {prompt.id!r}",
            do="report the task: its questions depend on more than seed and index",
        )
