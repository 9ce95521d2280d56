"""Keeps a file for each session with every committed turn, so that a server that was killed can continue.

A line is written, in one call, before its turn becomes history and before the client gets the answer. What a process
has written outlives it, so a `kill -9` loses no committed turn (a power cut may). When a line is replayed, the same
code commits the same ids, log-probs and routes. If the last line has no end, it was being written when the process
died: its turn never became history, and the line is cut off. Every other line carries a checksum, because a changed
byte could spell other tokens.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import MilesError, RunError
from miles_core.session.assembly import AnySession
from miles_core.session.base import Prepared
from miles_core.session.factory import SessionFactory
from miles_core.session.generation import Output
from miles_core.session.refusals import JournalDamaged
from miles_core.session.row import TokenIds
from miles_core.types import FinishReason, Message, SamplingParams, ToolCall

FORMAT = 2
_CHECK, _CHECK_SIZE = b',"crc32":"', len(b',"crc32":"00000000"}')
SUFFIX = ".session.jsonl"
_KEY = re.compile(r"[0-9a-f]{32}")
_log = logging.getLogger(__name__)


class Journal:
    """Args:
    folder: Created if it is absent. Only one server at a time writes to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block, no other process writes to the folder. The kernel releases it however this process ends.

        Raises:
            RunError: another server has it.
        """
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(
                    "another server writes to this journal, and two would mix their turns",
                    where=str(self._folder),
                    do="stop the other one, or name another folder",
                ) from error
            yield
        finally:
            os.close(descriptor)

    def sessions(self) -> list[str]:
        """The sessions that have a file, the least recently written first."""
        files = [path for path in self._folder.glob(f"*{SUFFIX}") if _KEY.fullmatch(path.name.removesuffix(SUFFIX))]
        return [path.name.removesuffix(SUFFIX) for path in sorted(files, key=lambda path: path.stat().st_mtime)]

    def open(self, key: str, params: SamplingParams) -> None:
        self._write(key, {"format": FORMAT, "params": asdict(params)}, os.O_CREAT | os.O_EXCL)

    def append(self, key: str, prepared: Prepared, output: Output) -> None:
        """Write a turn that is about to be committed."""
        self._write(key, {"turn": _turn(prepared), "output": _output(output)}, 0)

    def forget(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def load(self, key: str, factory: SessionFactory) -> AnySession | None:
        """The session as it was, or None if the journal has none of that name.

        Raises:
            JournalDamaged: the file is damaged, or was written under another family or history.
        """
        path = self._path(key) if _KEY.fullmatch(key) else None
        if path is None or not path.is_file():
            return None
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            _check_unfinished(path, raw[len(whole) :])
            os.truncate(path, len(whole))
        if not whole:
            path.unlink()
            return None
        try:
            head, *lines = map(_checked, whole[:-1].split(b"\n"))
            if head["format"] != FORMAT:
                raise ValueError(f"format {head['format']}, this server writes {FORMAT}")
            session = factory.open(key, _params(head["params"]))
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise _damaged(path, error) from error
        try:
            for line in lines:
                _replay(session, line)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MilesError) as error:
            session.close()
            raise _damaged(path, error) from error
        return session

    # --- private ------------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"

    def _write(self, key: str, line: dict[str, Any], flags: int) -> None:
        body = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
        data = body + _CHECK + f'{zlib.crc32(body):08x}"}}\n'.encode()
        # Opened anew for each line: thousands of sessions would run out of file descriptors.
        descriptor = os.open(self._path(key), os.O_WRONLY | os.O_APPEND | flags, 0o600)
        try:
            written = os.write(descriptor, data)
            if written < len(data):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(f"only {written} of {len(data)} bytes of a turn could be written")
        finally:
            os.close(descriptor)


def _checked(line: bytes) -> dict[str, Any]:
    body, check = line[:-_CHECK_SIZE], line[-_CHECK_SIZE:]
    found = json.loads(line)
    if check != _CHECK + f'{zlib.crc32(body):08x}"}}'.encode():
        raise ValueError("a line is not what was written: its checksum differs")
    if not isinstance(found, dict):
        raise TypeError("a line is no object")
    return found


def _check_unfinished(path: Path, rest: bytes) -> None:
    """Check what comes after the end of the last line: it may be the beginning of a line, but not a whole line with a
    wrong end."""
    end = rest.rfind(_CHECK) + _CHECK_SIZE
    if _CHECK_SIZE <= end < len(rest):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            _checked(rest[:end])
            raise _damaged(path, ValueError("a line is followed by something else than a new line"))


def _damaged(path: Path, error: Exception) -> JournalDamaged:
    return JournalDamaged(
        "the journal of a session cannot be read",
        found=f"{type(error).__name__}: {error}",
        where=str(path),
        do="serve with the family and history it was written under, or move the file away",
    )


def _replay(session: AnySession, line: dict[str, Any]) -> None:
    turn, output = line["turn"], line["output"]
    base = int(turn["base"])
    shared = int(turn["shared"])
    prompt = session.row_to(base)[:shared] if base >= 0 else array("i")
    prompt.frombytes(base64.b64decode(turn["fresh"]))
    prepared = Prepared(
        base=base,
        messages=tuple(_message(each) for each in turn["messages"]),
        tools=tuple(turn["tools"]),
        prompt_ids=TokenIds(prompt),
        shared=shared,
        edited=turn["edited"],
        generation=turn["generation"],
        params=_params(turn["params"]),
    )
    session.commit(prepared, _read_output(output))


def _turn(prepared: Prepared) -> dict[str, Any]:
    return {
        "base": prepared.base,
        "shared": prepared.shared,
        "fresh": _packed(array("i", prepared.prompt_ids[prepared.shared :])),
        "messages": [asdict(message) for message in prepared.messages],
        "tools": list(prepared.tools),
        "edited": prepared.edited,
        "generation": prepared.generation,
        "params": asdict(prepared.params),
    }


def _output(output: Output) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ids": _packed(output.ids),
        "logprobs": _packed(output.logprobs),
        "stretches": output.stretches,
        "finish_reason": output.finish_reason,
        "cached_tokens": output.cached_tokens,
    }
    if output.routes is not None:
        found["routes"] = {
            "dtype": output.routes.dtype.str,
            "shape": output.routes.shape,
            "data": base64.b64encode(np.ascontiguousarray(output.routes).tobytes()).decode(),
        }
    return found


def _read_output(raw: dict[str, Any]) -> Output:
    output = Output(finish_reason=FinishReason(raw["finish_reason"]), cached_tokens=raw["cached_tokens"])
    output.ids.frombytes(base64.b64decode(raw["ids"]))
    output.logprobs.frombytes(base64.b64decode(raw["logprobs"]))
    output.stretches = [(int(count), int(version)) for count, version in raw["stretches"]]
    if (routes := raw.get("routes")) is not None:
        data = np.frombuffer(base64.b64decode(routes["data"]), dtype=routes["dtype"])
        output.routes = data.reshape(routes["shape"]).copy()
    return output


def _packed(values: array[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _message(raw: dict[str, Any]) -> Message:
    return Message(**{**raw, "tool_calls": tuple(ToolCall(**call) for call in raw["tool_calls"])})


def _params(raw: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**raw, "stop": tuple(raw["stop"]), "stop_token_ids": tuple(raw["stop_token_ids"])})
