"""What this distribution offers."""

from miles_core.plugin import Capability, hookimpl

MILES_API = 1


@hookimpl
def miles_executors() -> list[Capability]:
    return [
        Capability(
            name="ray",
            summary="every trainer rank and engine is a Ray actor; several ranks, several hosts",
            load="miles_ray.executor:RayExecutor",
            options="miles_ray.options:RayOptions",
            provides=frozenset({"places-processes"}),
            needs=("ray>=2.40",),
        )
    ]
