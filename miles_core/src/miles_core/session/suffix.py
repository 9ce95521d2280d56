"""Renders appended messages through a checkpoint's own template, without rendering the history again.

The template is rendered twice with a short made-up conversation that ends with an assistant turn: once alone, and once
followed by the appended messages and the next opener. If the second text and the second row both start with the first,
the rest is what the messages add. So the work depends only on the appended messages, however long the session is.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.errors import DataError, SessionError
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall

_SYSTEM = Message(role="system", content="s")
_USER = Message(role="user", content="u")


def appended_ids(
    tokenizer: ChatTokenizer,
    appended: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    calls: Sequence[ToolCall] = (),
) -> list[int]:
    """The ids that the template adds for `appended` and the opener, after an assistant turn that is closed.

    Args:
        calls: Tool calls of that assistant turn; templates look up the call that a tool message answers.

    Raises:
        SessionError: with every made-up conversation, the template refuses the roles, or it changes earlier tokens when
            messages follow and so is not append-only. The error shows the two rows.
    """
    problem = SessionError("the chat template rendered nothing")
    for base in _bases(tuple(calls)):
        try:
            before = tokenizer.render(base, tools, add_generation_prompt=False)
            after = tokenizer.render([*base, *appended], tools, add_generation_prompt=True)
        except DataError as error:
            problem = SessionError(
                error.message, expected=error.expected, found=error.found, where=error.where, do=error.do
            )
            continue
        # Rows, not only texts, are compared: a seam inside a token would make them differ where the texts agree.
        row, longer = tokenizer.encode(before), tokenizer.encode(after)
        if longer[: len(row)] == row:
            return longer[len(row) :]
        problem = _not_append_only(tokenizer, row, longer, appended)
    raise problem


def _bases(calls: tuple[ToolCall, ...]) -> tuple[tuple[Message, ...], ...]:
    # Several shapes, since templates differ in what they insist on (a system turn, a user turn, none) and in what they
    # rewrite once a later user turn exists.
    turn = Message(role="assistant", content="" if calls else "a", tool_calls=calls)
    return ((_SYSTEM, _USER, turn), (_USER, turn), (_SYSTEM, turn), (turn,))


def _not_append_only(
    tokenizer: ChatTokenizer, row: Sequence[int], longer: Sequence[int], appended: Sequence[Message]
) -> SessionError:
    same = next((i for i, (a, b) in enumerate(zip(row, longer, strict=False)) if a != b), min(len(row), len(longer)))
    return SessionError(
        "the chat template is not append-only: later messages change the tokens of earlier ones",
        expected=_excerpt(tokenizer, row, same),
        found=_excerpt(tokenizer, longer, same),
        where=f"{tokenizer.where}, appended roles {[message.role for message in appended]}",
        do="pick a session.family written for this checkpoint",
    )


def _excerpt(tokenizer: ChatTokenizer, row: Sequence[int], at: int) -> str:
    shown = list(row[max(0, at - 4) : at + 8])
    return f"from token {max(0, at - 4)}: {shown} {tokenizer.decode(shown)!r}"
