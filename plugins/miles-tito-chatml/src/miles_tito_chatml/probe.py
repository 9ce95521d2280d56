"""What a checkpoint's template does, found out by rendering made-up conversations through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.errors import DataError, SessionError
from miles_core.session.suffix import appended_ids
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall
from miles_tito_chatml import fixed

_SYSTEM = Message(role="system", content="Be brief.")
_USER = Message(role="user", content=" Say\n a ")
_ASSISTANT = Message(role="assistant", content="b\n")
_CALL = ToolCall(id="call_0", name="probe_function", arguments='{"x": 1}')
_CALLING = Message(role="assistant", tool_calls=(_CALL,))
_RESULT = Message(role="tool", content="probe result", tool_call_id="call_0", name="probe_function")
_TOOL: Tool = {
    "type": "function",
    "function": {"name": "probe_function", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What the family must know of a template."""

    plain_chatml: bool
    """Plain conversations come out as ChatML to the character, and appended messages only append."""
    default_system: str | None
    """System prompt it writes when the conversation has none."""
    shows_tools: bool
    shows_calls: bool
    """Tools, and the calls of assistant messages with their results, appear in the text."""


def probe(tokenizer: ChatTokenizer) -> TemplateFacts:
    """Look at the checkpoint's template; cheap (about ten small renderings)."""
    default = _default_system(tokenizer)
    shows_calls = _shown(tokenizer, [_SYSTEM, _USER, _CALLING, _RESULT, _USER], ())
    return TemplateFacts(
        plain_chatml=_is_plain(tokenizer, default) and _only_appends(tokenizer, shows_calls),
        default_system=default,
        shows_tools=_shown(tokenizer, [_SYSTEM, _USER], (_TOOL,)),
        shows_calls=shows_calls,
    )


def _render(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Tool] = (), opener: bool = True
) -> str:
    try:
        return tokenizer.render(messages, tools, add_generation_prompt=opener)
    except DataError:
        return ""  # a template that refuses the conversation shows nothing of it


def _default_system(tokenizer: ChatTokenizer) -> str | None:
    head, _, _ = _render(tokenizer, [_USER]).partition(f"{fixed.START}user\n")
    opening, closing = f"{fixed.START}system\n", f"{fixed.END}\n"
    if head.startswith(opening) and head.endswith(closing):
        return head[len(opening) : -len(closing)]
    return None


def _is_plain(tokenizer: ChatTokenizer, default: str | None) -> bool:
    if any(tokenizer.token_id(token) not in tokenizer.special_ids for token in (fixed.START, fixed.END)):
        return False
    # The last one ends with an assistant turn: there, thinking templates write an empty thought.
    conversations = ([_USER], [_SYSTEM, _USER], [_SYSTEM, _USER, _ASSISTANT, _USER], [_SYSTEM, _USER, _ASSISTANT])
    return all(
        _render(tokenizer, messages, opener=opener)
        == fixed.conversation(messages, (), default) + (fixed.OPENER if opener else "")
        for messages in conversations
        for opener in (True, False)
    )


def _only_appends(tokenizer: ChatTokenizer, shows_calls: bool) -> bool:
    surfaces: list[list[Message]] = [[_USER], [_SYSTEM], [_ASSISTANT, _USER], [_RESULT], [_RESULT, _RESULT, _USER]]
    calls = (_CALL,) if shows_calls else ()
    try:
        for appended in surfaces:
            appended_ids(tokenizer, appended, calls=calls)
    except SessionError:
        return False
    return True


def _shown(tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    text = _render(tokenizer, messages, tools)
    return _CALL.name in text and all(message.content in text for message in messages if message.role == "tool")
