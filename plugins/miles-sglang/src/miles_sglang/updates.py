"""How a staged folder of weights enters a server that is paused: three ways, one at a time, each all or nothing here.

The server's own updates are in place: one that fails half-way leaves a mixture. Whoever calls this treats any error as
the loss of the server's weights.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from miles_core.errors import EngineError
from miles_sglang.client import Client
from miles_sglang.dialect import Dialect
from miles_sglang.options import SglangOptions


class Update(Protocol):
    """Puts a folder's weights into the server."""

    async def push(self, client: Client, dialect: Dialect, folder: Path, name: str, *, flush: bool) -> None:
        """Load every tensor and flush all prefixes, unless requests are frozen over them.

        Every message gives the weights the name `name`, so that it never stands at weights of somebody else.

        Raises:
            EngineError: the server refused or failed; its weights are then unknown.
        """
        ...

    async def close(self, client: Client | None) -> None: ...


class DiskUpdate:
    """The server reads the folder. Nothing passes through this process, and it is what `reload` uses too."""

    async def push(self, client: Client, dialect: Dialect, folder: Path, name: str, *, flush: bool) -> None:
        await checked(
            client,
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": name,
                "flush_cache": flush,
                "abort_all_requests": False,
            },
        )

    async def close(self, client: Client | None) -> None: ...


class TensorUpdate:
    """Tensors travel inside the request, one message for each file of the folder; needs no shared folder."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    async def push(self, client: Client, dialect: Dialect, folder: Path, name: str, *, flush: bool) -> None:
        files = files_of(folder)
        async with session(client, dialect):
            for number, file in enumerate(files):
                last = number == len(files) - 1
                body: dict[str, Any] = {
                    "serialized_named_tensors": [pack(list(read(file)))] * self._ranks,
                    "flush_cache": flush and last,
                    "weight_version": name,
                }
                await checked(client, "/update_weights_from_tensor", body)

    async def close(self, client: Client | None) -> None: ...


def make_update(options: SglangOptions) -> Update:
    """The way weights enter the server."""
    if options.update == "tensor":
        return TensorUpdate(options.tensor_parallel)
    if options.update == "distributed":
        from miles_sglang.group import GroupUpdate

        return GroupUpdate(options.tensor_parallel * options.data_parallel, options.backend)
    return DiskUpdate()


@contextlib.asynccontextmanager
async def session(client: Client, dialect: Dialect) -> AsyncIterator[None]:
    """The server's own bracket around a load. It is closed also when the load fails, else no other could begin."""
    if not dialect.has("update-sessions"):
        yield
        return
    await checked(client, "/begin_weight_update", {})
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineError):  # the load's own error follows; the server may be gone altogether
            await client.post("/end_weight_update", {}, timeout_s=60)
        raise
    await checked(client, "/end_weight_update", {})


async def clear(client: Client, dialect: Dialect) -> None:
    """End what a run that was killed may have left: a pause, and a load half-way."""
    await client.post("/continue_generation", {})
    if dialect.has("update-sessions"):
        with contextlib.suppress(EngineError):  # none is open
            await client.post("/end_weight_update", {})


async def checked(client: Client, path: str, body: dict[str, Any]) -> None:
    """POST and insist on success: some failures come with status 200.

    Raises:
        EngineError: with the server's message.
    """
    answer = await client.post(path, body)
    if not isinstance(answer, dict) or answer.get("success") is not True:
        message = answer.get("message") if isinstance(answer, dict) else answer
        raise EngineError(f"the server did not do {path}", expected="success", found=str(message), where=client.url)


def files_of(folder: Path) -> list[Path]:
    """Weight files of a folder in the order they were staged."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return [folder / "model.safetensors"]
    index = json.loads(path.read_text())
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def read(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one file."""
    with safe_open(str(file), framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 -- no mapping, only the method
            yield name, opened.get_tensor(name)


def pack(tensors: list[tuple[str, Tensor]]) -> str:
    """Base64 of a plain pickle: the values themselves, not handles to memory of this process."""
    buffer = io.BytesIO()
    pickle.dump(tensors, buffer, protocol=4)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
