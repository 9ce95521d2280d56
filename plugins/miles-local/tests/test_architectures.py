"""Log-probs, names and updates over architectures that differ in attention, experts and tying."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from miles_core.errors import EngineError
from miles_core.kinds.engine import EngineContext
from miles_core.testing.engine_oracle import Feed, answers, ask, logprobs_of, publish, weights_of
from miles_core.weights.digests import digest_tensor
from miles_local.engine import LocalEngine
from miles_local.options import LocalOptions
from miles_local.weights import checkpoint_views

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.18,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_HEADS = {**SIZES, "head_dim": 8}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama, untied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3-moe, fused experts": lambda: transformers.Qwen3MoeConfig(
        **SMALL_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=True
    ),
    "mistral, sliding window": lambda: transformers.MistralConfig(**SMALL_HEADS, sliding_window=8),
    "gemma2, soft cap and alternating windows": lambda: transformers.Gemma2Config(
        **SMALL_HEADS, sliding_window=8, query_pre_attn_scalar=8
    ),
    "gpt-oss, attention sinks": lambda: transformers.GptOssConfig(
        **SMALL_HEADS,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek-v3, keys wider than values": lambda: transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
}

PROMPTS = ([1, 20, 30, 40], list(range(50, 80)), [9], [*range(50, 75), 5, 6], list(range(100, 140)))


def save(name: str, folder: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_updates_agree_with_transformers(name: str, tmp_path: Path) -> None:
    folders = [save(name, tmp_path / str(seed), seed) for seed in (0, 1)]
    digests = [{n: digest_tensor(t) for n, t in weights_of(folder).items()} for folder in folders]

    async def test() -> None:
        context = EngineContext(model_path=str(folders[0]), context_length=None, device="cpu", seed=0)
        engine = LocalEngine(LocalOptions(max_batch_size=3, prefill_tokens=12), context)
        await engine.start()
        feed = Feed()
        await engine.open_receiver(lambda: feed)
        for version, folder in enumerate(folders):
            if version:
                await publish(engine, feed, folder, version)
            assert await engine.digests() == digests[version], "not the names or bytes of save_pretrained"
            requests = [ask(p, name=str(i), max_tokens=4 + 4 * i, seed=i) for i, p in enumerate(PROMPTS)]
            for request, answer in zip(requests, await answers(engine, requests), strict=True):
                expected = logprobs_of(folder, request.token_ids, answer.token_ids)
                assert torch.allclose(expected, torch.tensor(answer.logprobs), atol=1e-4)
        await engine.close()

    asyncio.run(test())


def test_an_architecture_with_layers_that_do_not_attend_is_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3NextConfig(**SIZES)
    config.save_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = LocalEngine(
        LocalOptions(), EngineContext(model_path=str(tmp_path), context_length=None, device="cpu", seed=0)
    )
    with pytest.raises(EngineError, match="Qwen3NextForCausalLM"):
        asyncio.run(engine.start())


def test_finding_the_experts_of_a_model_costs_one_conversion_for_each_fused_tensor(monkeypatch) -> None:
    """And one for the place of gate and up, the same in every layer: each conversion copies all experts of a layer."""
    from transformers import core_model_loading

    config = CONFIGS["qwen3-moe, fused experts"]()
    config.num_hidden_layers, config.num_experts = 3, 16
    model = transformers.AutoModelForCausalLM.from_config(config)
    converted: list[str] = []
    convert = core_model_loading.revert_weight_conversion

    def counting(model: Any, state: dict[str, Any]) -> Any:
        converted.extend(name for name, tensor in state.items() if "experts" in name and tensor.device.type != "meta")
        return convert(model, state)

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", counting)
    views = checkpoint_views(model)
    assert len([name for name in views if "experts" in name]) == 3 * 16 * 3
    assert len(converted) == 3 * 2 + 1  # the down projections come as views
