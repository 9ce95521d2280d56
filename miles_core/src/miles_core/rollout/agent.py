"""Environment `agent`: runs a separate agent program that reaches its session through a base URL and a key.

The program uses Chat Completions, Anthropic Messages or OpenAI Responses, as with any vendor, and knows nothing of
tokens or training. The server that it talks to runs in this process and serves the session from which the trajectory is
made.

A command gets the task as JSON on its standard input. It may write ``{"reward": 1.0, "metadata": {...}}`` to the file
that the variable MILES_RESULT names. A result on its output would not do: the model's own words appear there, and it
could score itself. A Python function gets a `Task` and returns such a mapping, a number, or None.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_core.errors import RunError
from miles_core.kinds.environment import EpisodeResult, SessionHandle
from miles_core.options import AgentOptions
from miles_core.registry import load_target
from miles_core.session.linear import LinearSession
from miles_core.session.serving.records import wire_message
from miles_core.session.serving.runner import listening
from miles_core.session.serving.settings import ServerSettings
from miles_core.session.serving.store import SessionStore
from miles_core.session.tree import TreeSession
from miles_core.types import Prompt

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
"""What a command inherits of this process's environment: enough to start, and no secret."""
OUTPUT_LIMIT = 1024 * 1024
"""Bytes of a command's output that are kept, of each stream; the rest is read and dropped."""
RESULT = "MILES_RESULT"
"""Names the file for reward and metadata."""


class AgentFailed(Exception):
    """The agent ended in a way that makes its episode unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent gets. It does not see the prompt's label, which is for the rewards."""

    prompt: Prompt
    base_url: str
    """The session's URL. An OpenAI client needs ``base_url + "/v1"``, an Anthropic client `base_url` itself."""
    key: str
    """The session's key. It also works as an API key together with the server's own URL."""

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_id": self.prompt.id,
            "messages": [wire_message(message) for message in self.prompt.messages],
            "tools": list(self.prompt.tools),
            "metadata": dict(self.prompt.metadata),
            "base_url": self.base_url,
            "key": self.key,
        }


class AgentEnvironment:
    """See `kinds.environment.Environment`."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._function: Callable[[Task], Awaitable[Any]] | None = None
        if options.function is not None:
            self._function = load_target(options.function)
        settings = ServerSettings(agent_sampling="override")
        self._store = SessionStore(None, settings)
        self._serving: asyncio.Task[str] | None = None
        self._stack = AsyncExitStack()

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt] | None:
        return None

    async def run(self, prompt: Prompt, session: SessionHandle) -> EpisodeResult:
        """Serve the session to the agent until it ends.

        Raises:
            AgentFailed: a command ended with another exit code than 0.
            RunError: the session is of a kind that cannot be served.
        """
        served = getattr(session, "session", session)
        if not isinstance(served, LinearSession | TreeSession):
            raise RunError(
                "the session cannot be served to an agent", found=type(served).__name__, expected="one of a run's own"
            )
        url = await self._url()
        entry = self._store.adopt(served)
        try:
            task = Task(prompt=prompt, base_url=f"{url}/sessions/{entry.key}", key=entry.key)
            found = await (self._command(task, url) if self._function is None else self._function(task))
        finally:
            overridden = dict(entry.overridden)
            self._store.release(entry.key)
        result = _result(found)
        return EpisodeResult(reward=result.reward, metadata={**result.metadata, "overridden_sampling": overridden})

    async def close(self) -> None:
        await self._stack.aclose()

    # --- private ------------------------------------------------------------------------------------------------------

    async def _url(self) -> str:
        if self._serving is None:
            serving = listening(self._store, host=self._options.host, port=self._options.port)
            self._serving = asyncio.ensure_future(self._stack.enter_async_context(serving))
        found = await asyncio.shield(self._serving)
        return self._options.public_url or found

    async def _command(self, task: Task, server: str) -> Any:
        with tempfile.TemporaryDirectory(prefix="miles-agent-") as folder:
            result = Path(folder) / "result.json"
            await self._run_command(task, {**_environment(task, server, self._options.env), RESULT: str(result)})
            return _read_result(result)

    async def _run_command(self, task: Task, environment: Mapping[str, str]) -> None:
        assert self._options.command is not None
        process = await asyncio.create_subprocess_exec(
            *shlex.split(self._options.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._options.cwd,
            env=environment,
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            _, complained, _ = await asyncio.gather(
                _tail(process.stdout), _tail(process.stderr), _give(process.stdin, json.dumps(task.as_json()).encode())
            )
            code = await process.wait()
        finally:
            # Also when all went well: what a command left behind would outlive its episode.
            _kill_group(process.pid)
            await process.wait()
        if code != 0:
            raise AgentFailed(_ended(code, complained[-2000:].decode(errors="replace")))


def _ended(code: int, complained: str) -> str:
    """The first line has what says most: the last line, and where a Python traceback ends."""
    last = complained.strip().rpartition("\n")[2].strip()
    places = re.findall(r'^ *File "(.+)", line (\d+)', complained, re.MULTILINE)
    place = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return f"the agent ended with exit code {code}: {last}{place}\n{complained}".rstrip()


@dataclass(frozen=True, slots=True)
class _Result:
    reward: float | None
    metadata: Mapping[str, Any]


def _result(found: Any) -> _Result:
    if found is None:
        return _Result(None, {})
    if isinstance(found, int | float) and not isinstance(found, bool):
        return _Result(float(found), {})
    if not isinstance(found, Mapping) or found.keys() - {"reward", "metadata"}:
        raise AgentFailed(f"an agent returns a number, None, or {{reward, metadata}}, not {found!r:.200}")
    reward, metadata = found.get("reward"), found.get("metadata") or {}
    if isinstance(reward, bool) or not isinstance(reward, int | float | None) or not isinstance(metadata, Mapping):
        raise AgentFailed(f"`reward` must be a number and `metadata` a mapping; found {found!r:.200}")
    return _Result(None if reward is None else float(reward), metadata)


def _environment(task: Task, server: str, own: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    given = {
        "MILES_SESSION_URL": task.base_url,
        "MILES_SESSION_KEY": task.key,
        "MILES_SERVER_URL": server,
        "OPENAI_BASE_URL": f"{task.base_url}/v1",
        "OPENAI_API_BASE": f"{task.base_url}/v1",
        "OPENAI_API_KEY": task.key,
        "ANTHROPIC_BASE_URL": task.base_url,
        "ANTHROPIC_API_KEY": task.key,
    }
    return {**inherited, **given, **own}


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while part := await stream.read(65536):
        kept = (kept + part)[-OUTPUT_LIMIT:]
    return kept


async def _give(stdin: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stdin.write(data)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # an agent need not read its task: the environment variables are enough


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it ended by itself
        os.killpg(pid, signal.SIGKILL)


def _read_result(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened:
            return json.loads(opened.read(OUTPUT_LIMIT))
    except ValueError as error:
        raise AgentFailed(f"what the agent left in {RESULT} is not JSON: {error}") from error
