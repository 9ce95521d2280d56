"""Token family `llama31`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="llama31",
            summary="Llama 3.1 and 3.3 Instruct: one JSON tool call a turn",
            load="miles_tito_llama.families:Llama31Family",
            options="miles_tito_llama.options:LlamaOptions",
        ),
    ]
