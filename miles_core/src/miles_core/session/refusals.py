"""Why a session refuses a request: one class for each thing a caller can do about it.

SessionError
├── SessionBusy      a turn is under way; ask again when it is over
├── SessionClosed    the session takes no further turn
├── StaleTurn        the session went on or was closed while this turn was generated; the turn is dropped
├── TurnCut          the turn to extend was cut off; branch before it, retry it, or end
├── ContextFull      the prompt leaves no room for a token
├── TooManyTurns     the session holds as many turns as it may
├── UnknownSession   no session of that name
└── JournalDamaged   what a journal holds of the session cannot be read
"""

from __future__ import annotations

from miles_core.errors import SessionError


class SessionBusy(SessionError):
    """A turn of this session is under way, and a linear history has one tail."""


class SessionClosed(SessionError):
    """The session takes no further turn."""


class StaleTurn(SessionError):
    """The session went on, or was closed, while the turn was generated: it never becomes history."""


class TurnCut(SessionError):
    """The turn that a request extends did not end by itself, so its row has no end to append to."""


class ContextFull(SessionError):
    """The prompt leaves no room for a single token."""

    prompt_tokens: int = 0


class TooManyTurns(SessionError):
    """The session holds as many turns as it may."""


class UnknownSession(SessionError):
    """No session of that name is open."""


class JournalDamaged(SessionError):
    """What a journal holds of the session cannot be read; the file stays as it is."""
