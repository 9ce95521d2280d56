"""The right to drive an attached server, kept by the server itself: whoever lets it lapse can lose it to another run.

SGLang opens a session of a given name once, and forgets it after a time-out of its own. Each engine has two such names,
and opens them in turn, each before the other ends, so that one is always open. Whoever can open both in one moment
knows that their engine is gone. No clocks are compared, and what a dead engine leaves ends by itself.

While a server loads weights it answers nobody, and names end meanwhile. But it ends them first, and then answers in the
order in which it was asked. An engine that lives has asked for one of its names by then, and others wait for one at a
time. Of an engine that died nothing is left but names, for `LEASE_S` more.

An engine that was stopped for longer than a lease may act once more before it notices. That is told too: the names of
weight versions (`claim`) travel with the weights, so the tokens of what it loads are refused by the other run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from miles_core.errors import EngineError
from miles_sglang.client import Client

LEASE_S, RENEW_S = 30.0, 20.0
"""How long a name stays open; and when the other one is opened, whose own time has ended by then."""
AGAIN_S = 1.0
"""Between two attempts to renew it."""
PROBE_S = 5.0
"""How long a name stays open that was only tried, and within what time both must be; a busy server is slow."""
TAKING = "miles-taking"


class Lease:
    """One engine's hold on one server.

    Args:
        owner: The engine's name, unlike that of any other.
    """

    def __init__(self, owner: str) -> None:
        self._names = _names(owner)
        self._turn = 0  # the name opened last

    async def renew(self, client: Client) -> bool:
        """Open a name anew; False when both are open.

        It is the other name's turn. But somebody may be waiting for that one beside a server that loads, and then this
        one must be asked for before the server answers.
        """
        for turn in (1 - self._turn, self._turn):
            if await _open(client, self._names[turn], LEASE_S):
                self._turn = turn
                return True
        return False

    async def end(self, client: Client) -> None:
        """Let others have the server."""
        for name in self._names:
            await _close(client, name)


async def lapsed(client: Client, owner: str) -> bool:
    """Whether that engine is gone; False also when the server took too long to tell."""
    names, began = _names(owner), _now()
    if not await _open(client, names[0], PROBE_S):
        return False
    free = await _open(client, names[1], PROBE_S)
    at_once = _now() - began < PROBE_S
    if at_once and not free:  # later it may be that engine's again
        await _close(client, names[0])
    return at_once and free


@asynccontextmanager
async def taking(client: Client) -> AsyncIterator[bool]:
    """Whether nobody else takes the server at this moment."""
    began = _now()
    alone = await _open(client, TAKING, LEASE_S)
    yield alone
    if alone and _now() - began < LEASE_S:  # later it may be somebody else's
        await _close(client, TAKING)


def _names(owner: str) -> tuple[str, str]:
    return f"{owner}/lease-0", f"{owner}/lease-1"


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _open(client: Client, name: str, timeout_s: float) -> bool:
    body = {"session_id": name, "capacity_of_str_len": 0, "timeout": timeout_s}
    try:
        return bool(await client.post("/open_session", body) == name)
    except EngineError as error:
        if "still open" in str(error):  # the server's way of telling that
            return False
        raise


async def _close(client: Client, name: str) -> None:
    await client.post("/close_session", {"session_id": name}, timeout_s=10)
