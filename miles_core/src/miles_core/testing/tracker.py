"""Conformance kit for trackers: every metric arrives under its step and name, and a resumed run keeps earlier steps.

    class TestMine(TrackerConformance):
        def make(self, tmp_path): return MyTracker(MyOptions(), tmp_path, "run", {"seed": 0})
        def recorded(self, tmp_path): return {step: {name: value}}

If what was recorded cannot be read back, leave `recorded` out; tests that need it are skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from miles_core.kinds.tracker import Tracker

Recorded = Mapping[int, Mapping[str, float]]

METRICS = {"reward/mean": 0.25, "loss/policy": -1.5e-3, "throughput/tokens_per_s": 1234.0}


class TrackerConformance:
    """Subclass it and say how to make the tracker."""

    quick_s = 0.25
    """`record` is called in the driver's event loop, so it may not wait for a network."""

    def make(self, tmp_path: Path) -> Tracker:
        """A tracker whose run directory is `tmp_path`; called again for a resume in the same place."""
        raise NotImplementedError

    def recorded(self, tmp_path: Path) -> Recorded | None:
        """Everything recorded under the run directory after `close`, or None when it cannot be read back."""
        return None

    def _read(self, tmp_path: Path) -> Recorded:
        found = self.recorded(tmp_path)
        if found is None:
            pytest.skip("this tracker cannot be read back")
        return found

    def test_every_metric_arrives_under_its_step_and_name(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        for step in range(3):
            tracker.record(step, {name: value + step for name, value in METRICS.items()})
        tracker.close()
        found = self._read(tmp_path)
        for step in range(3):
            for name, value in METRICS.items():
                got = found.get(step, {}).get(name)
                assert got == pytest.approx(value + step, rel=1e-5), f"step {step}, {name}: {got} was recorded"

    def test_steps_need_not_start_at_zero_or_be_contiguous(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.record(7, dict(METRICS))
        tracker.record(12, dict(METRICS))
        tracker.close()
        assert sorted(self._read(tmp_path)) == [7, 12], "the tracker counts steps by itself"

    def test_a_resumed_tracker_keeps_earlier_steps(self, tmp_path: Path) -> None:
        for steps in ((0, 1), (2,)):
            tracker = self.make(tmp_path)
            for step in steps:
                tracker.record(step, dict(METRICS))
            tracker.close()
        assert sorted(self._read(tmp_path)) == [0, 1, 2], "steps before the resume are gone"

    def test_metrics_may_come_and_go(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.record(0, {"a": 1.0})
        tracker.record(1, {"a": 2.0, "eval/b": 3.0})
        tracker.record(2, {})
        tracker.record(3, {"eval/b": 4.0})
        tracker.close()
        found = self._read(tmp_path)
        got = {step: dict(found.get(step, {})) for step in (0, 1, 3)}
        assert got == {0: {"a": 1.0}, 1: {"a": 2.0, "eval/b": 3.0}, 3: {"eval/b": 4.0}}, (
            f"metrics a and eval/b came and went, and {got} was recorded"
        )

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, 10**12])
    def test_any_number_is_accepted(self, tmp_path: Path, value: float) -> None:
        tracker = self.make(tmp_path)
        tracker.record(0, {"x": value})
        tracker.close()

    def test_the_metrics_are_not_changed(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        metrics = dict(METRICS)
        tracker.record(0, metrics)
        tracker.close()
        assert metrics == METRICS, "`record` changed the mapping it was given"

    def test_record_returns_quickly(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.record(0, dict(METRICS))  # the first may open a file
        best = math.inf
        for step in range(1, 4):
            started = time.perf_counter()
            tracker.record(step, dict(METRICS))
            best = min(best, time.perf_counter() - started)
        tracker.close()
        assert best < self.quick_s, f"`record` takes {best:.2f} s"

    def test_close_is_idempotent(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.close()
        tracker.close()
