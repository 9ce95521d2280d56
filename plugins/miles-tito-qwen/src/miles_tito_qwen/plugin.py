"""Token families `qwen3`, `qwen3-thinking`, `qwen35`, `qwen3-coder`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_tito_families() -> Iterable[Capability]:
    return [
        Capability(
            name="qwen3",
            summary="Qwen3 with optional thinking (0.6B to 235B); Hermes tool calls",
            load="miles_tito_qwen.families:Qwen3Family",
            options="miles_core.tito.options:ThinkingSwitch",
        ),
        Capability(
            name="qwen3-thinking",
            summary="Qwen3-Thinking-2507 and Qwen3-Next-Thinking: every reply begins in a thought",
            load="miles_tito_qwen.families:Qwen3ThinkingFamily",
            options="miles_core.tito.options:AlwaysThinks",
        ),
        Capability(
            name="qwen35",
            summary="Qwen3.5 and relatives: thinking in the opener, tagged tool calls",
            load="miles_tito_qwen.families:Qwen35Family",
            options="miles_core.tito.options:ThinkingSwitch",
        ),
        Capability(
            name="qwen3-coder",
            summary="Qwen3-Coder: no thinking, tagged tool calls",
            load="miles_tito_qwen.families:Qwen3CoderFamily",
            options="miles_core.tito.options:FamilyOptions",
        ),
    ]
