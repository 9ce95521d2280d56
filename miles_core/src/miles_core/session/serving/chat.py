"""The protocol OpenAI Chat Completions: reads requests, and writes answers and stream chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from miles_core.kinds.environment import Completion
from miles_core.kinds.tito_family import Delta
from miles_core.session.serving.asked import Asked
from miles_core.session.serving.fields import (
    OWNED,
    Fields,
    absent,
    anything,
    check_extra,
    empty,
    misfit,
    number,
    only,
    validated,
)
from miles_core.session.serving.problems import Refused
from miles_core.session.serving.transcript import Transcript
from miles_core.types import FinishReason, Message, ToolCall

PART_SEPARATOR = "\n"
"""Between the text parts of one message, which a row holds as one text."""


class WireFunction(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: str | dict[str, Any] | None = ""
    """JSON text. If it is an object, it is spelled compactly."""


class WireCall(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str = ""
    type: Literal["function"] = "function"
    function: WireFunction


class WireMessage(BaseModel):
    """A chat message. Keys that are not listed are ignored, because agent programs send many of their own."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    """Text, or text parts; images are refused."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for the same."""
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class WireTool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: FunctionTool


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool | None = None


class ChatFields(Fields):
    """What a request may say beside its messages."""

    model: str = ""
    """Any name; it has no effect, since the session's engine serves one model."""
    tools: list[WireTool] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """0 or -1 is off."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    logprobs: Literal[True] | None = None
    """Whether to return log-probs. They are recorded in any case; that cannot be switched off."""


class ChatRequest(ChatFields):
    """The whole request, for the schema."""

    messages: Annotated[list[WireMessage], Field(min_length=1)]


HARMLESS = {
    "n": number(1),
    "top_logprobs": number(0),
    "frequency_penalty": number(0),
    "presence_penalty": number(0),
    "repetition_penalty": number(1),
    "length_penalty": number(1),
    "min_tokens": number(0),
    "logit_bias": empty,
    "response_format": only({"type": "text"}),
    "tool_choice": only("auto"),
    "parallel_tool_calls": only(True),
    "modalities": only(["text"]),
    "return_meta_info": only(True),
    "no_stop_trim": only(False),
    "chat_template_kwargs": empty,
    "functions": empty,
    "function_call": absent,
    **dict.fromkeys(
        (
            "user",
            "metadata",
            "store",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "prediction",
            "extra_headers",
        ),
        anything,
    ),
}
WHY = {
    "n": "a session has one next turn, so n must be 1; open a session for every sample",
    "top_logprobs": "only the sampled token's log-prob is captured",
    "tool_choice": "what the model calls is its own choice; it cannot be forced",
    "parallel_tool_calls": "how many tools the model calls is its own choice",
    "logit_bias": "it would change the policy that is trained",
    "response_format": "constrained decoding would change the policy that is trained",
    "chat_template_kwargs": "the session's token family fixes how a prompt is rendered",
    "functions": "send tools",
}
_ADAPTER = TypeAdapter(WireMessage)


def read(body: Mapping[str, Any], transcript: Transcript) -> Asked:
    """The turn that a request body asks for.

    Raises:
        Refused: 400 naming the field.
    """
    rest = {name: value for name, value in body.items() if name != "messages"}
    if rest.get("logprobs") is False:
        raise Refused(400, "log-probs are always captured; leave the field out", param="logprobs")
    fields = validated(ChatFields, rest)
    check_extra(fields.model_extra or {}, HARMLESS, WHY)
    raw = body.get("messages")
    if not isinstance(raw, list) or not raw:
        raise Refused(400, "expected a list of at least one message", param="messages")
    return Asked(
        messages=transcript.read(raw, read_message, "messages"),
        tools=tuple(_tool(tool) for tool in rest.get("tools") or ()),
        stream=bool(fields.stream),
        usage=bool(fields.stream_options and fields.stream_options.include_usage),
        logprobs=bool(fields.logprobs),
        sampling=_sampling(fields),
        model=fields.model,
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    # `strict` asks for constrained decoding of arguments; the template never shows it.
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}


def _sampling(fields: ChatFields) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "seed")
        if (value := getattr(fields, name)) is not None
    }
    if found.get("top_k") == -1:
        found["top_k"] = 0
    limits = [value for value in (fields.max_tokens, fields.max_completion_tokens) if value is not None]
    if limits:
        found["max_tokens"] = min(limits)
    if fields.stop:
        found["stop"] = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    return found


def read_message(raw: Any, at: str) -> tuple[Message, ...]:
    """One wire message.

    Raises:
        Refused: 400 naming the field.
    """
    try:
        wire = _ADAPTER.validate_python(raw)
    except ValidationError as error:
        raise misfit(error, at) from error
    for name in wire.model_extra or {}:
        if name in OWNED:
            raise Refused(400, "token ids belong to the server; send messages", param=f"{at}.{name}")
    if (wire.model_extra or {}).get("function_call"):
        raise Refused(400, "send tool_calls", param=f"{at}.function_call")
    return (
        Message(
            role="system" if wire.role == "developer" else wire.role,
            content=text_of(wire.content, f"{at}.content"),
            reasoning=wire.reasoning_content or wire.reasoning or None,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=_spelled(call.function.arguments))
                for call in wire.tool_calls or ()
            ),
            tool_call_id=wire.tool_call_id,
            name=wire.name,
        ),
    )


def text_of(content: str | list[dict[str, Any]] | None, at: str) -> str:
    """The text of a message; its text parts are joined by newlines.

    Raises:
        Refused: a part is no text.
    """
    if not isinstance(content, list):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.get("text", part.get("refusal"))
        if part.get("type") not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            kind = part.get("type")
            raise Refused(400, f"only text can be part of a message (found {kind!r:.40})", param=f"{at}.{index}")
        texts.append(text)
    return PART_SEPARATOR.join(texts)


def _spelled(arguments: str | dict[str, Any] | None) -> str:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments or ""


# --- answers ----------------------------------------------------------------------------------------------------------


def finish_reason(completion: Completion) -> str:
    if completion.finish_reason is FinishReason.STOP:
        return "tool_calls" if completion.message.tool_calls else "stop"
    return completion.finish_reason.value


def usage(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.num_tokens,
        "total_tokens": completion.prompt_tokens + completion.num_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }


def answer(
    completion: Completion, *, response_id: str, model: str, created: int, logprobs: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """The body of a whole answer."""
    message = completion.message
    said: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [_call(call) for call in message.tool_calls]
    choice: dict[str, Any] = {
        "index": 0,
        "message": said,
        "finish_reason": finish_reason(completion),
        "logprobs": None if logprobs is None else {"content": logprobs},
    }
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage(completion),
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatStream:
    """Turns deltas into ``chat.completion.chunk`` objects."""

    def __init__(self, *, response_id: str, model: str, created: int, usage: bool) -> None:
        self._head = {"id": response_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._usage = usage
        self._calls = 0

    def start(self) -> Iterator[dict[str, Any]]:
        yield self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.reasoning:
            yield self._chunk({"reasoning_content": delta.reasoning})
        if delta.content:
            yield self._chunk({"content": delta.content})
        for call in delta.tool_calls:
            head = {"index": self._calls, "id": call.id, "type": "function"}
            yield self._chunk({"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]})
            rest = {"index": self._calls, "function": {"arguments": call.arguments}}
            yield self._chunk({"tool_calls": [rest]})
            self._calls += 1

    def end(self, completion: Completion, logprobs: list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
        last = self._chunk({}, finish_reason(completion))
        if logprobs is not None:
            last["choices"][0]["logprobs"] = {"content": logprobs}
        yield last
        if self._usage:
            yield {**self._head, "choices": [], "usage": usage(completion)}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
