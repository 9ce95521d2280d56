"""Published agent programs, unmodified, against a served session: every trained token was sampled, none was lost.

The programs run in `.venv-agents` (requirements/agents.txt, agents-npm.txt), since their dependencies are many; where it
is absent, in this interpreter. One that is not installed is skipped with that reason.

First a scripted policy, whose every token is known; then, marked slow, `miles serve` with SmolLM2 on the engine `local`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

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
from miles_core.tokenizer import ChatTokenizer
from miles_core.types import SamplingParams
from miles_tito_chatml.family import ChatMLFamily
from miles_tito_chatml.options import ChatMLOptions

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


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
"""Program -> (module it needs, or command of npm, what the policy says turn by turn, what the program prints at the end)."""
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
    family = ChatMLFamily(ChatMLOptions(), ChatTokenizer.from_dir(folder))
    engine = scripted_engine(family, texts)
    # smolagents and the OpenAI SDKs respell arguments; what they replay then still means the same.
    factory = SessionFactory([engine], family, loose_tool_call, context_length=200_000, history=history)
    settings = ServerSettings(sampling=SamplingParams(max_tokens=500), agent_sampling="override", picker=PICKERS["all"])
    async with listening(SessionStore(factory, settings)) as url:
        yield url, engine, family


async def run(program: str, url: str) -> str:
    task = await asyncio.create_subprocess_exec(
        interpreter(), str(PROGRAMS / f"{program}.py"), url, stdout=-1, stderr=-1, env=environment()
    )
    try:
        out, err = await asyncio.wait_for(task.communicate(), timeout=300)
    finally:
        if task.returncode is None:
            task.kill()
    assert task.returncode == 0, f"{out.decode()}\n{err.decode()[-3000:]}"
    return out.decode().strip().splitlines()[-1]


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
    async with served(tmp_path, texts, history) as (url, engine, family), httpx.AsyncClient(base_url=url) as http:
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
