"""Options of the transports."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)


class InProcessOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    buckets_in_flight: PositiveInt = 2
    """Buckets copied for an engine and not yet taken by it; bounds the extra memory of a publish."""


class CudaIpcOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    timeout_s: PositiveFloat = 300.0
    """Seconds one side waits for the other's next bucket, the trainer's export of it included."""


class DiskDeltaOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    publish_dir: Annotated[str, Field(min_length=1)]
    """Folder every host sees, or a URL that fsspec opens (s3://bucket/path); each run makes a folder of its own in
    it."""
    local_dir: Annotated[str, Field(min_length=1)]
    """Folder, not a URL, on a fast disk of each host; engines of one host share it. It holds two copies of the
    model, and a third while that is built."""
    encoding: Literal["xor", "overwrite"] = "xor"
    """xor is smaller when much changes; overwrite lists changed elements and can be applied twice."""
    checksum: Literal["xxh3-128", "blake3", "adler32"] = "xxh3-128"
    """Of each resulting tensor; blake3 where the storage is not trusted."""
    snapshot_every: NonNegativeInt = 20
    """Every so many versions a full snapshot is published beside the delta, for late joiners; 0 is never."""
    keep: Annotated[int, Field(ge=2)] = 4
    """Newest versions that stay published; older ones go once a full snapshot makes them superfluous. The newest may be
    published again for an engine that joins, and builds on the one before it."""
    visible_s: PositiveFloat = 120.0
    """Seconds until what one host wrote is visible to another; network file systems cache."""
    host: str = "127.0.0.1"
    """Address of the driver's host as trainer and engines reach it; the meeting point binds a free port on it."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds engines wait for the publication, the trainer's export included."""

    @field_validator("local_dir")
    @classmethod
    def _no_url(cls, place: str) -> str:
        if "://" in place:
            raise ValueError("engines map their copies: a folder is needed, not a URL")
        return place


class BroadcastOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address of the driver's host as trainer and engines reach it; the meeting point binds a free port on it."""
    timeout_s: PositiveFloat = 300.0
    """Seconds one side waits for the other's next bucket, the trainer's export of it included."""
    wire: Literal["auto", "gloo", "nccl"] = "auto"
    """nccl needs a GPU of its own for each party; auto takes it where that holds, else gloo through host memory."""


class P2pOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address of the driver's host as trainer and engines reach it; the meeting point binds a free port on it."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """rdma needs RDMA devices on every host; tcp works everywhere."""
    device: str = ""
    """RDMA device, such as mlx5_0; empty lets the transfer engine choose by topology."""
    timeout_s: PositiveFloat = 300.0
    """Seconds one side waits for the other's next bucket, the trainer's export of it included."""
    write_timeout_s: PositiveFloat = 30.0
    """Seconds after which a write that is not confirmed has failed, its retries included."""
    write_retries: NonNegativeInt = 2
    """Times a refused write is tried again before the update fails."""
    segment_mib: PositiveInt = 32
    """MiB that are packed, then written while the next are packed; a trainer rank registers four times as many."""
    engine_ranks: PositiveInt = 1
    """Ranks of each engine, each with memory of its own."""
    layout: Literal["hugging-face", "fused"] = "hugging-face"
    """What travels: the checkpoint's tensors, or fused and sharded parameters of one engine rank."""

    @model_validator(mode="after")
    def _ranks_of_fused(self) -> Self:
        if self.engine_ranks > 1 and self.layout == "hugging-face":
            raise ValueError(
                "engine_ranks above 1 needs layout: fused; hugging-face has one rank that takes everything"
            )
        return self

    @model_validator(mode="after")
    def _device_of_rdma(self) -> Self:
        if self.device and self.protocol != "rdma":
            raise ValueError("device is read with protocol: rdma only")
        return self
