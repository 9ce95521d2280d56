"""The list of protocols that a server speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.kinds.environment import Completion
from miles_core.session.serving import anthropic, chat, responses
from miles_core.session.serving.asked import Asked
from miles_core.session.serving.problems import Refused, anthropic_error, openai_error
from miles_core.session.serving.protocol import Event, Reply, WireProtocol, Writer
from miles_core.session.serving.store import Entry
from miles_core.session.serving.transcript import Transcript


def _read_chat(body: Mapping[str, Any], entry: Entry) -> Asked:
    return chat.read(body, entry.transcripts.setdefault("chat", Transcript()))


def _whole_chat(completion: Completion, reply: Reply, logprobs: list[Event] | None) -> Event:
    return chat.answer(
        completion, response_id=reply.response_id, model=reply.model, created=reply.created, logprobs=logprobs
    )


def _write_chat(reply: Reply, prompt_tokens: int) -> Writer:
    return chat.ChatStream(
        response_id=reply.response_id, model=reply.model, created=reply.created, usage=reply.asked.usage
    )


CHAT = WireProtocol(
    name="chat",
    path="/v1/chat/completions",
    id_prefix="chatcmpl-",
    read=_read_chat,
    whole=_whole_chat,
    writer=_write_chat,
    error=openai_error,
    named_events=False,
)

MESSAGES = WireProtocol(
    name="messages",
    path="/v1/messages",
    id_prefix="msg_",
    read=anthropic.read,
    whole=anthropic.whole,
    writer=anthropic.MessagesStream,
    error=anthropic_error,
    named_events=True,
)


def _responses_error(problem: Refused) -> Event:
    return openai_error(problem) | {"type": "error", "message": problem.message, "code": problem.code}


RESPONSES = WireProtocol(
    name="responses",
    path="/v1/responses",
    id_prefix=responses.PREFIX,
    read=responses.read,
    whole=responses.whole,
    writer=responses.ResponsesStream,
    error=_responses_error,
    named_events=True,
)

WIRES: tuple[WireProtocol, ...] = (CHAT, MESSAGES, RESPONSES)
