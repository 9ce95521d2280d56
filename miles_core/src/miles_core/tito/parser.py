"""The incremental parser of assistant turns: reasoning, content, tool calls, from ids or from text.

One code path serves streaming and whole replies: a whole reply is one fed at once. What could still become something
else is held back: half a tag, white space that a call would swallow, a call that is not complete. A call is a call
only once it is well-formed; a broken one is content, to the character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from miles_core.kinds.tito_family import Delta
from miles_core.tito.arguments import Unfinished
from miles_core.tito.formats import Call, CallFormat
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Tool, ToolCall

_SPACE = " \t\r\n"
_MAX_RESCANS = 64
"""Openings retried when a reply ends within a call; bounds what a model stuck on tags can cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """How reasoning stands before the content."""

    opening: str = "<think>"
    closing: str = "</think>"
    pad: str = "\n"
    """Between each tag and the reasoning."""
    after: str = "\n\n"
    """Between the closing tag and the content."""

    def write(self, reasoning: str) -> str:
        pad = self.pad
        return f"{self.opening}{pad}{reasoning}{pad}{self.closing}{self.after}"


class _Stage(Enum):
    LEAD = "behind an opener that holds a whole thought"
    START = "before anything"
    THOUGHT_START = "behind the opening tag of reasoning"
    THOUGHT = "in reasoning"
    THOUGHT_END = "behind the closing tag of reasoning"
    CONTENT = "in content"
    CALL = "behind the opening tag of a call"
    WHOLE = "in a reply that may be one call"


