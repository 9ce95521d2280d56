"""What an independent full forward says about an engine's answers, and the parts the engine kit asks with.

Two tiny random models that differ in weights alone, log-probs and greedy tokens of either by transformers in float32,
their weights as buckets with and without faults, and requests collected into whole answers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_core.errors import EngineError
from miles_core.kinds.engine import Chunk, Engine, GenerateRequest, PauseMode
from miles_core.testing.tiny import make_tiny_model
from miles_core.types import FinishReason, NamedTensor, SamplingParams, WeightBucket

CONTEXT = 96
"""Tokens of context of the kit's models."""


# --- the two models and what they say -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """Folders of two models that differ in weights alone."""

    served: Path
    published: Path


@functools.cache
def make_models(folder: Path) -> Models:
    """Made once for all tests that share a temporary folder."""
    first, second = (make_tiny_model(folder / f"engine-{seed}", seed=seed, context=CONTEXT) for seed in (0, 1))
    return Models(first, second)


@functools.cache
def _reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def full_logprobs(folder: Path, token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """f32[T, V]: row i holds the log-probs of what follows token i, by one forward over the whole row."""
    with torch.no_grad():
        logits: Tensor = _reference(folder)(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return (logits / temperature).log_softmax(-1)


def logprobs_of(folder: Path, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> Tensor:
    """f32[len(output)] of each sampled token."""
    rows = full_logprobs(folder, [*prompt, *output], temperature)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(output, dtype=torch.long)[:, None])[:, 0]


def greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` argmax tokens."""
    return list(_greedy(folder, tuple(prompt), count))


@functools.cache
def _greedy(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    row = prompt
    for _ in range(count):
        row = (*row, int(full_logprobs(folder, row)[-1].argmax()))
    return row[len(prompt) :]


def greedy_over_old_kv(old: Path, new: Path, row: Sequence[int], count: int) -> list[int]:
    """The next `count` argmax tokens of the new model where the old one has computed the KV of ``row[:-1]``."""
    with torch.no_grad():
        cache = _reference(old)(torch.tensor([list(row[:-1])]), use_cache=True).past_key_values
        following: list[int] = []
        last = row[-1]
        for _ in range(count):
            output = _reference(new)(torch.tensor([[last]]), cache=cache, use_cache=True)
            cache, last = output.past_key_values, int(output.logits[0, -1].argmax())
            following.append(last)
    return following


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Tensors of a folder by the names `save_pretrained` gave them."""
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def buckets_of(version: int, tensors: Sequence[NamedTensor], size: int = 4) -> list[WeightBucket]:
    """Cut tensors into buckets of `size`, the last marked so."""
    parts = [tuple(tensors[i : i + size]) for i in range(0, len(tensors), size)]
    return [
        WeightBucket(version=version, index=i, last=i == len(parts) - 1, tensors=part) for i, part in enumerate(parts)
    ]


class Feed:
    """Receiver double: yields the buckets it was given."""

    def __init__(self) -> None:
        self.buckets: list[WeightBucket] = []
        self.closed = False

    def receive(self, version: int) -> Iterator[WeightBucket]:
        yield from self.buckets

    def close(self) -> None:
        self.closed = True


# --- asking an engine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """Of each token."""
    finish_reason: FinishReason
    chunks: int
    cached_tokens: int


def ask(prompt: Sequence[int], *, name: str = "request", session: str | None = None, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        session_id=session or name,
        token_ids=tuple(prompt),
        params=SamplingParams(**params),
    )


async def collect(chunks: AsyncIterator[Chunk], before: Sequence[Chunk] = ()) -> Answer:
    """All chunks of a request as one answer; checks their form on the way."""
    taken = list(before)
    async for chunk in chunks:
        assert not taken or taken[-1].finish_reason is None, "a chunk came after the one with the finish reason"
        assert len(chunk.token_ids) == len(chunk.logprobs), "a chunk has another number of tokens than of log-probs"
        assert chunk.token_ids or chunk.finish_reason, "a chunk carries neither tokens nor a finish reason"
        taken.append(chunk)
    assert taken, "the request ended without a chunk"
    assert taken[-1].finish_reason is not None, "the last chunk carries no finish reason"
    return Answer(
        [token for chunk in taken for token in chunk.token_ids],
        [logprob for chunk in taken for logprob in chunk.logprobs],
        [chunk.weight_version for chunk in taken for _ in chunk.token_ids],
        taken[-1].finish_reason,
        len(taken),
        taken[-1].cached_tokens,
    )


async def answers(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Ask for all at once."""
    return list(await asyncio.gather(*(collect(engine.generate(request)) for request in requests)))


async def publish(engine: Engine, feed: Feed, folder: Path, version: int, mode: PauseMode = "retract") -> None:
    """Pause, stage, activate, resume: one publish of a folder's weights."""
    tensors = [NamedTensor(name=name, tensor=tensor) for name, tensor in weights_of(folder).items()]
    feed.buckets = buckets_of(version, tensors)
    await engine.pause(mode)
    await engine.receive(version)
    await engine.activate(version)
    await engine.resume()


def check_filtered(folder: Path, request: GenerateRequest, answer: Answer, tolerance: float) -> None:
    """Tokens within top-k, top-p and min-p, with the log-probs of the full vocabulary."""
    prompt, params = request.token_ids, request.params
    rows = full_logprobs(folder, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
    for row, token, logprob in zip(rows, answer.token_ids, answer.logprobs, strict=True):
        assert abs(float(row[token]) - logprob) <= tolerance, (
            f"log-prob {logprob:.4f} is not the full vocabulary's {float(row[token]):.4f} ({params})"
        )
        probs, own = row.exp(), float(row[token].exp())
        better = probs[probs > own * 1.001]  # ties and rounding give the benefit of the doubt
        assert params.top_k == 0 or len(better) < params.top_k, f"token {token} is outside the top {params.top_k}"
        assert float(better.sum()) < params.top_p + 1e-3, f"token {token} is outside top-p {params.top_p}"
        assert own >= params.min_p * float(probs.max()) * 0.999, f"token {token} is below min-p {params.min_p}"


PROMPTS = ([1, 20, 30, 40], [1, 77], [*range(50, 80)], [1, 20, 30, 40], [9], [*range(50, 75), 5, 6])
"""Of different lengths, two equal, two with a long common prefix."""


SPOILT = ("missing", "unknown", "twice", "shape", "dtype", "no last bucket", "version")


@contextmanager
def refused(otherwise: str) -> Iterator[list[str]]:
    """The block must raise an EngineError; its text is appended to what this yields."""
    said: list[str] = []
    try:
        yield said
    except EngineError as error:
        said.append(str(error))
    else:
        pytest.fail(otherwise)


def spoil(tensors: list[NamedTensor], fault: str) -> tuple[list[WeightBucket], str]:
    """Buckets of version 0 with one fault, and the word its error must hold."""
    victim = tensors[5]
    rest = tensors[:5] + tensors[6:]
    stranger = NamedTensor(name="model.layers.99.weight", tensor=victim.tensor)
    spoilt = {
        "missing": rest,
        "unknown": [*tensors, stranger],
        "twice": [*tensors, victim],
        "shape": [*rest, NamedTensor(name=victim.name, tensor=torch.zeros(3))],
        "dtype": [*rest, NamedTensor(name=victim.name, tensor=victim.tensor.double())],
    }.get(fault, tensors)
    buckets = buckets_of(1 if fault == "version" else 0, spoilt)
    if fault == "no last bucket":
        buckets[-1] = replace(buckets[-1], last=False)
    named = {"unknown": stranger.name, "no last bucket": "last", "version": "version"}
    return buckets, named.get(fault, victim.name)
