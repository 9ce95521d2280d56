"""What this distribution offers."""

from miles_core.plugin import Capability, Rule, conflicts, hookimpl

MILES_API = 1
DISK_DELTA_RULES = (
    conflicts(
        "backend.export_dtype in (float32, bfloat16, float16)",
        id="disk-delta-checkpoint-dtype",
        because="disk-delta compares with the checkpoint's bytes, so the export must have its dtypes",
        instead="backend.export_dtype: checkpoint, or transport: broadcast",
    ),
    Rule(
        id="disk-delta-url",
        because="disk-delta opens URLs through fsspec, which needs a package for most schemes",
        instead="pip install './miles_transports[object-store]' and the scheme's package (s3fs, gcsfs), or a "
        "folder that every host sees",
        check="miles_transports.rules:url_opens",
    ),
    Rule(
        id="disk-delta-folders",
        because="publish_dir is every host's and local_dir each host's own, which it clears of what is old",
        instead="transport.local_dir: a folder on a disk of each host, beside and not inside publish_dir",
        check="miles_transports.rules:folders_are_apart",
    ),
    Rule(
        id="disk-delta-writable",
        because="versions are written to publish_dir, and copies of them to local_dir",
        instead="a folder that can be written to; one that does not exist is made",
        check="miles_transports.rules:folders_are_writable",
    ),
)
INSTALL_MOONCAKE = "pip install './miles_transports[p2p]', or [p2p-cuda] on hosts with CUDA"
P2P_RULES = (
    conflicts(
        "placement.mode=colocated",
        id="p2p-separate",
        because="p2p re-shards in main memory and sends over the network; colocated sides share a device",
        instead="placement.mode: separate, or transport: broadcast",
    ),
    Rule(
        id="p2p-mooncake",
        because="p2p writes through Mooncake's transfer engine",
        instead=f"{INSTALL_MOONCAKE}, never both; its system libraries come with apt-get install libibverbs1 "
        "librdmacm1 libnuma1 libcurl4 liburing2",
        check="miles_transports.rules:mooncake_is_here",
    ),
    Rule(
        id="p2p-ranks-divide",
        when=("transport.layout=fused",),
        because="the fused layout divides parameters evenly among the engine's ranks",
        instead="transport.engine_ranks: a divisor of the model's heads and widths",
        check="miles_transports.rules:ranks_divide_the_model",
    ),
)


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
            name="cuda-ipc",
            summary="shows buckets to engines on the same GPU; colocated, no network",
            load="miles_transports.cuda_ipc:CudaIpcTransport",
            options="miles_transports.options:CudaIpcOptions",
            provides=frozenset({"same-process", "cross-process"}),
            rules=(
                conflicts(
                    "placement.mode=separate",
                    id="cuda-ipc-colocated",
                    because="cuda-ipc shares memory of one device; separate sides have one each",
                    instead="transport: broadcast, or placement.mode: colocated",
                ),
            ),
        ),
        Capability(
            name="disk-delta",
            summary="publishes changed bytes to shared storage; hosts patch their copies",
            load="miles_transports.delta.transport:DiskDeltaTransport",
            options="miles_transports.options:DiskDeltaOptions",
            provides=frozenset({"same-process", "cross-process", "cross-host"}),
            rules=DISK_DELTA_RULES,
        ),
        Capability(
            name="broadcast",
            summary="one sender to all engines through a NCCL or gloo group of its own",
            load="miles_transports.broadcast:BroadcastTransport",
            options="miles_transports.options:BroadcastOptions",
            provides=frozenset({"same-process", "cross-process", "cross-host"}),
        ),
        Capability(
            name="p2p",
            summary="every trainer rank writes into the memory of its own engines; many hosts, RDMA",
            load="miles_transports.p2p.transport:P2pTransport",
            options="miles_transports.options:P2pOptions",
            expects=(("mooncake", INSTALL_MOONCAKE),),
            provides=frozenset({"same-process", "cross-process", "cross-host"}),
            rules=P2P_RULES,
        ),
    ]
