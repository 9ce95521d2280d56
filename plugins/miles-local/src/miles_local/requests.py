"""What a request must be before the engine takes it: nothing is truncated or replaced silently."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_core.errors import EngineError
from miles_core.kinds.engine import GenerateRequest
from miles_core.types import SamplingParams


def check_request(request: GenerateRequest, *, vocab_size: int, context: int, routes: bool, where: str) -> None:
    """Verify that a request can be served.

    Args:
        routes: The engine records expert routes.

    Raises:
        EngineError: naming the first thing that cannot.
    """
    found = _prompt_problem(request.token_ids, vocab_size, context) or _params_problem(request.params, vocab_size)
    if request.routes and not routes:
        found = ("expert routes were asked for", "EngineContext.routes", "an engine that records none", None)
    if found is not None:
        message, expected, seen, do = found
        raise EngineError(f"request {request.request_id}: {message}", expected=expected, found=seen, where=where, do=do)


def row_limit(request: GenerateRequest, context: int) -> int:
    """Tokens of the row at which it ends by length: prompt and `max_tokens`, or the context."""
    return min(len(request.token_ids) + request.params.max_tokens, context)


Problem = tuple[str, str, str, str | None]
"""Message, expected, found, do."""


def _prompt_problem(token_ids: Sequence[int], vocab_size: int, context: int) -> Problem | None:
    if not token_ids:
        return "the prompt is empty", "at least one token id", "none", "begin with the tokenizer's BOS token"
    if len(token_ids) >= context:
        return (
            "the prompt does not fit the context",
            f"fewer than {context} tokens, to leave room for an answer",
            f"{len(token_ids)} tokens",
            "shorten the prompt or raise the context length; nothing is cut silently",
        )
    outside = next((i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size), None)
    if outside is not None:
        return (
            f"token {outside} of the prompt is outside the vocabulary",
            f"ids from 0 to {vocab_size - 1}",
            f"id {token_ids[outside]}",
            "use the tokenizer of the served checkpoint",
        )
    return None


def _params_problem(params: SamplingParams, vocab_size: int) -> Problem | None:
    checks = (
        ("temperature", math.isfinite(params.temperature) and params.temperature >= 0, "a finite number from 0"),
        ("top_p", 0 < params.top_p <= 1, "above 0, at most 1"),
        ("top_k", params.top_k >= 0, "0 (off) or more"),
        ("min_p", 0 <= params.min_p <= 1, "from 0 to 1"),
        ("max_tokens", params.max_tokens >= 1, "1 or more"),
        ("stop", all(params.stop), "strings that are not empty"),
        ("stop_token_ids", all(0 <= token < vocab_size for token in params.stop_token_ids), f"ids below {vocab_size}"),
    )
    for name, good, expected in checks:
        if not good:
            return f"`{name}` is out of range", expected, repr(getattr(params, name)), None
    return None
