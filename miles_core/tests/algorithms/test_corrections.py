"""Corrections: the worked example of a token sampled with probability 0.20, and loops for every level and action."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.algorithms import corrections

F64 = torch.float64


def logs(trainer: list[float], rollout: list[float]) -> torch.Tensor:
    return torch.tensor(trainer, dtype=F64).log() - torch.tensor(rollout, dtype=F64).log()


def flat(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)


def test_a_token_sampled_with_probability_one_fifth() -> None:
    # The trainer gives it 0.30, 0.50 or 0.02: ratios 1.5, 2.5 and 0.1 against the default interval [0, 2].
    log_ratio = logs([0.30, 0.50, 0.02], [0.20] * 3)
    truncated, metrics = corrections.tis(log_ratio, *flat(3))
    popped, _ = corrections.clip_or_pop(log_ratio, *flat(3))
    assert truncated.tolist() == pytest.approx([1.5, 2.0, 0.1])
    assert popped.tolist() == pytest.approx([1.5, 0.0, 0.1])
    assert metrics["ratio"].tolist() == pytest.approx([1.5, 2.5, 0.1])
    assert metrics["clipped_fraction"].tolist() == [0, 1, 0]
    assert metrics["abs_deviation"].tolist() == pytest.approx([0.5, 1.5, 0.9])


def test_the_lower_bound_acts_too_and_bounds_are_inclusive() -> None:
    log_ratio = torch.tensor([0.4, 0.5, 1.0]).double().log()
    assert corrections.tis(log_ratio, *flat(3), low=0.5)[0].tolist() == pytest.approx([0.5, 0.5, 1.0])
    one = torch.zeros(1, dtype=F64)
    assert corrections.clip_or_pop(one, *flat(1), low=1.0, high=1.0)[0].tolist() == [1.0]
    assert corrections.clip_or_pop(log_ratio, *flat(3), low=0.45)[0].tolist() == pytest.approx([0.0, 0.5, 1.0])


def test_metrics_only_measures_and_leaves_the_gradient_alone() -> None:
    log_ratio = logs([0.44, 0.36], [0.40, 0.40])
    weight, metrics = corrections.metrics_only(log_ratio, *flat(2))
    d = log_ratio.tolist()
    assert weight.tolist() == [1, 1]
    assert metrics["k1"].tolist() == pytest.approx([-x for x in d])
    assert metrics["k2"].tolist() == pytest.approx([x * x / 2 for x in d])
    assert metrics["k3"].tolist() == pytest.approx([math.exp(x) - 1 - x for x in d])
    assert metrics["ess"].tolist() == pytest.approx([1, 1])
    # perplexities 1 / sqrt(0.44 * 0.36) and 1 / 0.40
    assert metrics["perplexity_ratio"].tolist() == pytest.approx([0.40 / math.sqrt(0.44 * 0.36)] * 2)


def test_effective_sample_size_is_that_of_the_weights() -> None:
    log_ratio = logs([0.2, 0.4, 0.8], [0.4] * 3)
    _, metrics = corrections.tis(log_ratio, *flat(3), high=1.0)
    assert metrics["ess"][0].item() == pytest.approx((0.5 + 1 + 1) ** 2 / (3 * (0.25 + 1 + 1)))


def naive(
    rows: list[list[float]], masks: list[list[int]], level: str, action: str, low: float, high: float
) -> list[float]:
    found = []
    for row, mask in zip(rows, masks, strict=True):
        trained = [x for x, m in zip(row, mask, strict=True) if m]
        ratios = []
        for x, m in zip(row, mask, strict=True):
            unit = {"token": x, "sequence": sum(trained), "geometric": sum(trained) / max(len(trained), 1)}[level]
            ratios.append(math.exp(max(-20.0, min(20.0, unit))) if m else None)
        veto = any(r is not None and not low <= r <= high for r in ratios)
        for ratio in ratios:
            if ratio is None:
                found.append(1.0)
            elif action == "truncate":
                found.append(min(max(ratio, low), high))
            elif action == "mask":
                found.append(ratio if low <= ratio <= high else 0.0)
            else:
                found.append(0.0 if veto else 1.0)
    return found


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["truncate", "mask", "veto"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_importance_equals_a_loop(level: str, action: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rows = [data.draw(st.lists(st.floats(-2, 2), min_size=n, max_size=n)) for n in lengths]
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    log_ratio = torch.tensor([x for row in rows for x in row], dtype=F64)
    mask = torch.tensor([bool(m) for row in masks for m in row])
    ids = torch.tensor([s for s, n in enumerate(lengths) for _ in range(n)])
    weight, metrics = corrections.importance(
        log_ratio,
        mask,
        ids,
        level=level,
        action=action,
        low=0.5,
        high=1.7,  # type: ignore[arg-type]
    )
    assert weight.tolist() == pytest.approx(naive(rows, masks, level, action, 0.5, 1.7), abs=1e-9)
    assert all((values[~mask] == 0).all() and values.isfinite().all() for values in metrics.values())


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_metrics_are_token_weighted_whatever_the_packing(data: st.DataObject) -> None:
    """Summed over any split into whole sequences they are those of the whole batch."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    parts = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    total = sum(lengths)
    log_ratio = torch.tensor(data.draw(st.lists(st.floats(-2, 2), min_size=total, max_size=total)), dtype=F64)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    _, whole = corrections.importance(log_ratio, mask, ids, level="geometric", action="mask", low=0.5, high=1.7)
    split: dict[str, float] = {}
    for part in set(parts):
        here = torch.tensor(parts)[ids] == part
        _, renumbered = ids[here].unique(return_inverse=True)
        _, found = corrections.importance(
            log_ratio[here], mask[here], renumbered, level="geometric", action="mask", low=0.5, high=1.7
        )
        for name, values in found.items():
            split[name] = split.get(name, 0.0) + float(values.sum())
    of_the_batch = ("ess", "perplexity_ratio")  # no means over tokens
    for name in whole.keys() - set(of_the_batch):
        assert split[name] == pytest.approx(float(whole[name].sum()), abs=1e-9), name
    assert sum(split[name] for name in split if name.startswith("ratio_bin/")) == int(mask.sum())


def test_a_long_sequence_cannot_overflow_its_product() -> None:
    log_ratio = torch.full((400,), 3.0)
    weight, metrics = corrections.importance(log_ratio, *flat(400), level="sequence", action="mask")
    assert (weight == 0).all()
    assert all(values.isfinite().all() for values in metrics.values())


@pytest.mark.parametrize("action", ["truncate", "mask", "veto"])
def test_nan_is_passed_on_whatever_the_action(action: str) -> None:
    log_ratio = torch.tensor([math.nan, 0.0], dtype=F64)
    weight, _ = corrections.importance(log_ratio, *flat(2), action=action)  # type: ignore[arg-type]
    assert weight[0].isnan()
