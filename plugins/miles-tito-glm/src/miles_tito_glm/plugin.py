"""Token families `glm46`, `glm47`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="glm46",
            summary="GLM-4.5 and 4.6: tool results and users end the model's turn",
            load="miles_tito_glm.families:Glm46Family",
            options="miles_core.tito.options:ThinkingSwitch",
        ),
        Capability(
            name="glm47",
            summary="GLM-4.7 and 5: thinking in the opener, one-line tool calls",
            load="miles_tito_glm.families:Glm47Family",
            options="miles_core.tito.options:ThinkingSwitch",
        ),
    ]
