"""Expert routes of one request: the rows behind its key-values, and the rows that were recorded first.

A row's key-values may be computed again, after a preemption or under other weights, and then perhaps by other experts.
The log-probs handed out already belong to the first pass, so that one is reported; whoever copies the key-values gets
the rows that made them.
"""

from __future__ import annotations

import numpy as np

from miles_core.routing.codec import Routes, extend, pad

_GROW = 256
"""Rows by which the buffer grows at least."""


class RowRoutes:
    """Experts of the leading ids of one request: [tokens, L, K]."""

    def __init__(self) -> None:
        self._buffer: Routes | None = None
        self._stored = 0
        self._first: Routes | None = None

    def write(self, start: int, rows: Routes) -> None:
        """Store the rows of the tokens from position `start` on, which follow those stored so far."""
        assert start <= self._stored, f"routes of tokens {self._stored} to {start} are missing"
        end = start + rows.shape[0]
        if self._buffer is None or end > self._buffer.shape[0]:
            grown = np.empty((end + max(_GROW, end // 2), *rows.shape[1:]), dtype=rows.dtype)
            if self._buffer is not None:
                grown[: self._stored] = self._buffer[: self._stored]
            self._buffer = grown
        self._buffer[start:end] = rows
        self._stored = end

    def stored(self, tokens: int) -> Routes | None:
        """A copy of the rows that made the first `tokens` key-values."""
        return None if self._buffer is None else self._buffer[: min(tokens, self._stored)].copy()

    def restart(self) -> None:
        """The key-values are dropped; what was recorded first stays known."""
        self._first = self._known()
        self._stored = 0

    def report(self, tokens: int) -> Routes | None:
        """Rows of a request of `tokens` tokens as they were recorded first; the last token has none."""
        known = self._known()
        return None if known is None else pad(known, max(tokens - 1, 0)).copy()

    def _known(self) -> Routes | None:
        current = None if self._buffer is None else self._buffer[: self._stored]
        if self._first is None:
            return None if current is None else current.copy()
        return extend(self._first, self._first.shape[0], current)
