"""A request for a turn, whichever protocol it came by, and how its sampling fields are combined with the session's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from miles_core.session.serving.problems import Refused
from miles_core.types import Message, SamplingParams, Tool

AgentSampling = Literal["honour", "override"]
"""Whose sampling counts: the agent's, as in any server, or the session's, as a training run needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    stream: bool = False
    usage: bool = False
    """Whether to send token counts at the end of a stream."""
    logprobs: bool = False
    """Whether to return the log-probs of the sampled tokens."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `SamplingParams` that the agent set."""
    model: str = ""


def merge_sampling(
    own: SamplingParams, asked: Mapping[str, Any], mode: AgentSampling
) -> tuple[SamplingParams, dict[str, Any]]:
    """How a turn is sampled, and what the agent asked for without getting it.

    In either mode `max_tokens` can only be lowered, and stop strings can only be added: they end a turn, and do not
    change the distribution of its tokens.
    """
    changes: dict[str, Any] = {}
    if "max_tokens" in asked:
        changes["max_tokens"] = min(own.max_tokens, asked["max_tokens"])
    if asked.get("stop"):
        changes["stop"] = (*own.stop, *(text for text in asked["stop"] if text not in own.stop))
    rest = {name: value for name, value in asked.items() if name not in ("max_tokens", "stop")}
    if mode == "honour":
        return replace(own, **changes, **rest), {}
    ignored = {name: value for name, value in rest.items() if getattr(own, name) != value}
    return replace(own, **changes), ignored


def check_temperature(wanted: float, found: float | None) -> None:
    """Check that a continued history keeps its temperature, since a row is trained under one temperature.

    Args:
        found: Of the turn that is extended; None where there is none.

    Raises:
        Refused: 400 naming the field.
    """
    if found is not None and wanted != found:
        raise Refused(
            400,
            f"the session's earlier turns were sampled at {found:g}, and a row has one temperature",
            param="temperature",
        )
