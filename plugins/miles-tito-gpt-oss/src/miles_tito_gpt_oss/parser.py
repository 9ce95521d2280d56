"""Harmony replies, read while they are sampled: analysis is reasoning, a message to ``functions`` is a call.

A reply continues ``<|start|>assistant``, so it begins with the rest of a header. A call is held until its end, since
arguments that are no JSON object are content, to the character.
"""

from __future__ import annotations

import re
from enum import Enum

from miles_core.kinds.tito_family import Delta
from miles_core.tito.arguments import members
from miles_core.types import ToolCall

_MESSAGE, _END, _START = "<|message|>", "<|end|>", "<|start|>"
_ENDS = (_END, "<|call|>", "<|return|>", _START)
_OPENINGS = ("<|channel|>", " to=", "<|message|>", "<|constrain|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_MAX_HEADER = 300
"""Characters; a longer one is no header."""


class _Stage(Enum):
    HEADER = "in the rest of a header"
    BODY = "in a message that is shown at once"
    CALL = "in a message that may be a call"
    BETWEEN = "behind a message"


class HarmonyText:
    """See `miles_core.tito.parser.ReplyText`."""

    def __init__(self) -> None:
        self._stage = _Stage.HEADER
        self._text = ""
        self._header = ""
        self._reasoning = False
        self._calls = 0
        self._plain = False  # a reply without any header: all of it is content
        self._out: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        while self._step():
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        if self._stage is _Stage.CALL:
            self._call(self._text)
        elif self._stage is not _Stage.BETWEEN or self._text:
            self._show(self._text)
        self._text = ""
        return self._taken()

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _step(self) -> bool:
        if self._plain:
            self._show(self._text)
            self._text = ""
            return False
        match self._stage:
            case _Stage.HEADER:
                return self._read_header()
            case _Stage.BETWEEN:
                return self._between()
            case _:
                return self._body()

    def _read_header(self) -> bool:
        end = self._text.find(_MESSAGE)
        possible = any(opening.startswith(self._text[: len(opening)]) for opening in _OPENINGS)
        if not possible or max(end, len(self._text) if end < 0 else 0) > _MAX_HEADER:
            self._plain, self._reasoning = True, False
            return bool(self._text)
        if end < 0:
            return False
        self._header, self._text = self._text[: end + len(_MESSAGE)], self._text[end + len(_MESSAGE) :]
        self._reasoning = "<|channel|>analysis" in self._header
        self._stage = _Stage.CALL if _RECIPIENT.search(self._header) else _Stage.BODY
        return True

    def _body(self) -> bool:
        found = [(at, end) for end in _ENDS if (at := self._text.find(end)) >= 0]
        if not found:
            if self._stage is _Stage.BODY:
                held = _held(self._text)
                self._show(self._text[: len(self._text) - held])
                self._text = self._text[len(self._text) - held :]
            return False
        at, end = min(found)
        body, self._text = self._text[:at], self._text[at + (0 if end == _START else len(end)) :]
        if self._stage is _Stage.CALL:
            self._call(body)
        else:
            self._show(body)
        self._stage = _Stage.BETWEEN
        return True

    def _between(self) -> bool:
        """The next message's ``<|start|>assistant``; anything else is content."""
        opening = f"{_START}assistant"
        if self._text.startswith(opening):
            self._text, self._stage = self._text[len(opening) :], _Stage.HEADER
            return True
        if opening.startswith(self._text):
            return False
        self._plain, self._reasoning = True, False
        return True

    def _call(self, body: str) -> None:
        recipient = _RECIPIENT.search(self._header)
        assert recipient is not None
        try:
            members(body)
        except (ValueError, RecursionError):
            self._reasoning = False
            self._show(self._header + body)
            return
        call = ToolCall(id=f"call_{self._calls}", name=recipient[1], arguments=body.strip())
        self._calls += 1
        self._out.append(Delta(tool_calls=(call,)))

    def _show(self, text: str) -> None:
        if text:
            self._out.append(Delta(reasoning=text) if self._reasoning else Delta(content=text))


def _held(text: str) -> int:
    longest = min(len(text), max(map(len, _ENDS)) - 1)
    return next((n for n in range(longest, 0, -1) if any(end.startswith(text[-n:]) for end in _ENDS)), 0)
