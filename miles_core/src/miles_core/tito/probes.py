"""Short conversations that tell chat templates apart, and the comparison of a family with a template on them.

Every one is a conversation that a template can only write in one way without rewriting what was said before: at most
one user turn follows reasoning, no system message comes in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_core.errors import MilesError
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall

ADD: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "first"},
                "tag": {"type": "string"},
            },
            "required": ["a"],
        },
    },
}
NOW: Tool = {
    "type": "function",
    "function": {"name": "now", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}},
}

SYSTEM = Message(role="system", content="You are terse.")
USER = Message(role="user", content="What is 2 + 2?")
MORE = Message(role="user", content="And 3 + 3?")
ANSWER = Message(role="assistant", content="It is 4.")
ADD_CALL = ToolCall(id="functions.add:0", name="add", arguments='{"a": 2, "tag": "x y"}')
NOW_CALL = ToolCall(id="functions.now:1", name="now", arguments="{}")
CALLING = Message(role="assistant", content="I add.", reasoning="Use the tool.", tool_calls=(ADD_CALL,))
QUIET = Message(role="assistant", reasoning="Use the tool.", tool_calls=(ADD_CALL,))
SILENT = Message(role="assistant", reasoning="Both at once.", tool_calls=(ADD_CALL, NOW_CALL))
FOUR = Message(role="tool", content='{"sum": 4}', tool_call_id=ADD_CALL.id)
NOON = Message(role="tool", content="12:00", tool_call_id=NOW_CALL.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One conversation that ends where an assistant turn is to open."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


PROBES: Mapping[str, Probe] = {
    "user": Probe(messages=(USER,)),
    "system": Probe(messages=(SYSTEM, USER)),
    "two turns": Probe(messages=(SYSTEM, USER, ANSWER, MORE)),
    "tools": Probe(messages=(SYSTEM, USER), tools=(ADD, NOW)),
    "tools without system": Probe(messages=(USER,), tools=(ADD,)),
    "tool loop": Probe(messages=(SYSTEM, USER, CALLING, FOUR), tools=(ADD, NOW)),
    "silent call": Probe(messages=(SYSTEM, USER, QUIET, FOUR), tools=(ADD,)),
    "parallel calls": Probe(messages=(SYSTEM, USER, SILENT, FOUR, NOON), tools=(ADD, NOW)),
}


class Writes(Protocol):
    """What is compared with a template."""

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str: ...

    def template_variables(self) -> Mapping[str, object]: ...


def same_text(family: Writes, probe: Probe) -> bool:
    """Whether template and family write the same; both refusing counts as the same."""
    return _ours(family, probe) == _theirs(family, probe)


def difference(family: Writes, probe: Probe) -> str | None:
    """Where template and family part, the texts side by side; None where they write the same."""
    ours, theirs = _ours(family, probe), _theirs(family, probe)
    if ours == theirs:
        return None
    a, b = ours or "", theirs or ""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    near = slice(max(0, at - 50), at + 70)
    shown = ("refused" if ours is None else repr(a[near]), "refused" if theirs is None else repr(b[near]))
    return f"from character {at} on\n  family   {shown[0]}\n  template {shown[1]}"


def _ours(family: Writes, probe: Probe) -> str | None:
    try:
        return family.text(probe.messages, probe.tools)
    except MilesError:
        return None


def _theirs(family: Writes, probe: Probe) -> str | None:
    try:
        return family.tokenizer.render(
            probe.messages, probe.tools, add_generation_prompt=True, **family.template_variables()
        )
    except MilesError:
        return None
