"""Llama 3.1 and 3.3 Instruct: header tokens around every role, one JSON tool call as a whole reply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from miles_core.tito.arguments import Unfinished
from miles_core.tito.family import DeclaredFamily, Wrap
from miles_core.tito.formats import Call, CallFormat, read_json_call
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool, ToolCall
from miles_tito_llama import prompts
from miles_tito_llama.options import LlamaOptions

BEGIN, END = "<|begin_of_text|>", "<|eot_id|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeReply:
    """``{"name": ..., "parameters": {...}}`` and nothing else, perhaps behind ``<|python_tag|>``."""

    opening: str = ""
    closing: str = ""

    def read(self, body: str, tools: Sequence[Tool]) -> Sequence[Call]:
        try:
            return [read_json_call(body.strip().removeprefix("<|python_tag|>"), "parameters")]
        except Unfinished as error:
            raise ValueError("a call without its end") from error

    def write(self, calls: Sequence[ToolCall], *, content: bool) -> str:
        (call,) = calls
        return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "parameters": {call.arguments or "{}"}}}'


class Llama31Family(DeclaredFamily[LlamaOptions]):
    """The template trims what users and the system say; so does the family."""

    control_tokens = (BEGIN, "<|start_header_id|>", "<|end_header_id|>", END)
    stops = (END, "<|eom_id|>", "<|end_of_text|>")
    kept_stops = ("<|eom_id|>",)
    end = END
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    user = Wrap("<|start_header_id|>user<|end_header_id|>\n\n", END)
    system: ClassVar[Wrap | None] = Wrap("<|start_header_id|>system<|end_header_id|>\n\n", END)
    tool = Wrap("<|start_header_id|>ipython<|end_header_id|>\n\n", END)
    calls: ClassVar[CallFormat | None] = WholeReply()
    deliberate: ClassVar[Mapping[str, str]] = {"tool loop": "the template drops words beside a call; they are refused"}

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(LlamaOptions(), tokenizer)

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        said, rest = (messages[0].content.strip(), messages[1:]) if messages[0].role == "system" else ("", messages)
        listed = "".join(json.dumps(tool, ensure_ascii=False, indent=4) + "\n\n" for tool in tools)
        described = prompts.FORM + listed if tools else ""
        in_system = self.options.tools_in == "system"
        head = BEGIN + self._head(described if in_system else "", said, with_tools=bool(tools))
        if not tools or in_system:
            return head, rest
        if not rest or rest[0].role != "user":
            raise self._refused("tools before anything a user said", "a first user message", "set tools_in: system")
        asked = prompts.IN_USER + described + rest[0].content.strip()
        return head + self.user(asked), rest[1:]

    def _head(self, described: str, said: str, *, with_tools: bool) -> str:
        where = "Environment: ipython\n" if with_tools else ""
        intro = prompts.HAVE_TOOLS if described else ""
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self.options.date}\n\n"
        return f"<|start_header_id|>system<|end_header_id|>\n\n{where}{dates}{intro}{described}{said}{END}"

    def spoken(self, message: Message) -> str:
        wrap = self.user if message.role == "user" else self.system
        assert wrap is not None
        return wrap(message.content.strip())

    def said(self, message: Message, after: Message | None, *, forgotten: bool = False) -> str:
        if len(message.tool_calls) > 1:
            raise self._refused("several tool calls in one turn", "one", "let the agent answer them one by one")
        if not message.tool_calls:
            return message.content.strip()
        if message.content:
            raise self._refused("words beside a tool call", "a call alone", "leave the words out of the history")
        return self.called(message)

    def tool_result(self, message: Message, call: Message | None) -> str:
        return self.tool(json.dumps(message.content, ensure_ascii=False))

    def template_variables(self) -> Mapping[str, object]:
        return {"date_string": self.options.date, "tools_in_user_message": self.options.tools_in == "user"}
