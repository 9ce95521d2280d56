"""What a session costs beside the model: overhead of a turn, how it grows with history, memory, requests a second.

    python benchmarks/session.py [--turns 200] [--sessions 50]

The engine answers at once, so that everything measured is ours. Times are CPU times of this process, which other work
on the machine hardly touches; over HTTP they hold client and kernel too. Ratios are those of one run. Printed:

* overhead of a turn at the start (turns 2 to 10) and at the end, in process and over HTTP on loopback (a bare socket
  client that prepares its body beforehand), and their ratio;
* the same for a session that renders and tokenizes its whole history every turn, as a server without stored ids must;
* requests a CPU second over HTTP, many sessions at once;
* memory of a session of 32K tokens, for a thousand of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from miles_core.kinds.engine import Chunk, GenerateRequest
from miles_core.session.default_family import DefaultFamily
from miles_core.session.factory import SessionFactory
from miles_core.session.linear import LinearSession
from miles_core.session.matching import strict
from miles_core.session.serving.runner import listening
from miles_core.session.serving.settings import ServerSettings
from miles_core.session.serving.store import SessionStore
from miles_core.testing.tiny import IM_END, write_tiny_tokenizer
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import FinishReason, Message, SamplingParams

WORDS = "the agent reads a file and then it edits another one before the test is run again "


class Instant:
    """Answers every request with the same tokens, at once."""

    def __init__(self, ids: list[int]) -> None:
        self._chunk = Chunk(
            token_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            weight_version=0,
            finish_reason=FinishReason.STOP,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        yield self._chunk


def instant(tokenizer: ChatTokenizer) -> Instant:
    return Instant([*tokenizer.encode(WORDS * 2), IM_END])


def factory(tokenizer: ChatTokenizer, **options: Any) -> SessionFactory:
    engine: Any = instant(tokenizer)
    return SessionFactory([engine], DefaultFamily(None, tokenizer), strict, context_length=10**7, **options)


def observation(turn: int) -> Message:
    return Message(role="user", content=f"result {turn}: {WORDS * 4}")


async def in_process(tokenizer: ChatTokenizer, turns: int, history: Any) -> list[float]:
    """Seconds of each turn."""
    session: Any = factory(tokenizer, history=history).open("s", SamplingParams(max_tokens=10**6))
    messages: list[Message] = []
    spent = []
    for turn in range(turns):
        messages.append(observation(turn))
        start = time.process_time()
        completion = await session.complete(messages)
        spent.append(time.process_time() - start)
        messages.append(completion.message)
    return spent


async def tokenizing_all(tokenizer: ChatTokenizer, turns: int) -> list[float]:
    """Seconds of each turn for a server that keeps no ids: render and tokenize everything, ask, parse."""
    family, engine = DefaultFamily(None, tokenizer), instant(tokenizer)
    messages: list[Message] = []
    spent = []
    for turn in range(turns):
        messages.append(observation(turn))
        start = time.process_time()
        ids = family.render(messages)
        request = GenerateRequest(request_id="r", session_id="s", token_ids=tuple(ids), params=SamplingParams())
        output = [token async for chunk in engine.generate(request) for token in chunk.token_ids]
        message = family.parse(output)
        spent.append(time.process_time() - start)
        messages.append(message)
    return spent


class Client:
    """A keep-alive HTTP/1.1 client that does nothing but write and read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> Client:
        host, port = url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def post(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 20"), answer
        size = int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])
        return await self._reader.readexactly(size)

    def close(self) -> None:
        self._writer.close()


