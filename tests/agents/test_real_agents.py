"""Published agent programs, unmodified, against a served session: every trained token was sampled, none was lost.

The programs run in `.venv-agents` (requirements/agents.txt, agents-npm.txt), since their dependencies are many; where
it is absent, in this interpreter. One that is not installed is skipped with that reason.

First a scripted policy, whose every token is known; then, marked slow, `miles serve` with SmolLM2 on engine `local`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_core.driver import serve
from miles_core.kinds.engine import Chunk, Engine, GenerateRequest
from miles_core.registry import discover
from miles_core.session.factory import History, SessionFactory
from miles_core.session.leaves import PICKERS
from miles_core.session.matching import loose_tool_call
from miles_core.session.serving.chat import read_message
from miles_core.session.serving.records import unpacked
from miles_core.session.serving.runner import listening
from miles_core.session.serving.settings import ServerSettings
from miles_core.session.serving.store import SessionStore
from miles_core.testing.scripted import ScriptedEngine, scripted_logprob
from miles_core.testing.served_script import scripted_engine
from miles_core.testing.tiny import IM_END, write_tiny_tokenizer
from miles_core.tito.options import FamilyOptions
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import SamplingParams
from miles_tito_chatml.family import ChatMLFamily

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2-135m"


def call(name: str, **arguments: Any) -> str:
    """A Hermes call, spaced as no JSON library spaces it."""
    spelled = json.dumps(arguments, separators=(" ,", ":  "))
    return f'<tool_call>\n{{"name": "{name}", "arguments": {spelled}}}\n</tool_call>'


LOOK = ["I look.\n" + call("look", where="the box"), "There is a ball."]
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat x"
AGENTS: dict[str, tuple[str, list[str], str]] = {
    "openai_sync": ("openai", LOOK, "There is a ball."),
    "openai_async_stream": ("openai", ["Once upon a time.", "Then it ended: né 中."], "Then it ended: né 中."),
    "anthropic_sdk": ("anthropic", LOOK, "There is a ball."),
    "openai_agents": ("agents", LOOK, "There is a ball."),
    "smolagents_tools": ("smolagents", [LOOK[0], call("final_answer", answer="a ball")], "a ball"),
    "mini_swe_agent": (
        "minisweagent",
        ["I write.\n" + call("bash", command="printf hello > x"), "Done.\n" + call("bash", command=DONE)],
        "hello",
    ),
    "qwen_code": (
        "npm:qwen",
        ["I write.\n" + call("run_shell_command", command="echo hello > x", is_background=False), "Done."],
        "hello",
    ),
}
"""Program -> (module it needs or command of npm, what the policy says turn by turn, what the program prints last)."""
REWRITES = frozenset({"smolagents_tools"})
"""Agents that replay their calls as prose of their own: each request is then a branch."""


@cache
def interpreter() -> str:
    own = ROOT / ".venv-agents" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


@cache
def installed(module: str) -> bool:
    if module.startswith("npm:"):
        command = ROOT / ".venv-agents" / "node_modules" / ".bin" / module.removeprefix("npm:")
        return command.exists() and shutil.which("node") is not None
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([interpreter(), "-c", probe], check=False, env=environment()).returncode == 0


def environment() -> dict[str, str]:
    """Of an agent: nothing of this project on its path, and no calls home."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "true"}
    return {**kept, **quiet, "OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1"}


@contextlib.asynccontextmanager
async def served(
    folder: Path, texts: list[str], history: History
) -> AsyncIterator[tuple[str, ScriptedEngine, ChatMLFamily]]:
    write_tiny_tokenizer(folder)
    family = ChatMLFamily(FamilyOptions(), ChatTokenizer.from_dir(folder))
    engine = scripted_engine(family, texts)
    # smolagents and the OpenAI SDKs respell arguments; what they replay then still means the same.
    factory = SessionFactory([engine], family, loose_tool_call, context_length=200_000, history=history)
    settings = ServerSettings(sampling=SamplingParams(max_tokens=500), agent_sampling="override", picker=PICKERS["all"])
    async with listening(SessionStore(factory, settings)) as url:
        yield url, engine, family


