"""What a diagnosis looks at: a run's events and metrics, and, of some steps, its tokens with both sides' log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_core.errors import DataError
from miles_core.report.load import RunRecord
from miles_core.tracking.rollouts import RolloutRow

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

MAX_STEPS = 12
"""Steps whose rollouts are read: the first ones, where the weights are still the checkpoint's, and the rest evenly."""
FIRST_STEPS = 4


@dataclass(frozen=True)
class StepTokens:
    """The trained tokens of one step whose log-probs both sides know. K tokens of R trajectories."""

    step: int
    rollout: Float64
    """[K] engine's log-prob"""
    trainer: Float64
    """[K] trainer's, before the update"""
    row: Int64
    """[K] trajectory of the token, from 0"""
    place: Int64
    """[K] how many tokens of its trajectory were trained before it"""
    lag: Int64
    """[K] published versions since the one that sampled it; 0 is fresh, at least 1 is a token over older key-values"""
    cached: Sequence[int | None]
    """[R] prompt tokens whose key-values the engine reused over all turns; None where the trajectory does not say"""
    rows: Sequence[RolloutRow]

    @property
    def difference(self) -> Float64:
        """[K] trainer minus engine, nats."""
        return self.trainer - self.rollout

    @property
    def fresh(self) -> StepTokens:
        """The tokens that the trainer's own version sampled: age does not move those."""
        at = self.lag == 0
        arrays = {name: getattr(self, name)[at] for name in ("rollout", "trainer", "row", "place", "lag")}
        return StepTokens(step=self.step, cached=self.cached, rows=self.rows, **arrays)

    @property
    def mean_abs(self) -> float:
        return float(np.abs(self.difference).mean()) if self.rollout.size else float("nan")


@dataclass(frozen=True)
class Evidence:
    record: RunRecord
    events: Sequence[Mapping[str, Any]]
    """Without those of steps that the run went back behind and did again."""
    steps: Sequence[StepTokens]
    """Ascending; those with at least one token."""
    unreadable: Sequence[int] = ()
    """Steps whose rollouts are damaged."""

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Events of a kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def has_experts(self) -> bool:
        """Whether the run's model, if its folder is still there, is a mixture of experts."""
        return bool(self.record.has_experts)

    def setting(self, path: str) -> Any:
        """A value of run.yaml, or None."""
        found: Any = self.record.config
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


def gather(record: RunRecord) -> Evidence:
    """Read what a diagnosis needs. Rollouts of at most `MAX_STEPS` steps are opened."""
    # Rollouts of a step come before its metrics; later ones were left by an earlier life of a resumed run.
    there = [step for step in record.rollout_steps if not record.metrics or step <= record.steps + 1]
    rest = there[FIRST_STEPS:]
    spread: Any = np.unique(np.linspace(0, len(rest) - 1, MAX_STEPS - FIRST_STEPS).astype(int)) if rest else []
    chosen = [*there[:FIRST_STEPS], *(rest[at] for at in spread)]
    steps, unreadable = [], []
    for step in chosen:
        try:
            steps.append(_tokens(record, step))
        except DataError:
            unreadable.append(step)
    return Evidence(
        record=record,
        events=_standing(record.events),
        steps=[step for step in steps if step.rollout.size],
        unreadable=unreadable,
    )


def _standing(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Events without those that a resumption undid: errors before it, and contracts broken on steps done again."""
    standing: list[Mapping[str, Any]] = []
    for event in events:
        if event["event"] == "resume":
            last = int(event["step"])
            standing = [
                earlier
                for earlier in standing
                if earlier["event"] != "error" and (earlier["event"] != "contract_broken" or earlier["step"] <= last)
            ]
        standing.append(event)
    return standing


def _tokens(record: RunRecord, step: int) -> StepTokens:
    rows = record.rollouts(step)
    current = _scored_version(record, step)
    mixed_keys = (record.config.get("schedule") or {}).get("on_weight_update") == "in-place"
    parts: dict[str, list[Any]] = {name: [] for name in ("rollout", "trainer", "row", "place", "lag")}
    cached: list[int | None] = []
    for index, row in enumerate(rows):
        known = row.loss_mask & np.isfinite(row.old_logprobs) & np.isfinite(row.logprobs)
        count = int(known.sum())
        parts["rollout"].append(row.logprobs[known].astype(np.float64))
        parts["trainer"].append(row.old_logprobs[known].astype(np.float64))
        parts["row"].append(np.full(count, index, dtype=np.int64))
        parts["place"].append(np.arange(count, dtype=np.int64))
        lag = np.ones(count, dtype=np.int64) if current is None else current - row.versions[known]
        if mixed_keys and len(set(row.versions[row.versions >= 0].tolist())) > 1:
            lag = np.maximum(lag, 1)  # as in `contracts.versions.fresh_tokens`
        parts["lag"].append(lag)
        # The sum over turns says nothing of the first one: a later turn always reuses it.
        reused = row.metadata.get("cached_tokens") if row.metadata.get("turns", 1) == 1 else None
        cached.append(int(reused) if isinstance(reused, int | float) else None)
    arrays: dict[str, Any] = {name: np.concatenate(found) if found else np.zeros(0) for name, found in parts.items()}
    return StepTokens(step=step, cached=cached, rows=rows, **arrays)


def _scored_version(record: RunRecord, step: int) -> int | None:
    """The version that the trainer scored a step with; None where no engine had it, or nobody wrote it down."""
    metrics = record.at(step)
    if metrics.get("contract/logprobs/fresh_fraction") == 0:
        return None  # published less often than trained: labels equal the published version, not the trainer's
    if "contract/versions/current" in metrics:
        return int(metrics["contract/versions/current"])
    # A step that ended the run left no metrics. A synchronous one consumes what the version before it sampled.
    in_step = (record.config.get("schedule") or {}).get("mode") in (None, "sync")
    return step - 1 if in_step or step == 1 else None
