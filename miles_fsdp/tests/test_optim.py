"""The learning-rate schedule, weight decay's reach, and what a checkpoint may hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles_core.testing.backend_oracle import ADAMW
from miles_core.trainer.schedule import decays, learning_rate
from miles_fsdp.optim import Optimizer, clip, grad_norm, nonfinite

SETTINGS = replace(ADAMW, lr=2.0, min_lr_ratio=0.1, clip_grad_norm=1.0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [1.0, 2.0, 2.0, 1.55, 1.1, 0.65]),
        ("cosine", [1.0, 2.0, 2.0, 1.736396, 1.1, 0.463604]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_shape(schedule, expected) -> None:
    settings = replace(SETTINGS, schedule=schedule, warmup_steps=2, total_steps=6)
    assert [learning_rate(settings, update) for update in range(6)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_stays_at_its_floor_after_the_end(schedule) -> None:
    settings = replace(SETTINGS, schedule=schedule)
    assert [learning_rate(settings, update) for update in (10, 11, 500)] == pytest.approx([0.2] * 3)


def test_a_warm_up_as_long_as_the_run_is_no_division_by_zero() -> None:
    settings = replace(SETTINGS, schedule="cosine", warmup_steps=10, total_steps=10)
    assert learning_rate(settings, 9) == pytest.approx(2.0)
    assert learning_rate(settings, 10) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (4, 4), True),
        ("model.embed_tokens.weight", (4, 4), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 4), True),
        ("model.layers.0.input_layernorm.weight", (4,), False),
        ("model.layers.0.self_attn.q_norm.weight", (2, 4), False),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("model.layers.0.mlp.experts.bias", (2, 4), False),
    ],
)
def test_decay_acts_on_matrices_only(name, shape, expected) -> None:
    assert decays(name, torch.zeros(shape)) is expected


def test_steps_are_those_of_plain_adamw() -> None:
    torch.manual_seed(0)
    start = torch.randn(3, 4)
    ours, theirs = start.clone(), torch.nn.Parameter(start.clone())
    settings = replace(SETTINGS, lr=0.1, weight_decay=0.2)
    optimizer = Optimizer({"a.weight": ours}, settings)
    plain = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2, foreach=False)
    for _ in range(3):
        ours.grad = torch.randn(3, 4)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        plain.step()
    assert optimizer.updates == 3
    assert torch.allclose(ours, theirs.detach(), rtol=0, atol=1e-6)


def test_the_norm_is_global_and_clipping_scales_every_gradient() -> None:
    masters = {"a": torch.zeros(2), "b": torch.zeros(1), "untouched": torch.zeros(1)}
    masters["a"].grad, masters["b"].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    norm = grad_norm(masters)
    assert float(norm) == pytest.approx(5.0)
    clip(masters, norm, 1.0)
    assert masters["a"].grad.tolist() == pytest.approx([0.6, 0.0], rel=1e-4)
    clip(masters, grad_norm(masters), 10.0)
    assert masters["b"].grad.tolist() == pytest.approx([0.8], rel=1e-4)


def test_nonfinite_gradients_are_named() -> None:
    masters = {name: torch.zeros(2) for name in "abcde"}
    for name in "bcde":
        masters[name].grad = torch.tensor([0.0, float("inf")])
    masters["a"].grad = torch.zeros(2)
    assert nonfinite(masters, limit=3) == ["b", "c", "d"]
