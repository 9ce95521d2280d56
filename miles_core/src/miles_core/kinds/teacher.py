"""Teacher: scores the tokens of a trajectory under another model."""

from __future__ import annotations

from typing import Protocol

from miles_core.types import Float32, Trajectory


class Teacher(Protocol):
    """Created as ``Teacher(options)``."""

    async def score(self, trajectory: Trajectory) -> Float32:
        """f32[T] log-prob of each token of the row under the teacher; NaN for tokens it cannot score."""
        ...

    async def close(self) -> None: ...
