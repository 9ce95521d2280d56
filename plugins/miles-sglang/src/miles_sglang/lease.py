"""The right to drive an attached server, kept by the server itself: whoever lets it lapse can lose it to another run.

SGLang opens a session of a given name once, and forgets it after a time-out of its own. Two such names make a lease:
its holder opens them in turn, each before the other ends, so that one is always open. To take the lease one must open
both. No clocks are compared, and what a dead holder leaves ends by itself. A third name is open while weights load,
because the server does nothing else then.

A holder that was stopped for longer than a lease may act once more before it notices. That is told too: the names of
weight versions (`claim`) travel with the weights, so the tokens of what it loads are refused by the other run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from miles_core.errors import EngineError
from miles_sglang.client import Client

LEASE_S, RENEW_S = 30.0, 20.0
"""How long a name stays open; and when the other one is opened, whose own time has ended by then."""
AGAIN_S = 1.0
"""Between two attempts."""
PROBE_S = 1.0
"""How long a name stays open that was only tried."""
TURNS = ("miles-lease-0", "miles-lease-1")
LOADING = "miles-lease-loading"


class Lease:
    """One engine's hold on one server. Not held at first."""

    def __init__(self) -> None:
        self.held = False
        """Whether it was taken, and not ended since; it may have been lost."""
        self._turn = 0  # the name opened last
        self._opened = 0.0  # when, at the earliest
        self._one_at_a_time = asyncio.Lock()

    async def take(self, client: Client) -> bool:
        """Try once; False when somebody holds it, or did less than `LEASE_S` ago."""
        began = _now()
        if not await _open(client, TURNS[0], LEASE_S):
            return False
        for name in (TURNS[1], LOADING):
            if not await _open(client, name, PROBE_S):
                await _close(client, TURNS[0])
                return False
        await _close(client, LOADING)
        self._turn, self._opened, self.held = 0, began, True
        return True

    async def renew(self, client: Client) -> bool:
        """Open the name whose turn it is; False when it is still open. Whether somebody took the lease before that, the
        name of the served weights tells."""
        async with self._one_at_a_time:
            began = _now()
            if not await _open(client, TURNS[1 - self._turn], LEASE_S):
                return False
            self._turn, self._opened = 1 - self._turn, began
            return True

    @asynccontextmanager
    async def loading(self, client: Client, at_most_s: float) -> AsyncIterator[None]:
        """Hold it while the server loads weights, however long that takes.

        Args:
            at_most_s: When this ends by itself, should this process have vanished.
        """
        while not await _open(client, LOADING, at_most_s):  # noqa: ASYNC110 -- somebody tries it, far away
            await asyncio.sleep(AGAIN_S)
        try:
            yield
        finally:
            with suppress(EngineError):  # what went wrong with the load follows
                while _now() - self._opened > RENEW_S and not await self.renew(client):  # noqa: ASYNC110
                    await asyncio.sleep(AGAIN_S)
                await _close(client, LOADING)

    async def end(self, client: Client) -> None:
        """Let others have the server. For its holder."""
        self.held = False
        for name in TURNS:
            await _close(client, name)


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
