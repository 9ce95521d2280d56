"""Token-for-token comparison of a family with the template its checkpoint was published with.

Published templates are not kept here: what they render for the conversations below is, together with the SHA-256 of the
template. `python -m miles_core.testing.tito_reference TEMPLATE.jinja OUT.json --bos TOKEN` records it anew.

    class TestQwen3(RecordedTemplate):
        family = Qwen3Family
        recorded = DATA / "qwen3.json"
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from jinja2.sandbox import SandboxedEnvironment

from miles_core.chat_template import ChatTemplate
from miles_core.errors import DataError, MilesError
from miles_core.testing.tiny import write_tiny_tokenizer
from miles_core.tito.family import DeclaredFamily
from miles_core.tito.probes import ADD, ADD_CALL, ANSWER, FOUR, MORE, NOW, PROBES, QUIET, SYSTEM, USER, Probe
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How today's byte-level tokenizers cut text into words."""
TODAY = datetime.date(2026, 1, 2)
SEARCH: Tool = {
    "type": "function",
    "function": {
        "name": "search",
        "description": " Finds things.\nIn two lines. ",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what <to> find & é"},
                "limit": {"type": "integer", "default": 10},
                "kind": {"type": "string", "enum": ["web", "code"], "description": "where"},
                "filters": {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["query", "kind"],
        },
    },
}
_NESTED = ToolCall(
    id="functions.search:0",
    name="search",
    arguments='{"query": "a \\"b\\"\\n<c> é", "limit": 3, "filters": {"year": 2024}, "tags": ["x", "y"]}',
)
_FIRST_NOW = ToolCall(id="functions.now:0", name="now", arguments="{}")
_FOUND = Message(role="tool", content='  {"hits": []}\n', tool_call_id=_NESTED.id)
_SECOND_CALL = ToolCall(id="functions.add:1", name="add", arguments='{"a": 5, "tag": "z"}')
_SECOND = Message(role="assistant", reasoning="Once more.", tool_calls=(_SECOND_CALL,))
_SECOND_RESULT = Message(role="tool", content="5", tool_call_id="functions.add:1")

CONVERSATIONS: Mapping[str, Probe] = {
    **PROBES,
    "unicode": Probe(messages=(SYSTEM, Message(role="user", content="né 中文 👩‍👩‍👧 <b>&amp;</b>"))),
    "white space": Probe(messages=(Message(role="system", content=" s\n"), Message(role="user", content="\n  u \n\n"))),
    "three turns": Probe(messages=(USER, ANSWER, MORE, Message(role="assistant", content="6."), USER)),
    "rich tool": Probe(messages=(SYSTEM, USER), tools=(SEARCH, NOW)),
    "nested arguments": Probe(
        messages=(USER, Message(role="assistant", reasoning="Look.", tool_calls=(_NESTED,)), _FOUND), tools=(SEARCH,)
    ),
    "empty arguments": Probe(
        messages=(
            USER,
            Message(role="assistant", reasoning="When?", tool_calls=(_FIRST_NOW,)),
            Message(role="tool", content="12:00", tool_call_id=_FIRST_NOW.id),
        ),
        tools=(NOW,),
    ),
    "two calls in a row": Probe(messages=(SYSTEM, USER, QUIET, FOUR, _SECOND, _SECOND_RESULT), tools=(ADD,)),
    "call without reasoning": Probe(
        messages=(SYSTEM, USER, Message(role="assistant", tool_calls=(ADD_CALL,)), FOUR), tools=(ADD,)
    ),
    "system in the middle": Probe(messages=(USER, ANSWER, Message(role="system", content="Be brief."), MORE)),
    "reasoning before a user": Probe(
        messages=(USER, Message(role="assistant", content="4", reasoning="Two and two."), MORE)
    ),
}
"""Every family is compared on all of them; where it differs, its test says why."""


