"""The TensorBoard tracker, read back with TensorBoard's own reader."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from miles_core.testing.tracker import TrackerConformance

pytest.importorskip("tensorboard")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of tensorboard's own imports
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from miles_core.tracking.tensorboard import TensorBoardTracker


def make(folder: Path) -> TensorBoardTracker:
    return TensorBoardTracker(None, folder, "quick", {})


def recorded(folder: Path) -> dict[int, dict[str, float]]:
    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in reader.Tags()["scalars"]:
        for event in reader.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


class TestConformance(TrackerConformance):
    def make(self, tmp_path: Path) -> Any:
        return make(tmp_path)

    def recorded(self, tmp_path: Path) -> dict[int, dict[str, float]]:
        return recorded(tmp_path)


def test_a_resumed_run_hides_what_the_killed_one_wrote_from_there_on(tmp_path: Path) -> None:
    killed = make(tmp_path)
    for step in (1, 2, 3):
        killed.record(step, {"train/loss": float(step)})
    killed.close()
    resumed = make(tmp_path)
    resumed.record(2, {"train/loss": 20.0})
    resumed.close()
    assert recorded(tmp_path) == {1: {"train/loss": 1.0}, 2: {"train/loss": 20.0}}