def wire(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def over_http(tokenizer: ChatTokenizer, turns: int) -> list[float]:
    store = SessionStore(factory(tokenizer), ServerSettings(sampling=SamplingParams(max_tokens=10**6)))
    spent = []
    async with listening(store) as url:
        client = await Client.to(url)
        key = json.loads(await client.post("/sessions", b"{}"))["session_id"]
        messages: list[dict[str, str]] = []
        for turn in range(turns):
            messages.append(wire("user", observation(turn).content))
            body = json.dumps({"messages": messages}).encode()
            start = time.process_time()
            answer = await client.post(f"/sessions/{key}/v1/chat/completions", body)
            spent.append(time.process_time() - start)
            messages.append(wire("assistant", json.loads(answer)["choices"][0]["message"]["content"]))
        client.close()
    return spent


async def throughput(tokenizer: ChatTokenizer, sessions: int, turns: int) -> float:
    """Requests a CPU second of `sessions` agents at once, theirs included."""
    store = SessionStore(factory(tokenizer), ServerSettings(sampling=SamplingParams(max_tokens=10**6)))
    async with listening(store) as url:

        async def agent() -> None:
            client = await Client.to(url)
            key = json.loads(await client.post("/sessions", b"{}"))["session_id"]
            messages: list[dict[str, str]] = []
            for turn in range(turns):
                messages.append(wire("user", observation(turn).content))
                answer = await client.post(
                    f"/sessions/{key}/v1/chat/completions", json.dumps({"messages": messages}).encode()
                )
                messages.append(wire("assistant", json.loads(answer)["choices"][0]["message"]["content"]))
            client.close()

        start = time.process_time()
        await asyncio.gather(*(agent() for _ in range(sessions)))
        return sessions * turns / (time.process_time() - start)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def memory(tokenizer: ChatTokenizer, sessions: int) -> tuple[float, int]:
    """MiB of a thousand sessions, and tokens of one."""
    opener = factory(tokenizer)
    gc.collect()
    before = resident_bytes()
    kept = []
    for number in range(sessions):
        session: Any = opener.open(f"s{number}", SamplingParams(max_tokens=10**6))
        messages: list[Message] = []
        while len(session.row) < 32_768:
            messages.append(observation(len(messages)))
            completion = await session.complete(messages)
            messages.append(completion.message)
        kept.append(session)
    gc.collect()
    grown = resident_bytes() - before
    assert all(isinstance(session, LinearSession) for session in kept)
    return grown / sessions * 1000 / 2**20, len(kept[0].row)


def at(spent: list[float], turn: int, width: int = 9) -> float:
    """Median microseconds about a turn, so that a stray pause does not count."""
    return statistics.median(spent[max(turn - width // 2, 1) : turn + width // 2 + 1]) * 1e6


def best(run: Callable[[], list[list[float]]]) -> list[float]:
    """For each turn the least of several runs."""
    return [min(values) for values in zip(*run(), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    turns, repeats = arguments.turns, arguments.repeats
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_tokenizer(Path(folder))
        tokenizer = ChatTokenizer.from_dir(folder)
    print(
        f"# {platform.processor() or platform.machine()}, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}"
    )
    # First of all, since a process that freed memory before grows into that.
    mib, tokens = asyncio.run(memory(tokenizer, arguments.sessions))
    print(
        f"memory of 1,000 sessions of {tokens} tokens: {mib:.0f} MiB, {mib * 2**20 / 1000 / tokens:.1f} bytes a token"
    )
    print(f"# {turns} turns, best of {repeats} runs a turn, median of 9 turns; CPU microseconds")
    rows: dict[str, Callable[[], Any]] = {
        "linear, in process": lambda: in_process(tokenizer, turns, "linear"),
        "branching, in process": lambda: in_process(tokenizer, turns, "branching"),
        "linear, over HTTP": lambda: over_http(tokenizer, turns),
        "tokenizing all, in process": lambda: tokenizing_all(tokenizer, turns),
    }
    found: dict[str, float] = {}
    for name, make in rows.items():
        spent = best(lambda make=make: [asyncio.run(make()) for _ in range(repeats)])  # type: ignore[misc]
        early, late = at(spent, 5), at(spent, turns - 6)
        found[name] = late
        last = f"turns {turns - 9}-{turns - 1}"
        print(f"{name:<28} turns 2-10 {early:8.0f}   {last} {late:8.0f}   ratio {late / early:5.2f}")
    ratio = found["tokenizing all, in process"] / found["linear, in process"]
    print(f"tokenizing all / linear at turn {turns}: {ratio:.1f}")
    rate = asyncio.run(throughput(tokenizer, arguments.sessions, 20))
    print(f"HTTP requests a CPU second, {arguments.sessions} agents of 20 turns, client included: {rate:.0f}")


if __name__ == "__main__":
    main()
