"""Options of the family `chatml`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ChatMLOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    open_turn: Literal["refuse", "close"] = "refuse"
    """What going on after a turn without <|im_end|> does (it ended at a stop string): refuse it, or write the missing
    <|im_end|> as environment text, which is never trained. Turns cut off by length can never be extended."""
