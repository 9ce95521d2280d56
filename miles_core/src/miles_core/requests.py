"""What a request must be before an engine takes it: nothing is truncated or replaced silently."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_core.errors import EngineError
from miles_core.kinds.engine import GenerateRequest
from miles_core.types import SamplingParams

Problem = tuple[str, str, str, str | None]
"""Message, expected, found, do."""


def check_request(
    request: GenerateRequest, *, vocabulary: int, context: int, where: str, own: Problem | None = None
) -> None:
    """Verify that a request can be served.

    Args:
        context: Tokens of prompt plus output at most.
        own: What the engine itself found, told after what any engine would refuse.

    Raises:
        EngineError: naming the first thing that cannot.
    """
    found = prompt_problem(request.token_ids, vocabulary, context) or params_problem(request.params, vocabulary) or own
    if found is not None:
        message, expected, seen, do = found
        raise EngineError(f"request {request.request_id}: {message}", expected=expected, found=seen, where=where, do=do)


def prompt_problem(token_ids: Sequence[int], vocabulary: int, context: int) -> Problem | None:
    if not token_ids:
        return "the prompt is empty", "at least one token id", "none", "begin with the tokenizer's BOS token"
    if len(token_ids) >= context:
        return (
            "the prompt does not fit the context",
            f"fewer than {context} tokens, to leave room for an answer",
            f"{len(token_ids)} tokens",
            "shorten the prompt or raise the context length; nothing is cut silently",
        )
    ids = list(token_ids)
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        outside = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary)
        return (
            f"token {outside} of the prompt is outside the vocabulary",
            f"ids from 0 to {vocabulary - 1}",
            f"id {ids[outside]}",
            "use the tokenizer of the served checkpoint",
        )
    return None


def params_problem(params: SamplingParams, vocabulary: int) -> Problem | None:
    checks = (
        ("temperature", math.isfinite(params.temperature) and params.temperature >= 0, "a finite number from 0"),
        ("top_p", 0 < params.top_p <= 1, "above 0, at most 1"),
        ("top_k", params.top_k >= 0, "0 (off) or more"),
        ("min_p", 0 <= params.min_p <= 1, "from 0 to 1"),
        ("max_tokens", params.max_tokens >= 1, "1 or more"),
        ("stop", all(params.stop), "strings that are not empty"),
        ("stop_token_ids", all(0 <= token < vocabulary for token in params.stop_token_ids), f"ids below {vocabulary}"),
    )
    for name, good, expected in checks:
        if not good:
            return f"`{name}` is out of range", expected, repr(getattr(params, name)), None
    return None
