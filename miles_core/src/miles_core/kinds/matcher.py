"""Matcher: is the message an agent replays the one the session stored at that position?"""

from __future__ import annotations

from typing import Protocol

from miles_core.types import Message


class Matcher(Protocol):
    """``(stored, replayed) -> bool``: pure. An exception or a non-bool result fails the request, naming the matcher."""

    def __call__(self, stored: Message, replayed: Message, /) -> bool: ...
