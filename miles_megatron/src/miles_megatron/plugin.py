"""Training backend `megatron`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_backends() -> Iterable[Capability]:
    return [
        Capability(
            name="megatron",
            summary="Megatron Core: tensor, pipeline, context and expert parallelism for large MoE",
            load="miles_megatron.backend:MegatronBackend",
            options="miles_megatron.options:MegatronOptions",
            provides=frozenset({"multi-rank", "reference-model", "replays-routes"}),
        )
    ]
