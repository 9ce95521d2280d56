"""Real SGLang for the tests: an interpreter that has it, and servers on the CPU that several tests share.

`MILES_SGLANG_PYTHON` names the interpreter; else it is `.venv-sglang` at the root of the checkout, which `make test`
builds. A server takes half a minute of a core to start, so one lives for a whole session and is given its weights anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_core.kinds.engine import EngineContext
from miles_core.testing.engine_oracle import CONTEXT, make_models
from miles_sglang.client import Client
from miles_sglang.launch import command, environment
from miles_sglang.options import ServerOptions
from miles_sglang.process import ServerProcess, reserved_port

ROOT = Path(__file__).parents[3]
SUPPORT = Path(__file__).parent / "support"
CPU_ARGS: dict[str, bool | int | float | str] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 8192,
    "sleep_on_idle": True,
}
BOOT_S = 600
"""A server that takes longer to start hangs; ten others at work on the same two cores make half a minute three."""


def _python() -> Path | None:
    named = os.environ.get("MILES_SGLANG_PYTHON")
    python = Path(named) if named else ROOT / ".venv-sglang" / "bin" / "python"
    return python if python.exists() else None


@pytest.fixture(scope="session")
def cpu_options() -> dict[str, object]:
    """Options that start SGLang on this machine's CPU."""
    python = _python()
    if python is None:
        pytest.skip("no environment with SGLang: run `make .venv-sglang/ok`, or set MILES_SGLANG_PYTHON")
    return {
        "python": str(python),
        "module": "sglang_cpu.launch",
        "python_path": (str(SUPPORT),),
        "env": {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_NUM_THREADS": "1"},
        "dtype": "float32",
        "memory_fraction": 0.5,
        "max_running_requests": 16,
        "server_args": CPU_ARGS,
    }


@dataclass(frozen=True)
class Live:
    """A server that runs already."""

    url: str
    process: ServerProcess


StartServer = Callable[..., Live]


@pytest.fixture(scope="session")
def start_server(cpu_options: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start a server by hand, as someone who will attach to it would; all end with the session."""
    started: list[Live] = []

    def start(
        model: Path, *, context_length: int, routes: bool = False, step_s: float = 0.0, **options: object
    ) -> Live:
        settings = ServerOptions.model_validate({**cpu_options, **options})
        if step_s:
            settings = settings.model_copy(update={"env": {**settings.env, "SGLANG_CPU_STEP_S": str(step_s)}})
        context = EngineContext(model_path=str(model), context_length=None, device="cpu", seed=0, routes=routes)
        with reserved_port() as port, reserved_port() as collectives:
            argv = command(
                settings,
                context,
                context_length=context_length,
                port=port,
                collectives_port=collectives,
                name="test",
                version=-1,
                stream_interval=1,
            )
            log = tmp_path_factory.mktemp("server") / "server.log"
            live = Live(f"http://127.0.0.1:{port}", ServerProcess(argv, environment(settings), log, []))
            started.append(live)
            asyncio.run(_ready(live))
        live.process.note_files()
        return live

    yield start
    for live in started:
        live.process.kill()


@pytest.fixture(scope="session")
def seeded(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Live:
    """A server in deterministic mode that serves the engine kit's first model."""
    models = make_models(tmp_path_factory.getbasetemp())
    # Ten milliseconds a step: else the longest requests of the kit are over before a busy machine can pause them.
    return start_server(models.served, context_length=CONTEXT, deterministic=True, step_s=0.01)


async def _ready(live: Live) -> None:
    client = Client(live.url, "test server")
    try:
        async with asyncio.timeout(BOOT_S):
            while True:
                assert live.process.exit_code is None, live.process.tail()
                try:
                    await client.get("/health", timeout_s=30)
                except Exception:  # noqa: BLE001 -- a poll: whatever it is, it is asked again until the deadline
                    await asyncio.sleep(0.3)
                else:
                    return
    finally:
        await client.close()
