"""The protocol OpenAI Responses: reads input items, and writes output items and stream events.

`previous_response_id` names a turn of the session; the server has its history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from miles_core.kinds.environment import Completion
from miles_core.kinds.tito_family import Delta
from miles_core.session.linear import Turn
from miles_core.session.serving.asked import Asked
from miles_core.session.serving.chat import text_of
from miles_core.session.serving.fields import OWNED, Fields, anything, check_extra, empty, number, only, validated
from miles_core.session.serving.problems import Refused
from miles_core.session.serving.protocol import Event, Reply
from miles_core.session.serving.store import Entry
from miles_core.session.serving.transcript import Transcript
from miles_core.session.tree import Node
from miles_core.types import FinishReason, Message, ToolCall

Item = dict[str, Any]
PREFIX = "resp_"


class ResponsesFields(Fields):
    """What a request may say beside its input."""

    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Item] | None = None
    """Function tools: ``{"type": "function", "name", "description", "parameters"}``."""
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


class ResponsesRequest(ResponsesFields):
    """The whole request, for the schema."""

    input: str | list[Item]
    """A user's text, or items: message, function_call, function_call_output, reasoning."""


HARMLESS = {
    "tool_choice": only("auto"),
    "parallel_tool_calls": only(True),
    "text": only({"format": {"type": "text"}}, {}),
    "background": only(False),
    "truncation": only("disabled"),
    "top_logprobs": number(0),
    "conversation": empty,
    "prompt": empty,
    "max_tool_calls": empty,
    **dict.fromkeys(
        (
            "include",
            "metadata",
            "reasoning",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options",
            "user",
            "prompt_cache_key",
            "prompt_cache_retention",
        ),
        anything,
    ),
}
"""`reasoning` asks for summaries and efforts that hosted models have; here the family renders the prompt."""
WHY = {
    "tool_choice": "what the model calls is its own choice; it cannot be forced",
    "parallel_tool_calls": "how many tools the model calls is its own choice",
    "text": "constrained decoding would change the policy that is trained",
    "truncation": "the server never drops part of a history",
}


def read(body: Mapping[str, Any], entry: Entry) -> Asked:
    """The turn that a request body asks for.

    Raises:
        Refused: 400 naming the field.
    """
    fields = validated(ResponsesFields, {name: value for name, value in body.items() if name != "input"})
    check_extra(fields.model_extra or {}, HARMLESS, WHY)
    raw = body.get("input")
    items = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
    if not isinstance(items, list) or not (items or fields.previous_response_id):
        raise Refused(400, "expected a text or a list of at least one item", param="input")
    transcript = entry.transcripts.setdefault("responses", Transcript())
    messages = _merged(transcript.read(items, _item, "input"))
    if fields.previous_response_id is not None:
        messages = [*_history(fields.previous_response_id, entry), *messages]
    elif fields.instructions:
        messages = [Message(role="system", content=fields.instructions), *messages]
    sampling: dict[str, Any] = {
        name: value for name in ("temperature", "top_p") if (value := getattr(fields, name)) is not None
    }
    if fields.max_output_tokens is not None:
        sampling["max_tokens"] = fields.max_output_tokens
    return Asked(
        messages=messages,
        tools=tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(fields.tools or ())),
        stream=bool(fields.stream),
        sampling=sampling,
        model=fields.model or "",
    )


def _history(response_id: str, entry: Entry) -> tuple[Message, ...]:
    """The conversation up to an earlier answer of this session, that answer included."""
    # The id itself says which turn it was, so that it outlives the process as the turn does.
    turns: Sequence[Turn | Node] = entry.session.turns
    for at, turn in enumerate(turns):
        if response_id.startswith(f"{PREFIX}{entry.key}-{turn.generation}-"):
            return entry.session.messages_to(at)
    raise Refused(400, "no turn of this session answered with that id", param="previous_response_id")


def _tool(tool: Item, at: str) -> Item:
    if tool.get("type") != "function":
        kind = tool.get("type")
        raise Refused(400, f"only tools that the agent runs can be served (found {kind!r:.40})", param=f"{at}.type")
    if not isinstance(tool.get("name"), str):
        raise Refused(400, "expected a text", param=f"{at}.name")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _item(raw: Any, at: str) -> tuple[Message, ...]:
    if not isinstance(raw, dict):
        raise Refused(400, "expected an item", param=at)
    if owned := OWNED & raw.keys():
        raise Refused(400, "token ids belong to the server; send messages", param=f"{at}.{min(owned)}")
    kind = raw.get("type", "message")
    if kind == "message":
        return (_message(raw, at),)
    if kind == "function_call":
        call = ToolCall(
            id=_string(raw, "call_id", at), name=_string(raw, "name", at), arguments=_string(raw, "arguments", at)
        )
        return (Message(role="assistant", tool_calls=(call,)),)
    if kind == "function_call_output":
        output = raw.get("output")
        text = text_of(_parts(output, f"{at}.output"), f"{at}.output")
        return (Message(role="tool", content=text, tool_call_id=_string(raw, "call_id", at)),)
    if kind == "reasoning":
        content = _parts(raw.get("content"), f"{at}.content") or []
        texts = [content] if isinstance(content, str) else [_string(part, "text", at) for part in content]
        return (Message(role="assistant", reasoning="".join(texts) or None),)
    raise Refused(400, f"unknown kind of item {kind!r:.40}", param=f"{at}.type")


