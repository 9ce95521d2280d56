"""Token families `kimi-k2`, `kimi-k2-thinking`, `kimi-k25`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="kimi-k2",
            summary="Kimi-K2-Instruct: tool-call sections with the model's own call ids",
            load="miles_tito_kimi.families:KimiK2Family",
            options="miles_core.tito.options:FamilyOptions",
        ),
        Capability(
            name="kimi-k2-thinking",
            summary="Kimi-K2-Thinking: as kimi-k2, with a thought before every reply",
            load="miles_tito_kimi.families:KimiK2ThinkingFamily",
            options="miles_core.tito.options:AlwaysThinks",
        ),
        Capability(
            name="kimi-k25",
            summary="Kimi-K2.5 and 2.6: thought opened by the opener, no default system turn",
            load="miles_tito_kimi.families:KimiK25Family",
            options="miles_core.tito.options:ThinkingSwitch",
        ),
    ]
