"""Fleet: the engines that serve one version together, and the one place through which that version changes.

Only one update happens at a time: a second one waits, and the watchdog names both. An engine that wants to join waits
for the next update, because only then does the trainer hold exactly the weights that the number of the version means.
Until then it serves nobody. A newcomer that fails is left out, and the members get the version without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from miles_core.errors import MilesError, TransportError
from miles_core.kinds.engine import Engine, PauseMode
from miles_core.kinds.transport import Transport, WeightSource
from miles_core.watch import waiting
from miles_core.weights.lifecycle import Phase, PublishReport, UpdateSettings, WeightUpdate, run_update


class Fleet:
    """See the module.

    Args:
        transport: Open, between `source` and `engines` in this order.
    """

    def __init__(
        self, transport: Transport, source: WeightSource, engines: Sequence[Engine], settings: UpdateSettings
    ) -> None:
        self._transport, self._source, self._settings = transport, source, settings
        self._members = list(engines)
        self._newcomers: list[Engine] = []
        self._asked: set[Engine] = set()
        self._busy: str | None = None
        self._lock = asyncio.Lock()
        self._stale = False  # the transport connects others than the members
        self.phase = Phase.SERVING
        """Where the update in progress stands, or how the last one ended."""
        self.version: int | None = None
        """The last version that every member served; None before the first publish."""

    @property
    def members(self) -> tuple[Engine, ...]:
        """The engines that serve, and may be asked to generate."""
        return tuple(self._members)

    @property
    def asked(self) -> frozenset[Engine]:
        """The members, and all others that took part in the last update. If an engine made it fail, that may have been
        a newcomer."""
        return frozenset((*self._members, *self._asked))

    def join(self, engine: Engine) -> None:
        """Let an engine that was started take part from the next publish on."""
        if engine in self._members or engine in self._newcomers:
            raise TransportError("this engine is in the fleet already")
        self._newcomers.append(engine)

    def leave(self, engine: Engine) -> None:
        """Publish no further version to an engine, because it is gone or about to be closed."""
        if engine in self._newcomers:
            self._newcomers.remove(engine)
        self._asked.discard(engine)
        if engine in self._members:
            self._members.remove(engine)
            self._stale = True
        if self.phase is Phase.SPLIT:
            self.phase = Phase.REFUSED  # the next update asks the rest for their versions before it does anything

    async def publish(self, version: int, *, mode: PauseMode = "retract") -> PublishReport:
        """Make `version` the one that every member serves; newcomers become members.

        Raises:
            TransportError, ContractError: see `lifecycle.publish`. Newcomers stay out when the members fail.
        """
        async with self._turn(f"publish of version {version}"):
            newcomers, self._newcomers = self._newcomers, []
            if not newcomers:
                return await self._update(version, [], mode)
            try:
                return await self._update(version, newcomers, mode)
            except MilesError as error:
                if self.phase is Phase.SPLIT or not self._members:
                    raise
                report = await self._update(version, [], mode)
                first = len(self._members)
                return replace(report, refused={first + n: error.message for n in range(len(newcomers))})

    async def _update(self, version: int, newcomers: Sequence[Engine], mode: PauseMode) -> PublishReport:
        engines = [*self._members, *newcomers]
        update = WeightUpdate(version)
        self.phase = update.phase
        self._asked = set(engines)
        if newcomers or self._stale:
            self._stale = True
            await self._transport.close()
            await self._transport.open(self._source, engines)
        positions = frozenset(range(len(self._members), len(engines)))
        try:
            report = await run_update(update, self._transport, engines, self._settings, mode=mode, newcomers=positions)
        finally:
            self.phase = update.phase
        self._members, self._stale, self.version = engines, False, version
        return report

    @contextlib.asynccontextmanager
    async def _turn(self, what: str) -> AsyncIterator[None]:
        if self._busy is not None:
            with waiting(what, on=f"the end of the {self._busy}"):
                await self._lock.acquire()
        else:
            await self._lock.acquire()
        self._busy = what
        try:
            if self.phase is Phase.SPLIT:
                raise TransportError(
                    f"no {what} is possible",
                    expected="engines that agree on one version",
                    found="an earlier update left them split",
                    do="restart the run with --resume",
                )
            yield
        finally:
            self._busy = None
            self._lock.release()
