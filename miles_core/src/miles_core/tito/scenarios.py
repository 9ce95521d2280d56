"""Conversations that a token family must hold: what `miles tito check` and the conformance kit let it play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from miles_core.tito.probes import ADD, ADD_CALL, ANSWER, FOUR, MORE, NOON, NOW, NOW_CALL, SYSTEM, USER
from miles_core.types import Message, Tool, ToolCall

ANY: Tool = {
    "type": "function",
    "function": {
        "name": "any",
        "description": "Takes anything.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "number": {"type": "number"},
                "flag": {"type": "boolean"},
                "nothing": {"type": "null"},
                "list": {"type": "array"},
                "object": {"type": "object"},
            },
        },
    },
}
ODD_TEXT = "né 中文 👩‍👩‍👧\n<b>&amp;</b> {{ x }} {% y %} \\n \"quoted\" 'single'"
ODD_CALL = ToolCall(
    id="functions.any:0",
    name="any",
    arguments='{"text": "12", "number": 1.5, "flag": true, "nothing": null, "list": [1, "a"], "object": {"k": [null]}}',
)
TEXT_CALL = ToolCall(id="functions.any:0", name="any", arguments='{"text": " line\\n\\n  <b>é & \\"q\\"\\n"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A conversation; its assistant messages are sampled, the others are sent by the agent."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    plain: bool = False
    """Every family must hold it; others may be refused with a reason."""


def _call(*calls: ToolCall, content: str = "", reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def _result(call: ToolCall, content: str) -> Message:
    return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)


_THOUGHT = replace(ANSWER, reasoning="Two and two.")
_FOUR, _NOON = replace(FOUR, name="add"), replace(NOON, name="now")
_SECOND = ToolCall(id="functions.add:1", name="add", arguments='{"a": 5}')

SCENARIOS: Mapping[str, Scenario] = {
    "one turn": Scenario(messages=(USER, ANSWER), plain=True),
    "users in turn": Scenario(messages=(SYSTEM, USER, ANSWER, MORE, ANSWER, USER, ANSWER), plain=True),
    "reasoning in every turn": Scenario(messages=(USER, _THOUGHT, MORE, _THOUGHT, USER, _THOUGHT)),
    "tool loop": Scenario(
        messages=(SYSTEM, USER, _call(ADD_CALL), _FOUR, _call(_SECOND), _result(_SECOND, "5"), ANSWER, MORE, ANSWER),
        tools=(ADD, NOW),
    ),
    "tool loop with reasoning": Scenario(
        messages=(USER, _call(ADD_CALL, reasoning="Use it."), _FOUR, replace(_THOUGHT, reasoning="Done.")), tools=(ADD,)
    ),
    "words before a call": Scenario(messages=(USER, _call(ADD_CALL, content="I add."), _FOUR, ANSWER), tools=(ADD,)),
    "parallel calls": Scenario(messages=(USER, _call(ADD_CALL, NOW_CALL), _FOUR, _NOON, ANSWER), tools=(ADD, NOW)),
    "a user behind tool results": Scenario(messages=(USER, _call(ADD_CALL), _FOUR, MORE, ANSWER), tools=(ADD,)),
    "empty arguments": Scenario(messages=(USER, _call(NOW_CALL), _NOON, ANSWER), tools=(NOW,)),
    "arguments of every type": Scenario(
        messages=(USER, _call(ODD_CALL), _result(ODD_CALL, "[]"), ANSWER), tools=(ANY,)
    ),
    "arguments with line breaks": Scenario(
        messages=(USER, _call(TEXT_CALL), _result(TEXT_CALL, " x\n"), ANSWER), tools=(ANY,)
    ),
    "unicode": Scenario(
        messages=(replace(USER, content=ODD_TEXT), replace(ANSWER, content=ODD_TEXT), MORE, ANSWER), plain=True
    ),
    "white space": Scenario(
        messages=(replace(USER, content="\n\n a \n"), replace(ANSWER, content="b"), replace(USER, content=" "), ANSWER),
        plain=True,
    ),
    "an empty reply": Scenario(messages=(USER, replace(ANSWER, content=""), MORE, ANSWER), plain=True),
    "system in the middle": Scenario(messages=(USER, ANSWER, replace(SYSTEM, content="Be brief."), MORE, ANSWER)),
}


def given_and_sampled(messages: Sequence[Message]) -> list[tuple[tuple[Message, ...], Message]]:
    """(messages the agent sends, the reply), turn by turn."""
    turns: list[tuple[tuple[Message, ...], Message]] = []
    given: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            turns.append((tuple(given), message))
            given = []
        else:
            given.append(message)
    return turns
