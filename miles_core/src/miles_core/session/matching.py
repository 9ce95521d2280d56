"""Matchers, and how far the history that an agent sends agrees with the stored one.

An agent sends its whole history with every turn, and may spell it a little differently each time. A match only finds
the stored tokens: what was stored is kept, whatever the agent sends. None, "" and () count as equal everywhere. Apart
from that, `strict` forgives nothing, not even white space at the end.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NoReturn

from miles_core.errors import SessionError
from miles_core.kinds.matcher import Matcher
from miles_core.types import Message, ToolCall
from miles_core.user_function import in_words

COMPARED_FIELDS = ("role", "content", "reasoning", "tool_calls")
"""The fields that are compared. `name` and `tool_call_id` are not among them: agent programs add and drop them at will,
and the content of their message is compared anyway."""


class MatcherError(SessionError):
    """A matcher raised or did not return a bool."""


def strict(stored: Message, replayed: Message, /) -> bool:
    """Role, content, reasoning and tool calls are equal."""
    # Written out: every message of the history passes here with every turn.
    return (
        stored.role == replayed.role
        and _same(stored.content, replayed.content)
        and _same(stored.reasoning, replayed.reasoning)
        and _same(stored.tool_calls, replayed.tool_calls)
    )


def loose_tool_call(stored: Message, replayed: Message, /) -> bool:
    """As `strict`, but tool-call arguments may spell the same JSON object in another way.

    Key order and white space do not matter, and empty text is the empty object. Types do: true is not 1, "1" is not
    1; numbers are compared as exact decimals, so 1 is 1.0. Arguments that are no plain JSON object (broken, duplicate
    keys, NaN) are compared as text.
    """
    return (
        stored.role == replayed.role
        and _same(stored.content, replayed.content)
        and _same(stored.reasoning, replayed.reasoning)
        and len(stored.tool_calls) == len(replayed.tool_calls)
        and all(_same_call(a, b) for a, b in zip(stored.tool_calls, replayed.tool_calls, strict=True))
    )


def role_content_only(stored: Message, replayed: Message, /) -> bool:
    """Role and content are equal. Dangerous: turns that called different tools with empty text look alike."""
    return stored.role == replayed.role and _same(stored.content, replayed.content)


WARNINGS: dict[object, str] = {
    role_content_only: "session.matcher role-content-only takes turns that called different tools with the same text "
    "for one: a replay may be answered from the tokens of another call, and nothing will show it",
}


def warning_of(matcher: Matcher) -> str | None:
    """What the user of a matcher must be told loudly."""
    return WARNINGS.get(matcher)


def match_prefix(
    stored: Sequence[Message], replayed: Sequence[Message], matcher: Matcher, *, accepted: list[Message] | None = None
) -> int:
    """Number of leading messages of `replayed` that are the stored ones.

    Args:
        accepted: The object last accepted at each stored position; the matcher is pure and is not asked about it
            again. Updated in place.

    Raises:
        MatcherError: the matcher raised, or returned something that is not exactly a bool; names the matcher.
    """
    end = min(len(stored), len(replayed))
    # An agent that keeps its history sends the same objects with every turn: one pass at C speed.
    known = [] if accepted is None else list(map(operator.is_, accepted, replayed))
    start = known.index(False) if False in known else min(len(known), end)
    at = start
    while at < end and _ask(matcher, stored[at], replayed[at], at):
        at += 1
    if accepted is not None:
        accepted[start:at] = replayed[start:at]
    return at


def difference(stored: Sequence[Message], replayed: Sequence[Message], at: int) -> tuple[str, str]:
    """What is stored at position `at` and what was replayed there, as two short texts for an error."""
    if at >= len(replayed):
        return f"message {at}: {_short(stored[at])}", f"the history ends after {len(replayed)} message(s)"
    ours, theirs = stored[at], replayed[at]
    names = [name for name in COMPARED_FIELDS if not _same(getattr(ours, name), getattr(theirs, name))]
    fields = names or list(COMPARED_FIELDS)
    return f"message {at}: {_short(ours, fields)}", f"message {at}: {_short(theirs, fields)}"


# --- private ----------------------------------------------------------------------------------------------------------


def _same(stored: object, replayed: object) -> bool:
    return stored == replayed or not (stored or replayed)


def _ask(matcher: Matcher, stored: Message, replayed: Message, position: int) -> bool:
    try:
        answer = matcher(stored, replayed)
    except Exception as error:
        # Any exception of foreign code is the matcher's failure, never a match and never the agent's fault.
        raise MatcherError(
            f"the matcher {matcher_name(matcher)} raised {in_words(error)}",
            where=f"message {position} of the history",
            do="fix the matcher, or pick session.matcher: strict",
        ) from error
    if type(answer) is not bool:
        raise MatcherError(
            f"the matcher {matcher_name(matcher)} must return True or False",
            expected="bool",
            found=f"{type(answer).__name__}: {answer!r:.80}",
            where=f"message {position} of the history",
            do="return an exact bool; a truthy value is refused because it once hid a mistake",
        )
    return answer


def matcher_name(matcher: Callable[..., object]) -> str:
    """`module:name` of a matcher, for errors and reports."""
    name = getattr(matcher, "__qualname__", type(matcher).__qualname__)
    return f"{getattr(matcher, '__module__', type(matcher).__module__)}:{name}"


def _same_call(stored: ToolCall, replayed: ToolCall) -> bool:
    if (stored.id, stored.name) != (replayed.id, replayed.name):
        return False
    return stored.arguments == replayed.arguments or _same_object(stored.arguments, replayed.arguments)


def _same_object(stored: str, replayed: str) -> bool:
    try:
        return bool(_canonical_object(stored) == _canonical_object(replayed))
    except (ValueError, ArithmeticError, RecursionError):
        return False  # not plain JSON objects, and as text they differ


def _canonical_object(text: str) -> tuple[str, Any]:
    if not text:
        return ("object", ())
    value = json.loads(
        text, parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse, object_pairs_hook=_without_duplicates
    )
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return _canonical(value)


def _canonical(value: Any) -> tuple[str, Any]:
    """`value` with its JSON type beside it, since Python holds True, 1 and Decimal(1) for equal."""
    if isinstance(value, dict):
        return ("object", tuple(sorted((key, _canonical(item)) for key, item in value.items())))
    if isinstance(value, list):
        return ("array", tuple(_canonical(item) for item in value))
    return (type(value).__name__, value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _short(message: Message, fields: Sequence[str] = COMPARED_FIELDS) -> str:
    shown = {"role": message.role} | {name: getattr(message, name) or None for name in fields}
    return ", ".join(f"{name}={_clip(value)}" for name, value in shown.items() if value is not None or name in fields)


def _clip(value: Any, limit: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :]
