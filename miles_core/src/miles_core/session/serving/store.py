"""The open sessions of a server: their names, which nobody can guess, and the limits by which they are closed.

A limit never closes a session in use. Clients that ask for a closed session again are told why it was closed.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from miles_core.session.assembly import AnySession
from miles_core.session.factory import SessionFactory
from miles_core.session.refusals import JournalDamaged, UnknownSession
from miles_core.session.serving.journal import Journal
from miles_core.session.serving.metrics import ServerMetrics
from miles_core.session.serving.problems import Refused
from miles_core.session.serving.running import Running
from miles_core.session.serving.settings import ServerSettings
from miles_core.session.serving.transcript import Transcript
from miles_core.types import SamplingParams

REMEMBERED = 10_000
"""Closed sessions whose reason is still known."""


@dataclass(slots=True)
class Entry:
    """One open session, and what the server knows about it besides its history."""

    key: str
    session: AnySession
    created: float
    """Unix time."""
    last_used: float
    """On the store's clock."""
    running: Running = field(default_factory=Running)
    transcripts: dict[str, Transcript] = field(default_factory=dict)
    """By protocol."""
    overridden: dict[str, object] = field(default_factory=dict)
    """Sampling fields that the agent set without effect, with the value that it asked for last."""
    users: int = 0
    """How many requests are being served; above 0, no limit closes the session."""
    owned: bool = False
    """Whether a run opened it; then the run closes it."""


