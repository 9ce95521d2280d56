"""Token families `deepseek-v31`, `deepseek-v32`, `deepseek-v4`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="deepseek-v31",
            summary="DeepSeek-V3.1: tool calls in control tokens",
            load="miles_tito_deepseek.v31:DeepSeekV31Family",
            options="miles_tito_deepseek.options:DeepSeekOptions",
        ),
        Capability(
            name="deepseek-v32",
            summary="DeepSeek-V3.2: DSML tool calls, thinking within tool loops",
            load="miles_tito_deepseek.dsml:DeepSeekV32Family",
            options="miles_core.tito.options:ThinkingSwitch",
        ),
        Capability(
            name="deepseek-v4",
            summary="DeepSeek-V4: DSML tool calls, tool results in the user's turn",
            load="miles_tito_deepseek.dsml:DeepSeekV4Family",
            options="miles_core.tito.options:ThinkingSwitch",
        ),
    ]
