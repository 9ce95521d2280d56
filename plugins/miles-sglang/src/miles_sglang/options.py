"""Options of engine and teacher `sglang`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

Setting = bool | int | float | str


class ServerOptions(BaseModel):
    """How one SGLang server is started and watched."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    python: str | None = None
    """Interpreter of the environment that SGLang is installed in; null is the one Miles runs in."""
    module: str = "sglang.launch_server"
    """Module that starts the server; another one may prepare the process before it hands over."""
    python_path: tuple[str, ...] = ()
    """Folders put on the server's PYTHONPATH."""
    env: dict[str, str] = {}
    """Variables added to the server's environment."""
    server_args: dict[str, Setting] = {}
    """Further arguments of SGLang by their names, such as `attention_backend: triton`; true gives a bare flag. Those
    that Miles sets itself are refused."""
    tensor_parallel: PositiveInt = 1
    """GPUs that one replica of the model is split over."""
    data_parallel: PositiveInt = 1
    """Replicas behind one server; a session stays with one of them."""
    dtype: Literal["checkpoint", "float32", "bfloat16", "float16"] = "checkpoint"
    """Precision of weights and computation. Published weights must come in it: nothing is rounded on the way."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the GPU's memory for weights and KV; null leaves SGLang's own choice."""
    max_running_requests: PositiveInt | None = None
    """Requests decoded together; null leaves SGLang's own choice."""
    deterministic: bool = False
    """SGLang's deterministic mode: a request's seed decides its tokens. Slower, and without min-p."""
    log_dir: str | None = None
    """Folder of the servers' logs, one file each; null is the run's `logs` for engines, and none for teachers and
    outside a run."""
    start_timeout_s: PositiveFloat = 900.0
    """How long a server may take to become ready, kernels compiled at the first start included; and to answer anything
    else that is asked of it, such as the update of its weights. Streams of samples have no limit."""
    health_interval_s: PositiveFloat = 30.0
    """Time between two health checks, and how long the server may take to answer one."""
    restarts: NonNegativeInt = 3
    """Times within `restarts_within_s` that a server that died or hangs is started again with the weights it served.
    One that fails more often, or does not start again, is lost, and with it its engine, which the run may replace. A
    connection that breaks while the server answers is no restart."""
    restarts_within_s: PositiveFloat = 3600.0
    """Seconds that `restarts` counts over."""

    @model_validator(mode="after")
    def _not_ours(self) -> ServerOptions:
        if ours := sorted(name for name in self.server_args if name.replace("-", "_") in RESERVED):
            raise ValueError(f"server_args: Miles sets {', '.join(ours)} itself; use the options or keys for it")
        plain = [name.replace("-", "_") for name in self.server_args]
        if twice := sorted({name for name in plain if plain.count(name) > 1}):
            raise ValueError(f"server_args: {', '.join(twice)} twice, in two spellings")
        if never := sorted(name for name in self.server_args if name.replace("-", "_") in NEVER):
            raise ValueError(f"server_args: with {', '.join(never)} no server fits a run; leave it out")
        return self


class SglangOptions(ServerOptions):
    """Which servers sample, and how weights reach them."""

    urls: tuple[str, ...] = ()
    """Servers that run already, such as `http://host:30000`, one for each of `placement.engines`; empty starts them."""
    stream_interval: PositiveInt = 32
    """Tokens that travel in one message. Each costs both sides about 0.1 ms; a server that dies loses those on the
    way. Clients of `miles serve` that watch tokens come want fewer."""
    update: Literal["disk", "tensor", "distributed"] = "disk"
    """How staged weights enter the server: from files it reads, in the request itself, or broadcast to its ranks."""
    adapter: str | None = None
    """Folder of a LoRA adapter, as PEFT writes it, that every request is sampled through; for `miles serve`. Trainers
    have none, so weights cannot be published under it."""
    staging_dir: str | None = None
    """Where versions are staged; null is shared memory, else the temporary folder. With attached servers on another
    host and `update: disk`, a folder both hosts see. Holds up to two versions."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Library of `update: distributed`; nccl needs GPUs that are not shared with the engine's process."""


class TeacherOptions(ServerOptions):
    """Which model scores, and where it is served."""

    model: str
    """Folder of the teacher's checkpoint, in the form of Hugging Face."""
    url: str | None = None
    """A server that runs already and serves that model, such as `http://host:30000`; null starts one. Nothing is loaded
    into it, so runs may share it."""
    device: str = "cuda:0"
    """Device of a server that is started: `cpu`, or the first of its GPUs."""
    context_length: PositiveInt | None = None
    """Tokens of a row at most; null is the checkpoint's own limit."""


RESERVED = frozenset(
    {
        "model_path", "served_model_name", "api_key", "admin_api_key",
        "host", "port", "device", "dtype", "tp", "tp_size", "tensor_parallel_size", "dp", "dp_size",
        "data_parallel_size", "context_length", "weight_version", "custom_weight_loader", "random_seed",
        "incremental_streaming_output", "skip_server_warmup", "enable_return_routed_experts", "stream_interval",
        "enable_lora", "max_lora_rank", "lora_target_modules",
        "enable_deterministic_inference", "mem_fraction_static", "max_running_requests", "base_gpu_id",
    }
)  # fmt: skip
"""Arguments of the server that follow from the run-file, and keys: on a command line anybody would read them."""

NEVER = frozenset(
    {
        "load_format", "model", "nnodes", "node_rank", "dist_init_addr", "pp_size", "pipeline_parallel_size",
        "speculative_algorithm", "skip_tokenizer_init", "preferred_sampling_params", "disaggregation_mode",
    }
)  # fmt: skip
"""Arguments under which a server has no weights of the run, samples otherwise, or waits for others."""
