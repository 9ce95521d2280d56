"""True-on-policy is accepted for what was proven, and for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_core.config.load import parse
from miles_core.config.problems import Problem
from miles_core.config.resolve import check_run
from miles_core.numerics.profiles import PROFILES, find_profile
from miles_core.registry import Registry

from .conftest import write_registered_model

BASE = """\
name: run
model: mine
data: train.jsonl
rewards: [score.py:score]
rollout: {sampling: {max_tokens: 16}}
schedule: {steps: 3, group_size: 4}
precision: {true_on_policy: true}
"""


def problems(registry: Registry, *overrides: str) -> list[Problem]:
    return check_run(parse(BASE, overrides), registry)[1]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_registered_model_is_accepted(workplace: Path, registry: Registry, dtype: str) -> None:
    write_registered_model(workplace / "mine", dtype)
    assert problems(registry) == []


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("F32", {"num_hidden_layers": 3}),
        ("F32", {"model_type": "llama"}),
        ("F32", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
        ("F32", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("F32", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e4}}),
        ("F32", {"use_sliding_window": True}),
        ("F32", {"attention_bias": True}),
        ("F32", {"hidden_act": "gelu"}),
        ("F32", {"quantization_config": {"quant_method": "fp8"}}),
        ("F16", {}),
    ],
)
def test_anything_else_is_refused_with_the_list(
    workplace: Path, registry: Registry, dtype: str, changes: dict[str, Any]
) -> None:
    write_registered_model(workplace / "mine", dtype, **changes)
    (problem,) = problems(registry)
    assert problem.rule == "MIL801"
    if dtype != "F16":
        assert all(profile.name in problem.message for profile in PROFILES)


def test_on_a_gpu_only_bfloat16_is_proven(workplace: Path, registry: Registry) -> None:
    write_registered_model(workplace / "mine", "F32")
    (problem,) = problems(registry, "placement.device=cuda")
    assert problem.rule == "MIL801"
    assert "BF16" in problem.message


@pytest.mark.parametrize("backend", ["fsdp", "plain"])
def test_a_side_without_the_kernels_is_named(workplace: Path, registry: Registry, backend: str) -> None:
    write_registered_model(workplace / "mine")
    found = problems(registry, f"backend={backend}")
    assert [problem.rule for problem in found] == ([] if backend == "fsdp" else ["MIL802"])
    assert all("plain" in problem.message for problem in found)


def test_the_published_shapes_are_registered() -> None:
    shapes = {profile.name: profile for profile in PROFILES}
    small, large = shapes["qwen3-0.6b"], shapes["qwen3-4b"]
    assert (small.num_hidden_layers, small.hidden_size, small.head_dim) == (28, 1024, 128)
    assert (large.num_hidden_layers, large.hidden_size, large.num_attention_heads) == (36, 2560, 32)
    config = {"model_type": "qwen3", "rope_scaling": None, "hidden_act": "silu"}
    for profile in PROFILES:
        fields = {name: getattr(profile, name) for name in profile.__dataclass_fields__}
        assert find_profile(fields | config) is profile
