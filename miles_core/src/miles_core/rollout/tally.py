"""Tally: counts what became of everything that a step started. These equations hold, and a test checks them:

    groups_submitted  = groups_accepted + sum(filtered) + groups_aborted
    attempts          = succeeded + sum(failed) + engine_aborted          (of judged groups)
    attempts          = group_size * judged groups + retried
    sum(failed) + engine_aborted = retried + dropped

Figures of aborted groups depend on the moment of the abort, and so on the clock; `wasted` has them apart from the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from miles_core.types import Boundary, Group, Status, Trajectory


class Tally:
    """The counts of one step."""

    def __init__(self, *, group_size: int) -> None:
        self._group_size = group_size
        self.waves = 0
        self.submitted = 0
        self.judged = 0
        self.filtered: Counter[str] = Counter()
        self.rewards: list[float] = []
        self._attempts = 0
        self._succeeded = 0
        self._failed: Counter[Boundary] = Counter()
        self._timed_out = 0
        self._engine_aborted = 0
        self._retried = 0
        self._dropped = 0
        self._last_failure: dict[Boundary, str] = {}
        self._wasted: Counter[str] = Counter()

    def judge(self, attempts: Sequence[Trajectory], group: Group, *, retried: int, reason: str | None) -> None:
        """Count a judged group and all its attempts; `reason` is why it was dropped, or None if it was accepted."""
        self.judged += 1
        self._attempts += len(attempts)
        self._retried += retried
        self._dropped += sum(1 for t in group.trajectories if t.status in (Status.FAILED, Status.ABORTED))
        for trajectory in attempts:
            if trajectory.failure is not None:
                boundary = trajectory.failure.boundary
                self._failed[boundary] += 1
                self._timed_out += trajectory.failure.timed_out
                self._last_failure[boundary] = trajectory.failure.message.splitlines()[0]
            elif trajectory.status is Status.ABORTED:
                self._engine_aborted += 1
            else:
                self._succeeded += 1
        self.rewards += [t.reward for t in group.trainable if t.reward is not None]
        if reason is not None:
            self.filtered[reason] += 1

    def abort(self, attempts: Sequence[Trajectory], *, started: int) -> None:
        """Count a surplus group that was aborted before it was judged."""
        self._wasted["attempts_finished"] += len(attempts)
        self._wasted["attempts_cut"] += started - len(attempts)
        self._wasted["tokens_finished"] += sum(trajectory.response_tokens for trajectory in attempts)

    def last_failures(self) -> dict[str, str]:
        """The first line of the last failure at each boundary."""
        return {boundary.value: message for boundary, message in sorted(self._last_failure.items())}

    def wasted(self) -> dict[str, float]:
        names = ("attempts_finished", "attempts_cut", "tokens_finished")
        return {f"rollout/aborted_{name}": float(self._wasted[name]) for name in names}

    def stats(self, accepted: Sequence[Group]) -> dict[str, float]:
        """All figures of a step that collects in waves, under ``rollout/``."""
        counts = {"waves": self.waves, "groups_aborted": self.submitted - self.judged}
        waves = {f"rollout/{name}": float(value) for name, value in counts.items()}
        return {**waves, **self.judged_stats(), **self.batch_stats(accepted)}

    def judged_stats(self) -> dict[str, float]:
        """What became of everything started and judged, under ``rollout/``."""
        counts = {
            "groups_submitted": self.submitted,
            "attempts": self._attempts,
            "succeeded": self._succeeded,
            "engine_aborted": self._engine_aborted,
            "timed_out": self._timed_out,
            "retried": self._retried,
            "dropped": self._dropped,
        }
        stats = {f"rollout/{name}": float(value) for name, value in counts.items()}
        stats |= {f"rollout/failed/{boundary}": float(self._failed[boundary]) for boundary in Boundary}
        stats |= {f"rollout/filtered/{reason}": float(count) for reason, count in sorted(self.filtered.items())}
        return stats

    @staticmethod
    def batch_stats(accepted: Sequence[Group]) -> dict[str, float]:
        """Reward and length over the trajectories that will be trained, under ``rollout/``."""
        trained = [trajectory for group in accepted for trajectory in group.trainable]
        rewards = [t.reward for t in trained if t.reward is not None]
        tokens = [t.response_tokens for t in trained]
        mean = math.fsum(rewards) / len(rewards)
        flat = sum(1 for group in accepted if len({t.reward for t in group.trainable}) <= 1)
        figures = {
            "groups_accepted": len(accepted),
            "groups_zero_std": flat,
            "trained": len(trained),
            "reward_mean": mean,
            "reward_std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
            "reward_min": min(rewards),
            "reward_max": max(rewards),
            "response_tokens_mean": sum(tokens) / len(tokens),
            "response_tokens_max": max(tokens),
            "truncated_fraction": sum(t.status is Status.TRUNCATED for t in trained) / len(trained),
        }
        return {f"rollout/{name}": float(value) for name, value in figures.items()} | part_means(trained)


def part_means(trajectories: Sequence[Trajectory], prefix: str = "rollout") -> dict[str, float]:
    """Mean of each reward part over the trajectories that have it, as ``<prefix>/reward/<part>``: one segment a
    part."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metadata.get("reward_parts", {}).items():
            values.setdefault(name, []).append(value)
    return {
        f"{prefix}/reward/{name.replace('/', '.')}": math.fsum(found) / len(found)
        for name, found in sorted(values.items())
    }
