"""Filter: keep or drop a finished, scored group."""

from __future__ import annotations

from typing import Any, Protocol

from miles_core.types import Group


class Filter(Protocol):
    """``(group, **options) -> None | str``: None keeps the group, a short snake_case reason drops and counts it."""

    def __call__(self, group: Group, /, **options: Any) -> str | None: ...
