"""Combinations are refused with a reason before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.registry import load_target
from miles_core.rules import Facts, evaluate
from miles_megatron.options import MegatronOptions
from miles_megatron.plugin import miles_backends


def fired(ranks: int, **options: Any) -> list[tuple[str, str]]:
    (capability,) = miles_backends()
    values = {f"backend.{key}": value for key, value in MegatronOptions(**options).model_dump().items()}
    facts = Facts({**values, "placement.trainer_ranks": ranks})
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
