"""One engine call: samples a turn, and checks that the answer is one that can be trained.

An engine that drops the stop token, loses a log-prob or runs past the limit would silently put a wrong row into
training. Such an answer is an EngineError here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_core.errors import EngineError
from miles_core.kinds.engine import Chunk, Engine, GenerateRequest
from miles_core.types import FinishReason
from miles_core.watch import progress, waiting


@dataclass(slots=True)
class Output:
    """The tokens of one turn."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    stretches: list[tuple[int, int]] = field(default_factory=list)
    """(number of tokens, weight version), in order."""
    finish_reason: FinishReason | None = None
    routes: npt.NDArray[np.integer[Any]] | None = None
    cached_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        self.ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.stretches.append((len(chunk.token_ids), chunk.weight_version))
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.routes = chunk.routes
            self.cached_tokens = chunk.cached_tokens


async def generate(
    engine: Engine,
    request: GenerateRequest,
    *,
    engine_name: str,
    on_ids: Callable[[Sequence[int]], None] | None = None,
) -> Output:
    """Run `request` to its end. Cancelling closes the engine's iterator, which aborts the request there.

    Args:
        on_ids: Called with the ids of every accepted chunk, for callers that read along.

    Raises:
        EngineError: the engine failed, or its answer is no valid turn.
    """
    output = Output()
    stream = engine.generate(request)
    try:
        with waiting(f"request {request.request_id}", on=engine_name):
            async for chunk in stream:
                _check_chunk(chunk, output, request, engine_name)
                output.add(chunk)
                if on_ids is not None and chunk.token_ids:
                    on_ids(chunk.token_ids)
                progress()
    except EngineError:
        raise
    except Exception as error:
        # Whatever an engine raises is the engine's failure, not the environment's that happens to await it.
        raise EngineError(
            f"the engine failed while generating: {type(error).__name__}: {error}",
            where=f"{engine_name}, request {request.request_id}",
            do="see the engine's log; the session is unchanged and the turn can be tried again",
        ) from error
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
    _check_end(output, request, engine_name)
    return output


def _check_chunk(chunk: Chunk, output: Output, request: GenerateRequest, name: str) -> None:
    if output.finish_reason is not None:
        raise _invalid("the engine sampled on after it had finished", "no chunk", f"{chunk.token_ids}", request, name)
    if len(chunk.token_ids) != len(chunk.logprobs):
        found = f"{len(chunk.token_ids)} tokens, {len(chunk.logprobs)} log-probs"
        raise _invalid("the engine must give every sampled token its log-prob", "equal counts", found, request, name)
    bad = [value for value in chunk.logprobs if not (math.isfinite(value) and value <= 0.0)]
    if bad:
        raise _invalid("a log-prob is not one", "a finite number of at most 0", f"{bad[0]}", request, name)


def _check_end(output: Output, request: GenerateRequest, name: str) -> None:
    params, ids, reason = request.params, output.ids, output.finish_reason
    if reason is None:
        raise _invalid("the engine stopped without a finish reason", "stop, length or abort", "none", request, name)
    if len(ids) > params.max_tokens:
        raise _invalid("the engine ran past the limit", f"{params.max_tokens} tokens", f"{len(ids)}", request, name)
    if reason is FinishReason.LENGTH and not ids:
        raise _invalid("the engine reports `length` without a token", "at least one token", "none", request, name)
    stops = set(params.stop_token_ids)
    early = next((at for at, token in enumerate(ids[:-1]) if token in stops), None)
    if early is not None:
        found = f"token {ids[early]} at {early} of {len(ids)}"
        raise _invalid("the engine sampled on after a stop token", "the stop token last", found, request, name)
    ended = bool(ids) and ids[-1] in stops
    if reason is FinishReason.STOP and not ended and not (params.stop and ids):
        found = f"row ends with {ids[-3:].tolist()}"
        raise _invalid(
            "the engine reports `stop` but returns no stop token",
            f"one of {sorted(stops)} at the end",
            found,
            request,
            name,
        )
    if request.routes and reason is not FinishReason.ABORT:
        rows = None if output.routes is None else output.routes.shape[0]
        wanted = len(request.token_ids) + len(ids) - 1
        if rows != wanted:
            raise _invalid("routes are on but do not cover the row", f"{wanted} rows", f"{rows}", request, name)


def _invalid(message: str, expected: str, found: str, request: GenerateRequest, name: str) -> EngineError:
    where = f"{name}, request {request.request_id}"
    return EngineError(message, expected=expected, found=found, where=where, do="report it to the engine's author")
