"""Options of the tracker `wandb`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class WandbOptions(BaseModel):
    """Where the run appears. Who you are comes from `wandb login`, never from a run-file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    project: str = "miles"
    """Project the run belongs to."""
    entity: str | None = None
    """User or team; null takes the default of your login."""
    group: str | None = None
    """Groups runs in the project, for instance the seeds of one experiment."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline writes below the run directory, for `wandb sync` later; disabled sends and writes nothing."""
