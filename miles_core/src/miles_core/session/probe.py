"""Finds out what a checkpoint's chat template shows of a conversation, by rendering made-up conversations.

Templates silently drop what they do not know: tools, the calls of an assistant, the result of a tool. A family has to
know this, and to write what would be missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.errors import DataError
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall

NAME = "probe_function"
SYSTEM = Message(role="system", content="Be brief.")
USER = Message(role="user", content=" Say\n a ")
CALL = ToolCall(id="call_0", name=NAME, arguments='{"x": 1}')
CALLING = Message(role="assistant", tool_calls=(CALL,))
RESULT = Message(role="tool", content="probe result", tool_call_id=CALL.id, name=NAME)
TOOL: Tool = {
    "type": "function",
    "function": {"name": NAME, "description": "d", "parameters": {"type": "object", "properties": {}}},
}


def rendered(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opener: bool = True
) -> str:
    """The text that the template renders; empty if it refuses the conversation, since it then shows nothing of it."""
    try:
        return tokenizer.render(messages, tools, add_generation_prompt=opener)
    except DataError:
        return ""


def shows_tools(tokenizer: ChatTokenizer) -> bool:
    """Whether a conversation's tools appear in the text."""
    return NAME in rendered(tokenizer, [SYSTEM, USER], [TOOL])


def shows_calls(tokenizer: ChatTokenizer) -> bool:
    """Whether an assistant's tool calls and their results appear in the text."""
    text = rendered(tokenizer, [SYSTEM, USER, CALLING, RESULT, USER])
    # A tool's name may be written beside its result, so the call counts only if the arguments are there.
    return NAME in text and '"x"' in text.replace("'", '"') and RESULT.content in text
