"""Teacher `sglang`: log-probs of a row's tokens under a model that a server serves, attached or its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.requests import prompt_problem
from miles_core.types import Float32, Trajectory
from miles_core.watch import progress, waiting
from miles_sglang.checkpoint import read_checkpoint, row_limit
from miles_sglang.client import ServerGone
from miles_sglang.options import TeacherOptions
from miles_sglang.served import prove
from miles_sglang.server import Server
from miles_sglang.settings import check_model, fit_problems, refuse
from miles_sglang.staging import default_parent


class SglangTeacher:
    """See `miles_core.kinds.teacher.Teacher`. The server starts, or is attached to, with the first row.

    Scores are of the teacher's own distribution: temperature 1, the whole vocabulary.
    """

    def __init__(self, options: TeacherOptions) -> None:
        self._options = options
        self._name = "teacher sglang"
        self._checkpoint = read_checkpoint(Path(options.model), options.dtype)
        self._limit = row_limit(options.context_length, self._checkpoint, self._name, "context_length")
        self._server = Server(
            options,
            EngineContext(model_path=options.model, context_length=self._limit, device=options.device, seed=0),
            context_length=self._limit,
            stream_interval=1,
            url=options.url,
            check=self._check,
            restore=self._know,
            on_up=lambda: None,
            scratch=(),
            where=self._name,
            log_name="teacher",
        )
        self._starting = asyncio.Lock()
        self._version: str | None = None
        self._closed = False
        self._rids = itertools.count()

    async def score(self, trajectory: Trajectory) -> Float32:
        """See the protocol; the first token has no score.

        Raises:
            EngineError: the row does not fit the teacher, or its server answers what is no score of it.
        """
        ids = trajectory.token_ids.tolist()
        found = prompt_problem(ids, self._checkpoint.vocabulary, self._limit + 1)
        if found is not None:
            message, expected, seen, do = found
            raise EngineError(
                f"row {trajectory.prompt_id}: {message}", expected=expected, found=seen, where=self._name, do=do
            )
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        }
        await self._started()
        while True:
            generation = self._server.generation
            rid = f"{self._name}/{next(self._rids)}/{trajectory.prompt_id}"
            try:
                with waiting(f"score of {trajectory.prompt_id}", on=self._name):
                    answer = await self._server.client.post("/generate", {**body, "rid": rid})
                break
            except ServerGone:
                self._open()
                await self._server.revive(generation)
        progress()
        return self._scores(answer, ids)

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            await self._server.close()

    async def _started(self) -> None:
        async with self._starting:
            self._open()
            if self._server.failure is not None:
                raise self._server.failure
            if self._server.generation == 0:
                try:
                    await self._server.start()
                except BaseException:
                    await self._server.close()
                    raise

    def _open(self) -> None:
        if self._closed:
            raise EngineError("the teacher was closed", expected="an open teacher", where=self._name)

    def _check(self, info: Mapping[str, Any]) -> None:
        refuse(list(fit_problems(info, self._options, self._limit)), self._name)

    async def _know(self) -> None:
        """Nothing is loaded into a teacher's server; what it serves must be the checkpoint, and stay the same."""
        if self._server.attached:
            await check_model(self._server.client, self._checkpoint, self._name)
            await prove(self._server, self._checkpoint, Path(self._options.model), shared=default_parent())
        version = await self._server.served_version()
        if self._version not in (None, version):
            raise self._changed(version)
        self._version = version

    def _scores(self, answer: Any, ids: list[int]) -> Float32:
        try:
            meta = answer["meta_info"]
            entries = meta["input_token_logprobs"]
            named = [entry[1] for entry in entries]
            values = [entry[0] for entry in entries]
        except (IndexError, KeyError, TypeError) as error:
            raise EngineError(
                "the server's answer is no score",
                expected="meta_info with input_token_logprobs",
                found=repr(answer)[:300],
                where=self._name,
            ) from error
        if named != ids:
            raise EngineError(
                "the server scored other tokens",
                expected=f"{len(ids)} entries for ids {ids[:8]}",
                found=f"{len(named)} entries for ids {named[:8]}",
                where=self._name,
            )
        if meta.get("weight_version") != self._version:
            raise self._changed(str(meta.get("weight_version")))
        scores = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
        scores[0] = np.nan  # nothing comes before it
        if not np.isfinite(scores[1:]).all():
            at = 1 + int(np.flatnonzero(~np.isfinite(scores[1:]))[0])
            raise EngineError(
                "the teacher's logits are not finite",
                expected="finite log-probs",
                found=f"{values[at]} for id {ids[at]}, token {at} of the row",
                where=self._name,
                do="look at the checkpoint, or compute in another precision: dtype",
            )
        return np.minimum(scores, np.float32(0.0))  # a log-softmax rounds to slightly above 0

    def _changed(self, version: str) -> EngineError:
        return EngineError(
            "the teacher's weights changed under it",
            expected=f"weight version {self._version} throughout",
            found=version,
            where=self._name,
            do="give the teacher a server that no run publishes to",
        )
