"""Filter: decides whether a finished, scored group is trained."""

from __future__ import annotations

from typing import Any, Protocol

from miles_core.types import Group


class Filter(Protocol):
    """``(group, **options) -> None | str``. None keeps the group. A short reason in snake_case drops it; dropped groups
    are counted under their reason."""

    def __call__(self, group: Group, /, **options: Any) -> str | None: ...
