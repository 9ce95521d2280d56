"""The state of an asynchronous run in words, and what one more version of lag would buy and cost. Pure.

The queue tells which side waits: a buffer that is always empty means the trainer waits for data, one that is always
full means the rollout is held back and what it made grows old.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

IDLE = 0.1
"""Share of the time that a side may wait before it counts as waiting."""
WASTED = 0.05
"""Share of finished groups that may be discarded as stale before it counts as waste."""


class Verdict(StrEnum):
    ROLLOUT_BOUND = "rollout-bound"
    TRAINER_BOUND = "trainer-bound"
    BALANCED = "balanced"
    STALE = "data too stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A verdict and the sentence that says what to do about it."""

    verdict: Verdict
    sentence: str


def judge(figures: Mapping[str, float]) -> State | None:
    """The verdict on a step, or on means over several.

    Args:
        figures: ``async/…`` metrics and timings; ``async/stale`` and ``async/trained`` of the whole run.

    Returns:
        None for a run that is not asynchronous.
    """
    names = ("async/queue_fill", "async/trainer_idle_fraction", "async/engine_idle_fraction", "async/blocked_fraction")
    if any(name not in figures for name in names):
        return None
    fill, trainer_idle, engine_idle, blocked = (figures[name] for name in names)
    stale, trained = figures.get("async/stale", 0.0), figures.get("async/trained", 0.0)
    if stale > WASTED * (stale + trained):
        share = stale / (stale + trained)
        return State(
            verdict=Verdict.STALE,
            sentence=f"{share:.0%} of the finished groups were discarded as stale: lower max_concurrent_samples, raise "
            "max_weight_staleness, or publish less often",
        )
    if trainer_idle > IDLE and trainer_idle >= blocked:
        limited = figures.get("async/limited_fraction", 0.0)
        advice = "add engines, or raise max_concurrent_samples if the engines have room"
        if limited > IDLE:
            advice = (
                f"max_weight_staleness holds the rollout back {limited:.0%} of the time, when more engines or more in "
                "flight would not help; raise it, or leave it for fresher data"
            )
        return State(
            verdict=Verdict.ROLLOUT_BOUND,
            sentence=f"the trainer waits {trainer_idle:.0%} of the time and the buffer is {fill:.0%} full; {advice}",
        )
    if blocked > IDLE:
        return State(
            verdict=Verdict.TRAINER_BOUND,
            sentence=f"a full buffer holds the rollout back {blocked:.0%} of the time and queued data grows old: move "
            "devices to the trainer, or lower max_concurrent_samples",
        )
    return State(
        verdict=Verdict.BALANCED,
        sentence=f"the trainer waits {trainer_idle:.0%} of the time, {engine_idle:.0%} of the budget in flight is "
        "unused",
    )


def verdict_of_steps(metrics: Sequence[Mapping[str, float]], timings: Sequence[Mapping[str, float]]) -> State | None:
    """The verdict on the means of the last steps.

    Args:
        metrics, timings: Their lines, oldest first; the counts are those of the last one.
    """
    asynchronous = [line for line in timings if "async/queue_fill" in line]
    if not asynchronous:
        return None
    names = [name for name in asynchronous[-1] if name.startswith("async/")]
    means = {
        name: math.fsum(line[name] for line in asynchronous if name in line)
        / sum(name in line for line in asynchronous)
        for name in names
    }
    counts = next((line for line in reversed(metrics) if "async/trained" in line), {})
    return judge({**counts, **means})


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one more version of lag would change."""

    throughput: float
    """Steps an hour, as a ratio to now; at least 1."""
    kl: float | None
    """KL(rollout || trainer) in nats; None while nothing was stale yet."""
    ess: float | None
    """Effective sample size of the importance weights, as a fraction; None also where no correction measures it."""

    def __str__(self) -> str:
        parts = [f"one more version of lag: {(self.throughput - 1):+.0%} steps/h"]
        if self.kl is not None:
            parts.append(f"KL {self.kl:.2g} nats")
        if self.ess is not None:
            parts.append(f"effective sample size {self.ess:.0%}")
        return ", ".join(parts)


def forecast(
    generate_s: Sequence[float],
    train_s: Sequence[float],
    *,
    lag: int,
    kl: float | None,
    ess: float | None,
    staleness: float,
) -> Forecast:
    """Replay the measured steps with one more version of lag allowed.

    Args:
        generate_s: Seconds that the batch of each step took to generate on its own.
        train_s: Seconds that its training and publishing took.
        lag: Versions that a batch may be behind now.
        kl, ess: Measured now, at a token-weighted staleness of `staleness` versions; None where not measured.

    A batch starts once the one before it is generated and its weights are young enough; a step starts once its batch is
    there and the step before is done. Each update moves the policy by about the same distance, so the KL grows with the
    square of the lag, and the logarithm of the effective sample size with it.
    """
    now, more = (duration(generate_s, train_s, lag=allowed) for allowed in (lag, lag + 1))
    growth = ((staleness + 1) / staleness) ** 2 if staleness > 0 else None
    return Forecast(
        throughput=now / more,
        kl=None if growth is None or kl is None else kl * growth,
        ess=None if growth is None or ess is None else max(ess, 1e-6) ** growth,
    )


class Outlook:
    """Collects what `forecast` needs from the lines of the last steps."""

    def __init__(self, steps: int = 32) -> None:
        self._lines: deque[tuple[float, float]] = deque(maxlen=steps)
        self._metrics: Mapping[str, float] = {}

    def step(self, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Take the lines of a step; those of runs in turns are passed over."""
        if "async/generate_s" in timings and "time/train_s" in timings:
            phases = ("time/log_probs_s", "time/train_s", "time/publish_s")
            self._lines.append((timings["async/generate_s"], sum(timings.get(name, 0.0) for name in phases)))
            self._metrics = metrics

    def forecast(self) -> Forecast | None:
        """None before a few steps were seen."""
        if len(self._lines) < 4:
            return None
        found = self._metrics
        ess = [value for name, value in found.items() if name.startswith("correction/") and name.endswith("/ess")]
        return forecast(
            [generate for generate, _ in self._lines],
            [train for _, train in self._lines],
            lag=round(found.get("contract/versions/s_old_max", 0.0)),
            kl=found.get("contract/logprobs/kl_k3"),
            ess=ess[0] if ess else None,
            staleness=found.get("contract/versions/token_staleness", 0.0),
        )


def duration(generate_s: Sequence[float], train_s: Sequence[float], *, lag: int) -> float:
    """Seconds that a two-stage pipeline takes when batch k needs the weights of step ``k - 1 - lag``."""
    generated: list[float] = []
    trained: list[float] = []
    for step, (generate, train) in enumerate(zip(generate_s, train_s, strict=True)):
        needed = step - 1 - lag
        start = max(generated[-1] if generated else 0.0, trained[needed] if needed >= 0 else 0.0)
        generated.append(start + generate)
        trained.append(max(trained[-1] if trained else 0.0, generated[-1]) + train)
    return trained[-1] if trained else 0.0
