"""What the family must know of a checkpoint's template."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.errors import SessionError
from miles_core.session.probe import CALL, CALLING, RESULT, SYSTEM, USER, rendered, shows_calls, shows_tools
from miles_core.session.suffix import appended_ids
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message
from miles_tito_chatml import fixed

_ASSISTANT = Message(role="assistant", content="b\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    plain_chatml: bool
    """Plain conversations come out as ChatML to the character, and appended messages only append."""
    default_system: str | None
    """System prompt it writes when the conversation has none."""
    shows_tools: bool
    shows_calls: bool
    reads_calls: bool
    """Calls are shown as Hermes blocks, which is what the family reads, or not at all."""


def probe(tokenizer: ChatTokenizer) -> TemplateFacts:
    """Look at the checkpoint's template; cheap (some twenty small renderings)."""
    default = _default_system(tokenizer)
    calls = shows_calls(tokenizer)
    return TemplateFacts(
        plain_chatml=_is_plain(tokenizer, default) and _only_appends(tokenizer, calls),
        default_system=default,
        shows_tools=shows_tools(tokenizer),
        shows_calls=calls,
        reads_calls=not calls or '<tool_call>\n{"name": ' in rendered(tokenizer, [SYSTEM, USER, CALLING, RESULT, USER]),
    )


def _default_system(tokenizer: ChatTokenizer) -> str | None:
    head, _, _ = rendered(tokenizer, [USER]).partition(f"{fixed.START}user\n")
    opening, closing = f"{fixed.START}system\n", f"{fixed.END}\n"
    if head.startswith(opening) and head.endswith(closing):
        return head[len(opening) : -len(closing)]
    return None


def _is_plain(tokenizer: ChatTokenizer, default: str | None) -> bool:
    if any(tokenizer.token_id(token) not in tokenizer.special_ids for token in (fixed.START, fixed.END)):
        return False
    # The last one ends with an assistant turn: there, thinking templates write an empty thought.
    conversations = ([USER], [SYSTEM, USER], [SYSTEM, USER, _ASSISTANT, USER], [SYSTEM, USER, _ASSISTANT])
    return all(
        rendered(tokenizer, messages, opener=opener)
        == fixed.conversation(messages, (), default) + (fixed.OPENER if opener else "")
        for messages in conversations
        for opener in (True, False)
    )


def _only_appends(tokenizer: ChatTokenizer, shows_calls: bool) -> bool:
    surfaces: list[list[Message]] = [[USER], [SYSTEM], [_ASSISTANT, USER], [RESULT], [RESULT, RESULT, USER]]
    calls = (CALL,) if shows_calls else ()
    try:
        for appended in surfaces:
            appended_ids(tokenizer, appended, calls=calls)
    except SessionError:
        return False
    return True
