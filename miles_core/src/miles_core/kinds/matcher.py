"""Matcher: tells whether a message that an agent sends again is the one its session stored at that position."""

from __future__ import annotations

from typing import Protocol

from miles_core.types import Message


class Matcher(Protocol):
    """``(stored, replayed) -> bool``. Pure. If it raises, or returns anything but a bool, the request fails with an
    error that names the matcher."""

    def __call__(self, stored: Message, replayed: Message, /) -> bool: ...
