"""Recipe: a whole job beside the RL loop, such as supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Recipe(Protocol):
    """Created as ``Recipe(options)``."""

    async def run(self, run_dir: Path, config: Any) -> int:
        """Do the job; return the process's exit code."""
        ...
