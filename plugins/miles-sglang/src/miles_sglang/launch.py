"""The command line and environment of a managed server; pure."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from miles_core.kinds.engine import EngineContext
from miles_sglang.adapter import Adapter
from miles_sglang.options import ServerOptions

SPARE_TOKENS = 8
"""Context beyond the run's: a server keeps a few tokens for itself, and the engine alone decides where a row ends."""
SERVERSIDE = Path(__file__).parent / "serverside"
"""Code that runs inside the server; a folder of its own, so that nothing else of Miles' environment reaches it."""
LOADER = "miles_sglang_worker.handle"


def command(
    options: ServerOptions,
    context: EngineContext,
    *,
    context_length: int,
    port: int,
    name: str,
    version: int,
    stream_interval: int,
    collectives_port: int | None = None,
    adapter: Adapter | None = None,
) -> list[str]:
    """Arguments of the server's process.

    Args:
        context_length: Tokens of a row at most.
        name: Tells this server from another that took its port first.
        version: Of the weights it starts with.
        collectives_port: Where its ranks meet; None lets it choose. Of several replicas each chooses its own.
        adapter: Room is made for it, and for others of its rank and modules; it is loaded later.
    """
    device, _, first_gpu = context.device.partition(":")
    flags: dict[str, object] = {
        "model_path": context.model_path,
        "served_model_name": name,
        "host": "127.0.0.1",
        "port": port,
        "device": device,
        "dtype": "auto" if options.dtype == "checkpoint" else options.dtype,
        "tp_size": options.tensor_parallel,
        "dp_size": options.data_parallel,
        "context_length": context_length + SPARE_TOKENS,
        "weight_version": version,
        "custom_weight_loader": LOADER,
        "random_seed": context.seed % 2**31,
        "stream_interval": stream_interval,
        "incremental_streaming_output": True,
        "skip_server_warmup": True,
        "enable_deterministic_inference": options.deterministic,
        "enable_return_routed_experts": context.routes,
    }
    if adapter is not None:
        flags |= {"enable_lora": True, "max_lora_rank": adapter.rank}
    if collectives_port is not None and options.data_parallel == 1:
        flags["nccl_port"] = collectives_port
    if first_gpu:
        flags["base_gpu_id"] = int(first_gpu)
    if options.memory_fraction is not None:
        flags["mem_fraction_static"] = options.memory_fraction
    if options.max_running_requests is not None:
        flags["max_running_requests"] = options.max_running_requests
    flags |= {name.replace("-", "_"): value for name, value in options.server_args.items()}
    argv = [options.python or sys.executable, "-m", options.module]
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is not False:
            argv.append(f"{flag}={value}")
    if adapter is not None:
        argv += ["--lora-target-modules", *adapter.modules]
    return argv


def environment(options: ServerOptions, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The server's variables: those of this process, without its Python's and its temporary folder, and the options'
    own."""
    ours = ("PYTHON", "VIRTUAL_ENV", "TMPDIR")
    kept = {name: value for name, value in inherited.items() if not name.startswith(ours)}
    # By default in the temporary folder, which ends with the server; what was compiled is for the next one too.
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")))
    kept["PYTHONPATH"] = os.pathsep.join([str(SERVERSIDE), *options.python_path])
    kept["PYTHONUNBUFFERED"] = "1"
    # The few spare tokens are beyond what the checkpoint says; no row ever uses them.
    kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    return kept | options.env
