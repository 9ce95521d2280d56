"""Which engine serves a session: the same one for all its turns, since its KV cache holds the session's prefix."""

from __future__ import annotations

from collections.abc import Collection

from miles_core.errors import SessionError


class Affinity:
    """Assigns each key to the engine with the fewest open keys, the lowest index among equals. Deterministic.

    Args:
        engines: Number of engines, at least 1.
    """

    def __init__(self, engines: int) -> None:
        if engines < 1:
            raise SessionError("no engine to serve sessions", expected="at least 1", found=str(engines))
        self._open = [0] * engines
        self._home: dict[str, int] = {}

    def assign(self, key: str, serving: Collection[int] | None = None) -> int:
        """Index of the engine that serves `key` from now on; the same one until `release`, as long as it serves.

        Args:
            serving: Engines to choose from; None, or an empty one, is all.
        """
        allowed = sorted(serving or range(len(self._open)))
        if self._home.get(key) not in allowed:
            self.release(key)
            index = min(allowed, key=self._open.__getitem__)
            self._home[key] = index
            self._open[index] += 1
        return self._home[key]

    def release(self, key: str) -> None:
        """Forget `key`; unknown keys are ignored, so that closing twice is harmless."""
        index = self._home.pop(key, None)
        if index is not None:
            self._open[index] -= 1

    def load(self) -> tuple[int, ...]:
        """Open keys of each engine."""
        return tuple(self._open)

    def __contains__(self, key: str) -> bool:
        return key in self._home
