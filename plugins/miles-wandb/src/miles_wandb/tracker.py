"""WandbTracker: one W&B run for the whole life of a run directory, resumes included."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from miles_core.errors import PluginError
from miles_wandb.options import WandbOptions

ID_FILE = "wandb_id"


class WandbTracker:
    """Logs figures against their own `step`.

    W&B's built-in step only ever grows and drops what comes below it. A resumed run goes back to its checkpoint and
    records steps again, so the step is a figure like any other and every chart uses it as its axis.
    """

    def __init__(self, options: WandbOptions, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        try:
            self._run = wandb.init(
                id=_stable_id(run_dir),
                resume="allow",
                dir=str(run_dir),
                name=run_name,
                config=dict(config),
                project=options.project,
                entity=options.entity,
                group=options.group,
                tags=list(options.tags),
                mode=options.mode,
            )
        except wandb.Error as error:
            raise PluginError(
                "Weights & Biases could not start",
                found=str(error),
                where="tracking.trackers: wandb",
                do="run `wandb login`, set mode: offline, or remove the tracker",
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._run.log({"step": step, **finite})

    def close(self) -> None:
        self._run.finish()


def _stable_id(run_dir: Path) -> str:
    """The W&B id of this run directory, made at its first start."""
    file = run_dir / ID_FILE
    if not file.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex[:12] + "\n")
    return file.read_text().strip()
