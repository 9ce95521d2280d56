"""`update: distributed`: this process broadcasts staged tensors to the server's ranks, in a group of their own.

Rank 0 is here, rank ``1 + r`` is the server's rank r. The group is made for one start of the server: a process that
died leaves one that nobody can use. Every collective is waited for beside the request that announces it, so that a
server that fails ends the wait.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but torch lists no exports

from miles_core.errors import EngineError
from miles_sglang.client import Client
from miles_sglang.dialect import Dialect
from miles_sglang.updates import checked, files_of, read, session

TIMEOUT = timedelta(minutes=10)


class Group(Protocol):
    """What gloo's and NCCL's process groups share."""

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...


class GroupUpdate:
    """See the module.

    Args:
        ranks: Of the server, data-parallel ones included.
        host: Address of this process as the server sees it.
    """

    def __init__(self, ranks: int, backend: Literal["gloo", "nccl"], host: str = "127.0.0.1") -> None:
        self._ranks, self._backend, self._host = ranks, backend, host
        self._group: Group | None = None
        self._store: Any = None
        self._url: str | None = None
        self._name = ""

    async def push(self, client: Client, dialect: Dialect, folder: Path, name: str, *, flush: bool) -> None:
        group = await self._joined(client)
        files = files_of(folder)
        try:
            async with session(client, dialect):
                for number, file in enumerate(files):
                    last = number == len(files) - 1
                    await self._send(client, group, list(read(file)), name, flush=flush and last)
        except BaseException:
            self._group = None  # half a collective may be left in it
            raise

    async def close(self, client: Client | None) -> None:
        self._group = self._store = None

    async def _send(
        self,
        client: Client,
        group: Group,
        tensors: list[tuple[str, Tensor]],
        name: str,
        *,
        flush: bool,
    ) -> None:
        """Announce one file's tensors and broadcast them, in the same order."""
        body: dict[str, Any] = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": self._name,
            "flush_cache": flush,
            "weight_version": name,
        }
        device = torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")

        def broadcast() -> None:
            works = [group.broadcast(tensor.to(device), 0) for _, tensor in tensors]
            for work in works:
                work.wait(TIMEOUT)

        await _both(checked(client, "/update_weights_from_distributed", body), asyncio.to_thread(broadcast))

    async def _joined(self, client: Client) -> Group:
        """The group with this server, made anew for a server that was started anew."""
        if self._group is not None and self._url == client.url:
            return self._group
        self._name = f"miles-{secrets.token_hex(6)}"  # new to this process and to the server, whoever else met them
        self._url = client.url
        world = 1 + self._ranks
        # It listens already at a port of its own choice when the server is told of it.
        self._store = TCPStore(self._host, 0, world, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

        def join() -> Group:
            # The server makes its end with the same private helper, whose keys in the store no public call writes.
            group, _ = c10d._new_process_group_helper(
                world,
                0,
                [],
                c10d.Backend(self._backend),
                PrefixStore(self._name, self._store),
                group_name=cast(Any, self._name),
                timeout=TIMEOUT,
            )
            c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
            return cast(Group, group)

        body = {
            "master_address": self._host,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": self._name,
            "backend": self._backend,
        }
        _, joined = await _both(checked(client, "/init_weights_update_group", body), asyncio.to_thread(join))
        group: Group = joined
        self._group = group
        return group


async def _both(request: Any, work: Any) -> tuple[Any, Any]:
    """Wait for the server's answer and the collective; the first failure ends the wait for the other."""
    tasks = [asyncio.ensure_future(request), asyncio.ensure_future(work)]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        error = task.exception()
        if error is not None:
            for other in tasks:
                other.cancel()
            await asyncio.gather(tasks[0], return_exceptions=True)
            if isinstance(error, EngineError):
                raise error
            raise EngineError("a broadcast to the server failed", found=f"{type(error).__name__}: {error}") from error
    return tasks[0].result(), tasks[1].result()
