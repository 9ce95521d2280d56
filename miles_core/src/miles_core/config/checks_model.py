"""What must hold between a run-file and the checkpoint that it trains: its context, and its experts."""

from __future__ import annotations

from miles_core.config.checks import Check, Setup
from miles_core.config.model_folder import language_part
from miles_core.numerics.rotary import steady_tokens

PROBE_TOKENS = 52
"""Prompt and output of one probe; `weights.proof` makes them."""


def context_of(s: Setup) -> int | None:
    """The most tokens of prompt and output together, as far as it is known."""
    return s.spec.model.context_length or (s.model.context_length if s.model else None)


def _probe_room(s: Setup) -> str | None:
    context = context_of(s)
    if s.spec.weights.probes and context is not None and context < PROBE_TOKENS:
        return f"a probe takes {PROBE_TOKENS} tokens of a context of {context}"
    return None


def _room(s: Setup) -> str | None:
    context, longest = context_of(s), s.spec.rollout.sampling.max_tokens
    if context is not None and longest >= context:
        return f"{longest} sampled tokens leave no room for a prompt in a context of {context}"
    return None


def _context_limit(s: Setup) -> str | None:
    wanted, limit = s.spec.model.context_length, s.model.context_length if s.model else None
    if wanted is not None and limit is not None and wanted > limit:
        return f"the checkpoint was made for at most {limit} tokens"
    return None


def _one_rotation(s: Setup) -> str | None:
    context = context_of(s)
    steady = steady_tokens(language_part(s.model.config)) if s.model else None
    if s.model and context and steady and steady < min(context, s.model.context_length or context):
        return f"beyond {steady} tokens, longrope rotates a whole batch otherwise than each of its rows alone"
    return None


def _routes_of_dense(s: Setup) -> str | None:
    if s.spec.rollout.routes != "off" and s.model is not None and s.model.experts is None:
        return f"{s.model.architecture} is dense: it has no experts to record or replay"
    return None


def _routes_recorded(s: Setup) -> str | None:
    if s.spec.rollout.routes != "off" and not s.provides("engine", "records-routes"):
        return f"the engine `{s.spec.engine.use}` does not record experts"
    return None


def _routes_replayed(s: Setup) -> str | None:
    if s.spec.rollout.routes != "off" and not s.provides("backend", "replays-routes"):
        return f"the backend `{s.spec.backend.use}` can neither compare nor replay experts"
    return None


MODEL_CHECKS: tuple[Check, ...] = (
    Check(
        id="MIL503",
        about="Routes belong to models with experts.",
        path="rollout.routes",
        find=_routes_of_dense,
        do="set rollout.routes: off",
        reads=("model",),
    ),
    Check(
        id="MIL504",
        about="Routes need an engine that records them.",
        path="rollout.routes",
        find=_routes_recorded,
        do="set rollout.routes: off, or pick an engine that provides `records-routes`",
        kinds=("engine",),
    ),
    Check(
        id="MIL505",
        about="Routes need a backend that compares and replays them.",
        path="rollout.routes",
        find=_routes_replayed,
        do="set rollout.routes: off, or pick a backend that provides `replays-routes`",
        kinds=("backend",),
    ),
    Check(
        id="MIL507",
        about="Probes fit into the context.",
        path="weights.probes",
        find=_probe_room,
        do="set weights.probes: 0, or raise model.context_length",
        reads=("model",),
    ),
    Check(
        id="MIL601",
        about="The context holds a prompt besides the sampled tokens.",
        path="rollout.sampling.max_tokens",
        find=_room,
        do="lower it, or raise model.context_length",
        reads=("model",),
    ),
    Check(
        id="MIL603",
        about="The context is within the checkpoint's own limit.",
        path="model.context_length",
        find=_context_limit,
        do="set it to the checkpoint's limit at most, or to null for exactly that",
    ),
    Check(
        id="MIL604",
        about="Within the context, a token is rotated alike whatever else is in its batch.",
        path="model.context_length",
        find=_one_rotation,
        do="set it to original_max_position_embeddings of config.json at most",
        reads=("model",),
    ),
)
