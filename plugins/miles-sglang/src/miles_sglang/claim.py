"""Whose a server is: an engine writes its own name into the name of every weight version it gives to a server.

So tokens of weights that somebody else published are told from its own. An attached server is driven by whoever holds
its `lease`; what a run that has died left there, on this host or another, is void once that has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.errors import EngineError, EngineLost
from miles_core.watch import waiting
from miles_sglang.client import Client
from miles_sglang.lease import AGAIN_S, LEASE_S, RENEW_S, Lease, lapsed, taking

log = logging.getLogger(__name__)

RELEASED = "released"
"""The version's name once its engine has left the server."""
REST_S = 4.0
"""Between two attempts to take a lease; in it an engine that lives makes several to renew its own."""
UNKNOWN = -2
"""Version of weights that are there when an engine takes a server."""
_NAME = re.compile(r"miles/(?P<host>[^/]+)/(?P<pid>\d+)/(?P<began>[^/]+)/(?P<engine>[0-9a-f]+)/(?P<version>-?\d+)")


class Claim:
    """One engine's.

    Args:
        owner: Its name, of the form that `of_this_process` gives it.
        client: Of the server, which may be another after each start; raises `EngineError` while there is none.
        attached: Whether the server is one that others could attach to as well.
        lost: Called when another engine has it.
    """

    def __init__(
        self,
        owner: str,
        where: str,
        client: Callable[[], Client],
        *,
        attached: bool = False,
        lost: Callable[[EngineLost], None] = lambda _: None,
    ) -> None:
        self.owner, self.where, self._client = owner, where, client
        self.held = False
        """Whether an attached server was taken, and not released since; it may have been lost."""
        self._lease = Lease(owner) if attached else None
        self._lost = lost
        self._keeping: asyncio.Task[None] | None = None

    @classmethod
    def of_this_process(
        cls, where: str, client: Callable[[], Client], lost: Callable[[EngineLost], None], *, attached: bool
    ) -> Claim:
        pid = os.getpid()
        owner = f"miles/{here()}/{pid}/{_began(pid)}/{secrets.token_hex(4)}"
        return cls(owner, where, client, attached=attached, lost=lost)

    def name(self, version: int) -> str:
        """What the server calls a version of this engine."""
        return f"{self.owner}/{version}"

    def read(self, name: object, newest: int) -> int:
        """The version's number.

        Args:
            newest: Version that this engine published last.

        Raises:
            EngineError: another published it, or nobody did.
        """
        text = str(name)
        if text == "-1":  # of a server that Miles started, before its first update
            return -1
        if self._is_ours(text) and UNKNOWN < (number := int(text.rpartition("/")[2])) <= newest:
            return number
        raise EngineError(
            "the server serves weights that this run did not publish",
            expected=f"a version up to {newest} of {self.owner}",
            found=repr(name),
            where=self.where,
            do="give the server to this run alone",
        )

    async def take(self) -> None:
        """Make an attached server this engine's, until `release`; waits for the lease of a run that has died.

        Raises:
            EngineError: it belongs to another engine that lives.
        """
        if self._lease is None:
            return
        await self._stop_keeping()
        name = await served_name(self._client())
        if self._is_ours(name):  # it is brought back, and was never another's
            await self._lease.renew(self._client())
        else:
            with waiting(self.where, on=f"the lease of {_holder(name)}"):
                await self._take(self._client(), self._lease)
        self.held = True
        self._keeping = asyncio.create_task(self._keep(self._lease), name=f"{self.where}: lease")

    async def _take(self, client: Client, lease: Lease) -> None:
        waited_s = 0.0  # in rests: a server that loads answers late, and that counts for nobody
        while not _lives_here(name := await served_name(client)) and waited_s < 2 * LEASE_S:
            async with taking(client) as alone:
                name = await served_name(client)
                if alone and (_NAME.fullmatch(name) is None or await lapsed(client, _owner(name))):
                    await lease.renew(client)
                    return await _call(client, self.name(UNKNOWN))
                if waited_s == 0:
                    log.warning("%s: waits for the lease of %s to end", self.where, _holder(name))
                # Nobody tries meanwhile, so that an engine that lives finds its names untried.
                await asyncio.sleep(REST_S)
                waited_s += REST_S
        raise EngineError(
            "another engine of Miles uses this server",
            expected="a server for this engine alone: updates of two would mix in it",
            found=_holder(name),
            where=self.where,
            do=f"name another server, or end that run: {LEASE_S:g} s later the server is free",
        )

    async def _keep(self, lease: Lease) -> None:
        """Renew the lease until another engine has the server."""
        renewed = True
        while True:
            await asyncio.sleep(RENEW_S if renewed else AGAIN_S)
            try:
                renewed = await lease.renew(self._client())
                await self.check_held()
            except EngineLost as error:
                return self._lost(error)
            except EngineError:  # a server that does not answer is the health check's business
                renewed = False

    async def _stop_keeping(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def check_held(self) -> None:
        """Raises:
        EngineLost: another engine gave the server weights meanwhile.
        """
        if self._lease is None:
            return
        name = await served_name(self._client())
        if _NAME.fullmatch(name) and not self._is_ours(name):
            raise EngineLost(
                "another engine has taken this server, while this one could not renew its lease",
                found=_holder(name),
                where=self.where,
                do="look what held this process up, or cut it off from the server; then go on with --resume",
            )

    async def release(self) -> None:
        """End this engine's requests and leave an attached server to others, unless it is another's."""
        await self._stop_keeping()
        if self._lease is None or not self.held:
            return
        self.held, client = False, self._client()
        name = await served_name(client)
        if self._is_ours(name):
            await client.post("/abort_request", {"abort_all": True}, timeout_s=10)
            await client.post("/continue_generation", {}, timeout_s=10)
            await _call(client, RELEASED)
        await self._lease.end(client)

    def _is_ours(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None and _owner(name) == self.owner


async def served_name(client: Client) -> str:
    """What the server calls the weights it serves."""
    info: Any = await client.get("/model_info", timeout_s=60)
    return str(info.get("weight_version")) if isinstance(info, dict) else repr(info)


async def _call(client: Client, name: str) -> None:
    """Have the server call the weights it serves by another name."""
    body = {"new_version": name, "abort_all_requests": False}
    await client.post("/update_weight_version", body, timeout_s=60)


def here() -> str:
    """Where process numbers mean the same: the host, this start of it, and its namespace of processes."""
    marks = [Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")]
    boot = marks[0].read_text() if marks[0].exists() else ""
    space = os.readlink(marks[1]) if marks[1].is_symlink() else ""
    return f"{socket.gethostname()}+{hashlib.blake2b(f'{boot}{space}'.encode(), digest_size=4).hexdigest()}"


def _lives_here(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and found["host"] == here() and _began(int(found["pid"])) == found["began"]


def _owner(name: str) -> str:
    return name.rpartition("/")[0]


def _holder(name: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None:
        return f"an engine that has named no weights yet; the server calls its own {name!r}"
    return f"process {found['pid']} on {found['host'].partition('+')[0]}, its version {found['version']}"


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine did; tells it from a later one of its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "ended"
