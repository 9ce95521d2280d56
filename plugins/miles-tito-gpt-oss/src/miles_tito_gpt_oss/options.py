"""Options of the family `gpt-oss`."""

from __future__ import annotations

from typing import Literal

from miles_core.tito.options import AlwaysThinks


class GptOssOptions(AlwaysThinks):
    reasoning_effort: Literal["low", "medium", "high"] = "medium"
    """How long the model thinks; written into the system message."""
    date: str | None = None
    """The current date in the system message, as YYYY-MM-DD. None leaves the line out: a row that changes at midnight
    is not reproducible."""
