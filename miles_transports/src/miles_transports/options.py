"""Options of the transports."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt


class InProcessOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    buckets_in_flight: PositiveInt = 2
    """Buckets copied for an engine and not yet taken by it; bounds the extra memory of a publish."""


class BroadcastOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address of the driver's host as trainer and engines reach it; the meeting point binds a free port on it."""
    timeout_s: PositiveFloat = 300.0
    """Seconds one side waits for the other's next bucket, the trainer's export of it included."""
    wire: Literal["auto", "gloo", "nccl"] = "auto"
    """nccl needs a GPU of its own for each party; auto takes it where that holds, else gloo through host memory."""