class SessionStore:
    """Args:
    factory: Opens sessions for clients; None if only a run opens them.
    clock: Seconds; monotonic.
    """

    def __init__(
        self,
        factory: SessionFactory | None,
        settings: ServerSettings,
        *,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.factory, self.settings, self.metrics = factory, settings, ServerMetrics()
        self._journal, self._clock = journal, clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        """Least recently used first."""
        self.damaged: list[str] = []
        """What `restore` could not read, and why; a request for such a session is refused with the same words."""
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._away: dict[str, float] = {}
        """Sessions that only the journal holds, with when they were used last."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    @property
    def size_bytes(self) -> int:
        return sum(entry.session.size_bytes for entry in self._entries.values())

    # --- life of a session --------------------------------------------------------------------------------------------

    def create(self, params: SamplingParams) -> Entry:
        """Open a session under a name of 128 random bits.

        Raises:
            Refused: 503 when there are too many, all in use.
        """
        if self.factory is None:
            raise Refused(409, "sessions of this server are opened by its run")
        self._make_room()
        key = secrets.token_hex(16)
        session = self.factory.open(key, params)
        if self._journal is not None:
            self._journal.open(key, params)
            session.on_commit = partial(self._journal.append, key)
        self.metrics.add("miles_sessions_created_total")
        return self._enter(Entry(key=key, session=session, created=time.time(), last_used=self._clock()))

    def adopt(self, session: AnySession) -> Entry:
        """Serve a session that a run opened and will close, under a name of 128 random bits."""
        self.metrics.add("miles_sessions_created_total")
        key = secrets.token_hex(16)
        return self._enter(Entry(key=key, session=session, created=time.time(), last_used=self._clock(), owned=True))

    def release(self, key: str) -> None:
        """Stop serving a session that its run is done with; turns under way are cancelled."""
        self._drop(key, "released")
        self._gone[key] = "its episode ended"
        self._forget_old()

    def restore(self) -> int:
        """Open the sessions of the journal again, the latest first, as far as the limits allow. Returns how many are
        available."""
        found = 0
        for key in () if self._journal is None else self._journal.sessions():
            try:
                found += self._restored(key) is not None
            except JournalDamaged as error:
                # One bad file must not keep the other sessions from their agents.
                self.damaged.append(str(error))
        self.limit()
        return found

    def get(self, key: str) -> Entry:
        """An open session.

        Raises:
            Refused: 410 if it was closed, with the reason; 404 if it never existed; 503 if it is in the journal while
                all places are in use.
            JournalDamaged: the journal has it and cannot be read.
        """
        entry = self._entries.get(key) or self._restored(key)
        if entry is None:
            if key in self._gone:
                raise Refused(410, f"the session was closed: {self._gone[key]}")
            raise Refused(404, "no session of that name; POST /sessions opens one")
        return entry

    @contextmanager
    def using(self, key: str) -> Iterator[Entry]:
        """An open session that no limit closes inside the block. Raises what `get` raises."""
        entry = self.get(key)
        entry.users += 1
        self._entries.move_to_end(key)
        try:
            yield entry
        finally:
            entry.users -= 1
            entry.last_used = self._clock()

    def close(self, key: str, reason: str, *, label: str) -> None:
        """Close a session for good. Turns under way are cancelled, and its journal is deleted.

        Raises:
            UnknownSession: it is not open.
        """
        entry = self._drop(key, label)
        if self._journal is not None and not entry.owned:
            self._journal.forget(key)
        self._gone[key] = reason
        self._forget_old()

    def close_all(self) -> None:
        """Close all sessions at shutdown. Their journal stays."""
        for key in list(self._entries):
            self._drop(key, "shutdown")

    # --- limits -------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Close sessions that were not used for too long, also those that are only in the journal."""
        limit = self.settings.idle_timeout_s
        for key, last_used in list(self._away.items()):
            if self._clock() - last_used > limit:
                self._away.pop(key)
                assert self._journal is not None
                self._journal.forget(key)
                self._gone[key] = f"nobody used it for {limit:g} s"
        self._forget_old()
        for key, entry in list(self._entries.items()):
            if not self._busy(entry) and self._clock() - entry.last_used > limit:
                self.close(key, f"nobody used it for {limit:g} s", label="idle")

    def limit(self) -> None:
        """Bring memory below its limit by closing idle sessions, the least recently used first."""
        excess = self.size_bytes - self.settings.max_bytes
        for key, entry in list(self._entries.items()):
            if excess <= 0:
                return
            if not self._busy(entry):
                excess -= entry.session.size_bytes
                self._evict(key, "the server ran out of memory for idle sessions", "memory")

    def _make_room(self) -> None:
        self.limit()
        if len(self._entries) < self.settings.max_sessions:
            return
        idle = next((key for key, entry in self._entries.items() if not self._busy(entry)), None)
        if idle is None:
            raise Refused(503, f"all of {self.settings.max_sessions} sessions are in use; try again later")
        self._evict(idle, "the server had no place for another session", "count")

    def _evict(self, key: str, reason: str, label: str) -> None:
        """Remove a session from memory. If there is a journal, the session comes back when it is asked for."""
        if self._journal is None:
            self.close(key, reason, label=label)
        else:
            self._away[key] = self._drop(key, label).last_used

    # --- private ------------------------------------------------------------------------------------------------------

    def _forget_old(self) -> None:
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _busy(self, entry: Entry) -> bool:
        return entry.owned or entry.users > 0 or len(entry.running) > 0

    def _enter(self, entry: Entry) -> Entry:
        self._entries[entry.key] = entry
        return entry

    def _drop(self, key: str, label: str) -> Entry:
        entry = self._entries.pop(key, None)
        if entry is None:
            raise UnknownSession("no session of that name is open")
        if not entry.owned:
            entry.session.close()
        entry.running.cancel()
        self.metrics.add("miles_sessions_closed_total", reason=label)
        return entry

    def _restored(self, key: str) -> Entry | None:
        if self._journal is None or self.factory is None or key in self._entries:
            return self._entries.get(key)
        session = self._journal.load(key, self.factory)
        if session is None:
            return None
        try:
            self._make_room()
        except Refused:
            session.close()
            raise
        self._away.pop(key, None)
        session.on_commit = partial(self._journal.append, key)
        self.metrics.add("miles_sessions_created_total")
        return self._enter(Entry(key=key, session=session, created=time.time(), last_used=self._clock()))