class TextParser(Protocol):
    """`kinds.tito_family.StreamParser`, of text."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class ReplyText:
    """Feeds on text. See `kinds.tito_family.StreamParser` for what feeding promises.

    Args:
        thoughts: None when the model writes no reasoning.
        opened: The reply begins within reasoning, since the opener holds the opening tag.
        lead: What the reply begins with before any content, where the opener holds a whole thought.
    """

    def __init__(
        self,
        *,
        thoughts: Thoughts | None,
        opened: bool = False,
        lead: str = "",
        calls: CallFormat | None,
        tools: Sequence[Tool] = (),
    ) -> None:
        self._thoughts, self._calls, self._tools, self._lead = thoughts, calls, tuple(tools), lead
        self._stage = _Stage.THOUGHT_START if opened else _Stage.LEAD
        self._text = ""  # not yet certain
        self._scanned = 0  # of a call's text, where to look for its closing tag
        self._space = ""  # white space that a call behind it would swallow
        self._number = 0  # of calls found
        self._said = False  # any content
        self._out: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        while self._step(last=False):
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        for _ in range(_MAX_RESCANS):
            while self._step(last=True):
                pass
            if not self._text:
                break
            # The reply ended within a call: its tag is content, and what follows may still hold a good one.
            assert self._calls is not None
            self._say(self._text[: len(self._calls.opening)])
            self._text, self._stage = self._text[len(self._calls.opening) :], _Stage.CONTENT
        self._say(self._text)
        self._text = ""
        if not self._number and self._space:
            self._out.append(Delta(content=self._space))
        self._space = ""
        return self._taken()

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _step(self, *, last: bool) -> bool:
        """Go on with `_text`; False when more text is needed."""
        match self._stage:
            case _Stage.LEAD:
                return self._skip(self._lead, _Stage.START if self._thoughts else _Stage.CONTENT, last)
            case _Stage.START:
                return self._start(last)
            case _Stage.THOUGHT_START:
                return self._skip(self._thoughts.pad if self._thoughts else "", _Stage.THOUGHT, last)
            case _Stage.THOUGHT:
                return self._thought(last)
            case _Stage.THOUGHT_END:
                return self._skip(self._thoughts.after if self._thoughts else "", _Stage.CONTENT, last)
            case _Stage.CONTENT:
                return self._content(last)
            case _Stage.CALL:
                return self._call(last)
            case _Stage.WHOLE:
                return self._whole(last)

    def _start(self, last: bool) -> bool:
        assert self._thoughts is not None
        text, opening = self._text.lstrip(_SPACE), self._thoughts.opening
        if text.startswith(opening):
            self._text, self._stage = text[len(opening) :], _Stage.THOUGHT_START
        elif last or not opening.startswith(text):
            self._stage = _Stage.CONTENT
        else:
            return False
        return True

    def _skip(self, expected: str, then: _Stage, last: bool) -> bool:
        """Leave out as much of `expected` as is there."""
        common = _common_prefix(self._text, expected)
        if common == len(self._text) < len(expected) and not last:
            return False
        self._text, self._stage = self._text[common:], then
        return True

    def _thought(self, last: bool) -> bool:
        assert self._thoughts is not None
        end = self._text.find(self._thoughts.closing)
        if end >= 0:
            self._think(self._text[:end].removesuffix(self._thoughts.pad) if self._thoughts.pad else self._text[:end])
            self._text, self._stage = self._text[end + len(self._thoughts.closing) :], _Stage.THOUGHT_END
            return True
        held = 0 if last else _held(self._text, self._thoughts.pad + self._thoughts.closing, self._thoughts.closing)
        cut = len(self._text) - held
        self._think(self._text[:cut])
        self._text = self._text[cut:]
        return False

    def _content(self, last: bool) -> bool:
        calls = self._calls
        if calls is None:
            self._say(self._text)
            self._text = ""
            return False
        if not calls.opening:
            return self._maybe_whole(last)
        start = self._text.find(calls.opening)
        if start >= 0:
            self._say(self._text[:start])
            self._text, self._stage, self._scanned = self._text[start:], _Stage.CALL, len(calls.opening)
            return True
        cut = len(self._text) - (0 if last else _held(self._text, calls.opening))
        self._say(self._text[:cut])
        self._text = self._text[cut:]
        return False

    def _call(self, last: bool) -> bool:
        assert self._calls is not None
        opening, closing = self._calls.opening, self._calls.closing
        # A tag may have come in two pieces.
        close = self._text.find(closing, self._scanned)
        if close < 0:
            self._scanned = max(self._scanned, len(self._text) - len(closing) + 1)
            if last and closing not in self._text:
                self._say(self._text)
                self._text, self._stage = "", _Stage.CONTENT
            return False
        end = close + len(closing)
        start = 0
        found = self._read(self._text[len(opening) : close])
        if found == ():
            # A model that opened twice: the last opening may be the good one.
            start = self._text.rfind(opening, len(opening), close)
            found = self._read(self._text[start + len(opening) : close]) if start > 0 else ()
        if found is None:
            self._scanned = end
            return True
        if found:
            self._say(self._text[:start])
            self._call_all(found)
        else:
            self._say(self._text[:end])
        self._text, self._stage = self._text[end:], _Stage.CONTENT
        return True

    def _read(self, body: str) -> Sequence[Call] | None:
        """The calls in `body`; empty when it is broken, None when it may go on."""
        assert self._calls is not None
        try:
            calls = tuple(self._calls.read(body, self._tools))
            for call in calls:
                # Half a surrogate pair can be spelled in JSON, but it is no text: no answer and no file could hold it.
                f"{call.name}{call.arguments}{call.id or ''}".encode()
            return calls
        except Unfinished:
            return None
        except (ValueError, RecursionError):
            return ()

    def _maybe_whole(self, last: bool) -> bool:
        text = self._text.lstrip(_SPACE)
        if not self._said and not self._space and text.startswith(("{", "<|python_tag|>")):
            self._stage = _Stage.WHOLE
            return True
        if not text and not self._said and not last:
            return False
        if not self._said and not last and "<|python_tag|>".startswith(text):
            return False
        self._say(self._text)
        self._text = ""
        return False

    def _whole(self, last: bool) -> bool:
        if not last:
            return False
        found = self._read(self._text)
        if found:
            self._call_all(found)
        else:
            self._say(self._text)
        self._text = ""
        return False

    def _think(self, text: str) -> None:
        if text:
            self._out.append(Delta(reasoning=text))

    def _say(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip(_SPACE)
        self._space = text[len(kept) :]
        if self._number and not self._said:
            kept = kept.lstrip(_SPACE)
        if kept:
            self._said = True
            self._out.append(Delta(content=kept))

    def _call_all(self, found: Sequence[Call]) -> None:
        self._space = ""
        calls = []
        for call in found:
            calls.append(ToolCall(id=call.id or f"call_{self._number}", name=call.name, arguments=call.arguments))
            self._number += 1
        self._out.append(Delta(tool_calls=tuple(calls)))


class ReplyParser:
    """`StreamParser` over ids: decodes them piece by piece and leaves the stop token out."""

    def __init__(self, text: TextParser, tokenizer: ChatTokenizer, stop_token_ids: frozenset[int]) -> None:
        self._reply = text
        self._stream = tokenizer.text_stream()
        self._stops = stop_token_ids
        self._held: list[int] = []  # a stop token; text only if more follows, which no engine samples

    def feed(self, output_ids: Sequence[int]) -> list[Delta]:
        ids = [*self._held, *output_ids]
        self._held = ids[-1:] if ids and ids[-1] in self._stops else []
        return self._reply.feed(self._stream.push(ids[: len(ids) - len(self._held)]))

    def finish(self) -> list[Delta]:
        return [*self._reply.feed(self._stream.flush()), *self._reply.finish()]


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _held(text: str, *tags: str) -> int:
    """Length of the longest end of `text` that a tag could begin with."""
    longest = min(len(text), max(map(len, tags)) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)
