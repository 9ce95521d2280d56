"""Run scenarios on ranks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from miles_core.testing import together

RANKS = Path(__file__).parent / "ranks.py"


def run_ranks(folder: Path, world: int, scenarios: Sequence[str], *, device: str = "cpu") -> dict[str, list[Any]]:
    """What each rank found in each scenario."""
    together.run_ranks(RANKS, folder, world, [device, *scenarios])
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(world)]
        for name in scenarios
    }
