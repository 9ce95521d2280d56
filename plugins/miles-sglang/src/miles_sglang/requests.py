"""What of a request the server decides otherwise: what would end it, its output's limit, its seed, its rank."""

from __future__ import annotations

import hashlib

from miles_core.kinds.engine import GenerateRequest
from miles_core.requests import Problem
from miles_sglang.checkpoint import Checkpoint


def own_problem(
    request: GenerateRequest, checkpoint: Checkpoint, *, routes: bool, deterministic: bool
) -> Problem | None:
    """What this engine cannot serve beyond what none could. Min-p in deterministic mode would end the whole server.

    Args:
        routes: The server records expert routes.
    """
    if request.params.min_p > 0 and deterministic:
        return (
            "`min_p` is not available in deterministic mode",
            "min_p: 0",
            str(request.params.min_p),
            "set engine.deterministic: false, or rollout.sampling.min_p: 0",
        )
    if request.routes and (not routes or checkpoint.moe_layers is None):
        return (
            "expert routes were asked for",
            "an engine started with routes on, and a mixture of experts",
            "neither" if checkpoint.moe_layers is None else "routes off",
            "set rollout.routes",
        )
    return None


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
