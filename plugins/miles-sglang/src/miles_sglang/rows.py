"""One request as the engine sees it: what was sampled so far, and which weight version made each token.

A server says for certain which version sampled a token only in its last event. Before the first update in a request's
life there is only one answer, so tokens pass on at once; afterwards they are held until the last event tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_core.errors import EngineError
from miles_core.kinds.engine import Chunk, GenerateRequest
from miles_core.routing import codec
from miles_core.types import FinishReason
from miles_sglang.checkpoint import Checkpoint

Ending = Literal["retract", "abort"]

NO_SGLANG = "look for a proxy in between, or another program or release at this address"
FORMS = {"finish_reason": dict, "weight_versions": list, "cached_tokens": int}
"""Of what every event says about itself, where it says it."""
ROUNDING = 1e-3
"""By how much a log-prob may be above 0: half precision rounds, and no more."""


@dataclass(slots=True, eq=False)
class Row:
    """A request between its submission and its last chunk; it may take several attempts at a server."""

    request: GenerateRequest
    seed: int
    limit: int
    """Tokens of output at most."""
    rank: int | None
    """Data-parallel rank of its session; None where there is one."""
    ids: list[int] = field(default_factory=list)
    """Sampled, with known versions."""
    routes: codec.Routes | None = None
    cached: int = 0
    ending: Ending | None = None
    """What the engine aborted the present attempt for."""
    rid: str = ""
    """Of the present attempt."""
    barren: int = 0
    """Attempts, one after the other, that ended without a token though nobody here ended them."""


def payload(row: Row, *, checkpoint: Checkpoint, epoch: int, stream_interval: int) -> dict[str, Any]:
    """Body of POST /generate for what is left of a row. Every sampling parameter is spelt out: the checkpoint's
    generation_config must not fill one in."""
    params = row.request.params
    body: dict[str, Any] = {
        "rid": row.rid,
        "input_ids": list(row.request.token_ids) + row.ids,
        "sampling_params": {
            "max_new_tokens": row.limit - len(row.ids),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            # With it a server stops at nothing; without it also at the checkpoint's own end tokens.
            "ignore_eos": not checkpoint.stops <= set(params.stop_token_ids),
            "min_new_tokens": 0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": row.seed,
            "stream_interval": stream_interval,
        },
        "return_logprob": True,
        "stream": True,
        # Prefixes of other weights live under other keys: none can be continued, not even one that a request frozen
        # in place leaves behind.
        "extra_key": str(epoch),
    }
    if row.request.routes:
        body["return_routed_experts"] = True
    if row.rank is not None:
        body["routed_dp_rank"] = row.rank
    return body


@dataclass(slots=True)
class Piece:
    """Tokens of one event."""

    ids: list[int]
    logprobs: list[float]
    meta: dict[str, Any]

    @property
    def finish(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.meta.get("finish_reason")
        return found


def parse(event: dict[str, Any], where: str) -> Piece:
    """Read an event.

    Raises:
        EngineError: it has not the form of one, ids and log-probs do not belong together, or a log-prob is not finite.
    """
    try:
        ids, meta = event.get("output_ids") or [], event["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        logprobs = [entry[0] for entry in entries]
        named = [entry[1] for entry in entries]
        for name, form in FORMS.items():
            if meta.get(name) is not None and not isinstance(meta[name], form):
                raise TypeError(f"{name} is {meta[name]!r}")
        if not isinstance(ids, list):
            raise TypeError(f"output_ids is {ids!r}")
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise EngineError(
            "an event of the server has not the form of one",
            expected="output_ids, and meta_info with output_token_logprobs",
            found=f"{type(error).__name__}: {error}, in {event!r}"[:300],
            where=where,
            do=NO_SGLANG,
        ) from error
    if named != ids:
        raise EngineError(
            "the server's log-probs are not those of its tokens",
            expected=f"{len(ids)} entries for ids {ids[:8]}",
            found=f"{len(entries)} entries for ids {named[:8]}",
            where=where,
            do="start the server with --incremental-streaming-output",
        )
    # The server writes null for what is not finite, since JSON has no word for it.
    if any(isinstance(value, bool) or not isinstance(value, int | float | None) for value in logprobs):
        raise EngineError(
            "the server's log-probs are no numbers", found=repr(logprobs)[:300], where=where, do=NO_SGLANG
        )
    if None in logprobs or not all(map(math.isfinite, logprobs)):
        at = next(i for i, value in enumerate(logprobs) if value is None or not math.isfinite(value))
        raise EngineError(
            "the model's logits are not finite",
            expected="finite log-probs",
            found=f"{logprobs[at]} for id {ids[at]}",
            where=where,
            do="look at the last training steps: the published weights have diverged",
        )
    if logprobs and max(logprobs) > ROUNDING:
        raise EngineError(
            "the server's log-probs are none",
            expected="at most 0",
            found=f"{max(logprobs)}",
            where=where,
            do=NO_SGLANG,
        )
    if logprobs and max(logprobs) > 0.0:  # a log-softmax rounds to slightly above 0 where one token has all the mass
        logprobs = [min(value, 0.0) for value in logprobs]
    return Piece(ids, logprobs, meta)


def cut_at_stop(piece: Piece, stop_token_ids: Sequence[int]) -> bool:
    """Drop what was sampled after the first stop token; True when the piece now ends with one."""
    if not stop_token_ids:
        return False
    at = next((i for i, token in enumerate(piece.ids) if token in stop_token_ids), None)
    if at is None:
        return False
    del piece.ids[at + 1 :], piece.logprobs[at + 1 :]
    return True


def stretches(
    meta: dict[str, Any],
    already: int,
    count: int,
    current: int,
    number: Callable[[object], int],
    where: str,
    *,
    cut_off: bool = False,
) -> Iterator[tuple[int, int]]:
    """(tokens, version) in order for the last `count` tokens of an attempt.

    Args:
        meta: Of the attempt's last event.
        already: Tokens of the attempt before those.
        current: The version when the server gives no spans: such servers are never updated under a request.
        number: Of a version by the name the server gives it; refuses one that nobody published.
        cut_off: The attempt was aborted. Its spans may end early; tokens beyond them are not counted, so they are
            sampled again or were never there.

    Raises:
        EngineError: the spans do not cover the tokens, or are none.
    """
    spans = meta.get("weight_versions")
    if spans is None:
        yield count, current
        return
    at, end = already, already + count
    for span in spans:
        try:
            first, stop, name = int(span["start"]), min(int(span["end"]), end), span["version"]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                "the server's version spans are none",
                expected="version, start and end of each",
                found=repr(spans)[:300],
                where=where,
                do=NO_SGLANG,
            ) from error
        if stop > at and first <= at:
            yield stop - at, number(name)
            at = stop
    if at < end and not cut_off:
        raise EngineError(
            "the server's version spans do not cover its tokens",
            expected=f"{end} tokens",
            found=str(spans),
            where=where,
            do=NO_SGLANG,
        )


def routes_of(row: Row, meta: dict[str, Any], checkpoint: Checkpoint, where: str) -> codec.Routes | None:
    """Routes of an attempt's prompt and output joined to those of the attempts before; what was known where it brought
    none.

    Raises:
        EngineError: they are not those of the row's tokens and the checkpoint's layers.
    """
    encoded = meta.get("routed_experts")
    if encoded is None:
        return row.routes
    counts = meta.get("prompt_tokens"), meta.get("completion_tokens")
    rows = sum(count for count in counts if isinstance(count, int)) - 1  # also what came after a stop token
    wanted = len(row.request.token_ids) + len(row.ids) - 1
    if rows < wanted or not isinstance(encoded, str):
        raise EngineError(
            "the server's routes are not those of its tokens",
            expected=f"base64 of {wanted} rows",
            found=f"{type(encoded).__name__} of {rows} rows",
            where=where,
            do=NO_SGLANG,
        )
    moe = checkpoint.moe_layers or ()
    later = codec.decode(
        encoded,
        rows=rows,
        layers=checkpoint.layers,
        keep_layers=None if len(moe) == checkpoint.layers else moe,
    )
    kept = 0 if row.routes is None else row.routes.shape[0]
    return codec.extend(row.routes, kept, later[:wanted])


def finish_of(piece: Piece, where: str) -> FinishReason:
    """What ended an attempt.

    Raises:
        EngineError: the server ended it for a fault of its own.
    """
    finish = piece.finish or {}
    kind = finish.get("type")
    if kind == "length":
        return FinishReason.LENGTH
    if kind == "stop" and finish.get("matched") != "NaN happened":
        return FinishReason.STOP
    if kind == "abort" and finish.get("status_code") is None:
        return FinishReason.ABORT
    raise EngineError(
        "the server ended a request with an error",
        expected="stop or length",
        found=str(finish),
        where=where,
        do="read the server's log",
    )


def last_chunk(version: int, reason: FinishReason, row: Row) -> Chunk:
    """The chunk that carries the finish reason and no token."""
    return Chunk(
        token_ids=(),
        logprobs=(),
        weight_version=version,
        finish_reason=reason,
        routes=row.routes if row.request.routes else None,
        cached_tokens=min(row.cached, len(row.request.token_ids)),
    )
