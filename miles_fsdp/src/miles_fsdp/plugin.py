"""Training backend `fsdp`."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_backends() -> Iterable[Capability]:
    return [
        Capability(
            name="fsdp",
            summary="PyTorch FSDP2 over any Hugging Face causal LM; CPU or CUDA, one rank or many",
            load="miles_fsdp.backend:FsdpBackend",
            options="miles_fsdp.options:FsdpOptions",
            provides=frozenset({"multi-rank", "reference-model", "replays-routes"}),
        )
    ]
