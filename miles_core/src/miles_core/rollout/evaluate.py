"""Scores the model on held-out prompts, with sampling settings of their own. Nothing is trained on them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

from miles_core import watch
from miles_core.config.spec import EvalSpec
from miles_core.errors import ContractError, RunError
from miles_core.rollout.episode import SCORED, EpisodeKey, Episodes
from miles_core.rollout.scheduler import first_error, sampling_params
from miles_core.rollout.tally import part_means
from miles_core.types import Boundary, Prompt, SamplingParams, Status, Trajectory


async def evaluate(
    step: int,
    *,
    prompts: Sequence[Prompt],
    episodes: Episodes,
    spec: EvalSpec,
    retries: int,
    max_concurrent: int,
    version: int | None = None,
) -> dict[str, float]:
    """Metrics ``eval/…`` of the first `spec.prompts` prompts, always with the same seeds.

    Failed attempts are tried again, and then counted; no mean includes them. The standard error is that of the means
    of prompts, since samples of the same prompt are not independent.

    Args:
        version: The weight version that must have sampled every token; None does not check it.

    Raises:
        RunError: not one trajectory could be scored.
        ContractError: a token was sampled by another version; one score never mixes checkpoints.
    """
    chosen = [prompts[index] for index in range(min(spec.prompts, len(prompts)))]
    params = sampling_params(spec.sampling)
    gate = asyncio.Semaphore(max_concurrent)
    try:
        async with asyncio.TaskGroup() as tasks:
            with watch.waiting("driver", on=f"evaluation after step {step}"):
                started = [
                    [
                        tasks.create_task(_sample(episodes, gate, prompt, params, step, number, sample, retries))
                        for sample in range(spec.samples_per_prompt)
                    ]
                    for number, prompt in enumerate(chosen)
                ]
    except BaseExceptionGroup as several:
        raise (error := first_error(several)) from error.__cause__
    found = [[task.result() for task in row] for row in started]
    if version is not None:
        _check_version(step, found, version)
    return _metrics(step, found)


def _check_version(step: int, found: Sequence[Sequence[Trajectory]], version: int) -> None:
    spans = [span for row in found for trajectory in row if trajectory.reward is not None for span in trajectory.spans]
    others = sorted({span.weight_version for span in spans} - {version, -1})
    if others:
        raise ContractError(
            f"the score after step {step} would mix checkpoints",
            expected=f"tokens of weight version {version} alone",
            found=f"also of version {', '.join(map(str, others))}",
            where="eval",
        )


async def _sample(
    episodes: Episodes,
    gate: asyncio.Semaphore,
    prompt: Prompt,
    params: SamplingParams,
    step: int,
    number: int,
    sample: int,
    retries: int,
) -> Trajectory:
    for attempt in range(retries + 1):
        key = EpisodeKey(purpose="eval", step=step, epoch=0, draw=number, sample=sample, attempt=attempt)
        async with gate:
            generated = await episodes.generate(prompt, params, key)
        trajectory = await episodes.score(generated)
        if trajectory.status in SCORED:
            break
    return trajectory


def _metrics(step: int, by_prompt: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    every = [trajectory for row in by_prompt for trajectory in row]
    scored = [trajectory for trajectory in every if trajectory.reward is not None]
    failed = Counter(trajectory.failure.boundary for trajectory in every if trajectory.failure is not None)
    if not scored:
        messages = {t.failure.boundary: t.failure.message.splitlines()[0] for t in every if t.failure is not None}
        raise RunError(
            f"evaluation after step {step} scored nothing",
            expected="at least one scored trajectory",
            found="; ".join(f"{boundary}: {message}" for boundary, message in sorted(messages.items())),
            where="eval",
        )
    rewards_by_prompt = [[t.reward for t in row if t.reward is not None] for row in by_prompt]
    means = [math.fsum(rewards) / len(rewards) for rewards in rewards_by_prompt if rewards]
    rewards = [reward for row in rewards_by_prompt for reward in row]
    tokens = [t.response_tokens for t in scored]
    figures = {
        "reward_mean": math.fsum(rewards) / len(rewards),
        "reward_stderr": _standard_error(means),
        "truncated_fraction": sum(t.status is Status.TRUNCATED for t in scored) / len(scored),
        "response_tokens_mean": sum(tokens) / len(tokens),
        "response_tokens_max": max(tokens),
        "prompts": len(by_prompt),
        "scored": len(scored),
        "aborted": sum(t.status is Status.ABORTED for t in every),
    }
    metrics = {f"eval/{name}": float(value) for name, value in figures.items()}
    metrics |= {f"eval/failed/{boundary}": float(failed[boundary]) for boundary in Boundary}
    return metrics | part_means(scored, "eval")


def _standard_error(means: Sequence[float]) -> float:
    """Standard error of the mean over prompts; 0 with fewer than two."""
    count = len(means)
    if count < 2:
        return 0.0
    centre = math.fsum(means) / count
    return math.sqrt(math.fsum((mean - centre) ** 2 for mean in means) / (count - 1) / count)
