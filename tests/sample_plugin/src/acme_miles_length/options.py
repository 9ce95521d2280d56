"""Options of this distribution's capabilities."""

from pydantic import BaseModel, ConfigDict, PositiveInt


class LengthOptions(BaseModel):
    """Where the reward is highest."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    target_chars: PositiveInt = 20
    """Length of the best answer, in characters."""
