"""Tracker: receives what the run measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Created as ``Tracker(options, run_dir, run_name, config)`` with the resolved run-file as a plain mapping.

    Called from the driver; must return quickly. After a resume the steps continue where the checkpoint was.
    """

    def __init__(self, options: Any, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None: ...
    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...
