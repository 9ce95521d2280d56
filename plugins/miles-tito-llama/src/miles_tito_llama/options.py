"""Options of the family `llama31`."""

from __future__ import annotations

from typing import Literal

from miles_core.tito.options import FamilyOptions


class LlamaOptions(FamilyOptions):
    date: str = "26 Jul 2024"
    """The date in the system message; the default is that of the published template, which reads no clock."""
    tools_in: Literal["user", "system"] = "user"
    """Where tools are described: in the first user message, as the template does by default, or in the system
    message."""
