"""One submission of a row to the server, from POST to the end of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

from miles_core.errors import EngineError
from miles_core.kinds.engine import Chunk
from miles_core.types import FinishReason
from miles_sglang.checkpoint import Checkpoint
from miles_sglang.client import ServerGone, without_password
from miles_sglang.rows import Piece, Row, cut_at_stop, finish_of, last_chunk, parse, payload, routes_of, stretches
from miles_sglang.server import Server

BARREN = 8
"""Attempts without a token after which a request gives up."""
REST_S, LONGEST_REST_S = 0.05, 5.0
"""Half of the first rest between two of them, each twice as long as the one before; and the longest."""


class Attempt:
    """Emits a row's chunks while its server serves it.

    Args:
        adapter: Name of the LoRA adapter to sample through.
        number: Of a version by the name the server gives it.
        epoch: Counts changes of the weights; one that differs from the first means that tokens must wait for the spans.
    """

    def __init__(
        self,
        row: Row,
        server: Server,
        checkpoint: Checkpoint,
        epoch: Callable[[], int],
        number: Callable[[object], int],
        interval: int,
        where: str,
        *,
        adapter: str | None = None,
    ) -> None:
        self._row, self._server, self._checkpoint = row, server, checkpoint
        self._epoch, self._number, self._interval, self._where = epoch, number, interval, where
        self._adapter = adapter
        self._began = epoch()
        self._prior = len(row.ids)
        self._held = Piece([], [], {})
        self._taken_back = False  # this engine ended it, and it goes on later
        self._stopped = False  # a stop token came that the server does not stop at

    async def run(self, version: int, emit: Callable[[Chunk], None]) -> bool:
        """Submit the row and emit its chunks as they come.

        Args:
            version: Served now.

        Returns:
            True when the last chunk had a finish reason; False when the row was retracted.

        Raises:
            ServerGone: the server died; the row holds the tokens that are certain.
            EngineError: the server's answer makes no sense.
        """
        row = self._row
        body = payload(row, checkpoint=self._checkpoint, epoch=self._began, stream_interval=self._interval)
        if self._adapter is not None:
            body["lora_path"] = self._adapter  # the name it was loaded under, whatever the key says
        last: list[Chunk] | None = None
        try:
            # Read to its end, a few bytes after the last event: only then is the connection there for the next one.
            async with aclosing(self._server.client.stream(body)) as events:
                async for event in events:
                    piece = parse(event, self._where)
                    chunks = self._take(piece, version)
                    if piece.finish is not None:
                        last = chunks
                        continue
                    for chunk in chunks:
                        emit(chunk)
                    if self._stopped:
                        await self._abort(row.rid)
        except ServerGone:
            if last is None:
                raise
        finally:
            rid, row.rid = row.rid, ""
            if last is None:
                await self._abort(rid)
        if last is None:
            raise EngineError(
                "the server's stream ended without a finish reason",
                expected="one in the last event",
                where=self._where,
                do="read the server's log; look for a proxy in between",
            )
        for chunk in last:
            emit(chunk)
        return bool(last) and last[-1].finish_reason is not None

    async def rest(self) -> None:
        """Before the row is sent again: wait the longer, the more attempts brought nothing.

        Raises:
            EngineError: too many did.
        """
        row = self._row
        if self._taken_back or len(row.ids) > self._prior:
            row.barren = 0
            return
        row.barren += 1
        if row.barren > BARREN:
            raise EngineError(
                "the server ends a request again and again without a token",
                expected="tokens, or a reason",
                found=f"{row.barren} attempts that were aborted or broke",
                where=f"{self._where} at {without_password(self._server.client.url)}",
                do="read the server's log; look for somebody else who aborts its requests, or a proxy in between",
            )
        await asyncio.sleep(min(REST_S * 2**row.barren, LONGEST_REST_S))

    def _take(self, piece: Piece, version: int) -> list[Chunk]:
        row = self._row
        self._judge(piece.ids)
        if not row.ids and not self._held.ids:
            row.cached = int(piece.meta.get("cached_tokens") or 0)
        if not self._stopped:
            self._stopped = cut_at_stop(piece, row.request.params.stop_token_ids)
            self._held.ids += piece.ids
            self._held.logprobs += piece.logprobs
        if len(row.ids) + len(self._held.ids) > row.limit:
            raise self._strange("too long", f"at most {row.limit} tokens", f"{len(row.ids) + len(self._held.ids)}")
        if piece.finish is not None:
            return self._finish(piece, version)
        if self._epoch() != self._began or self._stopped:
            return []  # sampled by either version, or the last token: the last event tells
        return self._release([(len(self._held.ids), version)])

    def _judge(self, ids: list[int]) -> None:
        size = self._checkpoint.vocabulary
        if any(not isinstance(token, int) or not 0 <= token < size for token in ids):
            raise self._strange("token ids", f"ids below {size}", repr(ids)[:200])

    def _strange(self, what: str, expected: str, found: str) -> EngineError:
        return EngineError(
            f"the server's answer is not what was asked for: {what}",
            expected=expected,
            found=found,
            where=self._where,
            do="look for another model, or a proxy, at this address",
        )

    def _finish(self, piece: Piece, version: int) -> list[Chunk]:
        row = self._row
        reason = FinishReason.STOP if self._stopped else finish_of(piece, self._where)
        cut_off = reason is FinishReason.ABORT
        if reason is FinishReason.LENGTH and len(row.ids) + len(self._held.ids) < row.limit:
            raise self._strange("ended early", f"{row.limit} tokens", f"{len(row.ids) + len(self._held.ids)}")
        already = len(row.ids) - self._prior
        count, number = len(self._held.ids), self._number
        if piece.meta.get("weight_versions") is None and self._server.dialect.has("version-spans"):
            if count and not cut_off:
                raise self._strange("nothing says which weights made its tokens", "weight_versions", "none")
            count = 0  # they are sampled again
        spans = stretches(piece.meta, already, count, version, number, self._where, cut_off=cut_off)
        chunks = self._release(list(spans))
        row.routes = routes_of(row, piece.meta, self._checkpoint, self._where)
        if cut_off and row.ending != "abort":
            # Taken back, or ended by somebody else who may use the server: either way it goes on from what it has.
            self._taken_back, row.ending = row.ending is not None, None
            return chunks
        at = chunks[-1].weight_version if chunks else version
        return [*chunks, last_chunk(at, reason, row)]

    def _release(self, spans: list[tuple[int, int]]) -> list[Chunk]:
        """Hand out held tokens, as (tokens, version) in order."""
        held, self._held = self._held, Piece([], [], {})
        chunks: list[Chunk] = []
        at = 0
        for count, version in spans:
            if count:
                ids, logprobs = held.ids[at : at + count], held.logprobs[at : at + count]
                self._row.ids += ids
                chunks.append(Chunk(token_ids=tuple(ids), logprobs=tuple(logprobs), weight_version=version))
                at += count
        return chunks

    async def _abort(self, rid: str) -> None:
        """The reader has gone, or the stream has: the server must not go on."""
        with suppress(EngineError):  # a server that is gone samples nothing
            await self._server.client.post("/abort_request", {"rid": rid}, timeout_s=10)
