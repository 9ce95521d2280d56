"""Options of executor `ray`."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class RayOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    address: str | None = None
    """Cluster to join (`auto`, `host:port`); null starts one on this host and stops it at the end."""
    num_cpus: PositiveInt | None = None
    """CPUs a cluster started here offers; null takes all of this host."""
    object_store_mib: PositiveInt = 256
    """Shared memory of a cluster started here; holds the batch of one step."""
    cpus_per_rank: NonNegativeFloat = 0.5
    """CPUs reserved for a trainer rank; a reservation, not a limit."""
    cpus_per_engine: NonNegativeFloat = 0.5
    """CPUs reserved for an engine."""
    gpus_per_rank: PositiveFloat = 1.0
    """GPUs reserved for a trainer rank on CUDA; a fraction lets an engine share the device."""
    gpus_per_engine: PositiveFloat = 1.0
    """GPUs reserved for an engine on CUDA."""
    threads: PositiveInt = 1
    """CPU threads of each process (OMP_NUM_THREADS)."""
    env_vars: dict[str, str] = {}
    """Environment variables of every process."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds to wait for reserved resources and for the ranks to find each other."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Seconds a rank waits in a collective for the others."""
    worker_logs: bool = False
    """Print what workers print; their log files exist either way."""
