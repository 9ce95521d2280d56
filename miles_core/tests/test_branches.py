"""An attempt whose session branched: several rows, one reward, one vote in its group, one share of the loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from miles_core import batching
from miles_core.algorithms import advantages
from miles_core.contracts import tokens
from miles_core.types import Group, Prompt, Status, TokenSpan, Trajectory


def row(length: int, *, trained: bool = True, reward: float | None = None) -> Trajectory:
    sampled = np.arange(length) >= 2
    return Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=np.arange(length, dtype=np.int32),
        sampled=sampled,
        loss_mask=sampled & trained,
        logprobs=np.where(sampled, -0.5, np.nan).astype(np.float32),
        spans=(TokenSpan(start=2, end=length, weight_version=0),),
        temperature=1.0,
        status=Status.COMPLETED,
        reward=reward,
    )


def group(*attempts: Trajectory) -> Group:
    return Group(prompt=Prompt(id="p", messages=()), trajectories=attempts)


def branched() -> Group:
    """Rewards 1, 0, 0; the first attempt has three rows, one of which trains nothing."""
    first = replace(row(4, reward=1.0), branches=(row(5), row(6, trained=False)))
    return group(first, row(4, reward=0.0), row(4, reward=0.0))


def test_every_row_that_trains_is_in_the_batch_under_its_attempt() -> None:
    batch = batching.pack([branched(), group(row(3, reward=0.5))])
    assert batch.lengths.tolist() == [4, 5, 4, 4, 3]
    assert batch.attempt_ids is not None
    assert batch.attempt_ids.tolist() == [0, 0, 1, 2, 3]
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0, 0.0, 0.5]
    assert batch.select([1, 4]).attempt_ids.tolist() == [0, 3]  # type: ignore[union-attr]
    assert tokens.check([branched()], batching.pack([branched()])).offenders == ()


def test_an_attempt_votes_once_in_its_group() -> None:
    batch = batching.pack([branched()])
    found = batching.with_advantages(batch, advantages.grpo, {"std": False}).advantages
    # The mean of 1, 0, 0; counted by rows it would be a half.
    assert found[batch.loss_mask].tolist() == pytest.approx([2 / 3] * 5 + [-1 / 3] * 4)


@pytest.mark.parametrize("reduction", ["sequence-mean-token-sum", "sequence-mean-token-mean"])
def test_an_attempt_has_one_share_of_the_loss(reduction: str) -> None:
    batch = batching.with_token_weights(batching.pack([branched()]), reduction)
    shares = np.bincount(batch.token_attempts, weights=batch.token_weights)
    expected = [5 / 3, 2 / 3, 2 / 3] if reduction == "sequence-mean-token-sum" else [1 / 3] * 3
    assert shares.tolist() == pytest.approx(expected)
