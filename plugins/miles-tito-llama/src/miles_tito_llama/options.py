"""Options of the families of this distribution."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class LlamaOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    date: str = "26 Jul 2024"
    """The date in the system message; the default is the published template's, which knows no clock."""
    tools_in: Literal["user", "system"] = "user"
    """Where tools are described: in the first user message, as the template does by default, or in the system
    message."""
    open_turn: Literal["refuse", "close"] = "refuse"
    """What going on after a turn without its closing token does (it ended at a stop string): refuse it, or write the
    missing token as environment text, which is never trained. Turns cut off by length can never be extended."""
