"""What this distribution offers."""

from miles_core.plugin import Capability, conflicts, hookimpl

MILES_API = 1


@hookimpl
def miles_transports() -> list[Capability]:
    return [
        Capability(
            name="inprocess",
            summary="hands tensors over inside one process; with executor inprocess",
            load="miles_transports.inprocess:InProcessTransport",
            options="miles_transports.options:InProcessOptions",
            provides=frozenset({"same-process"}),
            rules=(
                conflicts(
                    "executor:places-processes",
                    id="inprocess-same-process",
                    because="the inprocess transport hands over inside one process; this executor starts several",
                    instead="transport: broadcast",
                ),
            ),
        ),
        Capability(
            name="broadcast",
            summary="one sender to all engines through a NCCL or gloo group of its own",
            load="miles_transports.broadcast:BroadcastTransport",
            options="miles_transports.options:BroadcastOptions",
            provides=frozenset({"same-process", "cross-process", "cross-host"}),
        ),
    ]
