"""LoRA adapters: what a folder must hold, and a real server that samples as the merged weights would."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.testing.engine_oracle import PROMPTS, Models, answers, ask, greedy, logprobs_of, make_models
from miles_sglang.adapter import read_adapter
from miles_sglang.engine import SglangEngine
from miles_sglang.options import SglangOptions

RANK, ALPHA = 4, 8
MODULES = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.getbasetemp())


def make_adapter(folder: Path, base: Path, seed: int, rank: int = RANK, **changes: Any) -> Path:
    """An adapter over a checkpoint, and beside it `merged`: the checkpoint with W + alpha / r * B A."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    merged = shutil.copytree(base, folder / "merged")
    (file,) = merged.glob("*.safetensors")
    weights, adapter = load_file(file), {}
    for name in [name for name in weights if any(f".{module}.weight" in name for module in MODULES)]:
        rows, columns = weights[name].shape
        a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator) * 0.1
        key = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        weights[name] = weights[name] + ALPHA / rank * (b @ a)
    assert adapter
    save_file(weights, file, metadata={"format": "pt"})
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"target_modules": "all-linear"}, "target_modules 'all-linear'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": None}, "cannot be read"),
    ],
)
def test_an_adapter_the_server_would_compute_otherwise_is_refused(
    models: Models, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(EngineError, match=named):
        read_adapter(make_adapter(tmp_path / "adapter", models.served, 1, **changes))


def test_a_folder_without_weights_or_without_anything_is_no_adapter(models: Models, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", models.served, 1)
    assert read_adapter(folder).modules == tuple(sorted(MODULES))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError, match="no weights"):
        read_adapter(folder)
    with pytest.raises(EngineError, match="cannot be read"):
        read_adapter(tmp_path)


@pytest.mark.sglang
async def test_a_server_without_room_for_adapters_refuses_one(seeded: Any, models: Models, tmp_path: Path) -> None:
    folder = str(make_adapter(tmp_path / "adapter", models.served, 1))
    options = SglangOptions(urls=(seeded.url,), dtype="float32", deterministic=True)
    engine = SglangEngine(options, _context(models))
    async with asyncio.timeout(240):
        await engine.start()
        try:
            with pytest.raises(EngineError, match="LoRA is not enabled"):
                await engine.use_adapter(folder)
            await _samples_as(engine, models.served)
        finally:
            await engine.close()


@pytest.mark.sglang
@pytest.mark.slow
async def test_requests_are_sampled_through_the_adapter_in_use(
    cpu_options: dict[str, Any], models: Models, tmp_path: Path
) -> None:
    first, second = (make_adapter(tmp_path / f"adapter {seed}", models.served, seed) for seed in (1, 2))
    cpu = {**cpu_options, "server_args": {**cpu_options["server_args"], "lora_backend": "torch_native"}}
    engine = SglangEngine(
        SglangOptions.model_validate({**cpu, "adapter": str(first), "log_dir": str(tmp_path)}), _context(models)
    )
    async with asyncio.timeout(900):
        await engine.start()
        try:
            await _samples_as(engine, first / "merged")
            await engine.use_adapter(str(second))
            await _samples_as(engine, second / "merged")
            with pytest.raises(EngineError, match="load_lora_adapter"):
                await engine.use_adapter(str(make_adapter(tmp_path / "too large", models.served, 3, rank=16)))
            await _samples_as(engine, second / "merged")
            process = engine._server.process
            assert process is not None
            process.kill()  # a server that was brought back has the adapter in use again
            await _samples_as(engine, second / "merged")
            await engine.use_adapter(None)
            await _samples_as(engine, models.served)
            with pytest.raises(EngineError, match="cannot be published under a LoRA adapter"):
                await engine.open_receiver(lambda: pytest.fail("a receiver was made"))
        finally:
            await engine.close()


def _context(models: Models) -> EngineContext:
    return EngineContext(model_path=str(models.served), context_length=None, device="cpu", seed=0)


async def _samples_as(engine: SglangEngine, folder: Path) -> None:
    (answer,) = await answers(engine, [ask(PROMPTS[2], max_tokens=8, temperature=0.0)])
    assert answer.token_ids == greedy(folder, PROMPTS[2], 8)
    np.testing.assert_allclose(answer.logprobs, logprobs_of(folder, PROMPTS[2], answer.token_ids), atol=1e-5)