def patient(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60)


async def run(program: str, url: str) -> str:
    """Its last line; it must end well."""
    code, out, err = await ran(program, url)
    assert code == 0, f"{out}\n{err[-3000:]}"
    return out.strip().splitlines()[-1]


async def ran(program: str, url: str) -> tuple[int | None, str, str]:
    task = await asyncio.create_subprocess_exec(
        interpreter(), str(PROGRAMS / f"{program}.py"), url, stdout=-1, stderr=-1, env=environment()
    )
    try:
        out, err = await asyncio.wait_for(task.communicate(), timeout=300)
    finally:
        if task.returncode is None:
            task.kill()
    return task.returncode, out.decode(), err.decode()


def only_assistant_text_differs(family: ChatMLFamily, row: list[int], sample: dict[str, Any]) -> None:
    """The row, against the whole conversation rendered at once: the same control tokens, other text only where the
    assistant speaks."""
    messages = [read_message(raw, "messages")[0] for raw in sample["messages"]]
    whole = family.render(messages)
    assert len(turns(family, row)) <= len(turns(family, whole))
    for ours, canonical in zip(turns(family, row)[2:], turns(family, whole)[2:], strict=False):
        assert ours == canonical or (ours.startswith("assistant") and canonical.startswith("assistant")), ours


def turns(family: ChatMLFamily, row: list[int]) -> list[str]:
    return [turn.partition("<|im_end|>")[0] for turn in family.tokenizer.decode(row).split("<|im_start|>")]


@pytest.mark.parametrize("program", AGENTS)
async def test_a_published_agent_trains_exactly_what_was_sampled(program: str, tmp_path: Path) -> None:
    module, texts, printed = AGENTS[program]
    if not installed(module):
        pytest.skip(f"{module} is not installed; see requirements/agents.txt, agents-npm.txt")
    history: History = "branching" if program in REWRITES else "linear"
    async with (
        served(tmp_path, texts, history) as (url, engine, family),
        patient(url) as http,
    ):
        key = (await http.post("/sessions", json={})).json()["session_id"]
        assert await run(program, f"{url}/sessions/{key}") == printed
        samples = (await http.post(f"/sessions/{key}/samples", json={"prompt_id": "p"})).json()["samples"]
    assert len(samples) == (len(texts) if history == "branching" else 1)
    said = [[*family.tokenizer.encode(text), IM_END] for text in texts]
    trained: list[int] = []
    for sample in samples:
        ids, mask, logprobs = (unpacked(sample[name]) for name in ("token_ids", "loss_mask", "logprobs"))
        mask = mask.astype(bool)
        trained += ids[mask].tolist()
        assert np.array_equal(np.isfinite(logprobs), mask)
        expected = [scripted_logprob(int(ids[at]), int(at)) for at in np.flatnonzero(mask)]
        assert np.allclose(logprobs[mask], expected, atol=1e-6)
        if history == "linear":
            only_assistant_text_differs(family, ids.tolist(), sample)
    assert trained == [index for turn in said for index in turn]
    if history == "branching":
        return
    prompts = [list(request.token_ids) for request in engine.requests]
    for before, turn, after in zip(prompts, said, prompts[1:], strict=False):
        assert after[: len(before) + len(turn)] == [*before, *turn]
    assert len(prompts) == len(texts)


class Recorded:
    """An engine that keeps what it was asked and what it sampled, as it passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.turns: list[tuple[list[int], list[int], list[float]]] = []
        """Prompt ids, sampled ids, their log-probs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        ids: list[int] = []
        logprobs: list[float] = []
        self.turns.append((list(request.token_ids), ids, logprobs))
        async for chunk in self._engine.generate(request):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            yield chunk


