"""gpt-oss: the Harmony format, a row of messages with channels.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>                      reasoning
    <|start|>assistant<|channel|>final<|message|>...<|return|>                      content; the turn ends
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>...<|call|>   a tool call; the turn ends

One reply may hold several of these. The seam: ``<|return|>`` only ever stands last, so when the conversation goes on
`merge` writes ``<|end|>`` in its place, as the format's documentation asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from miles_core.errors import DataError
from miles_core.kinds.tito_family import StreamParser
from miles_core.tito.family import DeclaredFamily, Wrap
from miles_core.tito.options import EarlierReasoning
from miles_core.tito.parser import ReplyParser
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import Message, Tool
from miles_tito_gpt_oss.options import GptOssOptions
from miles_tito_gpt_oss.parser import HarmonyText
from miles_tito_gpt_oss.schema import namespace

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
CALLS_GO = "\nCalls to these tools must go to the commentary channel: 'functions'."
START, END = "<|start|>assistant", "<|end|>"


class GptOssFamily(DeclaredFamily[GptOssOptions]):
    """One tool call a turn; the format has no place for two."""

    control_tokens = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")
    stops = ("<|return|>", "<|call|>")
    replaced_stops = ("<|return|>",)
    kept_stops = ("<|call|>",)
    end = END
    header = START
    user = Wrap("<|start|>user<|message|>", END)
    deliberate: ClassVar[Mapping[str, str]] = {
        "tool loop": "the template refuses reasoning and content beside one call; they are written as two messages",
        "parallel calls": "the template drops all calls but the first; the family refuses them",
    }

    @classmethod
    def for_checkpoint(cls, tokenizer: ChatTokenizer) -> Self:
        return cls(GptOssOptions(), tokenizer)

    @classmethod
    def claims(cls, tokenizer: ChatTokenizer) -> bool:
        """By tokens and template text: rendering the published template needs a clock."""
        try:
            cls.for_checkpoint(tokenizer)
        except DataError:
            return False
        source = tokenizer.template().source
        return all(part in source for part in ("<|channel|>analysis<|message|>", "<|start|>developer", IDENTITY))

    @property
    def reasons(self) -> bool:
        return True

    def earlier_reasoning(self) -> EarlierReasoning:
        return self.options.earlier_reasoning

    def forgets_before(self, messages: Sequence[Message]) -> int:
        answers = (i for i, message in enumerate(messages) if message.role == "assistant" and not message.tool_calls)
        return max((index + 1 for index in answers), default=0)

    def template_variables(self) -> dict[str, object]:
        return {"reasoning_effort": self.options.reasoning_effort}

    def preamble(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, Sequence[Message]]:
        date = "" if self.options.date is None else f"Current date: {self.options.date}\n"
        facts = f"{IDENTITY}\nKnowledge cutoff: 2024-06\n{date}\nReasoning: {self.options.reasoning_effort}\n\n"
        system = f"<|start|>system<|message|>{facts}{CHANNELS}{CALLS_GO if tools else ''}{END}"
        told = messages[0].role in ("system", "developer")
        instructions = messages[0].content if told else ""
        parts = [f"# Instructions\n\n{instructions}\n\n"] if instructions else []
        parts += [f"# Tools\n\n{namespace(tools)}"] if tools else []
        developer = f"<|start|>developer<|message|>{''.join(parts)}{END}" if parts else ""
        return system + developer, messages[1:] if told else messages

    def thought(self, message: Message, *, forgotten: bool = False) -> str:
        if forgotten or not message.reasoning:
            return ""
        return f"<|channel|>analysis<|message|>{message.reasoning}{END}{START}"

    def said(self, message: Message, after: Message | None, *, forgotten: bool = False) -> str:
        thought = self.thought(message, forgotten=forgotten)
        if not message.tool_calls:
            return f"{thought}<|channel|>final<|message|>{message.content}"
        if len(message.tool_calls) > 1:
            raise self._refused("several tool calls in one turn", "one", "let the agent answer them one by one")
        (call,) = message.tool_calls
        aside = f"<|channel|>commentary<|message|>{message.content}{END}{START}" if message.content else ""
        arguments = call.arguments or "{}"
        return f"{thought}{aside} to=functions.{call.name}<|channel|>commentary json<|message|>{arguments}"

    def ending(self, message: Message) -> str:
        return "<|call|>" if message.tool_calls else END

    def tool_result(self, message: Message, call: Message | None) -> str:
        calls = call.tool_calls if call is not None else ()
        named = next((each.name for each in calls if each.id == message.tool_call_id), None)
        name = named or message.name or (calls[0].name if calls else None)
        if name is None:
            raise self._refused("a tool result without a call", "a tool call before it", "name the tool in the message")
        result = json.dumps(message.content, ensure_ascii=False)
        return f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{result}{END}"

    def stream_parser(self, tools: Sequence[Tool] = ()) -> StreamParser:
        return ReplyParser(HarmonyText(), self.tokenizer, self.stop_token_ids)
