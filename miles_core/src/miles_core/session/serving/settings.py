"""The settings of a session server: plain values that do not change."""

from __future__ import annotations

from dataclasses import dataclass, field

from miles_core.session.leaves import Picker, drop_retries
from miles_core.session.serving.asked import AgentSampling
from miles_core.types import SamplingParams

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    model: str = "policy"
    """The name by which the model is listed, and with which it answers."""
    family: str = ""
    """Name by which a run-file picks the token family, for the metrics; empty where nobody told."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=4096))
    """The sampling of sessions that are created without their own."""
    agent_sampling: AgentSampling = "honour"
    """Whose temperature, top-p, top-k, min-p and seed apply."""
    picker: Picker = drop_retries
    """Chooses among the leaves of a branching history."""
    idle_timeout_s: float = 3600.0
    """A session that was not used for so long is closed."""
    max_sessions: int = 4096
    max_bytes: int = 4096 * MIB
    """About how much memory rows and messages of all sessions may take; beyond it, the least recently used idle
    sessions are closed."""
    max_body_bytes: int = 64 * MIB
    """The size of one request."""
