"""The process that computes rewards: it reads calls from stdin and writes verdicts to stdout, one at a time.

It runs other people's code, so it is made to be killed: it leads its own process group, dies with its parent, and
imports neither torch nor the event loop of the driver. A frame is a 4-byte length and a body. Bodies are pickles
towards the worker and JSON back, so the driver executes nothing that a grader writes.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from miles_core.kinds.reward import MAX_REWARD
from miles_core.registry import load_target
from miles_core.user_function import in_words, shown

HEADER_BYTES = 4
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_TRACE_CHARS = 4000


def main() -> None:
    """Serve until stdin closes. The first frame read has the reward functions. The first frame written says ready, or
    why not."""
    _die_with_parent()
    calls, verdicts = _private_pipes()
    rewards = []
    try:
        for load, options in _receive(calls):
            function = load_target(load)
            if not callable(function):
                raise TypeError(f"{load} is a {type(function).__name__}, not a function")
            rewards.append((function, options))
    except BaseException as error:  # noqa: BLE001 - other people's module code; the pool raises it as a PluginError
        _send(verdicts, {"error": in_words(error), "trace": _trace()})
        return
    _send(verdicts, {"ready": True})
    while True:
        try:
            index, scored = _receive(calls)
        except EOFError:
            return
        _send(verdicts, {"started": True})
        began = time.monotonic()
        function, options = rewards[index]
        verdict = _call(function, options, scored)
        _send(verdicts, {**verdict, "elapsed_s": time.monotonic() - began})


def _call(function: Callable[..., Any], options: Mapping[str, Any], scored: Any) -> dict[str, Any]:
    """Run one reward. An exception, or a value that is not a finite number, becomes an error and never a score."""
    try:
        value = function(scored, **options)
        if inspect.isawaitable(value):
            import asyncio  # here only: it is a third of the time a worker takes to start

            value = asyncio.run(_awaited(value))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the reward boundary: whatever a grader raises is a failed reward
        return {"error": in_words(error), "trace": _trace()}
    try:
        return _verdict(value)
    except Exception as error:  # noqa: BLE001 - the same boundary: a foreign object is asked for its number
        return {"error": f"{in_words(error)}{_defined(function)}"}


def _defined(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" (returned by {shown(Path(code.co_filename))}:{code.co_firstlineno})" if code else ""


async def _awaited(value: Any) -> Any:
    return await value


def _verdict(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {"reward": _number(value, "the reward"), "parts": {}}
    if "reward" not in value:
        raise ValueError(f"a mapping of rewards needs the key 'reward', found {sorted(map(str, value))}")
    parts = {str(name): _number(part, f"part {name!r}") for name, part in value.items() if name != "reward"}
    return {"reward": _number(value["reward"], "the reward"), "parts": parts}


def _number(value: Any, what: str) -> float:
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"{what} must be a number, found {value!r}")
    number = float(value)
    if not abs(number) <= MAX_REWARD:
        raise ValueError(f"{what} is {number}, which is no score")
    return number


def _trace() -> str:
    return traceback.format_exc()[-MAX_TRACE_CHARS:]


# --- the two pipes ----------------------------------------------------------------------------------------------------


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Reserve stdin and stdout for the protocol. What a reward prints goes to stderr, and if it reads, it finds
    nothing."""
    calls = os.fdopen(os.dup(0), "rb")
    verdicts = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls, verdicts


def _receive(stream: BinaryIO) -> Any:
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(header, "big")))


def _send(stream: BinaryIO, message: Mapping[str, Any]) -> None:
    body = json.dumps(message, allow_nan=False).encode()
    stream.write(len(body).to_bytes(HEADER_BYTES, "big") + body)
    stream.flush()


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the driver dies: a grader that hangs would never notice a closed
    pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
