"""Trackers that are wrong in one way each."""

import json
import time
from pathlib import Path

from miles_core.testing.tracker import TrackerConformance


class Jsonl:
    """Sound: one line a step."""

    mode = "a"

    def __init__(self, options, run_dir, run_name, config):
        self.file = (run_dir / "sound.jsonl").open(self.mode)

    def record(self, step, metrics):
        self.file.write(json.dumps({"step": step, "metrics": dict(metrics)}) + "\n")

    def close(self):
        self.file.close()


class Faulty(TrackerConformance):
    def make(self, tmp_path):
        return self.tracker(None, tmp_path, "run", {})

    def recorded(self, tmp_path):
        lines = map(json.loads, Path(tmp_path, "sound.jsonl").read_text().splitlines())
        return {line["step"]: line["metrics"] for line in lines}


class TestTruncatesOnResume(Faulty):
    class tracker(Jsonl):
        mode = "w"

    caught_by = {"test_a_resumed_tracker_keeps_earlier_steps": "steps before the resume are gone"}


class TestCountsSteps(Faulty):
    class tracker(Jsonl):
        def record(self, step, metrics):
            self.count = getattr(self, "count", -1) + 1
            super().record(self.count, metrics)

    caught_by = {
        "test_steps_need_not_start_at_zero_or_be_contiguous": "the tracker counts steps by itself",
        "test_a_resumed_tracker_keeps_earlier_steps": "steps before the resume are gone",
    }


class TestFixesColumnsAtTheFirstStep(Faulty):
    class tracker(Jsonl):
        def record(self, step, metrics):
            self.columns = getattr(self, "columns", list(metrics))
            super().record(step, {name: metrics[name] for name in self.columns if name in metrics})

    caught_by = {"test_metrics_may_come_and_go": "eval/b"}


class TestRoundsToTwoPlaces(Faulty):
    class tracker(Jsonl):
        def record(self, step, metrics):
            super().record(step, {name: round(value, 2) for name, value in metrics.items()})

    caught_by = {"test_every_metric_arrives_under_its_step_and_name": "loss/policy"}


class TestRefusesNan(Faulty):
    class tracker(Jsonl):
        def record(self, step, metrics):
            super().record(step, json.loads(json.dumps(dict(metrics), allow_nan=False)))

    caught_by = {"test_any_number_is_accepted": "Out of range float values"}


class TestPopsFromTheMapping(Faulty):
    class tracker(Jsonl):
        def record(self, step, metrics):
            super().record(step, metrics)
            metrics.clear()

    caught_by = {"test_the_metrics_are_not_changed": "changed the mapping"}


class TestWaitsForTheNetwork(Faulty):
    quick_s = 0.02

    class tracker(Jsonl):
        def record(self, step, metrics):
            time.sleep(0.03)
            super().record(step, metrics)

    caught_by = {"test_record_returns_quickly": "`record` takes"}


class TestClosesOnce(Faulty):
    class tracker(Jsonl):
        def close(self):
            self.file.write("")
            super().close()

    caught_by = {"test_close_is_idempotent": "I/O operation on closed file"}
