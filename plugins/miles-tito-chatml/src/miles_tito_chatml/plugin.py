"""Token family `chatml`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="chatml",
            summary="plain ChatML checkpoints: SmolLM2 and relatives; Hermes tool calls",
            load="miles_tito_chatml.family:ChatMLFamily",
            options="miles_core.tito.options:FamilyOptions",
        )
    ]
