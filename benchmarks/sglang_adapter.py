"""What engine `sglang` costs beside its server: Miles' own time for a request, and what 1,000 in flight leave behind.

    python benchmarks/sglang_adapter.py [--url http://127.0.0.1:30000 --model DIR] [--batch 64] [--tokens 256]

Without `--url` the server is a stub in another process that answers streams in the recorded form at once, so everything
measured here is the adapter's. CPU times are of this process: other work on the machine hardly touches them. Printed:

* CPU time of a request through the engine, and of the same request by a bare client that reads and drops the bytes;
  their difference is Miles' own. Wall time of the batch both ways, in turns, and the ratio: with the stub that answers
  at once nothing hides the adapter; one at the pace of a server (`--step-ms`), or the server of `--url`, decodes in
  another process meanwhile, and what remains is what a run loses. For the pace that is told as shares of the time the
  server needs, which is known exactly there: by how much the last answer is later, and the CPU time beyond the bare
  client's.
* Open files and resident memory before, during and after rounds of requests that are all in flight together, and after
  rounds that all readers leave meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from miles_core.kinds.engine import EngineContext, GenerateRequest
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import SamplingParams
from miles_sglang.checkpoint import read_checkpoint
from miles_sglang.engine import SglangEngine
from miles_sglang.options import SglangOptions
from miles_sglang.rows import Row, payload

INFO = {"version": "0.5.21", "incremental_streaming_output": True}


# --- the stub ---------------------------------------------------------------------------------------------------------


def events(tokens: int, interval: int) -> bytes:
    """A whole stream as a server writes it: `interval` tokens an event, every field of a real event."""
    parts: list[bytes] = []
    for done in range(0, tokens, interval):
        ids = [20 + (done + i) % 200 for i in range(min(interval, tokens - done))]
        end = done + len(ids)
        meta: dict[str, Any] = {
            "id": "0123456789abcdef",
            "finish_reason": {"type": "length", "length": tokens} if end == tokens else None,
            "prompt_tokens": 64,
            "weight_version": "-1",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "output_token_logprobs": [[-4.382026672363281 - i / 7, token, None] for i, token in enumerate(ids)],
            "completion_tokens": end,
            "cached_tokens": 0,
            "dp_rank": None,
        }
        if end == tokens:
            meta |= {"weight_versions": [{"version": "-1", "start": 0, "end": tokens}], "e2e_latency": 1.0}
        parts.append(b"data: " + json.dumps({"text": "some text", "output_ids": ids, "meta_info": meta}).encode())
    return b"\n\n".join([*parts, b"data: [DONE]", b""]) + b"\n"


def serve(pipe: Connection, tokens: int, interval: int) -> None:
    """Answers at once; while the gate is shut it answers nobody, and GET /held tells how many wait."""
    stream = events(tokens, interval)

    async def run() -> None:
        gate = asyncio.Event()
        gate.set()
        held, pace_s, version = 0, 0.0, "-1"

        async def generate(request: web.Request) -> web.StreamResponse:
            nonlocal held
            await request.read()
            if pace_s:
                return await paced(request)
            held += 1
            try:
                await gate.wait()
            finally:
                held -= 1
            return web.Response(body=stream, content_type="text/event-stream")

        async def paced(request: web.Request) -> web.StreamResponse:
            """One event whenever a server would have sampled its tokens."""
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            begun = asyncio.get_running_loop().time()
            for number, event in enumerate(stream.split(b"\n\n"), start=1):
                due = begun + min(number * interval, tokens) * pace_s
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                await response.write(event + b"\n\n")
            return response

        async def pace(request: web.Request) -> web.Response:
            nonlocal pace_s
            pace_s = float(request.match_info["ms"]) / 1000
            return web.json_response({})

        async def control(request: web.Request) -> web.Response:
            _ = gate.clear() if request.match_info["state"] == "shut" else gate.set()
            return web.json_response({})

        async def answer(request: web.Request) -> web.Response:
            nonlocal version
            body = await request.json() if request.can_read_body else {}
            version = body.get("weight_version", body.get("new_version", version))
            known: dict[str, Any] = {"/held": held, "/model_info": {"weight_version": version}, "/server_info": INFO}
            known["/open_session"] = body.get("session_id")
            return web.json_response(known.get(request.path, {"success": True}))

        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [web.post("/generate", generate), web.post("/gate/{state}", control), web.post("/pace/{ms}", pace)]
        )
        app.add_routes([web.route("*", "/{path:.*}", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.to_thread(pipe.recv)
        await runner.cleanup()

    asyncio.run(run())


# --- measuring --------------------------------------------------------------------------------------------------------


def request(name: str, tokens: int) -> GenerateRequest:
    params = SamplingParams(max_tokens=tokens, temperature=1.0)
    return GenerateRequest(request_id=name, session_id=name, token_ids=tuple(range(20, 84)), params=params)


async def through_engine(engine: SglangEngine, count: int, tokens: int) -> None:
    async def one(name: str) -> None:
        found = 0
        async for chunk in engine.generate(request(name, tokens)):
            found += len(chunk.token_ids)
        assert found == tokens, f"{found} tokens came, {tokens} were asked for"

    await asyncio.gather(*(one(f"{time.monotonic_ns()}-{i}") for i in range(count)))


async def bare(url: str, bodies: list[dict[str, Any]]) -> None:
    """The same requests by the least client there is."""

    async def one(http: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with http.post(f"{url}/generate", json={**body, "rid": f"{time.monotonic_ns()}"}) as response:
            assert response.status == 200, await response.text()
            async for _ in response.content.iter_any():
                pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(one(http, body) for body in bodies))


async def compare(
    engine: SglangEngine, url: str, model: Path, args: argparse.Namespace, rounds: int, server_s: float | None = None
) -> None:
    checkpoint = read_checkpoint(model, "checkpoint")
    row = Row(request("bare", args.tokens), seed=1, limit=args.tokens, rank=None)
    body = payload(row, checkpoint=checkpoint, epoch=0, stream_interval=args.interval)
    times: dict[str, list[tuple[float, float]]] = {"engine": [], "bare": []}
    for turn in range(rounds + 1):
        for name in times:
            wall, cpu = time.perf_counter(), time.process_time()
            if name == "engine":
                await through_engine(engine, args.batch, args.tokens)
            else:
                await bare(url, [body] * args.batch)
            if turn:  # the first one warms up
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    wall, cpu = ({k: statistics.median(t[i] for t in v) for k, v in times.items()} for i in (0, 1))
    each = {name: seconds / args.batch * 1e3 for name, seconds in cpu.items()}
    own = each["engine"] - each["bare"]
    print(f"CPU of a request: engine {each['engine']:.2f} ms, bare {each['bare']:.2f} ms, Miles' own {own:.2f} ms")
    print(f"wall of the batch: engine {wall['engine']:.3f} s, bare {wall['bare']:.3f} s", end=", ")
    print(f"ratio {wall['engine'] / wall['bare']:.3f}", flush=True)
    if server_s is not None:
        late, busy = wall["engine"] - server_s, own * args.batch / 1e3
        print(f"of the server's {server_s:.2f} s: {late / server_s:.2%} later", end=", ")
        print(f"{busy / server_s:.2%} CPU beyond the bare client's", flush=True)


def memory_and_files() -> tuple[float, int]:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resident, len(os.listdir("/proc/self/fd"))


async def in_flight(engine: SglangEngine, url: str, args: argparse.Namespace) -> None:
    """All requests wait at the stub together before any is answered."""
    print(f"before: {memory_and_files()[0]:.1f} MiB, {memory_and_files()[1]} files")
    async with aiohttp.ClientSession() as http:
        for number in range(args.rounds):
            await http.post(f"{url}/gate/shut")
            work = asyncio.create_task(through_engine(engine, args.in_flight, args.tokens))
            async with asyncio.timeout(300):
                while await (await http.get(f"{url}/held")).json() < args.in_flight:  # noqa: ASYNC110 -- far away
                    await asyncio.sleep(0.1)
            resident, files = memory_and_files()
            print(f"round {number + 1}, {args.in_flight} in flight: {resident:.1f} MiB, {files} files", end="; ")
            await http.post(f"{url}/gate/open")
            await work
            await asyncio.sleep(20 if number == args.rounds - 1 else 0.2)  # kept-alive connections close after 15 s
            resident, files = memory_and_files()
            print(f"after: {resident:.1f} MiB, {files} files", flush=True)


async def abandoned(engine: SglangEngine, url: str, args: argparse.Namespace) -> None:
    """Every reader leaves while its request waits at the stub."""

    async def one(name: str) -> None:
        async for _ in engine.generate(request(name, args.tokens)):
            pass

    async with aiohttp.ClientSession() as http:
        for number in range(args.rounds):
            await http.post(f"{url}/gate/shut")
            tasks = [asyncio.create_task(one(f"left-{number}-{i}")) for i in range(args.in_flight)]
            async with asyncio.timeout(300):
                while await (await http.get(f"{url}/held")).json() < args.in_flight:  # noqa: ASYNC110 -- far away
                    await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await http.post(f"{url}/gate/open")
            async with asyncio.timeout(300):
                while await (await http.get(f"{url}/held")).json() > 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await asyncio.sleep(4)  # the aborts' connections are idle and close
            resident, files = memory_and_files()
            print(f"round {number + 1}, {args.in_flight} left: {resident:.1f} MiB, {files} files", flush=True)


async def measure(url: str, model: Path, args: argparse.Namespace, *, stub: bool) -> None:
    options = SglangOptions(urls=(url,), stream_interval=args.interval, deterministic=args.deterministic)
    context = EngineContext(model_path=str(model), context_length=None, device="cpu", seed=0)
    engine = SglangEngine(options, context)
    await engine.start()
    try:
        await compare(engine, url, model, args, rounds=10 if stub else 3)
        if stub:
            await in_flight(engine, url, args)
            await abandoned(engine, url, args)
            async with aiohttp.ClientSession() as http:
                await http.post(f"{url}/pace/{args.step_ms}")
            print(f"--- stub that takes {args.step_ms:g} ms for a token of each request", flush=True)
            await compare(engine, url, model, args, rounds=7, server_s=args.tokens * args.step_ms / 1e3)
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="A running server; it must serve --model.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--interval", type=int, default=32, help="Tokens of an event; the option's default.")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--deterministic", action="store_true", help="The server of --url is in that mode.")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", end=", ")
    print(f"python {platform.python_version()}, aiohttp {aiohttp.__version__}, open files at most {soft}")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_tiny_model(Path(folder) / "model", context=512)
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, args.tokens, args.interval))
        process.start()
        try:
            print("--- stub", flush=True)
            asyncio.run(measure(f"http://127.0.0.1:{here.recv()}", model, args, stub=True))
        finally:
            here.send("stop")
            process.join(10)
            process.kill()
        if args.url:
            print(f"--- {args.url}", flush=True)
            asyncio.run(measure(args.url, model, args, stub=False))


if __name__ == "__main__":
    main()
