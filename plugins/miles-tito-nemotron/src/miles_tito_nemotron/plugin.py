"""Token family `nemotron3`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="nemotron3",
            summary="NVIDIA Nemotron 3: thinking in the opener, tagged tool calls",
            load="miles_tito_nemotron.families:Nemotron3Family",
            options="miles_core.tito.options:ThinkingSwitch",
        ),
    ]