class RecordedTemplate:
    """Subclass it with the family and what its template rendered."""

    family: ClassVar[type[DeclaredFamily[Any]]]
    recorded: ClassVar[Path]
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    """Mode -> the family's options, beside the defaults."""
    differs: ClassVar[Mapping[str, str]] = {}
    """`mode: conversation`, or a conversation in every mode -> why the rows differ. One that does not differ fails."""

    @pytest.mark.parametrize("name", CONVERSATIONS)
    def test_rows_are_the_published_templates_token_for_token(self, name: str, tmp_path: Path) -> None:
        record = json.loads(self.recorded.read_text(encoding="utf-8"))
        tokenizer = _Recorded.of(family_tokenizer(self.family, tmp_path, template="{{ '' }}"), record)
        for mode, given in self.options.items():
            family = self.make(tokenizer, given)
            theirs, ours = record["renderings"][mode][name], _row(family, CONVERSATIONS[name])
            same = ours == (None if theirs is None else tokenizer.encode(theirs))
            reason = self.differs.get(f"{mode}: {name}", self.differs.get(name))
            shown = None if ours is None else tokenizer.decode(ours)
            assert same == (reason is None), f"{mode}: {name}: {reason}\n{_difference(shown, theirs)}"

    def test_the_checkpoint_is_claimed_and_others_are_not(self, tmp_path: Path) -> None:
        record = json.loads(self.recorded.read_text(encoding="utf-8"))
        tokenizer = family_tokenizer(self.family, tmp_path, template="{{ '' }}")
        assert not self.family.claims(tokenizer), "claims a template that writes nothing"
        assert self.family.claims(_Recorded.of(tokenizer, record))
        for mode in record["renderings"].values():
            mode["system"] += "."
        assert not self.family.claims(_Recorded.of(tokenizer, record)), "claims a template that writes something else"

    def make(self, tokenizer: ChatTokenizer, options: Mapping[str, Any]) -> DeclaredFamily[Any]:
        """The family with these options beside its defaults."""
        default = self.family.for_checkpoint(tokenizer)
        return self.family(type(default.options).model_validate(dict(options)), tokenizer)


def family_tokenizer(family: type[DeclaredFamily[Any]], folder: Path, *, template: str) -> ChatTokenizer:
    """A byte-level tokenizer with the family's control tokens."""
    special = list(dict.fromkeys([*family.control_tokens, *family.stops]))
    bos = next((token for token in special if "begin" in token), None)
    write_tiny_tokenizer(folder, special=special, bos=bos, eos=family.stops[0], template=template, words=WORDS)
    return ChatTokenizer.from_dir(folder)


def _row(family: DeclaredFamily[Any], conversation: Probe) -> list[int] | None:
    try:
        return family.render(conversation.messages, conversation.tools)
    except MilesError:
        return None


class _Recorded(ChatTokenizer):
    """A tokenizer whose template is the recorded one."""

    record: Mapping[str, Any]

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, record: Mapping[str, Any]) -> _Recorded:
        found = cls.__new__(cls)
        found.__dict__.update(tokenizer.__dict__)
        found.record = record
        return found

    def render(self, messages: Any, tools: Any = (), *, add_generation_prompt: bool, **kwargs: Any) -> str:
        asked = Probe(messages=tuple(messages), tools=tuple(tools))
        name = next((name for name, probe in CONVERSATIONS.items() if probe == asked), None)
        given = self.record["variables"].items()
        mode = next((m for m, known in given if all(kwargs.get(k, v) == v for k, v in known.items())), None)
        text = self.record["renderings"][mode][name] if mode and name and add_generation_prompt else None
        if text is None:
            raise DataError("not recorded")
        return str(text)


def _difference(ours: str | None, theirs: str | None) -> str:
    a, b = ours or "", theirs or ""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    near = slice(max(0, at - 50), at + 70)
    return f"  ours   {None if ours is None else a[near]!r}\n  theirs {None if theirs is None else b[near]!r}"


def record(source: str, modes: Mapping[str, Mapping[str, Any]], variables: Mapping[str, str]) -> dict[str, Any]:
    """What a template renders for every conversation, None where it refuses.

    Some templates change lists while they render, which the immutable sandbox refuses; recording allows it.
    """
    template = ChatTemplate(source, variables=variables, today=TODAY, sandbox=SandboxedEnvironment)
    renderings = {
        mode: {name: _rendered(template, probe, given) for name, probe in CONVERSATIONS.items()}
        for mode, given in modes.items()
    }
    sha256 = hashlib.sha256(source.encode()).hexdigest()
    return {"sha256": sha256, "variables": {k: dict(v) for k, v in modes.items()}, "renderings": renderings}


def _rendered(template: ChatTemplate, probe: Probe, given: Mapping[str, Any]) -> str | None:
    try:
        return template.render(probe.messages, probe.tools, add_generation_prompt=True, **given)
    except DataError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what a published chat template renders.")
    parser.add_argument("template", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bos", default="", help="the checkpoint's BOS token")
    parser.add_argument("--mode", action="append", default=[], help='NAME={"variable": value}; default={} if none')
    given = parser.parse_args()
    parts = (mode.partition("=") for mode in given.mode or ["default={}"])
    modes = {name: json.loads(value) for name, _, value in parts}
    found = record(given.template.read_text(encoding="utf-8"), modes, {"bos_token": given.bos})
    text = json.dumps({"template": given.template.name, **found}, ensure_ascii=False, indent=1)
    given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
