"""Conformance kit for rewards: whatever a model says gets a finite score, in time, and the same one every time.

    class TestMine(RewardConformance):
        load = "my_pkg.reward:score"
        def examples(self): return [(scored_answer("4", label="4"), 1.0), (scored_answer("5", label="4"), 0.0)]

The reward is called as in a run: in a worker process that imports `load`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from miles_core.errors import PluginError, RewardError
from miles_core.kinds.reward import Scored
from miles_core.rollout.rewards import RewardPool, RewardSpec, RewardTimeout
from miles_core.types import Message, Prompt


def scored_answer(response: str, *, question: str = "2 + 2 = ?", label: Any = "4", **metadata: Any) -> Scored:
    """An episode of one question and one answer."""
    prompt = Prompt(id="p", messages=(Message(role="user", content=question),), label=label, metadata=metadata)
    messages = (*prompt.messages, Message(role="assistant", content=response))
    return Scored(prompt=prompt, messages=messages, response=response, truncated=False, metadata={})


ODD_ANSWERS: dict[str, str] = {
    "nothing": "",
    "blank": " \n\t",
    "no answer": "I do not know.",
    "a broken character": "4\ufffd",
    "other scripts": "四 ٤ ๔ ４",
    "not a number": "nan",
    "infinity": "-inf",
    "a huge number": "9" * 5000,
    "a division by zero": "1/0",
    "unbalanced": "((((([[[[{{{{" * 20,
    "unclosed tags": "<answer><think>" * 50,
    "json": '{"answer": null}',
    "repetition": "a" * 20_000 + "!",
    "many numbers": "1 " * 10_000,
}
"""What models do say; none may crash a grader, since a crash takes the trajectory out of training."""


class RewardConformance:
    """Subclass it and name the reward."""

    load: str
    """``module:function``, or ``/absolute/file.py:function``."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments of every call."""
    deadline_s = 60.0
    """For one answer, also an odd one."""

    def examples(self) -> Sequence[tuple[Scored, float | None]]:
        """Episodes with the score each must get, or None where any score will do. At least one."""
        raise NotImplementedError

    @pytest.fixture
    def scores(self, tmp_path_factory: pytest.TempPathFactory) -> Scores:
        # One worker scores everything once a class: starting a process that imports a large grader takes seconds.
        # (pytest deprecates class-scoped fixtures that read `self`.)
        if type(self) not in _SCORES:
            _SCORES[type(self)] = self._score_all(tmp_path_factory)
        return _SCORES[type(self)]

    def _score_all(self, tmp_path_factory: pytest.TempPathFactory) -> Scores:
        examples = [scored for scored, _ in self.examples()]
        canary = tmp_path_factory.mktemp("kit") / "canary"
        odd = [_with_response(examples[0], text) for text in ODD_ANSWERS.values()]
        attacks = [_with_response(examples[0], text) for text in _attacks(canary)]
        try:
            found = asyncio.run(self._score([*examples, *examples, *odd, *attacks]))
        except PluginError as error:
            return Scores(problem=error.message, canary=canary)
        parts = [len(examples), len(examples), len(odd), len(attacks)]
        first, second, odd_scores, _ = ([found.pop(0) for _ in range(count)] for count in parts)
        return Scores(examples=first, again=second, odd=odd_scores, canary=canary)

    async def _score(self, episodes: Sequence[Scored]) -> list[float | str]:
        """Score of each episode, or why there is none."""
        found: list[float | str] = []
        spec = RewardSpec(name="reward", load=self.load, options=self.options)
        async with RewardPool([spec], workers=1, timeout_s=self.deadline_s) as pool:
            for scored in episodes:
                try:
                    found.append((await pool.score(scored))[0] or 0.0)
                except RewardTimeout:
                    found.append(f"no score within {self.deadline_s:g} s")
                except RewardError as error:
                    found.append(error.message)
        return found

    def test_it_loads_in_a_worker(self, scores: Scores) -> None:
        problem = f"{self.load} does not load in a process of its own: {scores.problem}"
        assert scores.problem is None, problem

    def test_the_examples_score_as_they_should(self, scores: Scores) -> None:
        assert scores.problem is None, scores.problem
        for (scored, expected), score in zip(self.examples(), scores.examples, strict=True):
            assert isinstance(score, float), f"{scored.response[:40]!r}: {score}"
            wrong = f"{scored.response[:40]!r} scored {score}, expected {expected}"
            assert expected is None or score == pytest.approx(expected), wrong

    def test_odd_answers_get_a_score_too(self, scores: Scores) -> None:
        assert scores.problem is None, scores.problem
        failed = {name: score for name, score in zip(ODD_ANSWERS, scores.odd, strict=True) if isinstance(score, str)}
        assert not failed, f"no score for {failed}"

    def test_equal_episodes_get_equal_scores(self, scores: Scores) -> None:
        assert scores.problem is None, scores.problem
        assert scores.examples == scores.again, "scores differ between two calls"

    def test_an_answer_is_never_executed(self, scores: Scores) -> None:
        assert scores.problem is None, scores.problem
        assert not scores.canary.exists(), "the grader executed the model's answer"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the reward gave: a score, or why there is none."""

    canary: Path
    """Exists when an answer was executed."""
    problem: str | None = None
    """Why nothing could be scored at all."""
    examples: Sequence[float | str] = ()
    again: Sequence[float | str] = ()
    odd: Sequence[float | str] = ()


_SCORES: dict[type, Scores] = {}


def _with_response(scored: Scored, response: str) -> Scored:
    answer = replace(scored.messages[-1], content=response)
    return replace(scored, response=response, messages=(*scored.messages[:-1], answer))


def _attacks(canary: Path) -> list[str]:
    return [
        f"__import__('pathlib').Path({str(canary)!r}).touch()",
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"; touch {canary} #",
        f"' ; touch {canary} ; '",
    ]
