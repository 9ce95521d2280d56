"""Options of core's own capabilities; pydantic only, one small model per capability that takes options.

Function kinds receive the fields as keyword arguments, class kinds receive the model itself.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Options(BaseModel):
    """Base of core's option models: immutable, unknown keys refused, field docstrings become descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


# --- advantages -----------------------------------------------------------------------------------------------------


class GrpoOptions(Options):
    """Group-relative advantage (arXiv 2402.03300)."""

    std: bool = True
    """Divide by the group's standard deviation; false keeps the centred reward."""


class ReinforcePPOptions(Options):
    """REINFORCE++ (arXiv 2501.03262): discounted returns, normalised over the whole batch."""

    gamma: Fraction = 1.0
    """Discount per token of the reward that arrives at the end of the response."""


class GaeOptions(Options):
    """Generalised advantage estimation (arXiv 1506.02438), per token."""

    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Bias-variance dial: 1 is Monte Carlo, 0 is one-step."""
    normalize: bool = True
    """Normalise the advantages to mean 0 and standard deviation 1 over the trained tokens of the batch."""


# --- losses ---------------------------------------------------------------------------------------------------------


class PpoClipOptions(Options):
    """Clipped surrogate (arXiv 1707.06347), with separate bounds and an optional dual clip."""

    low: Fraction = 0.2
    """The ratio is clipped from below at 1 - low."""
    high: PositiveFloat | None = None
    """The ratio is clipped from above at 1 + high; null takes `low`."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bounds the loss of negative advantages at this multiple (arXiv 1912.09729); null is off."""


class GspoOptions(Options):
    """Sequence-level ratio (arXiv 2507.18071); its bounds are far smaller than a token ratio's."""

    low: Fraction = 3e-4
    """The sequence ratio is clipped from below at 1 - low."""
    high: PositiveFloat = 4e-4
    """The sequence ratio is clipped from above at 1 + high."""


class CispoOptions(Options):
    """Clipped importance weight that keeps every token's gradient (arXiv 2506.13585)."""

    low: Fraction = 1.0
    """The weight is clipped from below at 1 - low; 1 leaves the lower side open."""
    high: PositiveFloat = 4.0
    """The weight is clipped from above at 1 + high."""


# --- corrections ----------------------------------------------------------------------------------------------------


class RatioInterval(Options):
    """Interval of the ratio between trainer and rollout probability of a sampled token."""

    low: NonNegativeFloat = 0.0
    """Smallest ratio let through unchanged."""
    high: PositiveFloat = 2.0
    """Largest ratio let through unchanged."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self


class TisOptions(RatioInterval):
    """Truncated importance sampling: the ratio, clamped to the interval."""


class ClipOrPopOptions(RatioInterval):
    """In the interval the ratio passes; outside, the token leaves the gradient."""


class ImportanceOptions(RatioInterval):
    """Any level of ratio with any treatment of what leaves the interval."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio is judged: the token's, its sequence's product, or that product's geometric mean."""
    action: Literal["truncate", "mask", "veto"] = "truncate"
    """truncate: clamp the ratio; mask: 0 outside the interval; veto: drop sequences with an outlier, else weight 1."""


# --- rollout --------------------------------------------------------------------------------------------------------


class NonzeroStdOptions(Options):
    """Dynamic sampling (arXiv 2503.14476): drops groups whose rewards carry no signal."""

    min_std: NonNegativeFloat = 0.0
    """Groups whose reward standard deviation is not above this are dropped."""


class HttpRewardOptions(Options):
    """A reward served over HTTP: one POST per episode, JSON in, JSON out."""

    url: str
    """Where to POST ``{prompt, messages, response, label, truncated, metadata}``."""
    timeout_s: PositiveFloat = 20.0
    """Deadline of one request; keep it below `rollout.reward_timeout_s`."""
    retries: NonNegativeInt = 2
    """Times a refused connection or a 5xx answer is tried again."""


# --- data buffers ---------------------------------------------------------------------------------------------------


class BoundedBufferOptions(Options):
    """A queue of finished groups."""

    capacity_factor: PositiveFloat = 2.0
    """Groups held at most, as a multiple of `schedule.groups_per_step`."""


# --- environments -----------------------------------------------------------------------------------------------------


class AgentOptions(Options):
    """An agent program against the served session."""

    command: Annotated[str, Field(min_length=1)] | None = None
    """Command line of the agent, split like a shell does; it gets the task as JSON on standard input."""
    function: Annotated[str, Field(pattern=r"^.+:[A-Za-z_][\w.]*$")] | None = None
    """Instead of a command: an async Python function, module:attr or /absolute/file.py:fn, of one `Task`."""
    cwd: str | None = None
    """Folder the command runs in; null is that of the run."""
    env: dict[str, str] = {}
    """Environment variables of the command beside the session's; nothing secret is inherited."""
    host: str = "127.0.0.1"
    """Address the session server listens on; a sandbox elsewhere needs one it can reach."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port the session server listens on; 0 takes a free one."""
    public_url: str | None = None
    """URL under which agents reach the server, where it is not the address it listens on."""

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if (self.command is None) == (self.function is None):
            raise ValueError("give `command` or `function`, and not both")
        return self
