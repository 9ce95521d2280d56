"""Reads and writes tool calls of Hermes-style models: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Parsing never fails: what is not a well-formed call stays in the text. The arguments keep the exact characters that the
model wrote, since a call that went through a JSON library would be another text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from miles_core.kinds.tito_family import Delta, joined
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def parse_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split an assistant turn's text into what was said and what was called.

    Returns:
        The text without the well-formed calls, and the calls, numbered ``call_0``, ``call_1``, ... within the turn.
        In a turn with calls, white space at its end and before its first text is left out; otherwise the text is
        untouched.
    """
    stream = HermesStream()
    message = joined([*stream.feed(text), *stream.finish()])
    return message.content, message.tool_calls


class HermesStream:
    """Does the same while the text still grows; `feed` and `finish` are as in `kinds.tito_family.StreamParser`, but
    take text."""

    def __init__(self) -> None:
        self._held = ""
        """A block from its last opening tag on, which may become a call; outside a block a part of that tag."""
        self._seen = 0
        """No closing tag, and no second opening tag, begins before this position of a held block; 0 is outside."""
        self._space = ""
        """White space after what was given out; a call or the end may swallow it."""
        self._said = False
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        found: list[Delta] = []
        while self._block(found) if self._seen else self._outside(found):
            pass
        return found

    def finish(self) -> list[Delta]:
        found: list[Delta] = []
        self._say(self._held, found)
        if self._space and not self._calls:
            found.append(Delta(content=self._space))
        self._held = self._space = ""
        return found

    def _outside(self, found: list[Delta]) -> bool:
        """Give out text up to the next opening tag. Returns whether there is one."""
        start = self._held.find(_OPEN)
        if start < 0:
            start = len(self._held) - _overlap(self._held)
        else:
            self._seen = len(_OPEN)
        self._say(self._held[:start], found)
        self._held = self._held[start:]
        return self._seen > 0

    def _block(self, found: list[Delta]) -> bool:
        """Look at the next closing tag of a held block. Returns whether there is one."""
        # From closing tag to closing tag, so that a model stuck on opening tags costs linear time.
        close = self._held.find(_CLOSE, self._seen)
        start = self._held.rfind(_OPEN, self._seen, len(self._held) if close < 0 else close)
        if start > 0:
            self._say(self._held[:start], found)
            self._held = self._held[start:]
            self._seen, close = len(_OPEN), max(close - start, -1)
        if close < 0:
            self._seen = max(self._seen, len(self._held) - len(_CLOSE) + 1)
            return False
        end = close + len(_CLOSE)
        call = _call(self._held[len(_OPEN) : close], f"call_{self._calls}")
        if call is None:
            self._seen = end
            return True
        self._calls += 1
        self._space = self._space if self._said else ""
        self._held, self._seen = self._held[end:], 0
        found.append(Delta(tool_calls=(call,)))
        return True

    def _say(self, text: str, found: list[Delta]) -> None:
        text = self._space + text
        if self._calls and not self._said:
            text = text.lstrip()
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._said = True
            found.append(Delta(content=certain))


def _overlap(text: str) -> int:
    """Length of the longest end of `text` that an opening tag begins with."""
    return next((size for size in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:size])), 0)


class HermesParser:
    """`kinds.tito_family.StreamParser` for families whose models write Hermes blocks and no reasoning."""

    def __init__(self, tokenizer: ChatTokenizer, stop_token_ids: frozenset[int]) -> None:
        self._text = tokenizer.text_stream()
        self._calls = HermesStream()
        self._stops = stop_token_ids
        self._stop: list[int] = []
        """A stop token that may be the last, which is not text."""

    def feed(self, output_ids: Sequence[int]) -> list[Delta]:
        ids = [*self._stop, *output_ids]
        self._stop = [ids.pop()] if ids and ids[-1] in self._stops else []
        return self._calls.feed(self._text.push(ids))

    def finish(self) -> list[Delta]:
        return [*self._calls.feed(self._text.flush()), *self._calls.finish()]


class HermesTurns:
    """The assistant's side of a `kinds.tito_family.TitoFamily` whose model writes Hermes blocks and no reasoning."""

    tokenizer: ChatTokenizer
    stop_token_ids: frozenset[int]

    def spell(self, message: Message, after: Message | None = None) -> str:
        return spell_tool_calls(message.content, message.tool_calls)

    def parse(self, output_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        ids = list(output_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        content, calls = parse_tool_calls(self.tokenizer.decode(ids))
        return Message(role="assistant", content=content, tool_calls=calls)

    def stream_parser(self, tools: Sequence[Tool] = ()) -> HermesParser:
        return HermesParser(self.tokenizer, self.stop_token_ids)


def spell_tool_calls(content: str, calls: Sequence[ToolCall]) -> str:
    """The inverse of parsing: the content, then one block for each call, with its arguments verbatim."""
    blocks = [_spell(call) for call in calls]
    return "\n".join([content, *blocks] if content else blocks)


def inline_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with tool calls written into their content, for templates that do not show them."""
    return [
        replace(message, content=spell_tool_calls(message.content, message.tool_calls), tool_calls=())
        for message in messages
    ]


def inline_tools(messages: Sequence[Message], tools: Sequence[Tool], *, system: str = "") -> list[Message]:
    """The messages with the tools described in the system message, for templates that do not show them.

    Args:
        system: Content of the system message where the conversation has none.
    """
    found = list(messages)
    if not found or found[0].role != "system":
        found.insert(0, Message(role="system", content=system))
    head = found[0].content
    found[0] = replace(found[0], content=f"{head}\n\n{_describe(tools)}" if head else _describe(tools))
    return found


def _describe(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. Each line between the tags describes one as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write its name and arguments as JSON between tags, one block per call:\n"
        '<tool_call>\n{"name": "<function name>", "arguments": {"<argument>": "<value>"}}\n</tool_call>'
    )


def _spell(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _call(body: str, call_id: str) -> ToolCall | None:
    try:
        members = _members(body)
        name = json.loads(members["name"])
        arguments = members.get("arguments", "{}")
        if arguments.startswith('"'):
            arguments = json.loads(arguments)  # some models write the object as a string that holds JSON
        # Half a surrogate pair can be spelled in JSON, but it is no text: no answer and no file could hold it.
        f"{name}{arguments}".encode()
    except (ValueError, KeyError, RecursionError):
        return None
    return ToolCall(id=call_id, name=name, arguments=arguments) if isinstance(name, str) and name else None


def _members(body: str) -> dict[str, str]:
    """Key -> exact source text of its value, for a JSON object.

    Raises:
        ValueError: not one well-formed object with distinct keys.
    """
    at = _expect(body, _skip(body, 0), "{")
    found: dict[str, str] = {}
    at = _skip(body, at)
    while body[at : at + 1] != "}":
        if found:
            at = _skip(body, _expect(body, at, ","))
        key, at = _DECODER.raw_decode(body, at)
        if not isinstance(key, str) or key in found:
            raise ValueError("not a distinct key")
        start = _skip(body, _expect(body, _skip(body, at), ":"))
        _, at = _DECODER.raw_decode(body, start)
        found[key] = body[start:at]
        at = _skip(body, at)
    if _skip(body, at + 1) != len(body):
        raise ValueError("text after the object")
    return found


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _expect(text: str, at: int, char: str) -> int:
    if text[at : at + 1] != char:
        raise ValueError(f"expected {char!r} at {at}")
    return at + 1
