"""Whose a server is: an engine writes its own name into the name of every weight version it gives an attached server.

So tokens of weights that somebody else published are told from its own, and a run that would attach to the server of
another that lives is refused. A claim of a process that has ended is void; one of another host cannot be judged.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import EngineError
from miles_sglang.client import Client

RELEASED = "released"
"""The version's name once its engine has left the server."""
_NAME = re.compile(r"miles/(?P<host>[^/]+)/(?P<pid>\d+)/(?P<began>[^/]+)/(?P<engine>[0-9a-f]+)/(?P<version>-?\d+)")


@dataclass(frozen=True, slots=True)
class Claim:
    """One engine's."""

    owner: str
    where: str

    @classmethod
    def of_this_process(cls, where: str) -> Claim:
        pid = os.getpid()
        return cls(f"miles/{socket.gethostname()}/{pid}/{_began(pid)}/{secrets.token_hex(4)}", where)

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
        owner, _, number = text.rpartition("/")
        if owner == self.owner and int(number) <= newest:
            return int(number)
        raise EngineError(
            "the server serves weights that this run did not publish",
            expected=f"a version up to {newest} of {self.owner}",
            found=repr(name),
            where=self.where,
            do="give the server to this run alone",
        )

    async def check_free(self, client: Client) -> None:
        """Raises:
        EngineError: the server belongs to an engine that lives, or may.
        """
        name = await served_name(client)
        found = _NAME.fullmatch(name)
        if found is None or name.rpartition("/")[0] == self.owner or _ended(found):
            return
        raise EngineError(
            "another engine of Miles uses this server",
            expected="a server for this engine alone: updates of two would mix in it",
            found=f"process {found['pid']} on {found['host']}, its version {found['version']}",
            where=self.where,
            do=f"end that run, or name another server. If it has ended: curl {client.url}/update_weight_version "
            f"-H 'Content-Type: application/json' -d '{{\"new_version\": \"{RELEASED}\"}}'",
        )

    async def check_held(self, client: Client) -> None:
        """Raises:
        EngineError: somebody else gave the server weights meanwhile.
        """
        name = await served_name(client)
        if name != "-1" and name.rpartition("/")[0] != self.owner:
            self.read(name, -1)

    async def release(self, client: Client) -> None:
        """End this engine's requests and leave the server to others, unless it is another's."""
        if (await served_name(client)).rpartition("/")[0] == self.owner:
            await client.post("/abort_request", {"abort_all": True}, timeout_s=10)
            await client.post("/continue_generation", {}, timeout_s=10)
            body = {"new_version": RELEASED, "abort_all_requests": False}
            await client.post("/update_weight_version", body, timeout_s=10)


async def served_name(client: Client) -> str:
    """What the server calls the weights it serves."""
    info: Any = await client.get("/model_info", timeout_s=60)
    return str(info.get("weight_version")) if isinstance(info, dict) else repr(info)


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine did; tells it from a later one of its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "ended"


def _ended(found: re.Match[str]) -> bool:
    return found["host"] == socket.gethostname() and found["began"] != _began(int(found["pid"]))
