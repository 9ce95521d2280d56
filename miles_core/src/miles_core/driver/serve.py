"""`miles serve`: runs the session server with engines, a token family and a port, but without a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_core.config.load import KeyPath
from miles_core.config.model_folder import read_model_folder
from miles_core.config.resolve import ResolvedRun
from miles_core.config.spec import RolloutSpec, RunSpec
from miles_core.driver.assemble import context_length, make
from miles_core.driver.families import claimed_family, family_name, pick_family
from miles_core.driver.settings import choose_device, engine_spec
from miles_core.errors import ConfigError
from miles_core.executors.inprocess import InProcessExecutor
from miles_core.kinds.engine import Engine
from miles_core.kinds.executor import EngineSpec, Executor
from miles_core.kinds.matcher import Matcher
from miles_core.kinds.tito_family import TitoFamily
from miles_core.registry import Registry, load_target
from miles_core.session.factory import History, SessionFactory
from miles_core.session.leaves import PICKERS, Picker
from miles_core.session.matching import warning_of
from miles_core.session.serving.journal import Journal
from miles_core.session.serving.runner import listening
from miles_core.session.serving.settings import ServerSettings
from miles_core.session.serving.store import SessionStore
from miles_core.testing.served_script import read_script, scripted_engine
from miles_core.tokenizer import ChatTokenizer

SCRIPTED = "scripted"
SERVED = ("seed", "model", "session", "engine", "executor", "placement", "precision", "plugins")
"""Sections that `serve_run` reads, besides rollout.routes."""
UNREAD: tuple[KeyPath, ...] = (
    *((name,) for name in RunSpec.model_fields if name not in (*SERVED, "rollout")),
    *(("rollout", name) for name in RolloutSpec.model_fields if name != "routes"),
    ("placement", "mode"),
    ("placement", "trainer_ranks"),
)
"""What only training reads: a run-file of a server need not have it, and nothing wrong in it stops the server."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quick:
    """What a server without a run-file serves. Everything else has the defaults of the capabilities."""

    model: str
    engine: str
    family: str | None = None
    matcher: str = "strict"
    history: History = "linear"
    context_length: int | None = None
    script: Path | None = None
    """A file of answers, for the engine `scripted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    host: str
    port: int
    settings: ServerSettings
    journal: Path | None = None


def picker_named(name: str) -> Picker:
    """A leaf picker by name, or a function as ``module:attr``.

    Raises:
        ConfigError: there is none of that name.
    """
    if name in PICKERS:
        return PICKERS[name]
    if ":" in name:
        found: Picker = load_target(name)
        return found
    raise ConfigError("no leaf picker of that name", expected=f"one of {sorted(PICKERS)}, or module:attr", found=name)


def _warning(say: Say) -> Say:
    return lambda text: say(f"warning: {text}")


async def serve_quick(quick: Quick, registry: Registry, listen: Listen, say: Say) -> None:
    """Serve a model until a signal comes."""
    tokenizer = ChatTokenizer.from_dir(quick.model)
    family = claimed_family(tokenizer, registry, named=quick.family, warn=_warning(say))
    length = context_length(quick.context_length, read_model_folder(Path(quick.model)).context_length)
    executor = InProcessExecutor(None)
    try:
        if quick.engine == SCRIPTED:
            engines: Sequence[Engine] = [_scripted(quick, family, length)]
        else:
            engines = await executor.start_engines(_quick_spec(quick, registry))
        factory = SessionFactory(
            engines,
            family,
            _matcher(quick.matcher, registry),
            context_length=length,
            history=quick.history,
        )
        await _serve(factory, family_name(family, registry), listen, say)
    finally:
        await executor.close()


async def serve_run(resolved: ResolvedRun, registry: Registry, listen: Listen, say: Say) -> None:
    """Serve the model, engine and session section of a run-file until a signal comes; nothing is trained."""
    spec = resolved.spec
    family = pick_family(resolved, registry, ChatTokenizer.from_dir(spec.model.path), warn=_warning(say))
    length = context_length(spec.model.context_length, read_model_folder(Path(spec.model.path)).context_length)
    executor: Executor = make(resolved, "executor")
    try:
        engines = await executor.start_engines(engine_spec(resolved, choose_device(spec.placement.device)))
        factory = SessionFactory(
            engines,
            family,
            load_target(resolved.one["matcher"].capability.load),
            context_length=length,
            routes=spec.rollout.routes != "off",
            history=spec.session.history,
        )
        # The run-file says which leaves count; the flag is for a server without one.
        settings = replace(listen.settings, picker=PICKERS[spec.session.leaves])
        await _serve(factory, family_name(family, registry), replace(listen, settings=settings), say)
    finally:
        await executor.close()


async def _serve(factory: SessionFactory, family: str, listen: Listen, say: Say) -> None:
    if warning := warning_of(factory.matcher):
        say(f"warning: {warning}")
    async with contextlib.AsyncExitStack() as stack:
        journal = None if listen.journal is None else Journal(listen.journal)
        if journal is not None:
            stack.enter_context(journal.held())
        store = SessionStore(factory, replace(listen.settings, family=family), journal=journal)
        restored = store.restore()
        if journal is not None:
            say(f"journal: {listen.journal}, {restored} session(s) restored")
        for problem in store.damaged:
            say(f"warning: {problem}")
        url = await stack.enter_async_context(listening(store, host=listen.host, port=listen.port))
        ended = stack.enter_context(_until_signal())
        say(f"serving {listen.settings.model} with family {family} at {url}")
        say(f"open a session: curl -X POST {url}/sessions")
        await ended.wait()
        say("stopping: turns under way are aborted, committed ones are " + ("kept" if journal else "gone"))


@contextlib.contextmanager
def _until_signal() -> Iterator[asyncio.Event]:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    handled = (signal.SIGINT, signal.SIGTERM)
    for number in handled:
        loop.add_signal_handler(number, ended.set)
    try:
        yield ended
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


# --- without a run-file -----------------------------------------------------------------------------------------------


def _scripted(quick: Quick, family: TitoFamily, length: int) -> Engine:
    if quick.script is None:
        raise ConfigError("engine `scripted` samples from a file of answers", do="name it with --script FILE")
    return scripted_engine(family, read_script(quick.script), context_length=length)


def _quick_spec(quick: Quick, registry: Registry) -> EngineSpec:
    capability = registry.get("engine", quick.engine).capability
    return EngineSpec(
        load=capability.load,
        options=load_target(capability.options)() if capability.options else None,
        count=1,
        model_path=quick.model,
        context_length=quick.context_length,
        device=choose_device("auto"),
        seed=0,
    )


def _matcher(name: str, registry: Registry) -> Matcher:
    if ":" in name:
        found: Matcher = load_target(name)
        return found
    capability = registry.get("matcher", name).capability
    matcher: Matcher = load_target(capability.load)
    return matcher


def with_sampling(settings: ServerSettings, changes: Mapping[str, Any]) -> ServerSettings:
    """The settings with some of the default sampling replaced."""
    return replace(settings, sampling=replace(settings.sampling, **changes))
