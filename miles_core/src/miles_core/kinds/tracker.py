"""Tracker: receives the metrics of a run, for a dashboard of yours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Created in the driver as ``Tracker(options, run_dir, run_name, config)``; `config` is the resolved run-file.

    Training waits for its methods, so they must return quickly. After a resume, steps go on from the checkpoint's: the
    tracker may get a step again that it has seen before.
    """

    def __init__(self, options: Any, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None: ...
    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...
