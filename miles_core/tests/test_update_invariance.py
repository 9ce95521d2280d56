"""The gradient of an update is the one-batch gradient, whatever the micro-batches, packing and ranks.

A linear language model in float64 stands for the policy: a token's log-prob depends on the token before it in its own
sequence. Packing, weights, splits and plans are the real ones; ranks are simulated by summing what each would send.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core import batching
from miles_core.algorithms import advantages, corrections, losses
from miles_core.algorithms.reductions import REDUCTIONS, token_weights
from miles_core.kinds.loss import Loss, LossInputs
from miles_core.types import Group, Prompt, Status, TokenSpan, TrainBatch, Trajectory

VOCABULARY = 7


def trajectory(rng: np.random.Generator, length: int) -> Trajectory:
    prompt = int(rng.integers(1, length))
    sampled = np.arange(length) >= prompt
    mask = sampled & (rng.random(length) < 0.8)
    mask[prompt] = True
    return Trajectory(
        prompt_id="p",
        session_id="s",
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        sampled=sampled,
        loss_mask=mask,
        logprobs=np.where(sampled, -rng.random(length) * 3, np.nan).astype(np.float32),
        spans=(TokenSpan(start=prompt, end=length, weight_version=0),),
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        status=Status.COMPLETED,
        reward=float(rng.normal()),
    )


def log_probs(table: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """f64[N]; 0 at each sequence's first token."""
    ids = torch.from_numpy(batch.token_ids).long()
    temperature = torch.from_numpy(np.repeat(batch.temperatures, batch.lengths)).double()
    before = ids.roll(1)
    found = (table[before] / temperature[:, None]).log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    first = torch.zeros_like(ids, dtype=torch.bool)
    first[torch.from_numpy(batch.offsets[:-1])] = True
    return torch.where(first, 0.0, found)


def gradient(batch: TrainBatch, weights: np.ndarray, loss: Loss, table: torch.Tensor) -> torch.Tensor:
    """Of ``sum(weights * corrections * loss)`` over one micro-batch."""
    if not batch.num_sequences:
        return torch.zeros_like(table)
    leaf = table.clone().requires_grad_()
    assert batch.old_logprobs is not None
    output = loss(
        LossInputs(
            logprobs=log_probs(leaf, batch),
            old_logprobs=torch.from_numpy(batch.old_logprobs).double(),
            advantages=torch.from_numpy(batch.advantages).double(),
            mask=torch.from_numpy(batch.loss_mask),
            sequence_ids=torch.from_numpy(batch.sequence_ids),
        )
    )
    scale = torch.from_numpy(weights * batch.correction_weights)
    (found,) = torch.autograd.grad((scale * output.per_token).sum(), leaf)
    return found


def naive_gradient(batch: TrainBatch, mode: str, loss: Loss, table: torch.Tensor) -> torch.Tensor:
    """The same from the reduction's words: sequence by sequence, no weights, no packing."""
    leaf = table.clone().requires_grad_()
    sums, counts = [], []
    for sequence in range(batch.num_sequences):
        one = batch.select([sequence])
        assert one.old_logprobs is not None
        output = loss(
            LossInputs(
                logprobs=log_probs(leaf, one),
                old_logprobs=torch.from_numpy(one.old_logprobs).double(),
                advantages=torch.from_numpy(one.advantages).double(),
                mask=torch.from_numpy(one.loss_mask),
                sequence_ids=torch.zeros(one.num_tokens, dtype=torch.int64),
            )
        ).per_token
        sums.append((output * torch.from_numpy(one.correction_weights).double()).sum())
        counts.append(one.num_loss_tokens)
    if mode == "token-mean":
        total = sum(sums) / sum(counts)
    elif mode == "sequence-mean-token-mean":
        total = sum(s / c for s, c in zip(sums, counts, strict=True)) / len(sums)
    else:
        total = sum(sums) / len(sums) / (9 if mode == "fixed-length" else 1)
    assert isinstance(total, torch.Tensor)
    (found,) = torch.autograd.grad(total, leaf)
    return found


LOSSES: dict[str, Loss] = {"ppo-clip": losses.ppo_clip, "gspo": losses.gspo, "cispo": losses.cispo}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(2, 9), min_size=2, max_size=10),
    mode=st.sampled_from(REDUCTIONS),
    ranks=st.integers(1, 4),
    budget=st.integers(2, 40),
)
def test_any_plan_gives_the_one_batch_gradient(
    name: str, seed: int, lengths: list[int], mode: str, ranks: int, budget: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = [trajectory(rng, length) for length in lengths]
    half = len(rows) // 2
    groups = [
        Group(prompt=Prompt(id="p", messages=()), trajectories=tuple(part)) for part in (rows[:half], rows[half:])
    ]
    table = torch.from_numpy(rng.normal(size=(VOCABULARY, VOCABULARY)))

    batch = batching.pack(groups)
    noise = torch.from_numpy(rng.normal(size=batch.num_tokens))
    batch = batching.with_old_logprobs(batch, (log_probs(table, batch) + 0.1 * noise).float().numpy())
    batch, _ = batching.with_corrections(batch, [("tis", corrections.tis, {})])
    batch = batching.with_advantages(batch, advantages.grpo)
    weights = token_weights(batch.loss_mask, batch.sequence_ids, mode, fixed_length_tokens=9)

    expected = naive_gradient(batch, mode, LOSSES[name], table)
    found = torch.zeros_like(table)
    carried = replace(batch, token_weights=np.arange(batch.num_tokens, dtype=np.float32))  # float32 would cost digits
    for rank in batching.plan_micro_batches(batch.lengths, ranks, budget):
        for micro_batch in rank:
            part = carried.select(micro_batch)
            found += gradient(part, weights[part.token_weights.astype(np.int64)], LOSSES[name], table)
    assert torch.allclose(found, expected, atol=1e-6, rtol=0)


def test_a_mean_of_micro_batch_means_is_another_gradient() -> None:
    """The comparison above can fail: the classic fault moves the gradient by far more than its tolerance."""
    rng = np.random.default_rng(3)
    batch = batching.pack(
        [Group(prompt=Prompt(id="p", messages=()), trajectories=tuple(trajectory(rng, n) for n in (3, 9, 9, 4)))]
    )
    table = torch.from_numpy(rng.normal(size=(VOCABULARY, VOCABULARY)))
    batch = batching.with_old_logprobs(batch, log_probs(table, batch).float().numpy())
    batch = batching.with_advantages(batch, advantages.dr_grpo)
    expected = naive_gradient(batch, "token-mean", losses.ppo_clip, table)
    parts = [batch.select([0]), batch.select([1, 2, 3])]
    wrong = sum(
        gradient(part, token_weights(part.loss_mask, part.sequence_ids, "token-mean") / 2, losses.ppo_clip, table)
        for part in parts
    )
    assert (wrong - expected).abs().max() > 1e-3
