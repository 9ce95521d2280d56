"""Engine `local`: continuous batching of one model in this process.

One task of the event loop plans a step, a single worker thread computes it, and the task hands the tokens out;
between two steps anything may happen (arrivals, aborts, a pause, other weights), within one nothing does.

    CREATED ──start──> SERVING <──pause/resume──> PAUSED          any ──close──> CLOSED
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from miles_core.errors import EngineError, EngineLost
from miles_core.kinds.engine import Chunk, EngineContext, GenerateRequest, PauseMode
from miles_core.kinds.transport import Receiver
from miles_core.requests import check_request
from miles_core.routing.codec import Routes
from miles_core.types import FinishReason, WeightManifest
from miles_core.watch import progress, waiting
from miles_local.model import LocalModel, Sampled
from miles_local.options import LocalOptions
from miles_local.prefix import PrefixCache
from miles_local.scheduler import Plan, Row, Scheduler
from miles_local.stopping import ends_with_stop, load_tokenizer
from miles_local.stream import Stream, Token
from miles_local.weights import Staging

T = TypeVar("T")

QUIET_TURNS = 8
"""Turns of the event loop without a new request before a step begins: those who submit together are admitted
together."""


class Life(StrEnum):
    CREATED = "created"
    SERVING = "serving"
    PAUSED = "paused"
    CLOSED = "closed"


class LocalEngine:
    """See `miles_core.kinds.engine.Engine`."""

    def __init__(self, options: LocalOptions, context: EngineContext) -> None:
        self._options = options
        self._context = context
        self._name = f"engine local {context.index}"
        self._life = Life.CREATED
        self._keep_kv = False
        self._version = -1
        self._model: LocalModel | None = None
        self._tokenizer: Tokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"miles-local-{context.index}")
        self._scheduler = Scheduler(
            options.max_batch_size,
            options.kv_tokens,
            options.prefill_tokens,
            PrefixCache(options.prefix_cache_tokens) if options.prefix_cache else None,
        )
        self._streams: dict[Row, Stream] = {}
        self._arrivals = itertools.count()
        self._activity = 0
        self._wake = asyncio.Event()
        self._between_steps = asyncio.Lock()
        self._loop: asyncio.Task[None] | None = None
        self._receiver: Receiver | None = None
        self._staging: Staging | None = None
        self._counts = {"tokens_sampled": 0, "tokens_prefilled": 0, "cached_tokens": 0, "steps": 0}
        self._busy_s = 0.0

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._life is not Life.CREATED:
            raise self._error("the engine was started twice", expected="created", found=self._life)
        with waiting(self._name, on=f"loading {self._context.model_path}"):
            self._model = await self._in_thread(self._load)
        self._life = Life.SERVING
        self._loop = asyncio.create_task(self._serve(), name=self._name)

    def _load(self) -> LocalModel:
        context = self._context
        model = LocalModel.load(
            context.model_path, device=context.device, dtype=self._options.dtype, exact=context.true_on_policy
        )
        if context.routes:
            model.record_routes()
        wanted = context.context_length
        if wanted is not None and model.max_tokens is not None and wanted > model.max_tokens:
            raise self._error(
                "the context length is longer than the checkpoint was made for",
                expected=f"at most {model.max_tokens} tokens (max_position_embeddings; of longrope, the original ones)",
                found=f"context_length {wanted}",
                do="lower context_length",
            )
        if wanted is None and model.max_tokens is None:
            raise self._error(
                "nobody says how long the context is",
                expected="max_position_embeddings in config.json, or context_length",
                found="neither",
                do="set context_length",
            )
        return model

    async def close(self) -> None:
        if self._life is Life.CLOSED:
            return
        self._life = Life.CLOSED
        self._fail_all(self._closed_error())
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        async with self._between_steps:
            if self._receiver is not None:
                self._receiver.close()
            await self._in_thread(_nothing)  # the step in progress, if any, ends before its model goes
            self._model = self._staging = None
            self._thread.shutdown(wait=False)

    def _error(self, message: str, *, expected: str, found: str, do: str | None = None) -> EngineError:
        return EngineError(message, expected=expected, found=found, where=self._name, do=do)

    def _closed_error(self) -> EngineLost:
        return EngineLost("the engine was closed", expected="an open engine", found="closed", where=self._name)

    def _served(self) -> LocalModel:
        if self._life is Life.CLOSED:
            raise self._closed_error()
        if self._model is None:
            raise self._error("the engine is not serving", expected="a started engine", found=self._life)
        return self._model

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _undisturbed(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` in the model's thread, between two steps."""
        async with self._between_steps:
            return await self._in_thread(work, *args)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Sample; see the protocol. Output ends with `length` when the context is full, whatever `max_tokens` says."""
        row = self._make_row(request)
        stream = Stream()
        self._streams[row] = stream
        self._scheduler.add(row)
        self._activity += 1
        self._wake.set()
        try:
            while True:
                with waiting(f"request {request.request_id}", on=self._name):
                    chunk = await stream.take()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._activity += 1
            if self._streams.pop(row, None) is not None and not row.closed:
                self._scheduler.close(row, keep_prefix=False)

    def _make_row(self, request: GenerateRequest) -> Row:
        model = self._served()
        context = self._context.context_length or model.max_tokens
        assert context is not None
        own = None
        if request.routes and not self._context.routes:
            own = ("expert routes were asked for", "EngineContext.routes", "an engine that records none", None)
        check_request(request, vocabulary=model.vocab_size, context=context, where=self._name, own=own)
        if request.params.stop and self._tokenizer is None:
            self._tokenizer = load_tokenizer(Path(self._context.model_path))
        order = next(self._arrivals)
        seed = request.params.seed
        return Row(
            request,
            order,
            # Without a seed of its own a request takes the engine's and its arrival number: equal runs, equal tokens.
            f"{self._context.seed}|{self._context.index}|{order}" if seed is None else str(seed),
            list(request.token_ids),
            min(len(request.token_ids) + request.params.max_tokens, context),
        )

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            with waiting(self._name, on="requests" if self._life is Life.SERVING else "resume"):
                await self._wake.wait()
            await self._settle()
            async with self._between_steps:
                if self._life is not Life.SERVING or not self._scheduler.busy:
                    self._wake.clear()
                    continue
                try:
                    await self._step()
                except Exception as error:  # noqa: BLE001 -- named boundary: what breaks a step ends its requests alone
                    self._crash(error)

    async def _settle(self) -> None:
        """Let consumers and submitters run until nobody has anything new, so that a step's batch is no race."""
        quiet = 0
        while quiet < QUIET_TURNS:
            seen = self._activity
            await asyncio.sleep(0)
            quiet = quiet + 1 if seen == self._activity else 0

    async def _step(self) -> None:
        model = self._served()
        began = time.perf_counter()
        plan = self._scheduler.plan()
        if plan is None:
            return
        sampled = await self._in_thread(model.step, plan)
        self._busy_s += time.perf_counter() - began
        self._counts["steps"] += 1
        self._counts["tokens_prefilled"] += sum(part.count for part in plan.prefill)
        self._scheduler.advance(plan, sampled.routes)
        self._deliver(plan, sampled)
        progress()

    def _crash(self, error: Exception) -> None:
        failure = self._error(
            "a step of the engine failed; its requests are lost",
            expected="sampled tokens",
            found=f"{type(error).__name__}: {error}",
            do="retry; when it comes back, look at the cause below",
        )
        failure.__cause__ = error
        self._fail_all(failure)
        self._forget()

    def _fail_all(self, error: EngineError) -> None:
        for row in list(self._scheduler.rows()):
            self._scheduler.close(row, keep_prefix=False)
            self._streams.pop(row).fail(error)

    def _forget(self) -> None:
        """Drop every key-value, in the scheduler's books and in the model."""
        self._scheduler.flush()
        if self._model is not None:
            self._model.forget()

    def _deliver(self, plan: Plan, sampled: Sampled) -> None:
        for row, token_id, logprob in zip(plan.rows, sampled.token_ids, sampled.logprobs, strict=True):
            if row.closed:
                continue
            if logprob != logprob or logprob == float("-inf"):
                self._scheduler.close(row, keep_prefix=False)
                self._streams.pop(row).fail(
                    self._error(
                        f"the model's logits are not finite at token {len(row.ids)}",
                        expected="finite log-probs",
                        found=f"{logprob} under weight version {self._version}",
                        do="look at the last training steps: the published weights have diverged",
                    )
                )
                continue
            row.ids.append(token_id)
            self._counts["tokens_sampled"] += 1
            stream = self._streams[row]
            stream.put(Token(token_id, logprob, self._version))
            reason = self._finish_reason(row)
            if reason is not None:
                cached = min(row.cached or 0, len(row.request.token_ids))
                self._counts["cached_tokens"] += cached
                self._scheduler.close(row, keep_prefix=True)
                del self._streams[row]
                stream.finish(reason, cached, _routes(row))

    def _finish_reason(self, row: Row) -> FinishReason | None:
        params = row.request.params
        if row.ids[-1] in params.stop_token_ids:
            return FinishReason.STOP
        if params.stop:
            assert self._tokenizer is not None
            if ends_with_stop(
                self._tokenizer, row.ids[len(row.request.token_ids) - row.request.continued :], params.stop
            ):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(row.ids) >= row.limit else None

    # --- pausing and weights ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "retract") -> None:
        self._served()
        self._life = Life.PAUSED
        with waiting(f"pause of {self._name}", on="the step in progress"):
            async with self._between_steps:
                self._keep_kv = mode == "in-place"
                if mode == "retract":
                    self._scheduler.retract()
                elif mode == "abort":
                    self._end_all()

    def _end_all(self) -> None:
        for row in list(self._scheduler.rows()):
            self._scheduler.close(row, keep_prefix=False)
            self._streams.pop(row).finish(FinishReason.ABORT, 0, _routes(row))

    async def resume(self) -> None:
        self._served()
        self._life = Life.SERVING
        self._keep_kv = False
        self._wake.set()

    async def open_receiver(self, make: Callable[[], Receiver]) -> None:
        before, self._receiver = self._receiver, None
        if before is not None:
            before.close()
        # In a thread of its own: making it may block until the sender is there, and steps must go on meanwhile.
        self._receiver = await asyncio.to_thread(make)

    async def receive(self, version: int) -> WeightManifest:
        receiver, model = self._receiver, self._served()
        if receiver is None:
            raise self._error("no transport is connected", expected="open_receiver first", found="receive")
        self._staging = None
        staging = Staging(version, model.views)

        def take() -> WeightManifest:
            return staging.take(receiver.receive(version))

        with waiting(f"{self._name}, weight version {version}", on="the trainer's buckets"):
            received = await asyncio.to_thread(take)
        self._staging = staging
        progress()
        return received

    async def activate(self, version: int) -> None:
        model, staging = self._served(), self._staging
        if staging is None or staging.version != version:
            raise self._error(
                f"weight version {version} cannot be activated",
                expected=f"version {version}, staged completely",
                found="nothing staged" if staging is None else f"version {staging.version} staged",
                do="receive it first",
            )
        # Shielded: a caller that gives up must not leave new weights under the old version's number.
        await asyncio.shield(self._swap(model, staging))
        progress()

    async def _swap(self, model: LocalModel, staging: Staging) -> None:
        async with self._between_steps:
            kept = self._keep_kv
            await self._in_thread(functools.partial(model.replace, staging.tensors, keep_kv=kept))
            self._staging = None
            self._version = staging.version
            if kept:
                self._scheduler.freeze()
            else:
                self._scheduler.flush()

    async def version(self) -> int:
        return self._version

    async def scramble(self, seed: int) -> None:
        await asyncio.shield(self._make_noise(self._served(), seed))

    async def _make_noise(self, model: LocalModel, seed: int) -> None:
        async with self._between_steps:
            await self._in_thread(model.scramble, seed)
            self._scheduler.flush()

    async def digests(self, names: Collection[str] | None = None) -> Mapping[str, str]:
        return await self._undisturbed(self._served().digests, names)

    async def stats(self) -> Mapping[str, float]:
        """Gauges and counts since the start: requests running and waiting, tokens sampled, prefilled and reused, steps,
        seconds spent in steps, tokens kept for prefixes, MiB of key-values."""
        prefixes = self._scheduler.prefixes
        return {
            "running": float(len(self._scheduler.running)),
            "waiting": float(len(self._scheduler.waiting)),
            **{name: float(count) for name, count in self._counts.items()},
            "busy_s": self._busy_s,
            "prefix_tokens": float(prefixes.tokens if prefixes is not None else 0),
            "kv_mib": (self._model.kv_bytes if self._model is not None else 0) / 2**20,
        }


def _routes(row: Row) -> Routes | None:
    return row.routes.report(len(row.ids)) if row.request.routes else None


def _nothing() -> None: ...
