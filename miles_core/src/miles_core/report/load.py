"""A run as its directory tells it: what the report and the terminal views read. Nothing here writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any

from miles_core.config import yaml12
from miles_core.config.model_folder import ModelFolderError, read_model_folder
from miles_core.errors import DataError
from miles_core.tokenizer import ChatTokenizer
from miles_core.tracking import rollouts
from miles_core.tracking.live import figures_text
from miles_core.tracking.rollouts import RolloutRow
from miles_core.tracking.run_dir import RunDir, read_lines

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunRecord:
    """Everything a run left behind, as far as it got."""

    directory: RunDir
    config: Mapping[str, Any]
    """run.yaml"""
    config_text: str
    environment: Mapping[str, Any]
    """env.json"""
    metrics: Lines
    """By step, late scores with the step whose weights they measured."""
    timings: Lines
    events: Lines

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.directory.path.name))

    @property
    def steps(self) -> int:
        """Training steps recorded; step 0 holds an evaluation only."""
        return max((int(line["step"]) for line in self.metrics), default=0)

    @property
    def planned(self) -> int:
        """Training steps that the run-file asks for."""
        return int((self.config.get("schedule") or {}).get("steps", self.steps))

    @cached_property
    def cut_short(self) -> str | None:
        """Where a run ended that did not come to its end, in words; None of one that did, or that left no events."""
        last = next((event for event in reversed(self.events) if event["event"] in ("start", "stop")), {})
        outcome = last.get("outcome", "killed") if last else "finished"
        how = {"killed": "was killed, unless it still runs", "failed": "failed"}.get(outcome, "was stopped")
        if outcome == "finished":
            return None
        if self.steps >= self.planned:
            return f"The run {how}: all {self.planned} steps are done, not what comes after. `--resume` finishes it."
        step = "" if outcome == "stopped" else f"step {self.steps + 1} was never finished, "
        return f"The run {how}: {step}{self.steps} of {self.planned} steps are done. `--resume` goes on."

    def series(self, name: str, *, clock: bool = False) -> list[tuple[int, float]]:
        """(step, value) of a metric wherever it was recorded and finite."""
        lines = self.timings if clock else self.metrics
        return [
            (int(line["step"]), float(line[name]))
            for line in lines
            if isinstance(line.get(name), int | float) and math.isfinite(line[name])
        ]

    def at(self, step: int) -> dict[str, float]:
        """The finite metrics of a step; empty where it left no line."""
        line = next((line for line in self.metrics if line["step"] == step), {})
        return {n: float(v) for n, v in line.items() if isinstance(v, int | float) and math.isfinite(v) and n != "step"}

    def names(self, prefix: str, *, clock: bool = False) -> list[str]:
        """Recorded names that start with `prefix`, in the order of their first appearance."""
        lines = self.timings if clock else self.metrics
        return list(dict.fromkeys(name for line in lines for name in sorted(line) if name.startswith(prefix)))

    @cached_property
    def has_experts(self) -> bool | None:
        """Whether the run's model is a mixture of experts; None where its folder is gone."""
        try:
            return read_model_folder(Path(self.config["model"]["path"])).experts is not None
        except (ModelFolderError, KeyError, TypeError):
            return None

    def reading(self, contract: str, step: int) -> str:
        """What a contract measured on a step, in words."""
        if figures := figures_text(contract, self.at(step)):
            return figures
        if contract == "routes" and self.has_experts is False:
            return "none: the model is dense"
        return "not measured" + (": the step was never finished" if step > self.steps else "")

    @cached_property
    def rollout_steps(self) -> list[int]:
        return rollouts.steps(self.directory.rollouts)

    def rollouts(self, step: int) -> list[RolloutRow]:
        return rollouts.read(self.directory.rollouts, step)

    @cached_property
    def tokenizer(self) -> ChatTokenizer | None:
        """Of the model the run trained, or None when its folder is gone: the run outlives it."""
        path = (self.config.get("model") or {}).get("path")
        if path is None:
            return None
        try:
            return ChatTokenizer.from_dir(path)
        except DataError:
            return None


def load_run(path: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        DataError: it is none.
    """
    directory = RunDir(path)
    run_file = path / "run.yaml"
    if not run_file.exists() and not directory.metrics.exists():
        nearby = sorted(entry.parent.name for entry in path.parent.glob("*/run.yaml")) if path.parent.is_dir() else []
        raise DataError(
            "this is no run directory",
            expected="a folder with run.yaml and metrics.jsonl",
            found="no such folder" if not path.is_dir() else "neither file",
            where=str(path),
            do="name one of: " + ", ".join(nearby[:10]) if nearby else "give the path that `miles train` printed",
        )
    text = _text(run_file) if run_file.exists() else ""
    config = _config(text, run_file)
    environment = path / "env.json"
    return RunRecord(
        directory=directory,
        config=config,
        config_text=text,
        environment=_environment(environment) if environment.exists() else {},
        metrics=_with_late_scores(_lines(directory.metrics, step=int), _lines(directory.evals, step=int)),
        timings=_lines(directory.timings, step=int),
        events=_lines(directory.events, event=str, time=int | float),
    )


def _lines(file: Path, **keys: type | UnionType) -> Lines:
    """Every line of a record, with what each has."""
    lines = list(read_lines(file))
    for number, line in enumerate(lines, 1):
        if wrong := next((key for key, kind in keys.items() if not isinstance(line.get(key), kind)), None):
            raise DataError(
                "the run's record is damaged",
                expected=f"`{wrong}` in every line, a {'text' if keys[wrong] is str else 'number'}",
                found=repr(line.get(wrong)),
                where=f"{file}:{number}",
                do="repair or remove the line",
            )
    return lines


def _environment(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            "the run's record is damaged", expected="a JSON object", found=str(error), where=str(file), do="remove it"
        ) from error


def _with_late_scores(metrics: Lines, evals: Lines) -> Lines:
    if not evals:
        return metrics
    by_step: dict[int, dict[str, Any]] = {}
    for line in (*metrics, *evals):
        by_step.setdefault(int(line["step"]), {}).update(line)
    return [by_step[step] for step in sorted(by_step)]


def _text(run_file: Path) -> str:
    try:
        return run_file.read_text(encoding="utf-8")
    except ValueError as error:
        raise DataError("run.yaml cannot be read", found=str(error), where=str(run_file)) from error


def _config(text: str, run_file: Path) -> dict[str, Any]:
    """run.yaml as a run writes it, every section written out; a run-file that somebody wrote is none."""
    try:
        config = yaml12.parse(text).value
    except yaml12.YamlError as error:
        raise DataError("run.yaml cannot be read", found=error.message, where=str(run_file)) from error
    config = {} if config is None else config
    model, schedule = (config.get(name) or {} if isinstance(config, dict) else 0 for name in ("model", "schedule"))
    if not (
        isinstance(model, dict)
        and isinstance(schedule, dict)
        and isinstance(model.get("path", ""), str)
        and isinstance(schedule.get("steps", 0), int)
    ):
        raise DataError(
            "this is no run directory",
            expected="run.yaml as `miles train` writes it",
            found="a run-file that was not started from here",
            where=str(run_file.parent),
            do="give the path that `miles train` printed: <tracking.dir>/<name>",
        )
    return dict(config)


def quarters(values: Sequence[float]) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """(mean, standard error) of the first and last quarter of the steps, or None with fewer than two steps in each."""
    size = len(values) // 4
    if size < 2:
        return None
    return mean_and_error(values[:size]), mean_and_error(values[-size:])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error over the values."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, math.sqrt(variance / len(values))
