"""Serves one request for a turn, from its body to the answer, in the same way for every protocol."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from miles_core.errors import MilesError
from miles_core.kinds.environment import Completion
from miles_core.session.base import Prepared
from miles_core.session.refusals import ContextFull
from miles_core.session.serving.asked import Asked, check_temperature, merge_sampling
from miles_core.session.serving.http import DONE, EventStream, Json, event, read_object
from miles_core.session.serving.problems import Refused, refusal
from miles_core.session.serving.protocol import Event, Reply, WireProtocol
from miles_core.session.serving.running import ClientGone, TurnTask, while_connected
from miles_core.session.serving.store import Entry, SessionStore

_log = logging.getLogger(__name__)


class Turns:
    """Serves turns of the store's sessions."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    async def serve(self, request: Request, key: str, protocol: WireProtocol) -> Response:
        """Answer a request for a turn of session `key`.

        Raises:
            Refused, MilesError: there is no such turn, or it failed.
            ClientGone: the client has left.
        """
        started = time.monotonic()
        body = await read_object(request, self._store.settings.max_body_bytes)
        # A stack, since a streamed answer uses the session long after this function returned.
        using = ExitStack()
        try:
            entry = using.enter_context(self._store.using(key))
            asked = protocol.read(body, entry)
            prepared = self._prepared(entry, asked)
            reply = self._reply(entry, asked, prepared, protocol)
            turn = entry.running.start(entry.session, prepared, listens=asked.stream)
            if asked.stream:
                release = using.pop_all()
                source = self._stream(entry, turn, len(prepared.prompt_ids), reply, protocol, started)
                return EventStream(source, turn.task.cancel, on_gone=self._client_gone, on_close=release.close)
            completion = await while_connected(request.receive, turn.result())
            self._count(completion, protocol, started)
            return Json(protocol.whole(completion, reply, self._logprobs(entry, completion, asked)))
        except ClientGone:
            self._client_gone()
            raise
        finally:
            using.close()

    async def count_tokens(self, request: Request, key: str, protocol: WireProtocol) -> int:
        """Count the tokens of the prompt that the request would make, even if it does not fit. Nothing is sampled.

        Raises as `serve`.
        """
        body = await read_object(request, self._store.settings.max_body_bytes)
        with self._store.using(key) as entry:
            overflow = entry.session.overflow
            try:
                return len(self._prepared(entry, protocol.read(body, entry)).prompt_ids)
            except ContextFull as full:
                return full.prompt_tokens  # whoever counts wants to know by how much
            finally:
                entry.session.overflow = overflow  # nobody asked for a turn, so none failed to fit

    # --- private ------------------------------------------------------------------------------------------------------

    def _prepared(self, entry: Entry, asked: Asked) -> Prepared:
        session = entry.session
        params, ignored = merge_sampling(session.params, asked.sampling, self._store.settings.agent_sampling)
        prepared = session.prepare(asked.messages, asked.tools, params=params)
        before = session.turns[prepared.base].temperature if prepared.base >= 0 else None
        check_temperature(params.temperature, before)
        for name, value in ignored.items():
            entry.overridden[name] = value
            self._store.metrics.add("miles_overridden_fields_total", field=name)
        return prepared

    def _reply(self, entry: Entry, asked: Asked, prepared: Prepared, protocol: WireProtocol) -> Reply:
        number = f"{prepared.generation}-{prepared.base + 1}-{len(entry.session.turns)}"
        return Reply(
            response_id=f"{protocol.id_prefix}{entry.key}-{number}",
            model=asked.model or self._store.settings.model,
            created=int(time.time()),
            asked=asked,
        )

    async def _stream(
        self,
        entry: Entry,
        turn: TurnTask,
        prompt_tokens: int,
        reply: Reply,
        protocol: WireProtocol,
        started: float,
    ) -> AsyncGenerator[bytes, None]:
        writer = protocol.writer(reply, prompt_tokens)
        events = turn.pieces()
        try:
            for each in writer.start():
                yield self._event(each, protocol)
            async for piece in events:
                if isinstance(piece, Completion):
                    self._count(piece, protocol, started)
                    written = writer.end(piece, self._logprobs(entry, piece, reply.asked))
                else:
                    written = writer.delta(piece)
                for each in written:
                    yield self._event(each, protocol)
            if not protocol.named_events:
                yield DONE
        except Exception as error:  # noqa: BLE001 - the request boundary, as in `app`
            # The status line is long gone; protocols have an event for this, and clients raise at it.
            problem = as_refused(error)
            self._store.metrics.add("miles_requests_total", protocol=protocol.name, status=str(problem.status))
            yield self._event(protocol.error(problem), protocol)
        finally:
            await events.aclose()

    def _event(self, data: Event, protocol: WireProtocol) -> bytes:
        return event(data, data.get("type", "error") if protocol.named_events else None)

    def _logprobs(self, entry: Entry, completion: Completion, asked: Asked) -> list[Event] | None:
        """The sampled tokens with their log-probs in OpenAI's format, which has no ids."""
        if not asked.logprobs:
            return None
        ids, logprobs = entry.session.sampled_of(completion.turn)
        tokenizer = entry.session.family.tokenizer
        texts = [tokenizer.decode([index]) for index in ids]
        return [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, logprobs, strict=True)
        ]

    def _count(self, completion: Completion, protocol: WireProtocol, started: float) -> None:
        add = self._store.metrics.add
        add("miles_requests_total", protocol=protocol.name, status="200")
        add("miles_request_seconds_total", time.monotonic() - started, protocol=protocol.name)
        add("miles_turns_total", finish_reason=completion.finish_reason.value)
        add("miles_prompt_tokens_total", completion.prompt_tokens)
        add("miles_cached_tokens_total", completion.cached_tokens)
        add("miles_sampled_tokens_total", completion.num_tokens)

    def _client_gone(self) -> None:
        self._store.metrics.add("miles_clients_gone_total")


def as_refused(error: Exception) -> Refused:
    """What a client is told about `error`. An unexpected one is logged, and its text is not shown."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, MilesError):
        return refusal(error)
    _log.error("a request failed", exc_info=error)
    return Refused(500, "the server failed; its log has the reason")