def _message(raw: Item, at: str) -> Message:
    role = raw.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise Refused(400, f"unknown role {role!r:.40}", param=f"{at}.role")
    content = text_of(_parts(raw.get("content"), f"{at}.content"), f"{at}.content")
    return Message(role="system" if role == "developer" else role, content=content)


def _parts(value: Any, at: str) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return value
    raise Refused(400, "expected a text or a list of parts", param=at)


def _string(raw: Mapping[str, Any], name: str, at: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise Refused(400, "expected a text", param=f"{at}.{name}")
    return value


def _merged(messages: list[Message]) -> list[Message]:
    """Make one message of each assistant turn, which the protocol spreads over several items: reasoning, text,
    calls."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is None or last.role != "assistant" or message.role != "assistant" or message.reasoning:
            found.append(message)
            continue
        found[-1] = Message(
            role="assistant",
            content=last.content + message.content,
            reasoning=last.reasoning,
            tool_calls=last.tool_calls + message.tool_calls,
        )
    return found


# --- answers ----------------------------------------------------------------------------------------------------------


def whole(completion: Completion, reply: Reply, logprobs: list[Event] | None) -> Event:
    """The body of a whole answer."""
    writer = ResponsesStream(reply, completion.prompt_tokens)
    message = completion.message
    parts = (
        Delta(reasoning=message.reasoning or ""),
        Delta(content=message.content),
        *(Delta(tool_calls=(call,)) for call in message.tool_calls),
    )
    for part in parts:
        list(writer.delta(part))
    *_, last = writer.end(completion, logprobs)
    answer: Event = last["response"]
    return answer


class ResponsesStream:
    """Turns deltas into response events. One item is open at a time, and each kind of delta has a kind of item."""

    def __init__(self, reply: Reply, prompt_tokens: int) -> None:
        self._reply = reply
        self._items: list[Item] = []
        self._open: Item | None = None
        self._sequence = 0

    def start(self) -> Iterator[Event]:
        response = self._response("in_progress", None, None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def delta(self, delta: Delta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._opened("reasoning", {"summary": [], "content": [{"type": "reasoning_text", "text": ""}]})
            yield from self._text("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            part = {"type": "output_text", "text": "", "annotations": []}
            yield from self._opened("message", {"role": "assistant", "content": [part]})
            yield from self._text("response.output_text.delta", delta.content)
        for call in delta.tool_calls:
            yield from self._closed()
            yield from self._opened("function_call", {"call_id": call.id, "name": call.name, "arguments": ""})
            assert self._open is not None
            self._open["arguments"] = call.arguments
            yield self._inner("response.function_call_arguments.delta", delta=call.arguments)
            yield from self._closed()

    def end(self, completion: Completion, logprobs: list[Event] | None) -> Iterator[Event]:
        yield from self._closed()
        cut = completion.finish_reason is not FinishReason.STOP
        reason = {FinishReason.LENGTH: "max_output_tokens"}.get(completion.finish_reason, "content_filter")
        usage = {
            "input_tokens": completion.prompt_tokens,
            "input_tokens_details": {"cached_tokens": completion.cached_tokens},
            "output_tokens": completion.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completion.prompt_tokens + completion.num_tokens,
        }
        response = self._response("incomplete" if cut else "completed", {"reason": reason} if cut else None, usage)
        yield self._event("response.incomplete" if cut else "response.completed", response=response)

    # --- private ------------------------------------------------------------------------------------------------------

    def _opened(self, kind: str, fields: Item) -> Iterator[Event]:
        if self._open is not None and self._open["type"] == kind and kind != "function_call":
            return
        yield from self._closed()
        number = len(self._items)
        short = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = {"id": f"{short}_{self._reply.response_id}_{number}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._open = item
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield self._event("response.output_item.added", output_index=number, item=shown)
        if kind == "message":
            yield self._inner("response.content_part.added", content_index=0, part=dict(item["content"][0]))

    def _text(self, name: str, text: str) -> Iterator[Event]:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        extra: Item = {"logprobs": []} if name == "response.output_text.delta" else {}
        yield self._inner(name, content_index=0, delta=text, **extra)

    def _closed(self) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        kind = item["type"]
        if kind == "function_call":
            yield self._inner("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        elif kind == "reasoning":
            yield self._inner("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        else:
            part = dict(item["content"][0])
            yield self._inner("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._inner("response.content_part.done", content_index=0, part=part)
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))
        self._open = None

    def _inner(self, kind: str, /, **fields: Any) -> Event:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _response(self, status: str, incomplete: Item | None, usage: Item | None) -> Event:
        return {
            "id": self._reply.response_id,
            "object": "response",
            "created_at": self._reply.created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": None,
            "metadata": {},
            "model": self._reply.model,
            "output": [dict(item) for item in self._items] if status != "in_progress" else [],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": usage,
        }
