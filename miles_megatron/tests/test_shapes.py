"""Models of any shape under every layout of two ranks: each tensor comes back bit for bit, from the folder and from a
checkpoint of another layout, and log-probs are those of transformers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import miles_megatron.start  # noqa: F401
from miles_core.testing.backend_oracle import LOSS, expected_update
from miles_core.testing.pair import Pair, Task, scored_batch
from miles_megatron.fits import cuts_in, misfits
from miles_megatron.options import MegatronOptions

TABLES = "miles_megatron.architectures"
TENSOR = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {**TENSOR, "expert_parallel": 2},
    {**TENSOR, "distributed_optimizer": True},
    {"pipeline_parallel": 2, "virtual_pipeline": 2},
    {"context_parallel": 2},
    {**TENSOR, "expert_tensor_parallel": 2},
    {"tensor_parallel": 2},
    TENSOR,
    {"pipeline_parallel": 2},
    {"distributed_optimizer": True},
    {},
    {"expert_parallel": 2},
)
"""Of two ranks. The simplest example takes the first that divides, and goes on under the last."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair")) as made:
        yield made


@st.composite
def dense(draw: Any) -> dict[str, Any]:
    """What every architecture has."""
    heads, groups = draw(st.sampled_from([(4, 4), (4, 2), (6, 2), (2, 2), (4, 1), (3, 3)]))
    return {
        "vocab_size": draw(st.integers(271, 280)),
        "hidden_size": heads * 2 * draw(st.integers(3, 6)),
        "intermediate_size": 2 * draw(st.integers(5, 20)),
        "num_hidden_layers": draw(st.sampled_from([4, 4, 2, 1])),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": 64,
        "initializer_range": 0.18,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": draw(st.sampled_from([None, 0])),
    }


@st.composite
def routed(draw: Any) -> dict[str, Any]:
    """What DeepSeek-V3 and GLM have besides."""
    made, groups = draw(dense()), draw(st.sampled_from([1, 2]))
    return {
        **made,
        "n_routed_experts": groups * draw(st.integers(2, 3)),
        "num_experts_per_tok": 2,
        "n_group": groups,
        "topk_group": draw(st.integers(1, groups)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "moe_intermediate_size": 2 * draw(st.integers(5, 9)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "first_k_dense_replace": draw(st.integers(0, made["num_hidden_layers"])),
    }


HEAD = st.sampled_from([6, 8, 12])


@st.composite
def qwen3_moe(draw: Any) -> dict[str, Any]:
    made, chosen = draw(dense()), draw(st.integers(1, 3))
    return {
        **made,
        "head_dim": draw(HEAD),
        "num_experts": draw(st.integers(4, 6)),
        "num_experts_per_tok": chosen,
        "norm_topk_prob": chosen > 1 and draw(st.booleans()),
        "moe_intermediate_size": 2 * draw(st.integers(5, 9)),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.lists(st.integers(0, made["num_hidden_layers"] - 1), unique=True)),
    }


@st.composite
def glm4_moe(draw: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw(st.sampled_from([0.5, 1.0]))}
    return {
        **draw(routed()),
        "head_dim": draw(st.sampled_from([8, 12])),
        "attention_bias": draw(st.booleans()),
        "use_qk_norm": draw(st.booleans()),
        "rope_parameters": rope,
    }


@st.composite
def deepseek_v3(draw: Any) -> dict[str, Any]:
    made = draw(routed())
    return {
        **made,
        "num_key_value_heads": made["num_attention_heads"],
        "q_lora_rank": draw(st.sampled_from([None, 10, 16])),
        "kv_lora_rank": draw(st.sampled_from([10, 16])),
        "qk_nope_head_dim": draw(st.sampled_from([6, 8])),
        "qk_rope_head_dim": draw(st.sampled_from([4, 8])),
        "v_head_dim": draw(st.sampled_from([5, 8])),
    }


@st.composite
def with_head(draw: Any) -> dict[str, Any]:
    return {**draw(dense()), "head_dim": draw(HEAD)}


FAMILIES: dict[str, tuple[type[Any], st.SearchStrategy[dict[str, Any]]]] = {
    "dense:LLAMA": (transformers.LlamaConfig, with_head()),
    "dense:QWEN2": (transformers.Qwen2Config, dense()),
    "dense:QWEN3": (transformers.Qwen3Config, with_head()),
    "sparse:QWEN3_MOE": (transformers.Qwen3MoeConfig, qwen3_moe()),
    "sparse:GLM4_MOE": (transformers.Glm4MoeConfig, glm4_moe()),
    "sparse:DEEPSEEK_V3": (transformers.DeepseekV3Config, deepseek_v3()),
}


def fits(config: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    return not list(misfits(cuts_in(config), MegatronOptions(**options)))


@st.composite
def cases(draw: Any, table: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A config, and two layouts that divide the model."""
    config = draw(FAMILIES[table][1])
    possible = [options for options in LAYOUTS if fits(config, options)]
    return config, draw(st.sampled_from(possible)), draw(st.sampled_from(possible[::-1]))


def write(table: str, config: Mapping[str, Any], folder: Path) -> None:
    """The model as ``model``, and as ``other`` with other weights, but for what is not trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = FAMILIES[table][0](**config)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        with torch.no_grad():
            for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("_bias"))):
                tensor.add_(0.1 * torch.randn_like(tensor))
        model.save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "other")
    tensors = load_file(folder / "model" / "model.safetensors")
    others = {name: t if name.endswith("e_score_correction_bias") else 2 * t for name, t in tensors.items()}
    save_file(others, folder / "other" / "model.safetensors", metadata={"format": "pt"})


def check(pair: Pair, table: str, examples: int) -> None:
    @given(case=cases(table))
    @settings(max_examples=examples, deadline=None, derandomize=True)
    def every_shape(case: Any) -> None:
        config, first, second = case
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write(table, config, folder)
            load, state = f"{TABLES}.{table}", folder / "state"
            expected = expected_update(folder / "model", scored_batch(), LOSS).logprobs
            tasks = [
                Task(load=load, model=folder / "model", options=first, save=state),
                Task(load=load, model=folder / "other", options=second, resume=state, like=folder / "model"),
            ]
            for outcomes in pair.hold(tasks):
                for found in outcomes:
                    assert found.changed == []
                    assert np.abs(found.logprobs - expected).max() < 1e-5

    every_shape()


@pytest.mark.parametrize("table", FAMILIES)
def test_a_few_shapes_are_held_under_two_layouts(pair: Pair, table: str) -> None:
    check(pair, table, 2)


@pytest.mark.slow
@pytest.mark.parametrize("table", FAMILIES)
def test_many_shapes_are_held_under_two_layouts(pair: Pair, table: str) -> None:
    check(pair, table, 10)
