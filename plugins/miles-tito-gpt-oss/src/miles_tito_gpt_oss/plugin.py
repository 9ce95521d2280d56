"""Token family `gpt-oss`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="gpt-oss",
            summary="gpt-oss: Harmony channels, tool calls to functions",
            load="miles_tito_gpt_oss.families:GptOssFamily",
            options="miles_tito_gpt_oss.options:GptOssOptions",
        ),
    ]
