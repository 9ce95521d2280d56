"""The protocol Anthropic Messages: reads requests, and writes answers and stream events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from miles_core.kinds.environment import Completion
from miles_core.kinds.tito_family import Delta
from miles_core.session.serving.arguments import RAW, as_object, exact
from miles_core.session.serving.asked import Asked
from miles_core.session.serving.chat import PART_SEPARATOR
from miles_core.session.serving.fields import OWNED, Fields, anything, check_extra, empty, misfit, only, validated
from miles_core.session.serving.problems import Refused
from miles_core.session.serving.protocol import Event, Reply
from miles_core.session.serving.store import Entry
from miles_core.session.serving.transcript import Transcript
from miles_core.types import FinishReason, Message, ToolCall

Block = dict[str, Any]


class WireMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    """Text, or blocks: text, thinking, tool_use, tool_result. Images and documents are refused."""


class WireTool(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesFields(Fields):
    """What a request may say beside its messages."""

    model: str = ""
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    system: str | list[Block] | None = None
    tools: list[WireTool] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None


class MessagesRequest(MessagesFields):
    """The whole request, for the schema."""

    messages: Annotated[list[WireMessage], Field(min_length=1)]


HARMLESS = {
    "tool_choice": only({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "output_config": empty,
    "output_format": empty,
    **dict.fromkeys(
        ("metadata", "service_tier", "cache_control", "context_management", "thinking", "betas", "inference_geo"),
        anything,
    ),
}
"""`thinking` shows or hides what the model thinks anyway: the family renders the prompt."""
WHY = {
    "tool_choice": "what the model calls is its own choice; it cannot be forced",
    "output_format": "constrained decoding would change the policy that is trained",
    "output_config": "constrained decoding would change the policy that is trained",
}
_ADAPTER = TypeAdapter(WireMessage)


def read(body: Mapping[str, Any], entry: Entry) -> Asked:
    """The turn that a request body asks for.

    Raises:
        Refused: 400 naming the field.
    """
    fields = validated(MessagesFields, {name: value for name, value in body.items() if name != "messages"})
    check_extra(fields.model_extra or {}, HARMLESS, WHY)
    raw = body.get("messages")
    if not isinstance(raw, list) or not raw:
        raise Refused(400, "expected a list of at least one message", param="messages")
    transcript = entry.transcripts.setdefault("messages", Transcript())
    messages = transcript.read(raw, lambda item, at: _messages(item, at, entry), "messages")
    system = _text(fields.system, "system")
    sampling: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "max_tokens")
        if (value := getattr(fields, name)) is not None
    }
    if fields.stop_sequences:
        sampling["stop"] = tuple(fields.stop_sequences)
    return Asked(
        messages=[Message(role="system", content=system), *messages] if system else messages,
        tools=tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(fields.tools or ())),
        stream=bool(fields.stream),
        sampling=sampling,
        model=fields.model,
    )


def _tool(tool: WireTool, at: str) -> dict[str, Any]:
    kind = (tool.model_extra or {}).get("type")
    if kind not in (None, "custom"):
        raise Refused(400, f"only tools that the agent runs can be served (found {kind!r:.40})", param=f"{at}.type")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _messages(raw: Any, at: str, entry: Entry) -> tuple[Message, ...]:
    """The messages that one wire message stands for: results of tools are messages of their own."""
    try:
        wire = _ADAPTER.validate_python(raw)
    except ValidationError as error:
        raise misfit(error, at) from error
    if isinstance(raw, dict) and (owned := OWNED & raw.keys()):
        raise Refused(400, "token ids belong to the server; send messages", param=f"{at}.{min(owned)}")
    if wire.role != "assistant":
        return _user(wire, at)
    blocks = [{"type": "text", "text": wire.content}] if isinstance(wire.content, str) else wire.content
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        where = f"{at}.content.{index}"
        kind = block.get("type")
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise Refused(400, "expected an object", param=f"{where}.input")
            call_id = _string(block, "id", where)
            text = exact(call_id, given, entry.session.calls)
            calls.append(ToolCall(id=call_id, name=_string(block, "name", where), arguments=text))
        else:
            raise Refused(400, f"unknown kind of block {kind!r:.40}", param=f"{where}.type")
    return (
        # Joined without a separator: a stream gives one text in several blocks where tool calls stand between.
        Message(role="assistant", content="".join(texts), reasoning="".join(thoughts) or None, tool_calls=tuple(calls)),
    )


def _user(wire: WireMessage, at: str) -> tuple[Message, ...]:
    if isinstance(wire.content, str):
        return (Message(role=wire.role, content=wire.content),)
    found: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(wire.content):
        where = f"{at}.content.{index}"
        if block.get("type") == "tool_result":
            if texts:
                found.append(Message(role=wire.role, content=PART_SEPARATOR.join(texts)))
                texts = []
            content = _text(block.get("content"), f"{where}.content")
            found.append(Message(role="tool", content=content, tool_call_id=_string(block, "tool_use_id", where)))
        else:
            texts.append(_text([block], where))
    if texts or not found:
        found.append(Message(role=wire.role, content=PART_SEPARATOR.join(texts)))
    return tuple(found)


def _text(content: Any, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(400, "expected text or blocks", param=at)
    texts = []
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else block
            raise Refused(400, f"only text can be part of a message (found {kind!r:.40})", param=f"{at}.{index}")
        texts.append(_string(block, "text", f"{at}.{index}"))
    return PART_SEPARATOR.join(texts)


def _string(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise Refused(400, "expected a text", param=f"{at}.{name}")
    return value


# --- answers ----------------------------------------------------------------------------------------------------------

SIGNATURE = "unsigned"
"""Of thinking blocks: clients want one and hand it back unread."""


def _stop_reason(completion: Completion) -> str:
    if completion.finish_reason is FinishReason.STOP:
        return "tool_use" if completion.message.tool_calls else "end_turn"
    return "max_tokens" if completion.finish_reason is FinishReason.LENGTH else "refusal"


def _usage(prompt_tokens: int, cached: int, sampled: int) -> Event:
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": sampled,
    }


def whole(completion: Completion, reply: Reply, logprobs: list[Event] | None) -> Event:
    """The body of a whole answer."""
    message = completion.message
    blocks: list[Block] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [_tool_use(call, as_object(call.arguments)) for call in message.tool_calls]
    return _envelope(reply, blocks, _stop_reason(completion)) | {
        "usage": _usage(completion.prompt_tokens, completion.cached_tokens, completion.num_tokens)
    }


def _envelope(reply: Reply, blocks: list[Block], reason: str | None) -> Event:
    return {
        "id": reply.response_id,
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": None,
    }


def _tool_use(call: ToolCall, value: Mapping[str, Any]) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(value)}


class MessagesStream:
    """Turns deltas into message events. One block is open at a time, and each kind of delta has a kind of block."""

    def __init__(self, reply: Reply, prompt_tokens: int) -> None:
        self._reply, self._prompt_tokens = reply, prompt_tokens
        self._index = 0
        self._open: str | None = None

    def start(self) -> Iterator[Event]:
        message = _envelope(self._reply, [], None) | {"usage": _usage(self._prompt_tokens, 0, 0)}
        yield {"type": "message_start", "message": message}

    def delta(self, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._piece("thinking", {"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._piece("text", {"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls:
            yield from self._close()
            yield {"type": "content_block_start", "index": self._index, "content_block": _tool_use(call, {})}
            self._open = "tool_use"
            # The client parses this text, so what is no object must be wrapped here as it is in a whole answer.
            value = as_object(call.arguments)
            text = (
                call.arguments if RAW not in value and call.arguments.strip() else json.dumps(value, ensure_ascii=False)
            )
            yield self._inner({"type": "input_json_delta", "partial_json": text})

    def end(self, completion: Completion, logprobs: list[Event] | None) -> Iterator[Event]:
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(completion), "stop_sequence": None},
            "usage": _usage(completion.prompt_tokens, completion.cached_tokens, completion.num_tokens),
        }
        yield {"type": "message_stop"}

    def _piece(self, kind: str, delta: Event) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close()
            empty_block: Block = {"type": kind, kind: ""}
            if kind == "thinking":
                empty_block["signature"] = ""
            yield {"type": "content_block_start", "index": self._index, "content_block": empty_block}
            self._open = kind
        yield self._inner(delta)

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._inner({"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": self._index}
        self._index += 1
        self._open = None

    def _inner(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
