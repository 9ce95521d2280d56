"""rollouts/step_000012.parquet: one row per trajectory, written for people and tools that look back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles_core.types import Group, TrainBatch


def write(folder: Path, step: int, groups: Sequence[Group], batch: TrainBatch) -> None:
    """Write the step's trajectories with the trainer's log-probs beside the engine's."""