@contextlib.asynccontextmanager
async def served_model(
    folder: Path, history: History, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, Recorded]]:
    """`miles serve --model FOLDER --engine local`, but for the recorder between sessions and engine."""
    recorded: list[Recorded] = []

    def factory(engines: Sequence[Engine], *arguments: Any, **more: Any) -> SessionFactory:
        recorded.extend(Recorded(engine) for engine in engines)
        return SessionFactory(recorded, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(serve, "SessionFactory", factory)
    said: asyncio.Queue[str] = asyncio.Queue()
    settings = ServerSettings(agent_sampling="override", picker=PICKERS["all"])
    listen = serve.Listen(host="127.0.0.1", port=0, settings=settings)
    quick = serve.Quick(model=str(folder), engine="local", matcher="loose-tool-call", history=history)
    server = asyncio.create_task(serve.serve_quick(quick, discover(()), listen, said.put_nowait))
    try:
        while " at http" not in (line := await asyncio.wait_for(said.get(), timeout=120)):
            pass
        yield line.rpartition(" ")[2], recorded[0]
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server


def scored(folder: Path, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """f64[T] log-prob of each token given those before it, by transformers in one pass; 0 at the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].double()
    found = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    return np.concatenate([[0.0], found.numpy()])


@pytest.mark.slow
@pytest.mark.parametrize("program", [name for name in AGENTS if name != "qwen_code"])
async def test_a_published_agent_with_a_real_model(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is too small to succeed, and need not: whatever it says is trained as it was sampled."""
    module = AGENTS[program][0]
    if not installed(module):
        pytest.skip(f"{module} is not installed; see requirements/agents.txt")
    if not (MODEL / "config.json").exists():
        pytest.skip("models/smollm2-135m is not there; make quickstart creates it")
    history: History = "branching" if program in REWRITES else "linear"
    sampling = {"temperature": 1.0, "top_k": 20, "max_tokens": 160, "seed": 5}
    async with (
        served_model(MODEL, history, monkeypatch) as (url, engine),
        patient(url) as http,
    ):
        key = (await http.post("/sessions", json={"sampling": sampling})).json()["session_id"]
        code, out, err = await ran(program, f"{url}/sessions/{key}")
        reply = await http.post(f"/sessions/{key}/samples", json={"prompt_id": "p"}, timeout=60)
        samples = reply.json()["samples"]
        assert 'status="5' not in (await http.get("/metrics")).text
    print(f"{program}: exit {code}, {len(engine.turns)} turns, {len(samples)} rows: {out[-300:]} {err[-700:]}")
    assert engine.turns
    assert history == "branching" or len(samples) == 1
    trained: list[tuple[int, float]] = []
    for sample in samples:
        ids, mask, sampled, logprobs = (unpacked(sample[n]) for n in ("token_ids", "loss_mask", "sampled", "logprobs"))
        mask = mask.astype(bool)
        assert not (mask & ~sampled.astype(bool)).any()
        assert np.array_equal(np.isfinite(logprobs), sampled.astype(bool))
        trained += zip(ids[mask].tolist(), logprobs[mask].tolist(), strict=True)
        oracle = scored(MODEL, ids)[mask]
        off, shifted = (np.abs(oracle - each).mean() for each in (logprobs[mask], np.roll(logprobs[mask], 1)))
        mismatch = sample["metadata"]["tito_session_mismatch"]
        print(f"  {len(ids)} tokens, {mask.sum()} trained, off by {off:.4f} (shifted by one {shifted:.2f}), {mismatch}")
        assert off < 0.1 * shifted, "log-probs are not those of their positions"
        assert set(mismatch["kinds"]) <= {"assistant_text"}
    turns = engine.turns
    if history == "linear":  # an agent that left a reply out retried that turn; the session dropped it, and says so
        last, said, _ = turns[-1]
        turns = [turn for turn in turns if [*turn[0], *turn[1]] == [*last, *said][: len(turn[0]) + len(turn[1])]]
        assert samples[0]["metadata"]["discarded_turns"] == len(engine.turns) - len(turns)
    emitted = [pair for _, ids, logprobs in turns for pair in zip(ids, logprobs, strict=True)]
    assert [token for token, _ in trained] == [token for token, _ in emitted]
    assert np.allclose([each for _, each in trained], [each for _, each in emitted], atol=1e-6)
