"""What a server's settings must be for a run, and which of them are not; all problems at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles_core.config.model_folder import ModelFolderError, read_model_folder
from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_sglang.checkpoint import Checkpoint
from miles_sglang.client import Client
from miles_sglang.launch import SPARE_TOKENS
from miles_sglang.options import ServerOptions


def check_settings(
    info: Mapping[str, Any], options: ServerOptions, context: EngineContext, context_length: int, where: str
) -> None:
    """Compare GET /server_info with what an engine needs.

    Raises:
        EngineError: naming every setting that cannot work, with the flag that mends it.
    """
    refuse([*fit_problems(info, options, context_length), *sampling_problems(info, options, context)], where)


def url_of(urls: Sequence[str], index: int, where: str) -> str | None:
    """Address that an engine attaches to; None starts a server.

    Raises:
        EngineError: there are fewer addresses than engines.
    """
    if urls and index >= len(urls):
        raise EngineError(
            "there are fewer addresses than engines",
            expected=f"an address for engine {index}",
            found=f"{len(urls)} in engine.urls",
            where=where,
            do="set placement.engines to the number of addresses",
        )
    return urls[index] if urls else None


def refuse(found: Sequence[str], where: str) -> None:
    """Raises:
    EngineError: there are problems.
    """
    if found:
        raise EngineError(
            f"{len(found)} settings of the server do not fit this run",
            expected="a server started for it",
            found="; ".join(found),
            where=where,
            do="start the server with the flags named, or change the run-file",
        )


async def check_model(client: Client, checkpoint: Checkpoint, where: str) -> None:
    """Compare what an attached server says of its model with the checkpoint: weights of another architecture would end
    it, and scores of another model mean nothing.

    Raises:
        EngineError: it serves another architecture.
    """
    info = await client.get("/model_info", timeout_s=60)
    info = info if isinstance(info, dict) else {}
    served, path = info.get("architectures"), Path(str(info.get("model_path")))
    wanted, found = list(checkpoint.architectures), list(served or checkpoint.architectures)
    with suppress(ModelFolderError):  # a folder that is not on this host, or gone, tells nothing
        folder = read_model_folder(path)
        wanted += [f"{checkpoint.layers} layers", f"a vocabulary of {checkpoint.vocabulary}"]
        found += [f"{folder.layers} layers", f"a vocabulary of {folder.vocabulary}"]
    if checkpoint.architectures and found != wanted:
        raise EngineError(
            "the server serves another model",
            expected=f"{', '.join(wanted)}, as in {checkpoint.path}",
            found=f"{', '.join(found)}, as in {path}",
            where=where,
            do="attach to a server of this checkpoint, or name the one it serves",
        )


def fit_problems(info: Mapping[str, Any], options: ServerOptions, context_length: int) -> Iterator[str]:
    """One sentence for each setting under which the server cannot hold this run's model and rows."""
    for name, wanted_size in (("tp_size", options.tensor_parallel), ("dp_size", options.data_parallel)):
        if info.get(name) not in (None, wanted_size):
            yield f"{name} is {info[name]}, the run-file says {wanted_size}: --{name.replace('_', '-')}={wanted_size}"
    available = info.get("context_length")
    if available is not None and not isinstance(available, int):
        yield f"context_length is {available!r}, no number: is this SGLang?"
    elif available is not None and available < context_length + SPARE_TOKENS:
        yield f"context of {available} tokens: --context-length={context_length + SPARE_TOKENS} or more"
    capacity = info.get("max_total_num_tokens")
    if isinstance(capacity, int) and capacity < context_length:
        yield f"KV for {capacity} tokens cannot hold one row of {context_length}: raise --mem-fraction-static"
    dtype = info.get("dtype")
    if options.dtype != "checkpoint" and dtype not in (None, options.dtype):
        yield f"dtype is {dtype}, the run-file says {options.dtype}: --dtype={options.dtype}"
    if info.get("disaggregation_mode") not in (None, "null"):
        yield "prefill and decode are separate servers: without --disaggregation-mode"


def sampling_problems(info: Mapping[str, Any], options: ServerOptions, context: EngineContext) -> Iterator[str]:
    """One sentence for each setting under which samples, or what is told of them, are not the run's."""
    if not info.get("incremental_streaming_output"):
        yield "replies repeat all earlier tokens: --incremental-streaming-output"
    if context.routes and not info.get("enable_return_routed_experts"):
        yield "routes are on and the server records none: --enable-return-routed-experts"
    if bool(info.get("enable_deterministic_inference")) != options.deterministic:
        wanted = "with" if options.deterministic else "without"
        yield f"engine.deterministic is {str(options.deterministic).lower()}: {wanted} --enable-deterministic-inference"
    if info.get("skip_tokenizer_init"):
        yield "without a tokenizer there are no stop strings: without --skip-tokenizer-init"
    if info.get("speculative_algorithm"):
        yield "speculative decoding changes what is sampled under other weights: without --speculative-algorithm"
    if info.get("quantization") and options.dtype != "checkpoint":
        yield f"weights are quantised ({info['quantization']}): without --quantization"
    if info.get("preferred_sampling_params"):
        yield "the server alters sampling: without --preferred-sampling-params"
