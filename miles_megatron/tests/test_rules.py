"""Combinations are refused with a reason before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_core.registry import load_target
from miles_core.rules import Facts, evaluate
from miles_megatron.options import MegatronOptions
from miles_megatron.plugin import miles_backends


def fired(ranks: int, model: Path | None = None, **options: Any) -> list[tuple[str, str]]:
    (capability,) = miles_backends()
    values = {f"backend.{key}": value for key, value in MegatronOptions(**options).model_dump().items()}
    facts = Facts({**values, "placement.trainer_ranks": ranks, "model.path": str(model)})
    owned = [(rule, "miles-megatron") for rule in capability.rules]
    return [(v.rule.id, v.found) for v in evaluate(owned, facts, load_target)]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (8, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 8}),
        (8, {"pipeline_parallel": 2, "virtual_pipeline": 2, "context_parallel": 2}),
        (4, {"recompute": "full", "recompute_layers": 2, "expert_parallel": 2}),
    ],
)
def test_sound_layouts_pass(ranks: int, options: dict[str, Any]) -> None:
    assert fired(ranks, **options) == []


@pytest.mark.parametrize(
    ("rule", "ranks", "options"),
    [
        ("megatron-layout", 2, {"tensor_parallel": 4, "sequence_parallel": True}),
        ("megatron-layout", 4, {"expert_parallel": 8}),
        ("megatron-layout", 4, {"pipeline_parallel": 2, "expert_parallel": 4}),
        ("megatron-virtual-pipeline", 2, {"virtual_pipeline": 2}),
        ("megatron-sequence-parallel", 2, {"sequence_parallel": True}),
        ("megatron-experts-sequence", 4, {"tensor_parallel": 2, "expert_parallel": 2}),
        ("megatron-recompute-layers", 1, {"recompute_layers": 2}),
    ],
)
def test_unsound_ones_name_their_rule_and_numbers(rule: str, ranks: int, options: dict[str, Any]) -> None:
    ((found, text),) = fired(ranks, **options)
    assert found == rule
    assert text


CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_experts": 4,
    "moe_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("changes", "ranks", "options", "found"),
    [
        ({}, 4, {"tensor_parallel": 4, "sequence_parallel": True}, "2 key-value heads over 4 ranks"),
        ({"kv_lora_rank": 8}, 4, {"tensor_parallel": 4, "sequence_parallel": True}, None),
        ({}, 3, {"pipeline_parallel": 3}, "4 layers over 3 pieces"),
        ({}, 1, {"recompute": "full", "recompute_layers": 3}, "4 layers of a piece, recomputed 3 at a time"),
        ({}, 2, {"recompute": "full", "recompute_layers": 2, "pipeline_parallel": 2}, None),
        ({}, 3, {"expert_parallel": 3}, "4 experts over 3 ranks"),
        ({}, 2, {"tensor_parallel": 2}, "experts under tensor parallelism without sequence parallelism"),
        ({}, 8, {"context_parallel": 8}, "4 heads of each rank over 8 ranks"),
        ({"num_experts": 0}, 2, {"expert_parallel": 2}, "a model without experts"),
        ({"num_experts": 0, "experts_of_mine": 4}, 2, {"expert_parallel": 2}, None),
        ({}, 4, {"pipeline_parallel": 2, "expert_parallel": 2}, None),
    ],
)
def test_layouts_are_held_against_the_model(
    tmp_path: Path, changes: dict[str, int], ranks: int, options: dict[str, Any], found: str | None
) -> None:
    config = {key: value for key, value in (CONFIG | changes).items() if value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = [("megatron-divides-the-model", found)] if found else []
    assert fired(ranks, tmp_path, **options) == expected


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "norm_topk_prob: true of one expert per token"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": False}, None),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type: proportional"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type: mrope"),
        ({"rope_scaling": {"rope_type": "yarn"}}, None),
        ({"rope_scaling": {"type": "longrope"}}, None),
        ({"rope_scaling": {"type": "mrope"}, "rope_parameters": {"rope_type": "default"}}, "rope_type: mrope"),
        ({"rope_scaling": "text"}, "rope_type: text"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_type: one per layer type"),
    ],
)
def test_what_megatron_computes_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], found: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    fires = fired(1, tmp_path)
    assert [rule for rule, _ in fires] == (["megatron-computes-the-model"] if found else [])
    assert all(found in text for _, text in fires if found)
