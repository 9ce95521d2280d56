"""A replayed history as messages, parsing only what the last request did not bring already.

An agent sends its whole history every turn. Raw messages equal to those of the last request become the very objects
they became then, so that the session need not compare them again either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from miles_core.types import Message

Parse = Callable[[Any, str], tuple[Message, ...]]
"""(raw item, its path in the body) -> the messages it stands for."""


class Transcript:
    """The last request of one session and one protocol."""

    __slots__ = ("_numbers", "_parsed", "_raw")

    def __init__(self) -> None:
        self._raw: list[Any] = []
        self._numbers: dict[int, str] = {}
        """Item -> its spelling, where it holds numbers or booleans: Python finds True equal to 1."""
        self._parsed: list[tuple[Message, ...]] = []

    def read(self, raw: Sequence[Any], parse: Parse, at: str) -> list[Message]:
        """Messages of `raw`, item by item.

        Raises:
            Refused: an item cannot be used; nothing is remembered then.
        """
        raw = list(raw)
        same = min(len(raw), len(self._raw))
        if raw[:same] != self._raw[:same]:
            same = next(i for i in range(same) if raw[i] != self._raw[i])
        same = next((i for i, text in sorted(self._numbers.items()) if i < same and repr(raw[i]) != text), same)
        fresh = [parse(item, f"{at}.{same + index}") for index, item in enumerate(raw[same:])]
        self._raw = [*self._raw[:same], *raw[same:]]
        known = {index: text for index, text in self._numbers.items() if index < same}
        self._numbers = known | {i: repr(item) for i, item in enumerate(raw[same:], same) if _holds_numbers(item)}
        self._parsed = [*self._parsed[:same], *fresh]
        return [message for messages in self._parsed for message in messages]


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_numbers, value.values()))
    return any(map(_holds_numbers, value)) if isinstance(value, list) else isinstance(value, bool | int | float)
