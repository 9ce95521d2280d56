"""TensorBoard tracker: scalars under ``tensorboard/`` in the run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """Writes every figure of a step as a scalar at that step."""

    def __init__(self, options: Any, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self._folder = run_dir / "tensorboard"
        self._writer: SummaryWriter | None = None

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            # A resumed run records steps again: purge_step hides what the killed run had written from there on.
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
