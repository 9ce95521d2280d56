"""Exchanges with a real server, kept as files: which ones, and how one is had anew.

Each file of `recorded/` holds a request as this plugin writes it, the events or the refusal the server answered, and
the release of SGLang it came from. The model is the engine kit's first one, whose weights follow from its seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from miles_core.kinds.engine import GenerateRequest
from miles_core.types import SamplingParams
from miles_sglang.checkpoint import Checkpoint
from miles_sglang.rows import Row, payload

RECORDED = Path(__file__).parents[1] / "recorded"
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One request to POST /generate, as a row of this plugin."""

    prompt: tuple[int, ...]
    limit: int
    params: Json = field(default_factory=dict)
    already: tuple[int, ...] = ()
    """Sampled by an attempt before this one."""

    def row(self, name: str) -> Row:
        request = GenerateRequest(
            request_id=name, session_id=name, token_ids=self.prompt, params=SamplingParams(**self.params)
        )
        row = Row(request, seed=7, limit=self.limit, rank=None, ids=list(self.already))
        row.rid = f"recorded/{name}"
        return row

    def body(self, name: str, checkpoint: Checkpoint) -> Json:
        return payload(self.row(name), checkpoint=checkpoint, epoch=0, stream_interval=2)


CASES = {
    "greedy": Case((1, 20, 30, 40), 6, {"temperature": 0.0}),
    "sampled": Case((1, 77), 5, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}),
    "continued": Case((1, 20, 30), 6, {"temperature": 0.0}, already=(40, 41)),
    "stopped": Case((1, 20, 30, 40), 80, {"temperature": 1.5, "stop_token_ids": (2, *range(60, 160))}),
    "refused": Case((1, *range(20, 120), *range(20, 60)), 200, {"temperature": 0.0}),
}


async def exchange(url: str, body: Json) -> Json:
    """Ask the server; what it answered, decoded and nothing else."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
        http.post(f"{url}/generate", json=body) as response,
    ):
        text = await response.text()
    if response.status != 200:
        return {"status": response.status, "answer": json.loads(text)}
    return {"status": 200, "events": list(events_of(text))}


def events_of(text: str) -> Iterator[Json]:
    """Decoded server-sent events before ``[DONE]``."""
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def load(name: str) -> Json:
    found: Json = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def save(name: str, content: Json) -> None:
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def ids(answer: Json) -> list[int]:
    return [token for event in answer["events"] for token in event["output_ids"]]


def logprobs(answer: Json) -> list[float]:
    return [entry[0] for event in answer["events"] for entry in event["meta_info"].get("output_token_logprobs", [])]


def shape(value: Any) -> Any:
    """Keys and types of a decoded value; of a list, those of its first element, since lengths follow the machine."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
