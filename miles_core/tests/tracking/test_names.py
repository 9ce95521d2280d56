"""Every figure that any part of core records is declared, and the page about them is current."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import miles_core
from miles_core import batching
from miles_core.algorithms import corrections, losses
from miles_core.contracts import logprobs, routes, tokens, versions
from miles_core.kinds.loss import LossInputs, LossOutput
from miles_core.rollout.tally import Tally
from miles_core.tracking import names
from miles_core.types import Group, Prompt, Status, TokenSpan, Trajectory

SOURCE = Path(miles_core.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
LITERAL = re.compile(r"(rollout|train|eval|contract|correction|time|tokens|throughput)(/[a-z0-9_]*[a-z0-9])+")


def group() -> Group:
    sampled = np.array([False, True, True])
    row = Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=np.arange(3, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled,
        logprobs=np.array([np.nan, -1, -1], dtype=np.float32),
        spans=(TokenSpan(start=1, end=3, weight_version=0),),
        temperature=1.0,
        status=Status.COMPLETED,
        reward=1.0,
        routes=np.array([[[0, 1]], [[1, 2]]], dtype=np.int16),
        metadata={"reward_parts": {"format": 1.0}},
    )
    return Group(prompt=Prompt(id="p", messages=()), trajectories=(row,))


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == names.as_markdown(), "run `make docs`"


def test_no_name_is_declared_twice_and_every_one_has_a_unit_and_a_meaning() -> None:
    declared = [metric.name for metric in names.METRICS]
    assert len(set(declared)) == len(declared)
    assert all(metric.unit and metric.help for metric in names.METRICS)


def test_a_part_in_braces_stands_for_one_segment_or_for_the_rest() -> None:
    found = names.find("correction/clip-or-pop/ess")
    assert found is not None
    assert found.name == "correction/{correction}/ess"
    assert names.find("correction/a/b/ess") is None
    assert names.find("eval/reward/file.py:score/format") is not None
    assert names.undeclared(["step", "train/loss", "train/lossy", "time/save_s"]) == ["train/lossy"]


def literals() -> Iterator[tuple[str, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        if file.name != "names.py" and "testing" not in file.parts:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and LITERAL.fullmatch(node.value):
                    if node.value == "tokens/s":  # a unit
                        continue
                    yield file.name, node.value


def test_names_written_in_the_source_are_declared() -> None:
    found = list(literals())
    assert len(found) > 20  # the search itself works
    assert [pair for pair in found if names.find(pair[1]) is None] == []


def test_contracts_corrections_and_rollout_record_declared_names() -> None:
    groups = [group()]
    batch = batching.with_old_logprobs(batching.pack(groups), None)
    reports = [
        tokens.check(groups, batch),
        routes.check(batch, num_experts=4),
        logprobs.check(batch),
        versions.check(groups, current_version=0),
    ]
    recorded = {name for report in reports for name in report.figures}
    recorded |= batching.with_corrections(batch, [("tis", corrections.tis, {})])[1].keys()
    tally = Tally(group_size=1)
    tally.judge(groups[0].trajectories, groups[0], retried=0, reason="zero_std")
    recorded |= tally.stats(groups).keys() | tally.wasted().keys()
    assert "rollout/reward/format" in recorded
    assert names.undeclared(recorded) == []


@pytest.mark.parametrize("loss", [losses.ppo_clip, losses.gspo, losses.cispo])
def test_losses_record_declared_names(loss: Callable[..., LossOutput]) -> None:
    zeros = torch.zeros(2)
    inputs = LossInputs(
        logprobs=zeros, old_logprobs=zeros, advantages=zeros, mask=zeros == 0, sequence_ids=torch.zeros(2).long()
    )
    options = {"dual_clip": 3.0} if loss is losses.ppo_clip else {}
    assert names.undeclared(f"train/{name}" for name in loss(inputs, **options).metrics) == []


def test_deterministic_figures_and_those_of_the_clock_are_told_apart() -> None:
    assert not any(metric.clock for section in ("Rollout", "Training") for metric in names.SECTIONS[section])
    assert all(metric.clock for metric in names.SECTIONS["Wall clock"])
