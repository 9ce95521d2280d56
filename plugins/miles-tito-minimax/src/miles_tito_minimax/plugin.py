"""Token family `minimax-m2`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="minimax-m2",
            summary="MiniMax-M2, M2.5 and M2.7: every reply begins in a thought",
            load="miles_tito_minimax.families:MiniMaxM2Family",
            options="miles_core.tito.options:AlwaysThinks",
        ),
    ]
