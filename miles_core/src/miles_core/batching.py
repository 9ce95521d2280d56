"""Groups to the trainer's batch, and the batch to optimizer steps and micro-batches. Pure; nothing here waits or
writes.

    pack -> with_old_logprobs -> with_corrections -> with_advantages -> split_updates -> with_token_weights (each part)

`pack` leaves what is not known yet, advantages and token weights, at NaN: a forgotten stage shows in the first loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.algorithms.reductions import token_weights
from miles_core.errors import ContractError, PluginError, RunError
from miles_core.routing import codec
from miles_core.routing.codec import Routes
from miles_core.types import Float32, Group, Int64, TrainBatch, Trajectory

if TYPE_CHECKING:
    from miles_core.kinds.advantage import Advantage
    from miles_core.kinds.correction import Correction

CARRIED = {
    "token_ids": "token_ids",
    "sampled": "versions",
    "loss_mask": "loss_mask",
    "logprobs": "rollout_logprobs",
    "spans": "versions",
    "temperature": "temperatures",
    "reward": "rewards",
    "routes": "routes",
    "branches": "attempt_ids",
}
"""Where each field of a trajectory goes in the batch."""
LEFT_BEHIND = frozenset({"prompt_id", "session_id", "status", "failure", "messages", "metadata"})
"""Fields the trainer has no use for. A field in neither table is one that somebody forgot."""


def pack(groups: Sequence[Group]) -> TrainBatch:
    """Concatenate the trainable trajectories of `groups`, in order.

    Raises:
        RunError: none is trainable.
        ContractError: a trajectory breaks the tokens contract, or a field that rollout produced would not arrive.
    """
    attempts = [(index, attempt) for index, group in enumerate(groups) for attempt in group.trainable]
    rows = [(index, number, row) for number, (index, attempt) in enumerate(attempts) for row in attempt.rows]
    if not rows:
        raise RunError(
            "the batch is empty",
            expected="at least one completed or truncated, scored trajectory",
            found=f"{sum(len(g.trajectories) for g in groups)} trajectories in {len(groups)} groups, none trainable",
            do="look at the failures of this step in events.jsonl",
        )
    trajectories = [row for *_, row in rows]
    for row in trajectories:
        row.check()
    total = sum(row.length for row in trajectories)
    batch = TrainBatch(
        lengths=np.array([row.length for row in trajectories], dtype=np.int64),
        group_ids=np.array([index for index, *_ in rows], dtype=np.int64),
        attempt_ids=np.array([number for _, number, _ in rows], dtype=np.int64),
        rewards=np.array([attempts[number][1].reward for _, number, _ in rows], dtype=np.float32),
        temperatures=np.array([row.temperature or 1.0 for row in trajectories], dtype=np.float32),
        token_ids=np.concatenate([row.token_ids for row in trajectories]).astype(np.int32),
        loss_mask=np.concatenate([row.loss_mask for row in trajectories]),
        # NaN * 0 is NaN in a masked sum, so "none" becomes 0.0 here, after the check.
        rollout_logprobs=np.nan_to_num(np.concatenate([row.logprobs for row in trajectories])).astype(np.float32),
        versions=np.concatenate([_versions(row) for row in trajectories]),
        advantages=np.full(total, np.nan, dtype=np.float32),
        token_weights=np.full(total, np.nan, dtype=np.float32),
        correction_weights=np.ones(total, dtype=np.float32),
        routes=_routes(trajectories),
    )
    check_conservation(trajectories, batch)
    return batch


def check_conservation(trajectories: Sequence[Trajectory], batch: TrainBatch) -> None:
    """Verify that everything known of each token arrived.

    Raises:
        ContractError: naming the field that did not.
    """
    arrays = [f"metadata[{k!r}]" for row in trajectories for k, v in row.metadata.items() if isinstance(v, np.ndarray)]
    counts = {
        "token_ids": (sum(int(r.token_ids.sum()) for r in trajectories), int(batch.token_ids.sum(dtype=np.int64))),
        "sampled": (sum(r.response_tokens for r in trajectories), int((batch.versions != _UNSAMPLED).sum())),
        "loss_mask": (sum(int(r.loss_mask.sum()) for r in trajectories), batch.num_loss_tokens),
        "routes": (any(r.routes is not None for r in trajectories), batch.routes is not None),
    }
    lost = sorted(set(arrays)) + [name for name, (made, arrived) in counts.items() if made != arrived]
    if lost:
        raise ContractError(
            "conservation: rollout produced what the batch does not carry",
            expected="every per-token field in the batch",
            found="lost: " + ", ".join(lost),
            do="give the field a place in Trajectory, TrainBatch and batching.CARRIED",
        )


_UNSAMPLED = -1


def _versions(row: Trajectory) -> Int64:
    versions = np.full(row.length, _UNSAMPLED, dtype=np.int64)
    for span in row.spans:
        if span.weight_version < 0:
            raise ContractError(
                "version contract: tokens were sampled before any weights were published",
                expected="a weight version of 0 or more",
                found=f"{span.weight_version} at tokens [{span.start}, {span.end})",
                where=f"prompt {row.prompt_id!r}, session {row.session_id!r}",
                do="publish the trainer's weights before the first rollout",
            )
        versions[span.start : span.end] = span.weight_version
    return versions


def _routes(trajectories: Sequence[Trajectory]) -> Routes | None:
    """[N, L, K], or None when no trajectory has any. What a trajectory lacks is `UNRECORDED`, never made up."""
    with_routes = [row.routes for row in trajectories if row.routes is not None]
    if not with_routes:
        return None
    shapes = {routes.shape[1:] for routes in with_routes}
    if len(shapes) > 1:
        raise ContractError(
            "routes contract: trajectories of one batch have routes of different shapes",
            expected="one [layers, experts] shape",
            found=f"shapes {sorted(shapes)}",
            do="report the engines; do they serve one checkpoint?",
        )
    dtype = np.result_type(*with_routes)
    empty = np.empty((0, *shapes.pop()), dtype=dtype)
    rows = [codec.pad(empty if row.routes is None else row.routes.astype(dtype), row.length) for row in trajectories]
    return np.concatenate(rows)


# --- filling the batch ------------------------------------------------------------------------------------------------


def with_old_logprobs(batch: TrainBatch, logprobs: Float32 | None) -> TrainBatch:
    """Set the old policy: the trainer's pre-update log-probs f[N], or the rollout's own when `logprobs` is None.

    Raises:
        ContractError: wrong shape, or not finite at a trained token.
    """
    if logprobs is None:
        return replace(batch, old_logprobs=batch.rollout_logprobs)
    return replace(batch, old_logprobs=_arrived("old_logprobs", logprobs, batch))


def with_ref_logprobs(batch: TrainBatch, logprobs: Float32) -> TrainBatch:
    """Set the reference policy's log-probs f[N].

    Raises:
        ContractError: wrong shape, or not finite at a trained token.
    """
    return replace(batch, ref_logprobs=_arrived("ref_logprobs", logprobs, batch))


def _arrived(name: str, values: Float32, batch: TrainBatch) -> Float32:
    if values.shape != batch.token_ids.shape:
        raise ContractError(
            f"`{name}` does not belong to this batch",
            expected=f"shape {batch.token_ids.shape}",
            found=str(values.shape),
        )
    bad = batch.loss_mask & ~np.isfinite(values)
    if bad.any():
        at = int(np.argmax(bad))
        raise ContractError(
            f"`{name}` is not finite at a trained token",
            expected="a finite log-prob",
            found=f"{values[at]} at token {at}, {int(bad.sum())} in all",
            where=f"sequence {int(batch.sequence_ids[at])} of the batch",
            do="the weights or the forward pass are broken; resume from the last checkpoint with a lower learning rate",
        )
    return np.where(np.isfinite(values), values, 0.0).astype(np.float32)


def kl_in_reward(batch: TrainBatch, *, coef: float, estimator: str = "k1") -> Float32:
    """f[N] per-token KL of the old policy to the reference, times `coef`, for `with_advantages`; 0 outside the mask."""
    import torch

    from miles_core.algorithms import kl

    if batch.old_logprobs is None or batch.ref_logprobs is None:
        raise RunError("KL in the reward needs old and reference log-probs", do="call with_ref_logprobs first")
    old, reference = torch.from_numpy(batch.old_logprobs), torch.from_numpy(batch.ref_logprobs)
    values: Float32 = kl.estimate(estimator, old, reference).numpy() * np.float32(coef)
    return np.where(batch.loss_mask, values, np.float32(0.0))


def with_advantages(
    batch: TrainBatch, fn: Advantage, options: Mapping[str, Any] | None = None, *, kl: Float32 | None = None
) -> TrainBatch:
    """Evaluate an advantage on the whole batch. `kl` f[N] is already times its coefficient.

    Raises:
        PluginError: the advantage breaks its protocol (shape, NaN, not 0 outside the mask).
    """
    import torch

    from miles_core.kinds.advantage import AdvantageInputs

    # An attempt is scored once, however many rows its session branched into.
    _, first, attempts = np.unique(batch.token_attempts, return_index=True, return_inverse=True)
    sequence_of_first = batch.sequence_ids[first]
    inputs = AdvantageInputs(
        rewards=torch.from_numpy(batch.rewards[sequence_of_first]),
        group_ids=torch.from_numpy(batch.group_ids[sequence_of_first]),
        sequence_ids=torch.from_numpy(attempts.astype(np.int64)),
        mask=torch.from_numpy(batch.loss_mask),
        kl=None if kl is None else torch.from_numpy(kl),
        values=None if batch.values is None else torch.from_numpy(batch.values),
    )
    result = fn(inputs, **(options or {})).detach().numpy()
    _obeys("advantage", fn, result, batch, outside=0.0)
    return replace(batch, advantages=result.astype(np.float32))


def with_corrections(
    batch: TrainBatch, picks: Sequence[tuple[str, Correction, Mapping[str, Any]]]
) -> tuple[TrainBatch, dict[str, float]]:
    """Multiply the weights of the picked corrections ``(name, function, options)``.

    Returns:
        The batch, and the mean over trained tokens of each metric as ``correction/<name>/<metric>``. A correction
        that is picked twice has its place appended: ``importance``, ``importance-2``.
    Raises:
        PluginError: a correction breaks its protocol.
    """
    import torch

    if picks and batch.old_logprobs is None:
        raise RunError("corrections need the trainer's pre-update log-probs", do="call with_old_logprobs first")
    weights = np.ones(batch.num_tokens, dtype=np.float64)
    metrics: dict[str, float] = {}
    seen: dict[str, int] = {}
    for name, fn, options in picks:
        assert batch.old_logprobs is not None
        log_ratio = torch.from_numpy(batch.old_logprobs - batch.rollout_logprobs)
        weight, found = fn(
            log_ratio, torch.from_numpy(batch.loss_mask), torch.from_numpy(batch.sequence_ids), **dict(options)
        )
        array = weight.detach().numpy()
        _obeys("correction", fn, array, batch, outside=1.0)
        weights *= array
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name}-{seen[name]}"
        for metric, values in found.items():
            metrics[f"correction/{label}/{metric}"] = float(values.numpy()[batch.loss_mask].mean(dtype=np.float64))
    return replace(batch, correction_weights=weights.astype(np.float32)), metrics


def _obeys(kind: str, fn: Any, result: Any, batch: TrainBatch, *, outside: float) -> None:
    name = f"{getattr(fn, '__module__', '?')}:{getattr(fn, '__qualname__', repr(fn))}"
    if result.shape != batch.token_ids.shape:
        raise PluginError(
            f"{kind} {name} returned a wrong shape", expected=str(batch.token_ids.shape), found=str(result.shape)
        )
    if not np.isfinite(result).all():
        raise PluginError(
            f"{kind} {name} returned NaN or infinity",
            expected="finite values for finite rewards and log-probs",
            found=f"{result[~np.isfinite(result)][0]} at {int((~np.isfinite(result)).sum())} tokens",
        )
    if (result[~batch.loss_mask] != outside).any():
        raise PluginError(f"{kind} {name} must return {outside:g} outside the mask", found="other values there")


def with_token_weights(batch: TrainBatch, reduction: str, fixed_length_tokens: int | None = None) -> TrainBatch:
    """Set the reduction weights; `batch` is everything that one optimizer step trains on.

    Raises:
        RunError: no token is trained, or `fixed-length` has no length.
    """
    weights = token_weights(batch.loss_mask, batch.token_attempts, reduction, fixed_length_tokens=fixed_length_tokens)
    return replace(batch, token_weights=weights.astype(np.float32))


# --- splitting --------------------------------------------------------------------------------------------------------


def split_updates(batch: TrainBatch, minibatches: int) -> list[TrainBatch]:
    """Split into optimizer steps by whole groups, in order, as equal in groups as possible.

    Each part is an update of its own: call `with_token_weights` on it. The weights it comes with are NaN.

    Raises:
        RunError: fewer groups than parts.
    """
    groups = np.unique(batch.group_ids)
    if minibatches > len(groups):
        raise RunError(
            f"{len(groups)} groups cannot be split into {minibatches} updates",
            expected="at least one group for each optimizer step",
            where="schedule.minibatches",
            do="lower it, or raise schedule.groups_per_step; failed and filtered groups do not count",
        )
    parts = []
    for chosen in np.array_split(groups, minibatches):
        part = batch.select(np.flatnonzero(np.isin(batch.group_ids, chosen)).tolist())
        parts.append(replace(part, token_weights=np.full(part.num_tokens, np.nan, dtype=np.float32)))
    return parts


def plan_micro_batches(lengths: Sequence[int] | Int64, world_size: int, token_budget: int) -> list[list[list[int]]]:
    """Place whole sequences into micro-batches: ``[rank][micro-batch][sequence index]``.

    As many micro-batches as first-fit-decreasing needs under the budget, rounded up to the same number on every rank,
    since collectives run in each; levelled so that micro-batches and ranks carry about equal tokens. A sequence over
    the budget sits alone; micro-batches are empty only when there are fewer sequences than ranks. Deterministic.

    Args:
        lengths: Tokens of each sequence.
        world_size: Data-parallel ranks, at least 1.
        token_budget: Tokens of one micro-batch on one rank, at least 1.
    """
    sizes = [int(length) for length in lengths]
    bins = _first_fit_decreasing(sizes, token_budget)
    count = max(1, math.ceil(len(bins) / world_size)) * world_size
    return _deal(_split_to(_levelled(bins, sizes, count, token_budget), sizes, count), sizes, world_size)


def _first_fit_decreasing(sizes: list[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for sequence in sorted(range(len(sizes)), key=lambda s: (-sizes[s], s)):
        for index, room in enumerate(free):
            if sizes[sequence] <= room:
                bins[index].append(sequence)
                free[index] -= sizes[sequence]
                break
        else:
            bins.append([sequence])
            free.append(budget - sizes[sequence])
    return bins


def _levelled(bins: list[list[int]], sizes: list[int], count: int, budget: int) -> list[list[int]]:
    """At most `count` micro-batches as equal as a tighter budget makes them (MULTIFIT, Coffman et al. 1978).

    Eight halvings bring the tighter budget within half a percent of the tightest that still needs `count`.
    """
    tightest = min(budget, math.ceil(sum(sizes) / count))
    for _ in range(8):
        middle = (tightest + budget) // 2
        tighter = _first_fit_decreasing(sizes, middle)
        if len(tighter) <= count:
            bins, budget = tighter, middle
        else:
            tightest = middle + 1
    return bins


def _split_to(bins: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    """Split the heaviest micro-batches until there are `count`; empty ones fill up what cannot be split."""
    bins = list(bins)
    while len(bins) < count:
        splittable = [b for b in range(len(bins)) if len(bins[b]) > 1]
        if not splittable:
            return bins + [[] for _ in range(count - len(bins))]
        heaviest = bins.pop(max(splittable, key=lambda b: sum(sizes[s] for s in bins[b])))
        halves: tuple[list[int], list[int]] = ([], [])
        for sequence in heaviest:  # in decreasing size, each to the lighter half
            min(halves, key=lambda half: sum(sizes[s] for s in half)).append(sequence)
        bins.extend(halves)
    return bins


def _deal(bins: list[list[int]], sizes: list[int], world_size: int) -> list[list[list[int]]]:
    """Heaviest micro-batch to the least loaded rank that still has room for one."""
    each = len(bins) // world_size
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for members in sorted(bins, key=lambda b: (-sum(sizes[s] for s in b), b)):
        rank = min((r for r in range(world_size) if len(ranks[r]) < each), key=lambda r: (load[r], r))
        ranks[rank].append(sorted(members))
        load[rank] += sum(sizes[s] for s in members)
    return ranks
