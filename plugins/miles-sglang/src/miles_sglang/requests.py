"""What a request must be before a server sees it. Some of it would end the whole server: an id outside the vocabulary
does, and so does min-p in deterministic mode."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from miles_core.errors import EngineError
from miles_core.kinds.engine import GenerateRequest
from miles_core.types import SamplingParams
from miles_sglang.checkpoint import Checkpoint

Problem = tuple[str, str, str, str | None]
"""Message, expected, found, do."""


def check_request(
    request: GenerateRequest, *, checkpoint: Checkpoint, context: int, routes: bool, deterministic: bool, where: str
) -> None:
    """Verify that a request can be served.

    Raises:
        EngineError: naming the first thing that cannot.
    """
    found = _prompt_problem(request.token_ids, checkpoint.vocabulary, context)
    found = found or _params_problem(request.params, checkpoint.vocabulary)
    if found is None and request.params.min_p > 0 and deterministic:
        found = (
            "`min_p` is not available in deterministic mode",
            "min_p: 0",
            str(request.params.min_p),
            "set engine.deterministic: false, or rollout.sampling.min_p: 0",
        )
    if found is None and request.routes and not routes:
        found = (
            "expert routes were asked for",
            "an engine started with routes on, and a mixture of experts",
            "neither" if checkpoint.moe_layers is None else "routes off",
            "set rollout.routes",
        )
    if found is not None:
        message, expected, seen, do = found
        raise EngineError(f"request {request.request_id}: {message}", expected=expected, found=seen, where=where, do=do)


def output_limit(request: GenerateRequest, context: int) -> int:
    """Tokens of output at most: `max_tokens`, or what the context leaves."""
    return min(request.params.max_tokens, context - len(request.token_ids))


def seed_of(request: GenerateRequest, engine_seed: int, index: int, arrival: int) -> int:
    """The request's seed, else one from the engine's seed and the arrival number; 63 bits, as the server takes."""
    own = request.params.seed
    text = f"{engine_seed}|{index}|{arrival}" if own is None else str(own)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def rank_of(session_id: str, ranks: int) -> int | None:
    """The data-parallel rank that serves a session: a function of its id, so that all its turns find their prefix."""
    if ranks == 1:
        return None
    return int.from_bytes(hashlib.blake2b(session_id.encode(), digest_size=8).digest(), "little") % ranks


def _prompt_problem(token_ids: Sequence[int], vocabulary: int, context: int) -> Problem | None:
    if not token_ids:
        return "the prompt is empty", "at least one token id", "none", "begin with the tokenizer's BOS token"
    if len(token_ids) >= context:
        return (
            "the prompt does not fit the context",
            f"fewer than {context} tokens, to leave room for an answer",
            f"{len(token_ids)} tokens",
            "shorten the prompt or raise the context length; nothing is cut silently",
        )
    outside = next((i for i, token in enumerate(token_ids) if not 0 <= token < vocabulary), None)
    if outside is not None:
        return (
            f"token {outside} of the prompt is outside the vocabulary",
            f"ids from 0 to {vocabulary - 1}",
            f"id {token_ids[outside]}",
            "use the tokenizer of the served checkpoint",
        )
    return None


def _params_problem(params: SamplingParams, vocabulary: int) -> Problem | None:
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
