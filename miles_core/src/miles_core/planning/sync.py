"""How long a weight update stops generation, from topology alone; and which transport that favours.

Three constants, beside link speeds, describe a node of eight H100s. They were fitted to the seven published pairs of
broadcast and P2P windows (`PUBLISHED`); what they predict for your machines is worth a measurement:
``miles bench transports``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Fabric = Literal["shared-device", "network", "storage"]
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Speeds in GB/s (1e9 bytes)."""

    nic: float = 50.0
    """One network card of a node; a broadcast leaves through one."""
    nics_per_node: int = 8
    broadcast_efficiency: float = 0.7
    """Share of one card's speed that a bucketed broadcast reaches."""
    gather: float = 135.0
    """Gathering and renaming full tensors inside one pipeline stage."""
    host_staging: float = 19.0
    """Re-sharding into the target's layout in a node's main memory, then reading it from there (P2P)."""
    device_copy: float = 1500.0
    """Copy inside one device."""
    encode: float = 4.0
    """Diffing and compressing on one node's CPUs (disk-delta)."""
    storage: float = 2.0
    """Shared storage, as one node sees it."""
    reload: float = 40.0
    """Loading a host-local checkpoint into one node's devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Who sends how much to whom."""

    model_bytes: float
    """Full weights in the serving dtype."""
    trainer_nodes: int = 1
    trainer_pp: int = 1
    """Pipeline stages; each prepares its own tensors."""
    engine_nodes: int = 1
    engines: int = 1
    """Replicas of the model that serve."""
    fabric: Fabric = "network"
    """What trainer and engines have in common."""
    density: float = 0.02
    """Compressed delta as a share of the full bytes (disk-delta)."""
    post_load_s: float = 0.0
    """What the engine does after a P2P update, such as requantising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of one update."""

    transport: str
    prepare_s: float
    """While generation goes on."""
    pause_s: float
    """While generation stands."""
    wire_bytes: float
    because: str
    """What the time goes into."""

    @property
    def total_s(self) -> float:
        """Until the last engine serves the new version; a synchronous run waits for all of it."""
        return self.prepare_s + self.pause_s


def broadcast(topology: Topology, links: Links) -> Estimate:
    """One sender at a time; every engine hears everything. Stages gather ahead of their turn, so the gather divides by
    their number."""
    wire = topology.model_bytes / (links.nic * links.broadcast_efficiency * GB)
    pause = {"the whole model leaves through one network card": wire, GATHERING: _gather(topology, links)}
    return _estimate("broadcast", wire_bytes=topology.model_bytes, pause=pause)


def p2p(topology: Topology, links: Links) -> Estimate:
    """Every trainer node re-shards its share on its host and writes it to each engine."""
    sent = topology.model_bytes * topology.engines
    ends = min(topology.trainer_nodes, topology.engine_nodes)
    pause = {
        "re-sharding in main memory, divided by the trainer's nodes": topology.model_bytes
        / (topology.trainer_nodes * links.host_staging * GB),
        "a copy for each engine through the network cards of the smaller side": sent
        / (ends * links.nics_per_node * links.nic * GB),
        GATHERING: _gather(topology, links),
        "the engine's own work after the update": topology.post_load_s,
    }
    return _estimate("p2p", wire_bytes=sent, pause=pause)


def cuda_ipc(topology: Topology, links: Links) -> Estimate:
    """Handles travel, tensors are copied inside their device, once for each engine."""
    devices = topology.trainer_nodes * links.nics_per_node
    copied = topology.model_bytes * topology.engines
    pause = {
        "copies inside the devices": copied / (devices * links.device_copy * GB),
        f"{GATHERING}; no network is involved": _gather(topology, links),
    }
    return _estimate("cuda-ipc", wire_bytes=0.0, pause=pause)


def disk_delta(topology: Topology, links: Links) -> Estimate:
    """Diff, publish and materialise while generation goes on; only loading the result stops it."""
    delta = topology.model_bytes * topology.density
    prepare = {
        "diffing and compressing": topology.model_bytes / (topology.trainer_nodes * links.encode * GB),
        "writing the difference to shared storage": delta / (topology.trainer_nodes * links.storage * GB),
        "reading the difference from shared storage": delta / (links.storage * GB),
    }
    pause = {
        "loading the new checkpoint from local disks": topology.model_bytes
        * topology.engines
        / (topology.engine_nodes * links.reload * GB)
    }
    return _estimate("disk-delta", wire_bytes=delta * (1 + topology.engine_nodes), prepare=prepare, pause=pause)


GATHERING = "gathering full tensors"


def _estimate(
    transport: str, *, wire_bytes: float, pause: Mapping[str, float], prepare: Mapping[str, float] | None = None
) -> Estimate:
    """The sums of named seconds, and the name of the longest."""
    prepare = prepare or {}
    parts = {**prepare, **pause}
    return Estimate(
        transport=transport,
        prepare_s=sum(prepare.values()),
        pause_s=sum(pause.values()),
        wire_bytes=wire_bytes,
        because=max(parts, key=lambda name: parts[name]),
    )


def _gather(topology: Topology, links: Links) -> float:
    return topology.model_bytes / (topology.trainer_pp * links.gather * GB)


USABLE = {
    "shared-device": (cuda_ipc,),
    "network": (broadcast, p2p, disk_delta),
    "storage": (disk_delta,),
}
"""Transports that can work at all, by what the two sides share."""


def estimates(topology: Topology, links: Links | None = None) -> list[Estimate]:
    """All usable transports, soonest complete first."""
    links = links or Links()
    return sorted((each(topology, links) for each in USABLE[topology.fabric]), key=lambda found: found.total_s)


def recommend(found: Sequence[Estimate]) -> str:
    """The choice in words."""
    best, others = found[0], found[1:]
    if not others:
        return f"{best.transport}: the only one that works between these two sides"
    return (
        f"{best.transport}: complete after {best.total_s:.2f} s, {others[0].transport} after {others[0].total_s:.2f} s "
        f"({others[0].because}). Confirm it with `miles bench transports`."
    )


@dataclass(frozen=True, slots=True)
class Published:
    """One row of the published sweep: H100-80GB, 1 GiB buckets, mean of steps 3 to 12; nodes are per side."""

    model: str
    model_gb: float
    nodes: int
    trainer_pp: int
    broadcast_s: float
    p2p_s: float
    post_load_s: float = 0.0

    @property
    def topology(self) -> Topology:
        return Topology(
            model_bytes=self.model_gb * GB,
            trainer_nodes=self.nodes,
            trainer_pp=self.trainer_pp,
            engine_nodes=self.nodes,
            post_load_s=self.post_load_s,
        )


PUBLISHED = (
    Published("GLM-4.7-Flash", 60, 1, 1, 2.5086, 4.2290),
    Published("GLM-5, 4 layers", 26, 1, 1, 0.7322, 1.2608),
    Published("Qwen3-30B-A3B", 61, 2, 1, 2.6700, 2.1602),
    Published("GLM-4.5-Air", 212, 4, 4, 5.0011, 2.6372),
    Published("Qwen3-235B-A22B", 470, 8, 4, 10.7536, 3.1620),
    Published("GLM-5", 1488, 16, 8, 58.3015, 8.4797),
    Published("Kimi-K2", 2050, 32, 8, 53.2791, 7.2273, 0.884),
)
"""Sizes are two bytes a parameter; that of the cut GLM-5 follows from its configuration."""
