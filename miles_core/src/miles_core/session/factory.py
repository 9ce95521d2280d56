"""Opens sessions: chooses the token family, distributes sessions over engines, and gives each the rules of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from miles_core.errors import ConfigError
from miles_core.kinds.engine import Engine
from miles_core.kinds.matcher import Matcher
from miles_core.kinds.tito_family import TitoFamily
from miles_core.session.base import SessionSetup
from miles_core.session.linear import LinearSession
from miles_core.session.pool import EnginePool
from miles_core.session.tree import TreeSession
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import SamplingParams

History = Literal["linear", "branching"]

DEFAULT_FAMILY = "default"


class SessionFactory:
    """Opens sessions over a fixed set of engines. One per run and purpose; not thread-safe.

    Args:
        engines: All replicas. Every session stays with one of them for as long as that one serves.
        family, matcher: As the run picked them.
        context_length: The most tokens that prompt and output of a session may have together.
        routes: Whether to ask engines for the experts of every token (tag `records-routes`).
        history: Whether a session is one row that grows at its tail, or a tree of turns.

    Example:
        session = factory.open("step3-prompt7-0", SamplingParams(max_tokens=64, seed=11))
        try:
            result = await environment.run(prompt, session)
        finally:
            session.close()
        trajectory = assemble(session, prompt_id=prompt.id)
    """

    def __init__(
        self,
        engines: Sequence[Engine] | EnginePool,
        family: TitoFamily,
        matcher: Matcher,
        *,
        context_length: int,
        routes: bool = False,
        history: History = "linear",
    ) -> None:
        self.history = history
        self.family = family
        self.matcher = matcher
        self.context_length = context_length
        self._pool = engines if isinstance(engines, EnginePool) else EnginePool(engines)
        self._routes = routes

    def open(self, session_id: str, params: SamplingParams) -> LinearSession | TreeSession:
        """A new session under a name that no open session has.

        Args:
            params: How its turns are sampled. `max_tokens` limits each turn, and is lowered where the context ends. The
                family's stop tokens are added. `seed` is the session's; each turn derives its own from it.

        Raises:
            SessionError: a session of that name is open.
        """
        engine, name = self._pool.open(session_id)
        setup = SessionSetup(
            engine=engine,
            engine_name=name,
            family=self.family,
            matcher=self.matcher,
            params=params,
            context_length=self.context_length,
            routes=self._routes,
            on_close=lambda: self._pool.close(session_id),
        )
        return TreeSession(session_id, setup) if self.history == "branching" else LinearSession(session_id, setup)

    def load(self) -> tuple[int, ...]:
        """The number of open sessions of each engine, for the display."""
        return self._pool.load()


class FamilyChoice(NamedTuple):
    """Which family serves a checkpoint, and a warning for the user, if there is one."""

    name: str
    warning: str | None = None
    """Must be shown: the choice is a best effort."""


def choose_family(
    tokenizer: ChatTokenizer, families: Mapping[str, type[TitoFamily]], *, named: str | None = None
) -> FamilyChoice:
    """Choose the family for a checkpoint: the named one, else the one that claims it, else `default` with a warning.

    Args:
        families: Name -> class of every usable installed family, `default` included.
        named: What the run-file says, if anything.

    Raises:
        ConfigError: the named family is not installed, or several claim the checkpoint, or none does and `default`
            is not installed.
    """
    if named is not None:
        if named not in families:
            raise ConfigError(
                f"no usable token family is called {named!r}",
                expected=f"one of {sorted(families)}",
                where="session.family",
            )
        return FamilyChoice(named)
    claimants = [name for name in sorted(families) if name != DEFAULT_FAMILY and families[name].claims(tokenizer)]
    if len(claimants) == 1:
        return FamilyChoice(claimants[0])
    if claimants:
        raise ConfigError(
            "several token families claim this checkpoint",
            expected="exactly one",
            found=", ".join(claimants),
            where=tokenizer.where,
            do=f"name one in the run-file: session: {{family: {claimants[0]}}}",
        )
    if DEFAULT_FAMILY not in families:
        raise ConfigError(
            "no token family claims this checkpoint",
            expected=f"a claim by one of {sorted(families)}",
            where=tokenizer.where,
            do="install the checkpoint's family (miles-tito-...), or name one in session.family",
        )
    return FamilyChoice(
        DEFAULT_FAMILY,
        f"no installed token family claims {tokenizer.where}; the best-effort family `default` renders its template "
        "and refuses turns that are not append-only. Install a family for this checkpoint, or silence this by saying "
        "session: {family: default}",
    )
