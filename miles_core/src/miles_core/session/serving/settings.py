"""How a session server behaves; plain values, decided once."""

from __future__ import annotations

from dataclasses import dataclass, field

from miles_core.session.leaves import Picker, drop_retries
from miles_core.session.serving.asked import AgentSampling
from miles_core.types import SamplingParams

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    model: str = "policy"
    """Name under which the policy is listed and answers."""
    family: str = ""
    """Name by which a run-file picks the token family, for the metrics; empty where nobody told."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=4096))
    """Of sessions that are created without sampling of their own."""
    agent_sampling: AgentSampling = "honour"
    """Whose temperature, top-p, top-k, min-p and seed count."""
    picker: Picker = drop_retries
    """Chooses among the leaves of a branching history."""
    idle_timeout_s: float = 3600.0
    """A session nobody used for so long is closed."""
    max_sessions: int = 4096
    max_bytes: int = 4096 * MIB
    """Rows and messages of all sessions, about; beyond, the least recently used idle ones are closed."""
    max_body_bytes: int = 64 * MIB
    """Of one request."""
