"""Scores snapshots by a user's function. Each call has a process of its own, which is killed with its children.

    def evaluate(folder, facts):      # folder: pathlib.Path of a Hugging Face folder
        return {"reward": 0.5, "pass_at_4": 0.75}      # or a number: the reward

`facts` holds step, seed, prompts (id, messages, tools, label, metadata), samples_per_prompt and sampling. The process
uses the protocol of reward workers, so the function may do what a reward may: be `async`, print, and raise anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles_core.config.spec import RunSpec
from miles_core.driver.late_eval import EvalSkipped
from miles_core.rollout.reward_process import Lost, RewardProcess
from miles_core.types import Prompt
from miles_core.watch import waiting


class FunctionScorer:
    """A `late_eval.Scorer` that calls the function named by ``load``: ``module:fn`` or ``/absolute/file.py:fn``."""

    def __init__(self, load: str, spec: RunSpec, prompts: Sequence[Prompt]) -> None:
        self._load = load
        chosen = [prompts[index] for index in range(min(spec.eval.prompts, len(prompts)))]
        self._facts: dict[str, Any] = {
            "seed": spec.seed,
            "prompts": [asdict(prompt) for prompt in chosen],
            "samples_per_prompt": spec.eval.samples_per_prompt,
            "sampling": spec.eval.sampling.model_dump(mode="json"),
        }

    async def score(self, step: int, folder: Path) -> dict[str, float]:
        """See `Scorer.score`. Reasons: not_imported; raised, also if the result is no number; crashed."""
        process = await RewardProcess.start()
        try:
            with waiting("evaluation", on=f"{self._load} to evaluate step {step}"):
                await process.send([(self._load, {"facts": {"step": step, **self._facts}})])
                if error := (await process.receive()).get("error"):
                    raise EvalSkipped("not_imported", error)
                await process.send((0, folder))
                await process.receive()  # it has begun
                verdict = await process.receive()
        except Lost as lost:
            raise EvalSkipped("crashed", f"{self._load} {lost}") from lost
        finally:
            await process.kill()
        if error := verdict.get("error"):
            raise EvalSkipped("raised", f"{error}\n{verdict.get('trace', '')}".strip())
        parts = {f"eval/reward/{name}": float(value) for name, value in verdict["parts"].items()}
        return {
            "eval/reward_mean": float(verdict["reward"]),
            "eval/prompts": float(len(self._facts["prompts"])),
            **parts,
        }
