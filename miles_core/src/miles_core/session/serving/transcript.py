"""Reads a replayed history, and parses only what the last request did not contain.

An agent sends its whole history with every turn. Raw messages that equal those of the last request become the same
objects as before, so the session need not compare them again either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_core.types import Message

Parse = Callable[[Any, str], tuple[Message, ...]]
"""(raw item, its path in the body) -> the messages it stands for."""


class Transcript:
    """The last request of one session and one protocol."""

    __slots__ = ("_ends", "_messages", "_numbers", "_raw")

    def __init__(self) -> None:
        self._raw: list[Any] = []
        self._messages: list[Message] = []
        self._ends: list[int] = []
        """Messages up to and with each raw item."""
        self._numbers: dict[int, str] = {}
        """Item -> its spelling, where it holds numbers or booleans: Python finds True equal to 1."""

    def read(self, raw: list[Any], parse: Parse, at: str) -> list[Message]:
        """The messages of `raw`, item by item.

        Raises:
            Refused: an item cannot be used; nothing is remembered then.
        """
        same = min(len(raw), len(self._raw))
        if raw[:same] != self._raw[:same]:
            same = next(i for i in range(same) if raw[i] != self._raw[i])
        same = next((i for i, text in sorted(self._numbers.items()) if i < same and repr(raw[i]) != text), same)
        fresh = [parse(item, f"{at}.{index}") for index, item in enumerate(raw[same:], same)]
        del self._raw[same:], self._ends[same:], self._messages[self._ends[same - 1] if same else 0 :]
        for index in [index for index in self._numbers if index >= same]:
            del self._numbers[index]
        for index, (item, messages) in enumerate(zip(raw[same:], fresh, strict=True), same):
            self._raw.append(item)
            self._messages += messages
            self._ends.append(len(self._messages))
            if _holds_numbers(item):
                self._numbers[index] = repr(item)
        return list(self._messages)


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_numbers, value.values()))
    return any(map(_holds_numbers, value)) if isinstance(value, list) else isinstance(value, bool | int | float)
