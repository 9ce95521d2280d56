"""Engine `local`: a Hugging Face model in this process, sampled with continuous batching."""

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_engines() -> list[Capability]:
    return [
        Capability(
            name="local",
            summary="Hugging Face model in the engine's own process, CPU or one GPU; no server to run",
            load="miles_local.engine:LocalEngine",
            options="miles_local.options:LocalOptions",
            provides=frozenset(
                {"version-spans", "verifies-weights", "stages-aside", "streams", "pauses-in-place", "records-routes"}
            ),
        )
    ]
